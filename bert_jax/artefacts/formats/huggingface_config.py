"""Hugging Face's `config.json` of a BERT, and our `ModelConfig` and `TaskOutputs`, both ways."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_jax.artefacts.formats.config_fields import check_only, read_field, show, their_activation
from bert_jax.artefacts.formats.huggingface_files import model_class
from bert_jax.config.mapping import build, to_dict
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.task_heads import HeadNetwork, TaskHeadConfig
from bert_jax.tasks.long_texts import CUT, LongTexts
from bert_jax.tasks.task import HeadKind

_SIZES = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "num_positions",
    "type_vocab_size": "num_types",
    "hidden_size": "hidden_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "mlp_dim",
}
_RATES = {
    "hidden_dropout_prob": "hidden_dropout_rate",
    "attention_probs_dropout_prob": "attention_dropout_rate",
}
_SCALES = {"layer_norm_eps": "norm_eps", "initializer_range": "init_std"}
"""Theirs to ours. Where a file lacks a field, `BertConfig` and `ModelConfig` have one default."""

_ONLY: dict[str, tuple[Any, str]] = {
    "position_embedding_type": ("absolute", "only learned absolute positions are supported"),
    "is_decoder": (False, "a decoder attends to the past alone; this is an encoder"),
    "add_cross_attention": (False, "cross-attention is not supported"),
    "pruned_heads": ({}, "layers with fewer heads than the others are not supported"),
    "quantization_config": (None, "quantised weights are not read; save them as float32"),
}
"""Fields that change what the model computes: the one value that fits, and why."""

CLASSES: Mapping[str, HeadNetwork] = {
    "BertForSequenceClassification": "classification",
    "BertForTokenClassification": "tagging",
    "BertForQuestionAnswering": "span",
}
MULTIPLE_CHOICE = "BertForMultipleChoice"
"""Class with the network of a classification, one output, that compares rows."""
_PROBLEMS = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}
THRESHOLDS, LONG_TEXTS, READING = "label_thresholds", "long_texts", "reading"
"""Fields of our own in a `config.json`, which Transformers keeps and does not read."""
_MAX_LABEL_CHARS = 200


def model_config_from_huggingface(found: Mapping[str, Any], *, where: str) -> ModelConfig:
    """Return the architecture that a `config.json` describes.

    Fields that do not change what the encoder computes (heads, labels, generation) are passed over.
    `where` names the file in messages.

    Raises:
        UserError: Another type of model, or fields that are wrong or not supported: all at once.
    """
    kind = found.get("model_type")
    if kind is None:
        raise UserError(
            f"{where} has no field model_type, so that it may be of any kind of model (RoBERTa's "
            'weights have the names of BERT\'s). If it is a BERT, add "model_type": "bert"'
        )
    if kind != "bert":
        raise UserError(
            f"{where}: model_type is {show(kind)}; only 'bert' is supported. `bert-jax import` "
            "makes one of a RoBERTa, ELECTRA or DistilBERT"
        )
    fields: dict[str, Any] = {}
    wrong: list[str] = []

    for name, ours in (_SIZES | _RATES | _SCALES | {"hidden_act": "activation"}).items():
        if name in found and (value := read_field(name, ours, found[name], wrong)) is not None:
            fields[ours] = value
    check_only(found, _ONLY, wrong)
    defaults = ModelConfig()
    width = fields.get("hidden_dim", defaults.hidden_dim)
    heads = fields.get("num_heads", defaults.num_heads)
    if width % heads:
        wrong.append(f"hidden_size {width} is not divisible by num_attention_heads {heads}")
    if wrong:
        raise UserError(f"{where}: {'; '.join(wrong)}")
    return ModelConfig(**fields)


def model_config_to_huggingface(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a `config.json` for an architecture, without those of a head.

    What says how a step is computed (dtype, attention_impl, scan_unroll, remat) has no place there.
    """
    pairs = _SIZES | _RATES | _SCALES
    theirs: dict[str, Any] = {name: getattr(config, ours) for name, ours in pairs.items()}
    if config.projects_embeddings:
        theirs["embedding_size"] = config.embedding_width
    theirs["hidden_act"] = their_activation(config.activation)
    return {"model_type": "bert", **theirs}


