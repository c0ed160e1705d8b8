"""Conversion of Transformers' translation classes to our networks and back: fields and tensors.

`MarianMTModel` (post-norm) and `PegasusForConditionalGeneration` (pre-norm) are the Transformer of
Vaswani et al. 2017. Their position tables have all sines before all cosines, while ours alternate
sines and cosines (section 3.5). If every axis that has the model's width is permuted, one order
becomes the other exactly. The norms have a fixed epsilon of 1e-5.

`EncoderDecoderModel` is a BERT encoder and a BERT decoder with cross-attention (BERT2BERT, Rothe et
al. 2020). Our network has no pooler, because nothing reads it. The decoder's token type is added to
its position table. If encoder and decoder share a token table, two equal tables are written.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from bert_jax.artefacts.formats.bert_families import BERT
from bert_jax.artefacts.formats.entries import Entry, affine, norm, read_tensors, to_tensors
from bert_jax.artefacts.formats.families import maps, unread
from bert_jax.artefacts.formats.family import check_only, read_field, show, their_name
from bert_jax.artefacts.formats.model_config import (
    config_from_huggingface,
    config_to_huggingface,
    other_values,
)
from bert_jax.errors import UserError
from bert_jax.model.config import ARCHITECTURE, ModelConfig
from bert_jax.model.heads import MASKED_LM, Params
from bert_jax.model.rotation import sinusoids
from bert_jax.model.seq2seq.network import Network, Tying
from bert_jax.model.seq2seq.transformer import TransformerNetwork

Arrays = Mapping[str, np.ndarray]
_COMMON: dict[str, Any] = {
    "norm": "layer", "norm_bias": True, "num_kv_heads": 0, "gated": False, "embedding_dim": 0,
    "attention_pattern": "G", "attention_bias": True, "mlp_bias": True, "decoder_bias": True,
}  # fmt: skip
"""Fields of `ModelConfig` that have one value in all classes of this module."""


class Family(ABC):
    """A translation class of Transformers, and the conversion of its fields and tensors."""

    kind: str
    """Value of `model_type` in `config.json`."""
    class_name: str
    computes: ClassVar[Mapping[str, Any]]
    """Fields of `ModelConfig` that have one value in all models of the class."""
    tyings: tuple[Tying, ...] = ("all", "output", "none")
    """Values of `objective.tying` that the class supports."""
    untrained: tuple[str, ...] = ()
    """Parts that the class must have, but our networks lack. They are written as zeros."""

    def unlike(self, network: TransformerNetwork) -> list[str]:
        """List the fields in which a network differs from the class."""
        found = other_values(network.model, self.computes)
        if network.feature_dim:
            found.append(f"TransformerNetwork.feature_dim is {network.feature_dim}, not 0")
        if network.tying not in self.tyings:
            found.append(f"objective.tying is {network.tying!r}, not {self.tyings[0]!r}")
        return found

    @abstractmethod
    def config(self, network: TransformerNetwork) -> dict[str, Any]:
        """Return the fields of `config.json`, without token ids."""

    @abstractmethod
    def network(self, found: Mapping[str, Any], arrays: Arrays, where: str) -> TransformerNetwork:
        """Return the network of a `config.json`, or raise a UserError that lists wrong fields."""

    @abstractmethod
    def arrays(self, network: TransformerNetwork, params: Params) -> dict[str, np.ndarray]:
        """Return the tensors of the class by name, in float32, without copies of tied tensors."""

    @abstractmethod
    def params(self, network: TransformerNetwork, arrays: Arrays) -> Params:
        """Return a network's parameters, or raise a UserError that lists tensors with faults."""


def shapes_of(network: Network) -> Params:
    """Return a network's parameter tree with shapes in place of arrays."""
    return jax.eval_shape(network.init, jax.random.key(0))


_SHARED, _HEAD, _BIAS = "model.shared.weight", "lm_head.weight", "final_logits_bias"
_ENCODER_TABLE = "model.encoder.embed_tokens.weight"
_DECODER_TABLE = "model.decoder.embed_tokens.weight"
_POSITIONS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")


