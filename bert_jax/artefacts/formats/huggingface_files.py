"""Files in Hugging Face's format: weights in safetensors, and heads described in `config.json`."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.artefacts.formats.flax_weights import FLAX_WEIGHTS, read_flax
from bert_jax.config.bounds import Bounded, Count
from bert_jax.config.mapping import build, to_dict
from bert_jax.errors import UserError
from bert_jax.files.untrusted.json_file import read_json_object, short
from bert_jax.files.untrusted.safetensors_file import read_safetensors
from bert_jax.model.task_heads import HeadNetwork, TaskHeadConfig
from bert_jax.tasks.long_texts import CUT, LongTexts
from bert_jax.tasks.task import HeadKind
from bert_jax.tokenization import tokenizer_parts

MAX_CONFIG_BYTES = 1 << 24
_MAX_INDEX_BYTES = 1 << 24
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHER_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")

MULTIPLE_CHOICE = "ForMultipleChoice"
"""Suffix of the classes whose classification head gives one score for each choice."""
TASKS: Mapping[str, HeadNetwork] = {
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "tagging",
    "ForQuestionAnswering": "span",
    MULTIPLE_CHOICE: "classification",
}
"""Our kinds of fine-tuning heads, by suffix of the class name (without the family's name)."""
PRETRAINING_HEADS = ("mlm", "nsp", "rtd")
"""Our names of the pretraining heads."""
POOLED_HEADS = frozenset({"nsp"})
"""Pretraining heads that read the pooled first token."""
PRETRAINING_TASKS = (
    ({"rtd"}, "ForPreTraining"),
    ({"mlm", "nsp"}, "ForPreTraining"),
    ({"mlm"}, "ForMaskedLM"),
    ({"nsp"}, "ForNextSentencePrediction"),
    (set[str](), "Model"),
)
"""Pretraining heads and suffix of each class; a model gets the first class whose heads it has."""
LOGITS = {"prediction_logits": "mlm", "seq_relationship_logits": "nsp"}
"""Heads by output name of `BertForPreTraining`. The output of a class with one head is `logits`."""
_PROBLEMS = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}
SCORING = "sentence_transformers"
"""Field of `config.json` that names the function that `CrossEncoder` applies to the logits."""
UNTRAINED = "untrained_parts"
"""Field of `config.json` that lists untrained parts, added by an export to suit the class."""
THRESHOLDS, LONG_TEXTS, READING = "label_thresholds", "long_texts", "reading"
CONSTANT = "no_better_than_constant"
HEAD_FIELDS = (THRESHOLDS, LONG_TEXTS, READING, CONSTANT)
"""Our own fields about the head in a `config.json`. Transformers keeps them, but ignores them."""
_MAX_LABEL_CHARS = 1 << 12
_UNTYPED = "(xlm-?)?roberta|camembert|distilberttokenizer|tokenizersbackend"


@dataclass(frozen=True)
class Reading(Bounded):
    """Settings with which a tagging or span head reads texts: windows, and limits of answers."""

    stride: Count
    """Number of tokens from the start of one window to the start of the next."""
    max_question: Count = 64
    """Longest question, in tokens."""
    max_answer_tokens: Count = 30
    """Longest answer, in tokens."""
    null_threshold: float | None = None
    """Largest `null_odds` at which a question is answered. None means that all are answered."""


@dataclass(frozen=True)
class TaskOutputs:
    """A fine-tuning head and the meaning of its logits."""

    head: TaskHeadConfig
    objective: HeadKind
    labels: tuple[str, ...] = ()
    """Labels of classes and tags, in the order of the logits."""
    thresholds: tuple[float, ...] = ()
    """Lowest probability at which each label of a multi-label head applies; if empty, 0.5."""
    long: LongTexts = CUT
    """Treatment, in classification, of texts that are longer than the largest input."""
    reading: Reading | None = None
    """Windows and limits of answers for tags and spans. None means the defaults of the command."""


