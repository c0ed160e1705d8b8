"""The starting point of a fine-tuning run: initial parameters, objective and teacher."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.artefacts.formats.huggingface_files import TASKS, model_class
from bert_jax.artefacts.formats.model_config import with_own_pooler
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.config.mapping import diff
from bert_jax.errors import UserError, first_few
from bert_jax.model.config import ARCHITECTURE, ModelConfig
from bert_jax.model.embedding import EmbeddingConfig
from bert_jax.model.heads import MASKED_LM
from bert_jax.model.task_heads import TaskHeadConfig, starting_params
from bert_jax.objectives.distillation import DistillationConfig, Distilled
from bert_jax.objectives.embedding import Comparison, ContrastConfig, EmbeddingObjective
from bert_jax.objectives.objective import Objective, trained
from bert_jax.objectives.task import HEADS, ClassLoss, TaskObjective
from bert_jax.tasks.config import EmbeddingTaskConfig
from bert_jax.tasks.embedding import token_weights
from bert_jax.tasks.retrieval.metrics import ListLoss, PairKind
from bert_jax.tasks.rows import Rows, eval_batches
from bert_jax.tasks.skew import class_weights
from bert_jax.tasks.task import Task
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.start import RANDOM, with_positions

_HEAD_DROPOUT = 0.1
_WEIGHED, _SOME, _LIFT = 200, 16, 1e3
_UNTAUGHT = ("arcs", "choice", "ranking")
_MULTIPLE = 8
_COMPARISONS: dict[PairKind, Comparison] = {
    "pairs": "ranking", "texts": "ranking", "scores": "scores", "classes": "classes",
}  # fmt: skip
_log = logging.getLogger("bert_jax")

Trainable = TaskObjective | EmbeddingObjective
"""Objective of a fine-tuning run, without a teacher."""
Read = Callable[..., SavedModel]
"""Function that reads a model, as `read_model` does."""


def read_inits(
    config: FinetuneConfig, read: Read
) -> tuple[SavedModel, dict[str, SavedModel | None]]:
    """Read the model `init`; return it and all initialisations by name, None for random weights.

    Raise a UserError if `init` is empty or recurrent, or the baseline is `init` or has other sizes.
    """
    if not config.init:
        raise UserError(
            "init is empty; give --config.init=DIR, the work directory of a pretraining run or a "
            "directory in Hugging Face's format"
        )
    sparse, name = config.embedding.of_model().is_sparse, config.sweep.baseline
    initial = to_start_from(read(config.init, encoder_only=not sparse))
    given: dict[str, SavedModel | None] = {config.init: initial}
    if config.reinitialise:
        given = {RANDOM: None}
    if name and Path(name) in map(Path, given):
        raise UserError(f"sweep.baseline is {name!r}, the same as init")
    if name == RANDOM:
        given[RANDOM] = None
    elif name:
        other = given[name] = to_start_from(read(name, encoder_only=not sparse))
        values = [
            (field, getattr(initial.config, field), getattr(other.config, field))
            for field in (*ARCHITECTURE, "vocab_size")
        ]
        rows = [f"{field} {ours} and {theirs}" for field, ours, theirs in values if ours != theirs]
        if initial.tokenizer.fingerprint != other.tokenizer.fingerprint:
            rows.append("the tokenizers")
        if rows:
            raise UserError(
                f"sweep.baseline {name} differs from init ({'; '.join(rows)}); all runs of a sweep "
                "need the same architecture and tokenizer. Fine-tune the baseline in another run"
            )
    return initial, given


def to_start_from(saved: SavedModel) -> SavedModel:
    """Drop a pooler that classifiers of the model's family lack, unless a task head reads it."""
    if "layers" not in saved.params["encoder"]:
        raise UserError(f"{saved.name}: fine-tuning needs a Transformer, not a recurrent network")
    own = saved.config if saved.outputs is not None else with_own_pooler(saved.config)
    saved = dataclasses.replace(saved, config=own)
    return saved if own.pooler else saved.without({"pooler"})


