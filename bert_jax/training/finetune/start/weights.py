"""First weights of a run: the configured models, their heads, and the frozen parts."""

import dataclasses
import logging
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.artefacts.formats.huggingface_files import model_class
from bert_jax.artefacts.formats.model_config import with_own_pooler
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.errors import UserError, first_few
from bert_jax.model.config import ARCHITECTURE, ModelConfig
from bert_jax.model.embedding import Pooled
from bert_jax.model.task_heads import TaskHeadConfig, starting_params
from bert_jax.objectives.embedding import ContrastConfig
from bert_jax.objectives.task import HEADS, ClassLoss, TaskObjective
from bert_jax.tasks.skew import SkewConfig, class_weights
from bert_jax.tasks.task import Task
from bert_jax.training.finetune.config import FinetuneConfig

RANDOM = "random"
_HEAD_DROPOUT = 0.1
_TASK_CLASS = re.compile(r".*For(SequenceClassification|TokenClassification|QuestionAnswering)")
_ENCODER = frozenset({"encoder/embeddings", "encoder/layers", "encoder/final_norm"})
_log = logging.getLogger("bert_jax")


class Frozen(NamedTuple):
    """Parameters that a run does not change."""

    entries: frozenset[str] = frozenset()
    """Entries of the parameters, by /-joined paths."""
    layers: int = 0
    """Number of lower layers."""


def frozen_by(config: FinetuneConfig, model: ModelConfig) -> Frozen:
    """Name the parameters that `training.freeze` freezes; the encoder where LoRA is trained.

    Raises:
        UserError: More layers than the model has.
    """
    freeze = config.training.freeze
    if config.lora.rank or freeze == "encoder":
        return Frozen(_ENCODER)
    if not freeze:
        return Frozen()
    embeddings = frozenset({"encoder/embeddings"})
    if freeze == "embeddings":
        return Frozen(embeddings)
    layers = int(freeze)
    if not 1 <= layers <= model.num_layers:
        raise UserError(
            f"training.freeze is {layers}, and the model has {model.num_layers} layers; it must "
            f"be from 1 to {model.num_layers}, or 'embeddings'"
        )
    if layers == model.num_layers:
        return Frozen(embeddings | {"encoder/layers"})
    return Frozen(embeddings, layers)


def read_start(name: str) -> SavedModel:
    """Read a model to start from (see `to_start_from`)."""
    return to_start_from(read_model(name, encoder_only=True))


def to_start_from(saved: SavedModel) -> SavedModel:
    """Return a model with a pooler if the classifiers of its family have one.

    A model with its own head keeps the head's input.
    """
    own = saved.config if saved.outputs is not None else with_own_pooler(saved.config)
    saved = dataclasses.replace(saved, config=own)
    return saved if own.pooler else saved.without({"pooler"})


def encoder_of(initial: SavedModel, config: FinetuneConfig) -> ModelConfig:
    """Return the architecture with the settings of this run."""
    training, model = config.training, initial.config
    model = dataclasses.replace(model, remat=training.remat, attention_impl=training.attention_impl)
    length, rotates = config.task.max_length, model.positions == "rope"
    if rotates and length > model.num_positions:
        _log.warning(
            "task.max_length is %d, and %s was trained on rows of at most %d tokens: rotations go "
            "on beyond that, but only this run teaches the model to use them",
            length, initial.name, model.num_positions,
        )  # fmt: skip
        model = dataclasses.replace(model, num_positions=length)
    rate = training.dropout_rate
    if rate is None:
        return model
    # Kernels of long rows and of windows have no dropout of the attention probabilities.
    keeps = rotates and not model.attention_dropout_rate
    return dataclasses.replace(
        model, hidden_dropout_rate=rate, attention_dropout_rate=0.0 if keeps else rate
    )


def pooling_of(config: FinetuneConfig, initial: SavedModel, network: str) -> Pooled:
    """Return the pooling of a classification without a pooler."""
    why = ""
    if network != "classification":
        why = "this task predicts from each token"
    elif initial.config.pooler:
        why = f"{initial.name} is of an architecture with a pooler, which reads the first token"
    if why and config.pooling != "auto":
        raise UserError(f"pooling is {config.pooling!r}, but {why}; leave pooling at 'auto'")
    if config.pooling != "auto":
        return config.pooling
    return "cls" if why else initial.pooling


def read_baseline(name: str, initial: SavedModel) -> SavedModel | None:
    """Read the model that `sweep.baseline` names, of the same architecture as `initial`.

    Returns:
        The model; None for random weights.
    """
    if name == RANDOM:
        return None
    other = read_start(name)
    values = [
        (field, getattr(initial.config, field), getattr(other.config, field))
        for field in (*ARCHITECTURE, "vocab_size")
    ]
    rows = [f"{field} {ours} and {theirs}" for field, ours, theirs in values if ours != theirs]
    if initial.tokenizer.fingerprint != other.tokenizer.fingerprint:
        rows.append("other tokenizers")
    if rows:
        raise UserError(
            f"sweep.baseline {name} is not the same model as init ({'; '.join(rows)}); members of "
            "a sweep share one. Fine-tune it in a run of its own"
        )
    return other