def head_from_huggingface(
    task: str, found: Mapping[str, Any], arrays: Mapping[str, np.ndarray], *, bias: str, rate: Any
) -> TaskOutputs:
    """Read a fine-tuning head from `found`, the content of `config.json`, and the model's tensors.

    `task` is the class-name suffix of the model, a key of `TASKS`. `bias` names the tensor with one
    number per output. `rate` is the dropout rate before the head. Raise a UserError if the labels,
    the problem type or another field is invalid or does not fit.
    """
    kind = TASKS[task]
    if type(rate) not in (int, float) or not 0 <= rate < 1:
        raise UserError(f"config.json: classifier_dropout is {rate!r:.80}; it must be in [0, 1)")
    given = found.get(READING) if kind in ("span", "tagging") else None
    reading = None if given is None else build(Reading, given, f"config.json: {READING}")
    if kind == "span":
        return TaskOutputs(TaskHeadConfig("span", 2, 0.0), "span", reading=reading)
    outputs = arrays.get(bias)
    if outputs is None or outputs.ndim != 1:
        raise UserError(f"{bias} is missing or not a vector, so the number of labels is unknown")
    size = len(outputs)
    head = TaskHeadConfig(kind, size, float(rate))
    if task == MULTIPLE_CHOICE:
        return TaskOutputs(head, "choice")
    labels = _labels(found.get("id2label"), size)
    if kind == "tagging":
        return TaskOutputs(head, "tags", labels, reading=reading)
    problem, score = found.get("problem_type"), _score(found)
    known = problem in (None, *_PROBLEMS.values())
    if known and score == "Sigmoid":
        problem = _PROBLEMS["multi_label"]
    elif known and (problem is None or (score and size == 1)):
        problem = "regression" if size == 1 else "single_label_classification"
    objective: Any = next((ours for ours, theirs in _PROBLEMS.items() if theirs == problem), None)
    fits = {"regression": size == 1, "single_label": size > 1, "multi_label": True}
    if not fits.get(objective):
        raise UserError(
            f"config.json: problem_type is {problem!r:.80}, but the head has {size} outputs; "
            "regression has one, single_label_classification two or more, and "
            "multi_label_classification any number"
        )
    long = build(LongTexts, found.get(LONG_TEXTS, {}), f"config.json: {LONG_TEXTS}")
    if objective == "regression":
        return TaskOutputs(head, objective, long=long)
    thresholds = _thresholds(found, labels) if objective == "multi_label" else ()
    return TaskOutputs(head, objective, labels, thresholds, long)


def head_class(outputs: TaskOutputs) -> str:
    """Return the suffix of the class names for a head; raise UserError if there is no class."""
    if outputs.objective == "choice":
        return MULTIPLE_CHOICE
    task = next((task for task, kind in TASKS.items() if kind == outputs.head.kind), None)
    if task is None:
        raise UserError(f"no class of Transformers has a head for {outputs.head.kind}")
    return task


def head_to_huggingface(outputs: TaskOutputs) -> dict[str, Any]:
    """Return the fields of `config.json` for a head, except its class and dropout rate."""
    if outputs.objective == "choice":
        return {}
    fields: dict[str, Any] = {}
    if outputs.objective in _PROBLEMS:
        fields["problem_type"] = _PROBLEMS[outputs.objective]
        score = "Sigmoid" if outputs.objective == "multi_label" else "Identity"
        fields[SCORING] = {"activation_fn": f"torch.nn.{score}"}
    if outputs.thresholds:
        fields[THRESHOLDS] = dict(zip(outputs.labels, outputs.thresholds, strict=True))
    if outputs.reading is not None:
        fields[READING] = to_dict(outputs.reading)
    if outputs.long != CUT:
        fields[LONG_TEXTS] = to_dict(outputs.long)
    if outputs.head.kind != "span":
        labels = outputs.labels or _labels(None, outputs.head.num_labels)
        fields["id2label"] = {str(n): label for n, label in enumerate(labels)}
        fields["label2id"] = {label: n for n, label in enumerate(labels)}
    return fields


def _score(found: Mapping[str, Any]) -> str:
    """Return the function that `CrossEncoder` applies to logits, or "" if no field names one."""
    given, before = found.get(SCORING), found.get("sbert_ce_default_activation_function")
    path = given.get("activation_fn", before) if isinstance(given, Mapping) else before
    return "" if path is None else torch_class(path, ("Identity", "Sigmoid"), "activation_fn")


def torch_class(path: Any, supported: Collection[str], where: str) -> str:
    """Return the name of a class of `torch.nn` from its full path; raise UserError for others."""
    known = re.fullmatch(r"torch\.nn\.(?:modules\.\w+\.)?(\w+)", f"{path}")
    if known is None or known[1] not in supported:
        said = f"{', '.join(supported)} of torch.nn are supported"
        raise UserError(f"{where} is {short(path)}; {said}")
    return known[1]


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


def _labels(found: Any, number: int) -> tuple[str, ...]:
    if found is None:
        return tuple(f"LABEL_{n}" for n in range(number))
    names = [found.get(str(n)) for n in range(number)] if isinstance(found, Mapping) else []
    good = [name for name in names if isinstance(name, str) and len(name) <= _MAX_LABEL_CHARS]
    if len(good) != number or len(found) != number or len(set(good)) != number:
        raise UserError(
            f'config.json: id2label must give each of the {number} labels of the head, "0" to '
            f'"{number - 1}", a different name'
        )
    return tuple(good)