@dataclass(frozen=True)
class Reading:
    """Windows of long texts, and limits of answers, of a head for tags or spans."""

    stride: int
    """Sub-words from one window to the next."""
    max_question: int = 64
    """Longest question, in tokens."""
    max_answer_tokens: int = 30
    """Longest answer."""
    null_threshold: float | None = None
    """Greatest `null_odds` of a question that is answered; None: every one is."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        for name in ("stride", "max_question", "max_answer_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; 1 is the least")


class NoClassError(UserError):
    """Refusal of a model that no class of Transformers computes."""


@dataclass(frozen=True)
class TaskOutputs:
    """A head and what its logits mean."""

    head: TaskHeadConfig
    objective: HeadKind
    labels: tuple[str, ...] = ()
    """Labels of classes and tags, in the order of the logits."""
    thresholds: tuple[float, ...] = ()
    """Least probability of each of several labels; (): one half."""
    long: LongTexts = CUT
    """Treatment of texts with more tokens than a row, of a classification."""
    reading: Reading | None = None
    """Windows and answers of tags and spans; None: those of the verb."""


def head_from_huggingface(
    found: Mapping[str, Any], state_dict: Mapping[str, np.ndarray]
) -> TaskOutputs | None:
    """Return the head of one of their classes that are known; None of any other.

    Raises:
        UserError: The labels or the type of the problem do not fit the weights.
    """
    made_by = model_class(found)
    kind = "classification" if made_by == MULTIPLE_CHOICE else CLASSES.get(made_by)
    if kind is None:
        return None
    rate = found.get("classifier_dropout")
    rate = found.get("hidden_dropout_prob", 0.1) if rate is None else rate
    if type(rate) not in (int, float) or not 0 <= rate < 1:
        raise UserError(f"config.json: classifier_dropout is {rate!r:.80}; it must be in [0, 1)")
    if kind == "span":
        return TaskOutputs(TaskHeadConfig("span", 2, 0.0), "span", reading=_reading(found))
    bias = state_dict.get("classifier.bias")
    if bias is None or bias.ndim != 1:
        raise UserError("classifier.bias is missing, or no vector: the number of labels is unknown")
    head = TaskHeadConfig(kind, len(bias), float(rate))
    if made_by == MULTIPLE_CHOICE:
        return TaskOutputs(head, "choice")
    labels = _labels(found.get("id2label"), len(bias))
    if kind == "tagging":
        return TaskOutputs(head, "tags", labels, reading=_reading(found))
    problem = found.get("problem_type")
    if problem is None:
        problem = "regression" if len(bias) == 1 else "single_label_classification"
    objective: Any = next((ours for ours, theirs in _PROBLEMS.items() if theirs == problem), None)
    fits = {"regression": len(bias) == 1, "single_label": len(bias) > 1, "multi_label": True}
    if not fits.get(objective):
        raise UserError(
            f"config.json: problem_type is {problem!r:.80} and the head has {len(bias)} outputs; "
            "regression has one, single_label_classification two or more, and "
            "multi_label_classification any number"
        )
    if objective == "regression":
        return TaskOutputs(head, objective, long=_long_texts(found))
    thresholds = _thresholds(found, labels) if objective == "multi_label" else ()
    return TaskOutputs(head, objective, labels, thresholds, _long_texts(found))


def head_to_huggingface(outputs: TaskOutputs) -> dict[str, Any]:
    """Return the fields of a `config.json`, the class among them.

    Raises:
        NoClassError: No class of theirs has the head.
    """
    head = outputs.head
    theirs = next((name for name, kind in CLASSES.items() if kind == head.kind), None)
    if outputs.objective == "choice":
        return {"architectures": [MULTIPLE_CHOICE], "classifier_dropout": head.dropout_rate}
    if theirs is None:
        raise NoClassError(f"no class of Transformers has a head for {head.kind}")
    fields: dict[str, Any] = {
        "architectures": [theirs],
        "classifier_dropout": head.dropout_rate,
    }
    if outputs.objective in _PROBLEMS:
        fields["problem_type"] = _PROBLEMS[outputs.objective]
    if outputs.thresholds:
        fields[THRESHOLDS] = dict(zip(outputs.labels, outputs.thresholds, strict=True))
    if outputs.reading is not None:
        fields[READING] = to_dict(outputs.reading)
    if outputs.long != CUT:
        fields[LONG_TEXTS] = to_dict(outputs.long)
    labels: Sequence[str] = outputs.labels
    if head.kind != "span":
        labels = labels or [f"LABEL_{n}" for n in range(head.num_labels)]
        fields["id2label"] = {str(n): label for n, label in enumerate(labels)}
        fields["label2id"] = {label: n for n, label in enumerate(labels)}
    return fields


def _thresholds(found: Mapping[str, Any], labels: Sequence[str]) -> tuple[float, ...]:
    given = found.get(THRESHOLDS)
    if given is None:
        return ()
    values = [given.get(label) for label in labels] if isinstance(given, Mapping) else []
    good = [v for v in values if isinstance(v, int | float) and 0 <= v <= 1]
    if len(good) != len(labels) or len(given) != len(labels):
        raise UserError(
            f"config.json: {THRESHOLDS} must have a number from 0 to 1 for each label of the head"
        )
    return tuple(map(float, good))


def _long_texts(found: Mapping[str, Any]) -> LongTexts:
    return build(LongTexts, found.get(LONG_TEXTS, {}), f"config.json: {LONG_TEXTS}")


def _reading(found: Mapping[str, Any]) -> Reading | None:
    given = found.get(READING)
    return None if given is None else build(Reading, given, f"config.json: {READING}")


def _labels(found: Any, number: int) -> tuple[str, ...]:
    if found is None:
        return tuple(f"LABEL_{n}" for n in range(number))
    names = [found.get(str(n)) for n in range(number)] if isinstance(found, Mapping) else []
    good = [name for name in names if isinstance(name, str) and len(name) <= _MAX_LABEL_CHARS]
    if len(good) != number or len(found) != number or len(set(good)) != number:
        raise UserError(
            f"config.json: id2label must name each of the {number} labels of the head, from "
            f'"0" to "{number - 1}", each once'
        )
    return tuple(good)
