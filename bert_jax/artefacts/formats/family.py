"""Facts about a family of foreign encoders: what it computes, and the names in its files."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from bert_jax.artefacts.formats.entries import Entry, affine, norm
from bert_jax.artefacts.formats.huggingface_config import MULTIPLE_CHOICE, TASKS
from bert_jax.artefacts.formats.huggingface_files import model_class
from bert_jax.model.config import ModelConfig
from bert_jax.model.pooling import Pooled
from bert_jax.model.task_heads import HeadNetwork

EMBEDDINGS, LAYERS = ("encoder", "embeddings"), ("encoder", "layers")
ATTENTION, MLP = (*LAYERS, "attention"), (*LAYERS, "mlp")
SIZES = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "num_positions",
    "hidden_size": "hidden_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "mlp_dim",
    "initializer_range": "init_std",
}
BERT_FIELDS = {
    **SIZES, "type_vocab_size": "num_types", "hidden_act": "activation",
    "layer_norm_eps": "norm_eps", "hidden_dropout_prob": "hidden_dropout_rate",
    "attention_probs_dropout_prob": "attention_dropout_rate",
}  # fmt: skip
"""Fields of `config.json` to ours."""
NOT_QUANTISED = {
    "quantization_config": (None, "quantised weights are not read; save them as float32"),
}


@dataclass(frozen=True)
class Family:
    """Facts about one family; its tables of parameters lead straight to our tree."""

    name: str
    classes: str
    """Beginning of its class names; of several, separated by bars, the first is written."""
    prefix: str
    """Beginning of the encoder's names, which the file of a bare encoder lacks."""
    encoder: tuple[Entry, ...]
    pretraining: Mapping[str, tuple[Entry, ...]]
    """Pretraining heads by our names of them; `mlm` is always there."""
    computes: Mapping[str, Any]
    """Fields of `ModelConfig` that are equal in all models of the family."""
    fields: Mapping[str, str]
    """Fields of `config.json` to ours."""
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Fields of `config.json` that change what is computed: the one value that fits, and why."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `config.json` that a file may lack, to the values that they then have."""
    sets: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelConfig` that a model read from a file gets, and that another may have
    otherwise: how parameters start, or what the file cannot say."""
    follows: Mapping[str, str] = field(default_factory=dict)
    """Fields of `ModelConfig` that a file gives together with another field, to the other field."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Older beginnings of names, to today's."""
    heads: Mapping[str, tuple[Entry, ...]] = field(default_factory=dict)
    """Fine-tuning heads by our kinds; a head that reads the pooler begins with it."""
    compares: bool = False
    """Whether a class with the head of a classification compares rows: multiple choice."""
    pooler: tuple[Entry, ...] = ()
    """Pooler of classes without a fine-tuning head, and of old files."""
    poolings: Mapping[str, Pooled] = field(default_factory=dict)
    """Values of `classifier_pooling` to ours, the default first; empty: BERT's pooler."""
    classifies: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelConfig` that are equal in all classifiers of the family."""
    dropouts: Mapping[str, str] = field(
        default_factory=lambda: dict.fromkeys(TASKS.values(), "classifier_dropout")
    )
    """Fields of `config.json` with the dropout before a head; else the layers' rate."""
    class_names: Mapping[str, str] = field(default_factory=dict)
    """Classes by task, such as ForMaskedLM; others are `classes` and the task."""
    theta: float = 10000.0
    """Base of the rotations where the file names none."""
    local: bool = False
    """Whether layers may be local, with a theta of their own."""
    narrows_mlp: bool = False
    """Whether the file gives the width of an ungated network; the gated one has 2/3 of that."""
    refuses: Callable[[ModelConfig], list[str]] = lambda config: []
    """Function from a configuration to further reasons why the family cannot compute it."""
    native: bool = True
    """Whether Transformers has the class; without it the model's own code would have to be run."""
    like_bert: bool = False
    """Whether the family computes what a BERT does, up to token types, positions and the pooler.
    Files may lack sizes, which are then BERT's, and have pretraining heads beside a fine-tuning
    head."""
    written: Collection[str] | None = None
    """Tasks of the classes that are written, and read without an import; None: all."""
    has_types: bool = True
    """Whether the encoder has token types; without them its table has an entry that is zeros."""
    doubles_type: bool = False
    """Whether one token type becomes two equal ones, which further training may tell apart."""
    first_position: int | None = None
    """Distance of the first position from padding's id; None: positions count from 0."""
    exact_gelu_head: bool = False
    """Whether the masked-LM head has the exact GELU whatever the encoder has."""

    def class_of(self, task: str) -> str:
        """Return the class of a task, such as ForMaskedLM, or Model for the bare encoder."""
        return self.class_names.get(task, f"{self.classes.partition('|')[0]}{task}")

    def task_of(self, found: Mapping[str, Any]) -> str:
        """Return the class of a `config.json` without the family's name, such as ForMaskedLM."""
        name = model_class(found)
        tasks = {theirs: task for task, theirs in self.class_names.items()}
        return tasks.get(name) or re.sub(f"^(?:{self.classes})(?=For|Model)", "", name)

    def head_of(self, found: Mapping[str, Any]) -> HeadNetwork | None:
        """Return the kind of the fine-tuning head that a `config.json` describes, if it is read."""
        task = self.task_of(found)
        kind = TASKS.get(task)
        return kind if kind in self.heads and (self.compares or task != MULTIPLE_CHOICE) else None

    def table(
        self, parts: Collection[str] = (), head: str | None = None, *, pooler: bool = False
    ) -> list[Entry]:
        """Return the entries of the encoder, of pretraining heads, and of a fine-tuning head."""
        table = [*self.encoder, *(self.pooler if pooler else ())]
        for part, entries in self.pretraining.items():
            table += entries if part in parts else ()
        return table if head is None else [*table, *self.heads[head]]

    def name_of(self, *path: str) -> str:
        """Return the name of a parameter of the encoder."""
        return next(entry.name for entry in self.encoder if entry.path == path)

    @property
    def copies(self) -> dict[str, str]:
        """Names of the tied decoder, which a file may hold twice, to the names of its originals."""
        names = {entry.path: entry.name for entry in self.pretraining["mlm"]}
        decoder, bias = names["mlm", "decoder"], names["mlm", "bias"]
        second = decoder.removesuffix("weight") + "bias"
        token = self.name_of(*EMBEDDINGS, "token")
        return {decoder: token} | ({} if second == bias else {second: bias})

    def pooling_fields(self, pooling: str) -> dict[str, str]:
        """Return the field of a `config.json` that says what a classification reads."""
        names = [theirs for theirs, ours in self.poolings.items() if ours == pooling]
        return {"classifier_pooling": names[0]} if names else {}


def token_table(name: str) -> Entry:
    """Return the entry of the embedding table of tokens."""
    return Entry(f"{name}.weight", (*EMBEDDINGS, "token"), "vocab")


def masked_lm(dense: str, norm_name: str, decoder: str, bias: str) -> tuple[Entry, ...]:
    """Return the entries of a masked-LM head with a map and a norm before its decoder."""
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