def with_head(
    config: FinetuneConfig,
    initial: SavedModel,
    model: ModelConfig,
    task: Task,
    given: Mapping[str, SavedModel | None],
    frozen: Mapping[str, Any],
    read: Read,
) -> tuple[TaskObjective, dict[str, Any]]:
    """Return the objective for a task head, and the parameters of each initialisation.

    `given` comes from `read_inits`, `frozen` from `frozen_parts`. Raise a UserError if a setting
    does not fit the task, or `head` is "keep" but no head fits.
    """
    if config.embedding != ContrastConfig():
        raise UserError(
            f"the section embedding is set, but task.kind is {config.task.kind!r}; set task.kind "
            "to 'embedding', or leave the section out"
        )
    network = HEADS[task.objective].network
    pools = network == "classification" and model.pooler
    if pools and not (initial.has_pooler or config.reinitialise):
        _log.warning(
            "%s has no pooler, but this task needs one: it starts with random weights", initial.name
        )
    why, pooling = "", config.pooling
    if network != "classification":
        why = "this task predicts from each token"
    elif initial.config.pooler:
        why = f"the architecture of {initial.name} has a pooler, which reads the first token"
    if pooling == "auto":
        pooling = "cls" if why else initial.pooling
    elif why:
        raise UserError(f"pooling is {pooling!r}, but {why}; leave pooling at 'auto'")
    rate = config.training.dropout_rate
    head = TaskHeadConfig(
        network,
        num_labels=task.num_outputs,
        # BERT's SQuAD head reads the encoder's output without dropout.
        dropout_rate=0.0 if task.objective == "span" else _HEAD_DROPOUT if rate is None else rate,
        pooling=pooling,
    )

    def start_of(name: str, saved: SavedModel | None) -> Any:
        """Return the parts (encoder, transform, head) that do not begin with random weights."""
        if saved is None:
            return {}
        start = starting_params(model, head, saved.params)
        if config.head == "fresh":
            return start
        again = saved.outputs is None and saved.origin.kind == "huggingface"
        try:
            if again and model_class(saved.origin.config).endswith(tuple(TASKS)):
                saved = read(name)  # with its task head
            return {**start, "head": kept_head(saved, head, task)}
        except UserError as error:
            if config.head == "keep":
                raise UserError(
                    f"head is 'keep', but {error}; set head to 'fresh' or 'auto'"
                ) from error
            return start

    starts = {name: start_of(name, saved) for name, saved in given.items()}
    skew, rows, names = task.config.skew, task.train_split().rows, task.spec.labels
    weights = class_weights(skew.class_weights, rows, names, "task.class_weights")
    lists: ListLoss = getattr(task.config, "loss", "contrast")
    loss = ClassLoss(weights, skew.focal_gamma, skew.label_smoothing, lists)
    return TaskObjective(model, head, task.objective, loss, lora=config.lora, **frozen), starts


def kept_head(saved: SavedModel, head: TaskHeadConfig, task: Task) -> Any:
    """Return the weights of a saved head, with outputs in the order of the task's labels.

    Raise a UserError if the head does not fit the task; the message gives the reason.
    """
    outputs = saved.outputs
    if outputs is None or "head" not in saved.params:
        raise UserError(f"{saved.name} has no task head")
    if (outputs.objective, outputs.head.kind) != (task.predicts, head.kind):
        raise UserError(
            f"the head of {saved.name} is for {outputs.objective}, but the task is {task.predicts}"
        )
    names, wanted, kept = outputs.labels, task.spec.labels, saved.params["head"]
    if task.objective != "regression" and set(names) != set(wanted):
        differ = {"lack": sorted({*wanted} - {*names}), "have": sorted({*names} - {*wanted})}
        parts = [f"{what} {first_few(some, 5)}" for what, some in differ.items() if some]
        raise UserError(f"the labels of {saved.name} {' and '.join(parts)}")
    if task.objective == "arcs":
        if names != wanted:
            raise UserError(f"task.labels of {saved.name} have the order {','.join(names)}")
        return kept
    kernel, bias = (np.asarray(kept[part]) for part in ("kernel", "bias"))
    if task.objective == "regression":  # a saved head predicts raw scores
        mean, deviation = np.float32(task.spec.mean), np.float32(task.spec.deviation)
        return {"kernel": kernel / deviation, "bias": (bias - mean) / deviation}
    # The outputs for a span (start and end) and for a choice (its score) have no labels.
    order = [names.index(label) for label in wanted] or slice(None)
    return {"kernel": kernel[..., order], "bias": bias[order]}