def with_head(
    config: FinetuneConfig,
    initial: SavedModel,
    model: ModelConfig,
    task: Task,
    inits: Sequence[str],
    given: Sequence[SavedModel | None],
) -> tuple[TaskObjective, tuple[Any, ...]]:
    """Return the objective of a head, and the parameters that each initialisation provides.

    Args:
        config: Configuration of the run.
        initial: Model of `init`.
        model: Architecture with the settings of the run.
        task: The task, with its data.
        inits: Names of the initialisations.
        given: Model of each initialisation; None for random weights.
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
            "%s has no pooler, which this task reads: it begins at random, as the head does",
            initial.name,
        )
    rate = config.training.dropout_rate
    head = TaskHeadConfig(
        network,
        num_labels=task.num_outputs,
        # BERT's SQuAD head reads the encoder's output as it is.
        dropout_rate=0.0 if task.objective == "span" else _HEAD_DROPOUT if rate is None else rate,
        pooling=pooling_of(config, initial, network),
    )
    starts = tuple(
        start_of(config, name, saved, model, head, task)
        for name, saved in zip(inits, given, strict=True)
    )
    frozen, loss = frozen_by(config, model), _class_loss(task.config.skew, task)
    objective = TaskObjective(
        model, head, task.objective, loss, lora=config.lora, frozen=frozen.entries,
        frozen_layers=frozen.layers,
    )  # fmt: skip
    return objective, starts


def _class_loss(skew: SkewConfig, task: Task) -> ClassLoss:
    where = f"task.{task.config.kind}.class_weights"
    weights = class_weights(skew.class_weights, task.train_split().rows, task.spec.labels, where)
    return ClassLoss(weights, skew.focal_gamma, skew.label_smoothing)


def start_of(
    config: FinetuneConfig,
    name: str,
    saved: SavedModel | None,
    model: ModelConfig,
    head: TaskHeadConfig,
    task: Task,
) -> Any:
    """Return the parts of the parameters with which the training of a task begins.

    Args:
        config: Configuration of the run.
        name: Directory of `saved`.
        saved: Model, in Hugging Face's format without its head; None: random weights.
        model: Architecture of the run.
        head: Head of the run.
        task: Task of the run.

    Returns:
        The encoder, the head transform and the head, except parts that start at random.

    Raises:
        UserError: `head` is "keep", and the head of `saved` does not fit the task.
    """
    if saved is None:
        return {}
    start = starting_params(model, head, saved.params)
    if config.head == "fresh":
        return start
    try:
        kept = kept_head(_with_head(name, saved), head, task)
    except UserError as error:
        if config.head == "keep":
            raise UserError(
                f"head is 'keep', but {error}; set head to 'fresh' or 'auto'"
            ) from error
        return start
    return {**start, "head": kept}


def _with_head(name: str, saved: SavedModel) -> SavedModel:
    """Read a model in Hugging Face's format again, with its head, if its class has one."""
    if saved.outputs is not None or saved.origin.kind != "huggingface":
        return saved
    has_head = _TASK_CLASS.fullmatch(model_class(saved.origin.config))
    return read_model(name) if has_head else saved


def kept_head(saved: SavedModel, head: TaskHeadConfig, task: Task) -> Any:
    """Return the weights of a saved head for a task with the same labels, in any order.

    Raises:
        UserError: The head does not fit the task; the message gives the reason.
    """
    outputs = saved.outputs
    if outputs is None or "head" not in saved.params:
        raise UserError(f"{saved.name} has no head of a task")
    if (outputs.objective, outputs.head.kind) != (task.objective, head.kind):
        raise UserError(
            f"the head of {saved.name} predicts {outputs.objective}, and this task {task.objective}"
        )
    kernel, bias = (np.asarray(saved.params["head"][part]) for part in ("kernel", "bias"))
    if task.objective == "regression":  # a saved head predicts scores, a run standardised ones
        mean, deviation = np.float32(task.spec.mean), np.float32(task.spec.deviation)
        return {"kernel": kernel / deviation, "bias": (bias - mean) / deviation}
    names, wanted = outputs.labels, task.spec.labels
    if set(names) != set(wanted):
        lacks, others = sorted(set(wanted) - set(names)), sorted(set(names) - set(wanted))
        parts = [
            f"{what} {first_few(labels, 5)}"
            for what, labels in (("lack", lacks), ("have", others))
            if labels
        ]
        raise UserError(f"the labels of {saved.name} {' and '.join(parts)}")
    if not wanted:  # start and end of a span
        return {"kernel": kernel, "bias": bias}
    order = [names.index(label) for label in wanted]
    return {"kernel": kernel[..., order], "bias": bias[order]}