def _layers(side: str, *attentions: tuple[str, str]) -> list[Entry]:
    """Return the entries of the layers of `side`; `attentions` pairs foreign names with ours."""
    layer, ours = f"model.{side}.layers.{{n}}", (side, "layers")
    entries = []
    for theirs, name in attentions:
        under = f"{layer}.{theirs}"
        entries += maps(f"{under}.{{first}}_proj", (*ours, name))
        entries += affine(f"{under}.out_proj", *ours, name, "output", num_inputs=2)
        entries += norm(f"{under}_layer_norm", *ours, f"{name}_norm")
    return [
        *entries,
        *affine(f"{layer}.fc1", *ours, "mlp", "up"),
        *affine(f"{layer}.fc2", *ours, "mlp", "down"),
        *norm(f"{layer}.final_layer_norm", *ours, "mlp_norm"),
        *norm(f"model.{side}.layer_norm", side, "final_norm"),
    ]


_MARIAN_TABLE = (
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
"""Fields of `ModelConfig`, by name in `config.json`."""
_SAME = {"decoder_attention_heads": "num_heads", "decoder_ffn_dim": "mlp_dim"}
"""Fields of the decoder in `config.json` that must have the values of our encoder's fields."""


class Marian(Family):
    """Class `MarianMTModel` of Transformers."""

    kind = "marian"
    class_name = "MarianMTModel"
    computes: ClassVar = {
        **_COMMON, "positions": "sinusoidal", "norm_order": "post", "norm_eps": 1e-5,
        "embedding_norm": False, "num_types": 0, "head_transform": False,
    }  # fmt: skip

    @override
    def config(self, network: TransformerNetwork) -> dict[str, Any]:
        model = network.model
        fields = {name: getattr(model, ours) for name, ours in (_SIZES | _SAME).items()}
        sharing: dict[str, Any] = {}
        if self.tyings != ("all",):
            sharing["decoder_vocab_size"] = model.vocab_size
            sharing["share_encoder_decoder_embeddings"] = network.tying == "all"
        return {
            "model_type": self.kind, **fields, "decoder_layers": network.decoder.num_layers,
            "activation_function": their_name("activation", model.activation),
            "activation_dropout": 0.0, "scale_embedding": model.scale_embeddings,
            "is_encoder_decoder": True, "tie_word_embeddings": network.tying != "none", **sharing,
        }  # fmt: skip

    @override
    def network(self, found: Mapping[str, Any], arrays: Arrays, where: str) -> TransformerNetwork:
        wrong: list[str] = []
        fields: dict[str, Any] = {**self.computes}
        for name, ours in {**_SIZES, "activation_function": "activation"}.items():
            fields[ours] = read_field(name, ours, found.get(name), wrong)
        layers = read_field("decoder_layers", "num_layers", found.get("decoder_layers"), wrong)
        only = {name: (fields[ours], f"expected {fields[ours]}") for name, ours in _SAME.items()}
        only["decoder_vocab_size"] = (fields["vocab_size"], "expected one vocabulary")
        check_only(found, only, wrong)
        for name in ("scale_embedding", "tie_word_embeddings", "share_encoder_decoder_embeddings"):
            if not isinstance(found.get(name, True), bool):
                wrong.append(f"{name} is {show(found[name])}; it must be true or false")
        if wrong:
            raise UserError(f"{where}: {'; '.join(wrong)}")
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
    def params(self, network: TransformerNetwork, arrays: Arrays) -> Params:
        arrays = {name: array[0] if name == _BIAS else array for name, array in arrays.items()}
        all_tables = dict.fromkeys((_ENCODER_TABLE, _DECODER_TABLE, _HEAD), _SHARED)
        copies = {"all": all_tables, "output": {_HEAD: _DECODER_TABLE}, "none": {}}[network.tying]
        copies |= dict.fromkeys(_POSITIONS, "")
        table, shapes = self._table(network), shapes_of(network)
        halves = read_tensors(table, shapes, arrays, network.model, copies)
        return _permuted(network, halves, np.argsort(_order(network)))

    def _table(self, network: TransformerNetwork) -> list[Entry]:
        table = _SHARED if network.tying == "all" else _ENCODER_TABLE
        return [Entry(table, ("encoder", "embeddings", "token"), "vocab"), *_MARIAN_TABLE]


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
        halves = np.asarray(table)[:, _order(network)]  # this class has the tables in its files
        return super().arrays(network, params) | {name: halves.copy() for name in _POSITIONS}


def _order(network: TransformerNetwork) -> np.ndarray:
    """Return our index for each width index of Transformers: even indices first, then odd."""
    width = network.model.hidden_dim
    return np.r_[0:width:2, 1:width:2]


def _permuted(network: TransformerNetwork, params: Params, order: np.ndarray) -> Params:
    def permute(axes: tuple[str | None, ...], array: Any) -> np.ndarray:
        places = [order if name == "embed" else np.arange(size)
                  for name, size in zip(axes, array.shape, strict=True)]  # fmt: skip
        return np.asarray(array)[np.ix_(*places)]

    return jax.tree.map(
        permute, network.axes(), params, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )


_CROSS_LAYER = "decoder.bert.encoder.layer.{n}.crossattention"
_CROSS = ("decoder", "layers", "cross")


def _moved(entries: Iterable[Entry], name: str, root: str) -> list[Entry]:
    """Rename entries of BERT and move them to another root of our parameter tree."""
    return [
        replace(e, name=name + e.name.removeprefix("bert."), path=(root, *e.path[1:]))
        for e in entries
    ]


_PAIR_TABLE = (
    *_moved(BERT.encoder, "encoder.", "encoder"),
    *_moved(BERT.encoder, "decoder.bert.", "decoder"),
    *maps(f"{_CROSS_LAYER}.self.{{part}}", _CROSS),
    *affine(f"{_CROSS_LAYER}.output.dense", *_CROSS, "output", num_inputs=2),
    *norm(f"{_CROSS_LAYER}.output.LayerNorm", "decoder", "layers", "cross_norm"),
    *_moved(BERT.pretraining[MASKED_LM], "decoder.", "output"),
)
_TABLES = (
    "encoder.embeddings.word_embeddings.weight", "decoder.bert.embeddings.word_embeddings.weight",
    "decoder.cls.predictions.decoder.weight",
)  # fmt: skip
"""Names of the token tables of source, target and output."""
_PAIR_POSITIONS = "decoder.bert.embeddings.position_embeddings.weight"
_TYPES = "decoder.bert.embeddings.token_type_embeddings.weight"
_SOURCE_TYPES = "encoder.embeddings.token_type_embeddings.weight"
_PAIR_BIAS, _SECOND_BIAS = "decoder.cls.predictions.bias", "decoder.cls.predictions.decoder.bias"
_POOLER = ("encoder.pooler.dense.weight", "encoder.pooler.dense.bias")


class BertPair(Family):
    """Class `EncoderDecoderModel`, made of a `BertModel` and a `BertLMHeadModel`."""

    kind = "encoder-decoder"
    class_name = "EncoderDecoderModel"
    computes: ClassVar = {
        **_COMMON, "positions": "learned", "norm_order": "post", "embedding_norm": True,
        "head_transform": True, "head_bias": True, "head_activation": "",
        "scale_embeddings": False,
    }  # fmt: skip
    untrained = ("pooler",)

    @override
    def config(self, network: TransformerNetwork) -> dict[str, Any]:
        tied = network.tying != "none"
        sides = [
            config_to_huggingface("bert", side)
            | {"type_vocab_size": side.num_types or 1, "tie_word_embeddings": tied}
            for side in (network.model, network.decoder)
        ]
        sides[1] |= {"is_decoder": True, "add_cross_attention": True}
        return {
            "model_type": self.kind,
            "is_encoder_decoder": True,
            "tie_word_embeddings": tied,
            "encoder": {**sides[0], "architectures": ["BertModel"]},
            "decoder": {**sides[1], "architectures": ["BertLMHeadModel"]},
        }

    @override
    def network(self, found: Mapping[str, Any], arrays: Arrays, where: str) -> TransformerNetwork:
        wrong = []
        for name in ("encoder", "decoder"):
            if not isinstance(found.get(name), dict):
                wrong.append(f"{name} is {show(found.get(name))}; it must have a BERT's fields")
        if wrong:
            raise UserError(f"{where}: {'; '.join(wrong)}")
        decoder = dict(found["decoder"])
        for name in ("is_decoder", "add_cross_attention"):
            if decoder.pop(name, None) is not True:
                wrong.append(f"decoder.{name} is {show(found['decoder'].get(name))}, not true")
        sides = []
        for name, side in (("encoder", found["encoder"]), ("decoder", decoder)):
            if side.get("model_type") != "bert":
                raise unread(side, where=f"{where}: {name}")
            sides.append(config_from_huggingface(side, where=f"{where}: {name}"))
        model, writer = sides
        wrong += [
            f"decoder: {name} is {getattr(writer, name)!r}; it must be {getattr(model, name)!r}, "
            "as in the encoder"
            for name in ("vocab_size", *ARCHITECTURE)
            if name not in ("num_layers", "num_types")
            and getattr(writer, name) != getattr(model, name)
        ]
        if wrong:
            raise UserError(f"{where}: {'; '.join(wrong)}")
        if model.num_types == 1 and not np.any(arrays.get(_SOURCE_TYPES, 1)):
            model = replace(model, num_types=0)  # zeros, which the class requires
        tying: Tying = "output" if decoder.get("tie_word_embeddings", True) else "none"
        tables = [arrays[name] for name in _TABLES[:2] if name in arrays]
        if tying == "output" and len(tables) == 2 and np.array_equal(tables[0], tables[1]):
            tying = "all"
        return TransformerNetwork(model, writer.num_layers, tying)

    @override
    def arrays(self, network: TransformerNetwork, params: Params) -> dict[str, np.ndarray]:
        found = to_tensors(params, network.model, _PAIR_TABLE)
        width = network.model.hidden_dim
        zeros = {_TYPES: (1, width), _POOLER[0]: (width, width), _POOLER[1]: (width,)}
        if not network.model.num_types:
            zeros[_SOURCE_TYPES] = (1, width)
        found |= {name: np.zeros(shape, np.float32) for name, shape in zeros.items()}
        if network.tying == "all":
            found[_TABLES[1]] = found[_TABLES[0]].copy()
        if network.tying == "none":
            found[_SECOND_BIAS] = found[_PAIR_BIAS].copy()
        return found

    @override
    def params(self, network: TransformerNetwork, arrays: Arrays) -> Params:
        found = {n: array for n, array in arrays.items() if not n.endswith("position_ids")}
        for name in (*_POOLER, *([] if network.model.num_types else [_SOURCE_TYPES])):
            found.pop(name, None)
        types = found.pop(_TYPES, None)
        if types is not None and np.any(types) and _PAIR_POSITIONS in found:
            # All tokens of the decoder have type 0, so every position can include its vector.
            found[_PAIR_POSITIONS] = found[_PAIR_POSITIONS].astype(np.float32) + types[:1]
        if _SECOND_BIAS in found:
            found.setdefault(_PAIR_BIAS, found[_SECOND_BIAS])
        first, second, output = _TABLES
        tied = {"all": {second: first, output: first}, "output": {output: second}, "none": {}}
        copies = {_SECOND_BIAS: _PAIR_BIAS, **tied[network.tying]}
        return read_tensors(_PAIR_TABLE, shapes_of(network), found, network.model, copies)


FAMILIES: dict[str, Family] = {each.kind: each for each in (Marian(), Pegasus(), BertPair())}


def family_of(network: Network, name: str) -> tuple[Family, TransformerNetwork]:
    """Return the class of Transformers that can compute a network, and the network.

    Raise a UserError if no class can; the message lists the differences from the nearest class.
    """
    if not isinstance(network, TransformerNetwork):
        raise UserError(f"{name}: no class of Transformers computes a {type(network).__name__}")
    unlike = {kind: family.unlike(network) for kind, family in FAMILIES.items()}
    nearest = min(unlike, key=lambda kind: len(unlike[kind]))
    if unlike[nearest]:
        raise UserError(
            f"{name}: no class of Transformers computes this model. The nearest is "
            f"{FAMILIES[nearest].class_name}, but {'; '.join(unlike[nearest])}"
        )
    return FAMILIES[nearest], network
