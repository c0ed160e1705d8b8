"""The Transformer as it was published, as Marian (post-norm) or Pegasus (pre-norm) of Transformers.

The position tables of these classes have all sines before all cosines; ours alternate sines and
cosines (Vaswani et al. 2017, section 3.5). Permuting every axis of the model's width converts one
order to the other exactly. The norms have a fixed epsilon of 1e-5.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from bert_jax.artefacts.formats.config_fields import check_only, read_field, show, their_activation
from bert_jax.artefacts.formats.entries import Entry, affine, norm, read_tensors, to_tensors
from bert_jax.artefacts.formats.seq2seq.family import LAYERS, Family, refuse, shapes_of
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import Params
from bert_jax.model.rotation import sinusoids
from bert_jax.model.seq2seq.network import Tying
from bert_jax.model.seq2seq.transformer import TransformerNetwork

_SHARED, _HEAD, _BIAS = "model.shared.weight", "lm_head.weight", "final_logits_bias"
_ENCODER_TABLE = "model.encoder.embed_tokens.weight"
_DECODER_TABLE = "model.decoder.embed_tokens.weight"
_POSITIONS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
_EPS = 1e-5


def _layers(side: str, *attentions: tuple[str, str]) -> list[Entry]:
    """Return the entries of one side's layers; `attentions` pairs foreign names with ours."""
    layer, ours = f"model.{side}.layers.{{n}}", (side, "layers")
    entries = []
    for theirs, name in attentions:
        under = f"{layer}.{theirs}"
        for part in ("query", "key", "value"):
            entries += affine(f"{under}.{part[0]}_proj", *ours, name, part)
        entries += affine(f"{under}.out_proj", *ours, name, "output", num_inputs=2)
        entries += norm(f"{under}_layer_norm", *ours, f"{name}_norm")
    return [
        *entries,
        *affine(f"{layer}.fc1", *ours, "mlp", "up"),
        *affine(f"{layer}.fc2", *ours, "mlp", "down"),
        *norm(f"{layer}.final_layer_norm", *ours, "mlp_norm"),
        *norm(f"model.{side}.layer_norm", side, "final_norm"),
    ]


_TABLE = (
    *_layers("encoder", ("self_attn", "attention")),
    *_layers("decoder", ("self_attn", "attention"), ("encoder_attn", "cross")),
    Entry(_DECODER_TABLE, ("decoder", "embeddings", "token"), "vocab"),
    Entry(_BIAS, ("output", "bias"), "vocab"),
    Entry(_HEAD, ("output", "decoder"), "vocab"),
)

_SIZES = {
    "vocab_size": "vocab_size", "max_position_embeddings": "num_positions",
    "d_model": "hidden_dim", "encoder_layers": "num_layers",
    "encoder_attention_heads": "num_heads", "encoder_ffn_dim": "mlp_dim",
    "dropout": "hidden_dropout_rate", "attention_dropout": "attention_dropout_rate",
    "init_std": "init_std",
}  # fmt: skip
"""Fields of `config.json` to fields of `ModelConfig`."""
_SAME = {"decoder_attention_heads": "num_heads", "decoder_ffn_dim": "mlp_dim"}
"""Fields of the decoder that our networks share with the encoder."""