def with_vectors(
    config: FinetuneConfig,
    model: ModelConfig,
    task: Task,
    given: Mapping[str, SavedModel | None],
    frozen: Mapping[str, Any],
) -> tuple[EmbeddingObjective, dict[str, Any], dict[str, Any]]:
    """Return the objective for embedding vectors, and two sets of parameters per initialisation.

    The first set, for digests, is as read from the models. In the second set, for training, values
    for sparse vectors are fitted to the texts; the last digits depend on the machine. Arguments are
    as in `with_head`. Raise a UserError if a setting does not fit vectors, the rows or the model.
    """
    contrast, section = config.embedding, config.task
    assert isinstance(section, EmbeddingTaskConfig)  # because `task` is an EmbeddingTask
    comparison = _COMPARISONS[section.rows] if section.loss == "contrast" else section.loss
    if config.pooling != "auto":
        raise UserError(
            f"pooling is {config.pooling!r}, which is for classification; leave pooling at 'auto' "
            "and set embedding.pooling"
        )
    if config.head != "auto":
        raise UserError(f"head is {config.head!r}, but vectors have no head; leave head at 'auto'")
    if contrast.symmetric and comparison != "ranking":
        raise UserError(
            f"embedding.symmetric is set, but task.rows is {section.rows!r} and task.loss "
            f"{section.loss!r}; only rows 'pairs' or 'texts' with loss 'contrast' can be symmetric"
        )
    kept = contrast.of_model(section.query_prefix, section.document_prefix)
    kept.check_width(model.hidden_dim)
    train = task.train_split().rows
    if kept.static_queries:
        frozen = {**frozen, "frozen": frozen.get("frozen", frozenset()) | {"queries"}}
    length = query_length(train)
    # Vectors use no pooler, but Transformers' bare BERT supports only the pooler activation tanh.
    model = dataclasses.replace(model, pooler_activation="tanh")
    objective = EmbeddingObjective(
        model, kept, comparison, train.group, contrast, length, lora=config.lora, **frozen
    )
    if not trained(objective, objective.axes()):
        raise UserError(
            f"training.freeze is {config.training.freeze!r}, but these vectors have no other part "
            "to train; name fewer parts"
        )
    if section.rows == "texts" and not objective.has_dropout():
        raise UserError(
            "task.rows is 'texts', which compares a text with itself under different "
            "dropout, but the model has no dropout; set training.dropout_rate above 0"
        )
    for each in filter(None, given.values()):
        if "maps" in each.params.get("pooling", {}):
            _log.warning("%s: training leaves out the Dense modules after the pooling", each.name)
        for name, theirs, ours in diff(each.embedding or kept, kept):
            if name in ("pooling", "query_prefix", "document_prefix"):
                _log.warning("%s has the %s %r, but this run has %r", each.name, name, theirs, ours)
    starts = {
        name: {} if each is None else starting_vectors(kept, each) for name, each in given.items()
    }
    return objective, starts, {n: fitted(each, objective, task) for n, each in starts.items()}


def fitted(start: Any, objective: EmbeddingObjective, task: Task) -> Any:
    """Fit a sparse model's pretrained bias, and set its query weights, from the training texts."""
    config, train, special = objective.config, task.train_split().rows, task.tokenizer.special_ids
    if config.is_sparse and start:
        start = with_few_tokens(config, objective.model, start, train, special.pad)
    if config.static_queries:
        size, idf = objective.model.vocab_size, objective.contrast.queries == "idf"
        weights = token_weights(train, size, idf=idf)
        weights[[*vars(special).values()]] = 0
        start = {**start, "queries": weights}
    return start


def starting_vectors(config: EmbeddingConfig, saved: SavedModel) -> Any:
    """Return the parameters of a model from which the training of vectors starts.

    Raise a UserError if sparse vectors need a masked-LM head, which the model lacks.
    """
    if config.is_sparse and MASKED_LM not in saved.params:
        raise UserError(
            f"{saved.name} has no masked-LM head, which embedding.pooling 'splade' reads; set init "
            "to a pretrained model with this head, or choose another pooling"
        )
    kept = saved.without({"pooler"}).params
    parts = "encoder", *[MASKED_LM] * bool(config.is_sparse and kept[MASKED_LM])
    start = {name: kept[name] for name in parts}
    if config.pooling == "weighted" and "score" in kept.get("pooling", {}):
        start["pooling"] = {"score": kept["pooling"]["score"]}
    return start


