"""Families of modern encoders: what each computes, and the names of its parameters.

A family is one entry of `MODERN`. Its tables lead straight to our tree; a parameter that a model
has not, such as the bias of a map without one, is passed over. Sources: the classes of
Transformers 5, and for NeoBERT Le Breton et al. 2025 and the names in its published file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bert_jax.artefacts.formats.entries import Entry, affine, norm
from bert_jax.model.config import ModelConfig
from bert_jax.model.pooling import Pooled

_EMBEDDINGS, _LAYERS = ("encoder", "embeddings"), ("encoder", "layers")
_ATTENTION, _MLP = (*_LAYERS, "attention"), (*_LAYERS, "mlp")
_QKV = ("query", "key", "value")


@dataclass(frozen=True)
class Modern:
    """Facts about one family."""

    name: str
    classes: str
    """Beginning of its class names."""
    prefix: str
    """Beginning of the encoder's names, which the file of a bare encoder lacks."""
    encoder: tuple[Entry, ...]
    masked_lm: tuple[Entry, ...]
    computes: Mapping[str, Any]
    """Fields of `ModelConfig` that are equal in all models of the family."""
    fields: Mapping[str, str]
    """Fields of `config.json` to ours."""
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Fields of `config.json` that change what is computed: the one value that fits, and why."""
    sets: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelConfig` that a model read from a file gets, and that another may have
    otherwise: how parameters start, or what the file cannot say."""
    follows: Mapping[str, str] = field(default_factory=dict)
    """Fields of `ModelConfig` that a file gives together with another one, to that one."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Older beginnings of names, to those of today."""
    heads: Mapping[str, tuple[Entry, ...]] = field(default_factory=dict)
    """Fine-tuning heads by our kinds."""
    poolings: Mapping[str, Pooled] = field(default_factory=dict)
    """Values of `classifier_pooling` to ours, the default first; empty: BERT's pooler."""
    classifies: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelConfig` that are equal in all classifiers of the family."""
    class_names: Mapping[str, str] = field(default_factory=dict)
    """Classes by task, such as ForMaskedLM; others are `classes` and the task."""
    theta: float = 10000.0
    """Base of the rotations where the file names none."""
    local: bool = False
    """Whether layers may be local, with a theta of their own."""
    narrows_mlp: bool = False
    """Whether the file gives the width of a network without gate, of which 2/3 are taken."""
    refuses: Callable[[ModelConfig], list[str]] = lambda config: []
    """Function from a configuration to further reasons why the family cannot compute it."""
    native: bool = True
    """Whether Transformers has the class; without it the model's own code would have to be run."""

    def class_of(self, task: str) -> str:
        """Return the class of a task, such as ForMaskedLM, or Model for the bare encoder."""
        return self.class_names.get(task, f"{self.classes}{task}")

    @property
    def token(self) -> str:
        """Name of the embedding table."""
        return next(e.name for e in self.encoder if e.path == (*_EMBEDDINGS, "token"))

    @property
    def copies(self) -> dict[str, str]:
        """Names of the tied decoder, which a file may hold beside its original, to that one."""
        names = {entry.path: entry.name for entry in self.masked_lm}
        decoder, bias = names["mlm", "decoder"], names["mlm", "bias"]
        second = decoder.removesuffix("weight") + "bias"
        return {decoder: self.token} | ({} if second == bias else {second: bias})


def _fused(name: str, under: tuple[str, ...], parts: tuple[str, ...]) -> list[Entry]:
    """Return the entries of maps that are one tensor, one below another."""
    return [entry for part in parts for entry in affine(name, *under, part)]


def _apart(names: Mapping[str, str], under: tuple[str, ...]) -> list[Entry]:
    """Return the entries of maps, by our names of them."""
    return [e for part, name in names.items() for e in affine(name, *under, part)]


def _token(name: str) -> Entry:
    return Entry(f"{name}.weight", (*_EMBEDDINGS, "token"), "vocab")


_COMMON = {"positions": "rope", "scale_embeddings": False, "gated": True, "embedding_dim": 0}
_PRE = {**_COMMON, "norm_order": "pre", "num_types": 0, "pooler": False}
_RMS = {
    **_PRE, "norm": "rms", "embedding_norm": False, "first_norm": True, "attention_pattern": "G",
    "head_transform": False,
}  # fmt: skip
_SIZES = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "num_positions",
    "hidden_size": "hidden_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "mlp_dim",
    "initializer_range": "init_std",
}
_NOT_QUANTISED = {
    "quantization_config": (None, "quantised weights are not read; save them as float32"),
}

_MODERNBERT_LAYER = "model.layers.{n}"
_MODERNBERT = Modern(
    name="ModernBERT",
    classes="ModernBert",
    prefix="model.",
    encoder=(
        _token("model.embeddings.tok_embeddings"),
        *norm("model.embeddings.norm", *_EMBEDDINGS, "norm"),
        *norm(f"{_MODERNBERT_LAYER}.attn_norm", *_LAYERS, "attention_norm"),
        *_fused(f"{_MODERNBERT_LAYER}.attn.Wqkv", _ATTENTION, _QKV),
        *affine(f"{_MODERNBERT_LAYER}.attn.Wo", *_ATTENTION, "output", num_inputs=2),
        *norm(f"{_MODERNBERT_LAYER}.mlp_norm", *_LAYERS, "mlp_norm"),
        *_fused(f"{_MODERNBERT_LAYER}.mlp.Wi", _MLP, ("gate", "up")),
        *affine(f"{_MODERNBERT_LAYER}.mlp.Wo", *_MLP, "down"),
        *norm("model.final_norm", "encoder", "final_norm"),
    ),
    masked_lm=(
        *affine("head.dense", "mlm", "dense"),
        *norm("head.norm", "mlm", "norm"),
        Entry("decoder.weight", ("mlm", "decoder"), "vocab"),
        Entry("decoder.bias", ("mlm", "bias"), "vocab"),
    ),
    computes={
        **_PRE, "norm": "layer", "embedding_norm": True, "first_norm": False, "num_kv_heads": 0,
        "head_transform": True,
    },
    fields={
        **_SIZES, "hidden_activation": "activation", "norm_eps": "norm_eps",
        "norm_bias": "norm_bias", "attention_bias": "attention_bias", "mlp_bias": "mlp_bias",
        "decoder_bias": "decoder_bias", "tie_word_embeddings": "tied",
        "attention_dropout": "attention_dropout_rate", "mlp_dropout": "mlp_dropout_rate",
        "embedding_dropout": "embedding_dropout_rate", "classifier_bias": "head_bias",
        "classifier_activation": "head_activation",
    },
    only=_NOT_QUANTISED,
    sets={
        "norm_eps": 1e-5, "norm_bias": False, "attention_bias": False, "mlp_bias": False,
        "attention_dropout_rate": 0.0, "mlp_dropout_rate": 0.0, "embedding_dropout_rate": 0.0,
        "head_bias": False, "head_activation": "gelu", "init": "scaled",
    },
    heads=dict.fromkeys(
        ("classification", "tagging", "span"),
        (
            *affine("head.dense", "transform", "dense"),
            *norm("head.norm", "transform", "norm"),
            *affine("classifier", "head"),
        ),
    ),
    poolings={"cls": "cls", "mean": "mean"},
    follows={"hidden_dropout_rate": "attention_dropout_rate"},
    local=True,
)  # fmt: skip

_EUROBERT_LAYER = "model.layers.{n}"
_EUROBERT = Modern(
    name="EuroBERT",
    classes="EuroBert",
    prefix="model.",
    encoder=(
        _token("model.embed_tokens"),
        *norm(f"{_EUROBERT_LAYER}.input_layernorm", *_LAYERS, "attention_norm"),
        *_apart(
            {part: f"{_EUROBERT_LAYER}.self_attn.{part[0]}_proj" for part in _QKV}, _ATTENTION
        ),
        *affine(f"{_EUROBERT_LAYER}.self_attn.o_proj", *_ATTENTION, "output", num_inputs=2),
        *norm(f"{_EUROBERT_LAYER}.post_attention_layernorm", *_LAYERS, "mlp_norm"),
        *_apart(
            {part: f"{_EUROBERT_LAYER}.mlp.{part}_proj" for part in ("gate", "up", "down")}, _MLP
        ),
        *norm("model.norm", "encoder", "final_norm"),
    ),
    masked_lm=(
        Entry("lm_head.weight", ("mlm", "decoder"), "vocab"),
        Entry("lm_head.bias", ("mlm", "bias"), "vocab"),
    ),
    computes=_RMS,
    fields={
        **_SIZES, "hidden_act": "activation", "rms_norm_eps": "norm_eps",
        "num_key_value_heads": "num_kv_heads", "attention_bias": "attention_bias",
        "mlp_bias": "mlp_bias", "tie_word_embeddings": "tied",
        "attention_dropout": "attention_dropout_rate",
    },
    only=_NOT_QUANTISED,
    sets={
        "activation": "silu", "norm_eps": 1e-5, "tied": False, "attention_bias": False,
        "mlp_bias": False, "attention_dropout_rate": 0.0, "hidden_dropout_rate": 0.0,
        "head_activation": "gelu",
    },
    heads={
        "classification": (*affine("dense", "transform", "dense"), *affine("classifier", "head")),
        "tagging": tuple(affine("classifier", "head")),
    },
    poolings={"late": "late", "bos": "cls", "mean": "mean"},
    classifies={"head_activation": "gelu", "head_bias": True},
    follows={"decoder_bias": "mlp_bias"},
)  # fmt: skip

_NOMIC_LAYER = "nomic_bert.encoder.layers.{n}"
_NOMIC = Modern(
    name="Nomic BERT",
    classes="NomicBert",
    prefix="nomic_bert.",
    encoder=(
        _token("nomic_bert.embeddings.word_embeddings"),
        Entry("nomic_bert.embeddings.token_type_embeddings.weight", (*_EMBEDDINGS, "type")),
        *norm("nomic_bert.emb_ln", *_EMBEDDINGS, "norm"),
        *_fused(f"{_NOMIC_LAYER}.attn.Wqkv", _ATTENTION, _QKV),
        *affine(f"{_NOMIC_LAYER}.attn.out_proj", *_ATTENTION, "output", num_inputs=2),
        *norm(f"{_NOMIC_LAYER}.norm1", *_LAYERS, "attention_norm"),
        *affine(f"{_NOMIC_LAYER}.mlp.fc11", *_MLP, "up"),
        *affine(f"{_NOMIC_LAYER}.mlp.fc12", *_MLP, "gate"),
        *affine(f"{_NOMIC_LAYER}.mlp.fc2", *_MLP, "down"),
        *norm(f"{_NOMIC_LAYER}.norm2", *_LAYERS, "mlp_norm"),
    ),
    masked_lm=(
        *affine("cls.predictions.transform.dense", "mlm", "dense"),
        *norm("cls.predictions.transform.layer_norm", "mlm", "norm"),
        Entry("cls.predictions.decoder.weight", ("mlm", "decoder"), "vocab"),
        Entry("cls.predictions.bias", ("mlm", "bias"), "vocab"),
    ),
    computes={
        **_COMMON, "norm": "layer", "norm_order": "post", "norm_bias": True,
        "embedding_norm": True, "attention_pattern": "G", "num_kv_heads": 0,
        "attention_bias": False, "mlp_bias": False, "head_transform": True, "head_bias": True,
        "head_activation": "", "decoder_bias": True, "tied": True,
    },
    fields={
        **_SIZES, "type_vocab_size": "num_types", "hidden_act": "activation",
        "layer_norm_eps": "norm_eps", "hidden_dropout_prob": "hidden_dropout_rate",
        "attention_probs_dropout_prob": "attention_dropout_rate",
    },
    only={
        **_NOT_QUANTISED,
        "tie_word_embeddings": (True, "this family's decoder is its embedding table"),
    },
    sets={"activation": "silu", "hidden_dropout_rate": 0.0, "attention_dropout_rate": 0.0},
    heads={
        "classification": (
            *affine("nomic_bert.pooler.dense", "encoder", "pooler", "dense"),
            *affine("classifier", "head"),
        ),
        "tagging": tuple(affine("classifier", "head")),
    },
    classifies={"pooler_activation": "tanh"},
    aliases={"bert.": "nomic_bert."},
    refuses=lambda config: [] if config.num_types else ["model.num_types is 0, not at least 1"],
    theta=1000.0,
)  # fmt: skip

_NEOBERT_LAYER = "model.transformer_encoder.{n}"
_NEOBERT = Modern(
    name="NeoBERT",
    classes="NeoBERT",
    prefix="model.",
    encoder=(
        _token("model.encoder"),
        *(
            Entry(
                f"{_NEOBERT_LAYER}.qkv.weight",
                (*_ATTENTION, part, "kernel"),
                "kernel",
                by_head=True,
                pairs=part != "value",
            )
            for part in _QKV
        ),
        *affine(f"{_NEOBERT_LAYER}.wo", *_ATTENTION, "output", num_inputs=2),
        *_fused(f"{_NEOBERT_LAYER}.ffn.w12", _MLP, ("gate", "up")),
        *affine(f"{_NEOBERT_LAYER}.ffn.w3", *_MLP, "down"),
        *norm(f"{_NEOBERT_LAYER}.attention_norm", *_LAYERS, "attention_norm"),
        *norm(f"{_NEOBERT_LAYER}.ffn_norm", *_LAYERS, "mlp_norm"),
        *norm("model.layer_norm", "encoder", "final_norm"),
    ),
    masked_lm=(
        Entry("decoder.weight", ("mlm", "decoder"), "vocab"),
        Entry("decoder.bias", ("mlm", "bias"), "vocab"),
    ),
    computes={
        **_RMS, "num_kv_heads": 0, "activation": "silu", "attention_bias": False,
        "mlp_bias": False, "decoder_bias": True, "tied": False, "rope_theta": 10000.0,
    },
    fields={
        **{theirs: ours for theirs, ours in _SIZES.items() if theirs != "max_position_embeddings"},
        "max_length": "num_positions", "norm_eps": "norm_eps", "decoder_init_range": "init_std",
    },
    only={
        **_NOT_QUANTISED,
        "rms_norm": (True, "only the published form, with RMS norms, is read"),
        "rope": (True, "only the published form, with rotations, is read"),
        "hidden_act": ("swiglu", "only the published form, with SwiGLU, is read"),
        "dropout": (0, "dropout is not read from a NeoBERT's file"),
    },
    sets={"norm_eps": 1e-6, "hidden_dropout_rate": 0.0, "attention_dropout_rate": 0.0},
    class_names={"Model": "NeoBERT", "ForMaskedLM": "NeoBERTLMHead"},
    narrows_mlp=True,
    refuses=lambda config: (
        [f"model.mlp_dim is {config.mlp_dim}, not a multiple of 8"] if config.mlp_dim % 8 else []
    ),
    native=False,
)  # fmt: skip

MODERN: Mapping[str, Modern] = {
    "modernbert": _MODERNBERT,
    "eurobert": _EUROBERT,
    "nomic_bert": _NOMIC,
    "neobert": _NEOBERT,
}
"""Families by the field `model_type`."""