class Marian(Family):
    """Class `MarianMTModel` of Transformers."""

    kind = "marian"
    class_name = "MarianMTModel"
    computes: ClassVar = {
        **LAYERS, "positions": "sinusoidal", "norm_order": "post", "norm_eps": _EPS,
        "embedding_norm": False, "num_types": 0, "head_transform": False,
    }  # fmt: skip

    @override
    def config(self, network: TransformerNetwork) -> dict[str, Any]:
        model, decoder = network.model, network.decoder
        fields: dict[str, Any] = {name: getattr(model, ours) for name, ours in _SIZES.items()}
        fields |= {name: getattr(model, ours) for name, ours in _SAME.items()}
        return {
            "model_type": self.kind,
            **fields,
            "decoder_layers": decoder.num_layers,
            "activation_function": their_activation(model.activation),
            "activation_dropout": 0.0,
            "scale_embedding": model.scale_embeddings,
            "is_encoder_decoder": True,
            "forced_eos_token_id": None,
            "tie_word_embeddings": network.tying != "none",
            **self._sharing(network),
        }

    @override
    def network(
        self, found: Mapping[str, Any], arrays: Mapping[str, np.ndarray], where: str
    ) -> TransformerNetwork:
        wrong: list[str] = []
        fields: dict[str, Any] = {**self.computes}
        pairs = {**_SIZES, "activation_function": "activation"}
        for name, ours in pairs.items():
            fields[ours] = read_field(name, ours, found.get(name), wrong)
        layers = read_field("decoder_layers", "num_layers", found.get("decoder_layers"), wrong)
        for name, ours in _SAME.items():
            check_only(found, {name: (fields[ours], f"expected {fields[ours]}")}, wrong)
        size = fields["vocab_size"]
        check_only(found, {"decoder_vocab_size": (size, "expected one vocabulary")}, wrong)
        flags = ("scale_embedding", "tie_word_embeddings", "share_encoder_decoder_embeddings")
        for name in flags:
            if not isinstance(found.get(name, True), bool):
                wrong.append(f"{name} is {show(found[name])}; it must be true or false")
        refuse(where, wrong)
        tying: Tying = "output" if found.get("tie_word_embeddings", True) else "none"
        model = ModelConfig(**fields, scale_embeddings=found.get("scale_embedding", False))
        shared = found.get("share_encoder_decoder_embeddings", True)
        return TransformerNetwork(model, layers, "all" if shared else tying)

    @override
    def arrays(self, network: TransformerNetwork, params: Params) -> dict[str, np.ndarray]:
        halves = _permuted(network, params, _order(network))
        found = to_tensors(halves, network.model, self._table(network))
        return {**found, _BIAS: found[_BIAS][None]}

    @override
    def params(self, network: TransformerNetwork, arrays: Mapping[str, np.ndarray]) -> Params:
        arrays = {name: array[0] if name == _BIAS else array for name, array in arrays.items()}
        all_tables = dict.fromkeys((_ENCODER_TABLE, _DECODER_TABLE, _HEAD), _SHARED)
        copies = {"all": all_tables, "output": {_HEAD: _DECODER_TABLE}, "none": {}}[network.tying]
        copies |= dict.fromkeys(_POSITIONS, "")
        halves = read_tensors(
            self._table(network), shapes_of(network), arrays, network.model, copies
        )
        return _permuted(network, halves, np.argsort(_order(network)))

    def _sharing(self, network: TransformerNetwork) -> dict[str, Any]:
        """Return the fields that tell which token tables are shared."""
        return {
            "decoder_vocab_size": network.model.vocab_size,
            "share_encoder_decoder_embeddings": network.tying == "all",
        }

    def _table(self, network: TransformerNetwork) -> list[Entry]:
        table = _SHARED if network.tying == "all" else _ENCODER_TABLE
        return [Entry(table, ("encoder", "embeddings", "token"), "vocab"), *_TABLE]


class Pegasus(Marian):
    """Class `PegasusForConditionalGeneration`: Marian with pre-norm layers and final norms."""

    kind = "pegasus"
    class_name = "PegasusForConditionalGeneration"
    computes: ClassVar = {**Marian.computes, "norm_order": "pre", "first_norm": True}
    tyings = ("all",)

    @override
    def arrays(self, network: TransformerNetwork, params: Params) -> dict[str, np.ndarray]:
        model = network.model
        table = sinusoids(jnp.arange(model.num_positions), model.hidden_dim)
        halves = np.asarray(table)[:, _order(network)]  # this class expects the tables in the file
        return super().arrays(network, params) | {name: halves.copy() for name in _POSITIONS}

    @override
    def _sharing(self, network: TransformerNetwork) -> dict[str, Any]:
        return {}


def _order(network: TransformerNetwork) -> np.ndarray:
    """Return our index of each foreign index along the width: even ones, then odd ones."""
    width = network.model.hidden_dim
    return np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2)])


def _permuted(network: TransformerNetwork, params: Params, order: np.ndarray) -> Params:
    """Permute every axis that has the model's width."""

    def permute(axes: tuple[str | None, ...], array: Any) -> np.ndarray:
        places = [order if name == "embed" else np.arange(size)
                  for name, size in zip(axes, array.shape, strict=True)]  # fmt: skip
        return np.asarray(array)[np.ix_(*places)]

    permuted: Params = jax.tree.map(
        permute, network.axes(), params, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )
    return permuted