def model_class(found: Mapping[str, Any]) -> str:
    """Return the class that a `config.json` names, or "AutoModel" if the file names none.

    Only a plain name is accepted, because messages show the class in commands for the user.
    """
    classes = found.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    plain = isinstance(name, str) and re.fullmatch(r"[A-Z]\w{1,60}", name)
    return str(name) if plain else "AutoModel"


def tokenizer_config(directory: Path) -> dict[str, Any]:
    """Read `tokenizer_config.json`; return {} if there is none."""
    path = directory / "tokenizer_config.json"
    return read_json_object(path, max_bytes=_MAX_INDEX_BYTES) if path.is_file() else {}


def marks_second(directory: Path, found: Mapping[str, Any]) -> bool:
    """Return true if the tokenizer of a `config.json` gives second texts of pairs token type 1.

    Tokenizers of RoBERTa, XLM-R, CamemBERT and DistilBERT, and TokenizersBackend, give type 0. The
    tokenizers of generic classes do as their post-processor says.
    """
    fields, file = tokenizer_config(directory), directory / "tokenizer.json"
    kind = fields.get("tokenizer_class") or found.get("tokenizer_class") or found.get("model_type")
    if isinstance(names := fields.get("model_input_names"), list):
        typed = "token_type_ids" in names
    else:
        typed = not re.match(_UNTYPED, f"{kind}", re.I)
    generic = kind in ("PreTrainedTokenizerFast", "TokenizersBackend") and file.is_file()
    return typed and (not generic or tokenizer_parts.Reading(file).marks_second())


def model_max_length(directory: Path) -> int | None:
    """Return the largest number of tokens that a tokenizer's files allow; None means no limit."""
    path = directory / "tokenizer_config.json"
    return row_length(tokenizer_config(directory), "model_max_length", path)


def row_length(fields: Mapping[str, Any], name: str, where: Path) -> int | None:
    """Return a limit of the number of tokens; None if the field is missing or huge (say, 1e30)."""
    length = fields.get(name)
    if length is None or (isinstance(length, int | float) and length > 1 << 24):
        return None  # Transformers writes 1e30 for no limit
    if type(length) is not int or length < 8:
        raise UserError(f"{where}: {name} is {short(length)}; it must be at least 8")
    return length


def weight_files(directory: Path) -> list[Path]:
    """Return a directory's weight files, all in the format that `read_weights` prefers."""
    if (directory / INDEX).is_file():
        return sorted(directory.glob("*.safetensors"))
    files = (directory / name for name in (WEIGHTS, FLAX_WEIGHTS))
    return [path for path in files if path.is_file()][:1]


def read_weights(directory: Path, made_by: str) -> dict[str, np.ndarray]:
    """Map or read all tensors, by name, from one file or from the shards that an index lists.

    Raise a UserError if there are no weights, both a file and an index, or a malformed file. The
    message says how to convert weights of another format with the class `made_by`.
    """
    single, index = directory / WEIGHTS, directory / INDEX
    if single.is_file() and index.is_file():
        raise UserError(f"{directory} has both {WEIGHTS} and {INDEX}; remove the wrong one")
    if single.is_file():
        return read_safetensors(single)
    if index.is_file():
        return _read_shards(directory, index)
    if (directory / FLAX_WEIGHTS).is_file():
        return read_flax(directory / FLAX_WEIGHTS)
    for name in _OTHER_WEIGHTS:
        if (directory / name).exists():
            raise UserError(
                f"{directory} has only the weights {name}, which are not read; {WEIGHTS} is "
                "needed. If you trust the file, convert it with Transformers, "
                f"{made_by}.from_pretrained({str(directory)!r}).save_pretrained(NEW), and copy "
                "the tokenizer's files to NEW"
            )
    raise UserError(f"{directory} has no weights: no {WEIGHTS}, {INDEX} or {FLAX_WEIGHTS}")


def _read_shards(directory: Path, index: Path) -> dict[str, np.ndarray]:
    files = read_json_object(index, max_bytes=_MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(files, Mapping) or not files:
        raise UserError(f"{index}: weight_map must be an object that maps tensor names to files")
    found: dict[str, np.ndarray] = {}
    wrong: list[str] = []
    by_file: dict[str, set[str]] = {}
    for name, file in files.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", file):
            raise UserError(
                f"{index}: the tensor {name[:80]!r} is in {file!r:.80}; a .safetensors file of the "
                "same directory is needed"
            )
        by_file.setdefault(file, set()).add(name)
    for file, names in sorted(by_file.items()):
        tensors = read_safetensors(directory / file)
        wrong += [f"{name[:80]!r} is not in {file}" for name in sorted(names - tensors.keys())]
        wrong += [f"{name[:80]!r} is in {file}, but the index does not say so"
                  for name in sorted(tensors.keys() - names)]  # fmt: skip
        found |= tensors
    if wrong:
        raise UserError(f"{index} does not match the weight files: {'; '.join(wrong[:20])}")
    return found