def with_few_tokens(
    config: EmbeddingConfig, model: ModelConfig, start: Any, rows: Rows, pad_id: int
) -> Any:
    """Lower the bias of a masked-LM head until a text gives weight to 200 tokens, on average.

    After a short pretraining, most logits are above 0, so each text would at first have a weight
    for most of the vocabulary. The probabilities of masked tokens do not change.
    """
    head = start.get(MASKED_LM, {})
    if "bias" not in head:
        return start
    texts = [row for row, tokens in enumerate(rows.tokens[:_SOME]) if len(tokens)]
    few = Rows([rows.tokens[row] for row in texts], rows.second_start[texts])
    ((_, batch),) = eval_batches(few, (int(few.lengths.max()),), len(few), pad_id)
    raised = {**start, MASKED_LM: {**head, "bias": head["bias"] + _LIFT}}
    objective = EmbeddingObjective(model, config, group=1)
    vectors = jax.jit(partial(objective.represent, seed=None, layout=None))(raised, batch)
    logits = np.expm1(vectors) - _LIFT  # (text, vocabulary entry): the largest over tokens
    above = float(np.quantile(logits, max(0.0, 1 - _WEIGHED / logits.shape[-1])))
    return {**start, MASKED_LM: {**head, "bias": head["bias"] - max(0.0, above)}}


def saved_objective(model: SavedModel, task: Task, rows: Rows) -> Trainable:
    """Make the objective with which a saved model computes the outputs for rows."""
    config, section = model.embedding, task.config
    if config is None:
        assert model.outputs is not None  # else it has no task
        return TaskObjective(model.config, model.outputs.head, task.objective)
    assert isinstance(section, EmbeddingTaskConfig)
    comparison, length = _COMPARISONS[section.rows], query_length(rows)
    return EmbeddingObjective(model.config, config, comparison, rows.group, query_length=length)


def scoring(objective: Trainable, rows: Rows) -> Trainable:
    """Return the objective that scores `rows`, with the sizes of their groups and queries."""
    if isinstance(objective, TaskObjective):
        return objective
    return dataclasses.replace(objective, group=rows.group, query_length=query_length(rows))


def query_length(rows: Rows) -> int:
    """Return the length to which queries (first rows of groups) are padded; 0 without groups."""
    longest = int(rows.row_lengths[:: rows.group].max(initial=0))
    return -(-longest // _MULTIPLE) * _MULTIPLE if rows.group > 1 else 0


def with_teacher(
    config: DistillationConfig, objective: Objective, initial: SavedModel, task: Task, read: Read
) -> tuple[Distilled, SavedModel]:
    """Return a student's objective, and the teacher with only the parameters that a run needs.

    These are the encoder, any transform, and the head, in the order of the task's labels. Raise a
    UserError if the task allows no teacher, or the teacher's tokenizer, head or size is wrong.
    """
    assert config.teacher
    if not isinstance(objective, TaskObjective) or objective.kind in _UNTAUGHT:
        raise UserError(
            f"distil.teacher is {config.teacher!r}, but task.kind is {task.config.kind!r}; only "
            "classes, scores, tags and spans are learned from a teacher"
        )
    saved = read(config.teacher)
    ours, theirs = initial.tokenizer.fingerprint, saved.tokenizer.fingerprint
    if ours != theirs:
        raise UserError(
            f"distil.teacher: the tokenizer of {saved.name} ({theirs[:12]}) differs from the "
            f"tokenizer of {initial.name} ({ours[:12]}); give a teacher with the student's "
            "tokenizer"
        )
    try:
        kept = kept_head(saved, objective.config, task)
    except UserError as error:
        raise UserError(
            f"distil.teacher: {error}; give a model that was fine-tuned on the same labels"
        ) from error
    assert saved.outputs is not None  # else it has no head
    longest, most = int(np.max(task.train_split().rows.lengths)), saved.config.num_positions
    remedy = f"the longest row has {longest} tokens; set task.max_length to at most {most}"
    model = with_positions(saved, longest, remedy)
    whole = saved.complete_params() if model.pooler else saved.without({"pooler"}).params
    params = {name: tree for name, tree in whole.items() if name in ("encoder", "transform")}
    head = dataclasses.replace(saved.outputs.head, dropout_rate=0.0)
    teacher = TaskObjective(model, head, objective.kind)
    saved = dataclasses.replace(saved, params={**params, "head": kept})
    return Distilled(objective, teacher, config), saved
