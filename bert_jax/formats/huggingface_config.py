"""Hugging Face's `config.json` of a BERT and our `ModelConfig`, both ways."""

from collections.abc import Mapping
from typing import Any

from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig

MAX_SIZE = 1 << 24
MAX_LAYERS = 1024
"""Bounds for values from a file; no existing model is beyond them."""

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

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Theirs to ours; the first of several is the one that is written."""

_ONLY: dict[str, tuple[Any, str]] = {
    "position_embedding_type": ("absolute", "only learned absolute positions are supported"),
    "is_decoder": (False, "a decoder attends to the past alone; this is an encoder"),
    "add_cross_attention": (False, "cross-attention is not supported"),
    "pruned_heads": ({}, "layers with fewer heads than the others are not supported"),
    "quantization_config": (None, "quantised weights are not read; save them as float32"),
}
"""Fields that change what the model computes: the one value that fits, and why."""


def model_config_from_huggingface(found: Mapping[str, Any], *, where: str) -> ModelConfig:
    """Return the architecture that a `config.json` describes.

    Fields that do not change what the encoder computes (heads, labels, generation) are passed over.

    Args:
        found: The file's content.
        where: Names the file in messages.

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
            f"{where}: model_type is {_show(kind)}; only 'bert' is supported. `bert-jax import` "
            "makes one of a RoBERTa, ELECTRA or DistilBERT"
        )
    fields: dict[str, Any] = {}
    wrong: list[str] = []

    def take(name: str, ours: str, fits: bool, wanted: str) -> None:
        if name not in found:
            return
        if fits:
            fields[ours] = found[name]
        else:
            wrong.append(f"{name} is {_show(found[name])}; it must be {wanted}")

    for name, ours in _SIZES.items():
        value: Any = found.get(name)
        limit = MAX_LAYERS if ours == "num_layers" else MAX_SIZE
        take(name, ours, type(value) is int and 1 <= value <= limit, f"from 1 to {limit:,}")
    for name, ours in _RATES.items():
        rate: Any = found.get(name)
        take(name, ours, type(rate) in (int, float) and 0 <= rate < 1, "in [0, 1)")
    for name, ours in _SCALES.items():
        scale: Any = found.get(name)
        take(name, ours, type(scale) is float and 0 < scale < 1, "between 0 and 1")
    act = found.get("hidden_act")
    known = isinstance(act, str) and act in ACTIVATIONS
    take("hidden_act", "activation", known, "one of " + ", ".join(ACTIVATIONS))
    for ours in fields.keys() & set(_RATES.values()):  # 0 may be written without a point
        fields[ours] = float(fields[ours])
    if "activation" in fields:
        fields["activation"] = ACTIVATIONS[fields["activation"]]
    for name, (only, why) in _ONLY.items():
        if name in found and found[name] not in (only, None):
            wrong.append(f"{name} is {_show(found[name])}; {why}")
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
    theirs["hidden_act"] = next(t for t, ours in ACTIVATIONS.items() if ours == config.activation)
    return {"model_type": "bert", **theirs}


def _show(value: object) -> str:
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return repr(value)[:80]
