"""Encoder families of other libraries: what they compute, and the names in their files."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from bert_jax.artefacts.formats.entries import Entry, affine, norm
from bert_jax.artefacts.formats.huggingface_files import MULTIPLE_CHOICE, TASKS, model_class
from bert_jax.files.untrusted.json_file import short
from bert_jax.model.config import ModelConfig
from bert_jax.model.embedding import Pooled
from bert_jax.model.task_heads import HeadNetwork

EMBEDDINGS, LAYERS = ("encoder", "embeddings"), ("encoder", "layers")
ATTENTION, MLP = (*LAYERS, "attention"), (*LAYERS, "mlp")
SIZES = {
    "vocab_size": "vocab_size", "max_position_embeddings": "num_positions",
    "hidden_size": "hidden_dim", "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads", "intermediate_size": "mlp_dim",
    "initializer_range": "init_std",
}  # fmt: skip
BERT_FIELDS = {
    **SIZES, "type_vocab_size": "num_types", "hidden_act": "activation",
    "layer_norm_eps": "norm_eps", "hidden_dropout_prob": "hidden_dropout_rate",
    "attention_probs_dropout_prob": "attention_dropout_rate",
}  # fmt: skip
"""Fields of `ModelConfig`, by name in `config.json`."""
MAX_SIZE = 1 << 24
MAX_LAYERS = 1024
"""Upper bounds for values from a file; no existing model exceeds them."""

ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
    "silu": "silu", "swish": "silu",
}  # fmt: skip
"""Our activations, by name in `config.json`. If several names fit, exports write the first."""

_VALUES: Mapping[str, Mapping[str, Any]] = {
    "activation": ACTIVATIONS,
    "head_activation": ACTIVATIONS,
    "relative_norm": {"layer_norm": True, "none": False},
    "relative_terms": {"p2c|c2p": "c2p|p2c", "c2p|p2c": "c2p|p2c", "c2p": "c2p", "p2c": "p2c"},
}
"""Values by name in `config.json`, for fields of `ModelConfig`; exports write the first name."""
_FLAGS = {
    "norm_bias", "attention_bias", "mlp_bias", "decoder_bias", "head_bias", "tied",
    "relative_shared",
}  # fmt: skip
NOT_QUANTISED = {
    "quantization_config": (None, "quantised weights are not read; save them as float32")
}


@dataclass(frozen=True)
class Family:
    """A family of encoders; its tables map the tensors in its files to our parameter tree."""

    name: str
    classes: str
    """Prefixes of the class names, separated by `|`; exports write the first."""
    prefix: str
    """Prefix of the encoder's tensor names; the file of a bare encoder omits it."""
    encoder: tuple[Entry, ...]
    pretraining: Mapping[str, tuple[Entry, ...]]
    """Entries of the pretraining heads by our names; `mlm` is always present."""
    computes: Mapping[str, Any]
    """Fields of `ModelConfig` that have one value in all models of the family."""
    fields: Mapping[str, str]
    """Fields of `ModelConfig`, by name in `config.json`."""
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Fields of `config.json` with one supported value: (this value, the reason for messages)."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Default values of fields that a `config.json` may lack."""
    synonyms: Mapping[str, str] = field(default_factory=dict)
    """Names in `fields`, by a synonym that a `config.json` may use; the synonym has priority."""
    sets: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields of `ModelConfig` for files that do not give them. Unlike a field in
    `computes`, such a field may have another value in some models of the family."""
    follows: Mapping[str, str] = field(default_factory=dict)
    """Fields of `ModelConfig` that always equal another field, each mapped to that field."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Current prefixes of tensor names, by older prefix."""
    heads: Mapping[str, tuple[Entry, ...]] = field(default_factory=dict)
    """Entries of the fine-tuning heads by kind; the pooler's entries, if any, come first."""
    compares: bool = False
    """Whether the family has a multiple-choice class, whose classification head scores choices."""
    pooler: tuple[Entry, ...] = ()
    """Entries of the pooler of classes without a task head; old files of others may have them."""
    poolings: Mapping[str, Pooled] = field(default_factory=dict)
    """Map from each value of `classifier_pooling` in a file to the pooling of bert_jax; the first
    value is the default. If the map is empty, the family's classifiers use BERT's pooler."""
    classifies: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelConfig` that have one value in all classifiers of the family."""
    dropouts: Mapping[str, str] = field(
        default_factory=lambda: dict.fromkeys(TASKS.values(), "classifier_dropout")
    )
    """Field of `config.json` with the dropout rate (default: the layers' rate), by kind of head."""
    class_names: Mapping[str, str] = field(default_factory=dict)
    """Irregular class names, by task such as ForMaskedLM. Regular names are a prefix and a task."""
    theta: float = 10000.0
    """Base of the rotary angles if the file does not give it."""
    local: bool = False
    """Whether layers may have local attention, with a separate base of the rotary angles."""
    narrows_mlp: bool = False
    """Whether files give the feed-forward width of ungated layers; gated layers have 2/3 of it."""
    refuses: Callable[[ModelConfig], list[str]] = lambda config: []
    """Function that returns the family's own reasons for not supporting a configuration, if any."""
    native: bool = True
    """Whether Transformers has the family's class; if not, only the model's own code can run it."""
    like_bert: bool = False
    """Whether the family computes as BERT does, except for token types, positions and the pooler.
    Its files may omit sizes (BERT's apply) and have pretraining heads beside a fine-tuning head."""
    written: Collection[str] | None = None
    """Tasks whose files are read directly, without `bert-jax import`. None means all tasks."""
    has_types: bool = True
    """Whether the encoder has token types; if not, reading adds a table of zeros."""
    doubles_type: bool = False
    """Whether reading duplicates a single token type, so that training can make two types of it."""
    first_position: int | None = None
    """Offset of the first position from the padding id. None means that positions start at 0."""
    exact_gelu_head: bool = False
    """Whether the masked-LM head uses the exact GELU, whatever the encoder's activation."""

    def class_of(self, task: str) -> str:
        """Return the class name for a task such as ForMaskedLM, or Model for the bare encoder."""
        return self.class_names.get(task, f"{self.classes.partition('|')[0]}{task}")

    def task_of(self, found: Mapping[str, Any]) -> str:
        """Return the task of a `config.json`: its class without the prefix, such as ForMaskedLM."""
        name = model_class(found)
        tasks = {theirs: task for task, theirs in self.class_names.items()}
        return tasks.get(name) or re.sub(f"^(?:{self.classes})(?=For|Model)", "", name)

    def head_of(self, found: Mapping[str, Any]) -> HeadNetwork | None:
        """Return the kind of fine-tuning head in a `config.json`, or None if no head is read."""
        task = self.task_of(found)
        kind = TASKS.get(task)
        return kind if kind in self.heads and (self.compares or task != MULTIPLE_CHOICE) else None

    def table(
        self, parts: Collection[str] = (), head: str | None = None, *, pooler: bool = False
    ) -> list[Entry]:
        """Return the entries of the encoder, the pretraining heads `parts` and the head `head`."""
        table = [*self.encoder, *(self.pooler if pooler else ())]
        for part, entries in self.pretraining.items():
            table += entries if part in parts else ()
        return table if head is None else [*table, *self.heads[head]]

    def name_of(self, *path: str) -> str:
        """Return the name that files give to the encoder parameter at `path` of our tree."""
        return next(entry.name for entry in self.encoder if entry.path == path)

    @property
    def copies(self) -> dict[str, str]:
        """Names of tensors that only copy a tied tensor, each mapped to the tied tensor's name."""
        names = {entry.path: entry.name for entry in self.pretraining["mlm"]}
        decoder, bias = names["mlm", "decoder"], names["mlm", "bias"]
        second = decoder.removesuffix("weight") + "bias"
        token = self.name_of(*EMBEDDINGS, "token")
        return {decoder: token} | ({} if second == bias else {second: bias})

    def pooling_fields(self, pooling: str) -> dict[str, str]:
        """Return the field of `config.json` that says which states a classifier pools."""
        names = [theirs for theirs, ours in self.poolings.items() if ours == pooling]
        return {"classifier_pooling": names[0]} if names else {}


def token_table(name: str) -> Entry:
    """Return the entry of the token embedding table."""
    return Entry(f"{name}.weight", (*EMBEDDINGS, "token"), "vocab")


def masked_lm(dense: str, norm_name: str, decoder: str, bias: str) -> tuple[Entry, ...]:
    """Return the entries of a masked-LM head: a linear map, a norm and the decoder."""
    return (
        *affine(dense, "mlm", "dense"),
        *norm(norm_name, "mlm", "norm"),
        *decoder_of(decoder, bias),
    )


def decoder_of(decoder: str, bias: str) -> tuple[Entry, ...]:
    """Return the entries of the decoder of a masked-LM head."""
    return (
        Entry(f"{decoder}.weight", ("mlm", "decoder"), "vocab"),
        Entry(f"{bias}.bias", ("mlm", "bias"), "vocab"),
    )


def read_field(name: str, ours: str, value: Any, wrong: list[str]) -> Any:
    """Convert the value of a field of the file to a value of the `ModelConfig` field `ours`.

    A value that does not fit becomes None, and `wrong` gets an entry that says what would fit.
    """
    result: Any
    if (known := _VALUES.get(ours)) is not None:
        if ours == "relative_terms" and isinstance(value, list):
            value = "|".join(map(str, value))
        fits = isinstance(value, str) and value in known
        wanted, result = f"one of {', '.join(known)}", known.get(f"{value}")
    elif ours in _FLAGS:
        fits, wanted, result = isinstance(value, bool), "true or false", value
    elif ours.endswith("_rate"):
        fits, wanted = type(value) in (int, float) and 0 <= value < 1, "in [0, 1)"
        result = float(value) if fits else None  # 0 may be written as an integer
    elif ours in ("norm_eps", "init_std"):
        fits, wanted, result = type(value) is float and 0 < value < 1, "between 0 and 1", value
    elif ours in ("relative_buckets", "relative_distance"):
        fits, wanted = type(value) is int and -1 <= value <= MAX_SIZE, f"from -1 to {MAX_SIZE:,}"
        result = max(value, 0) if fits else None  # files have -1 for our 0
    else:
        limit = MAX_LAYERS if ours == "num_layers" else MAX_SIZE
        fits, wanted = type(value) is int and 1 <= value <= limit, f"from 1 to {limit:,}"
        result = value
    if not fits:
        wrong.append(f"{name} is {show(value)}; it must be {wanted}")
    return result if fits else None


def check_only(
    found: Mapping[str, Any], only: Mapping[str, tuple[Any, str]], wrong: list[str]
) -> None:
    """Add to `wrong` the fields whose value is neither the supported value nor null."""
    for name, (value, why) in only.items():
        if name in found and found[name] not in (value, None):
            wrong.append(f"{name} is {show(found[name])}; {why}")


def their_name(field: str, value: Any) -> str:
    """Return the name in `config.json` of the value of a field, such as an activation."""
    return next(theirs for theirs, ours in _VALUES[field].items() if ours == value)


def show(value: object) -> str:
    """Format a value from a file for a message, as `short` does, but write null as "None"."""
    return "None" if value is None else short(value)
