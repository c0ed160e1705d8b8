"""A BERT encoder and a BERT decoder with cross-attention: `EncoderDecoderModel`.

Sources: Rothe et al. 2020 (BERT2BERT), and the classes of Transformers 5. That class has three
parts that ours lacks: a pooler that nothing reads; token types in the decoder, which we add to its
positions; and a token table for each side (two equal tables if our model has one).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from bert_jax.artefacts.formats.bert_families import BERT
from bert_jax.artefacts.formats.config_fields import show
from bert_jax.artefacts.formats.entries import Entry, affine, norm, read_tensors, to_tensors
from bert_jax.artefacts.formats.families import unread
from bert_jax.artefacts.formats.model_config import config_from_huggingface, config_to_huggingface
from bert_jax.artefacts.formats.seq2seq.family import LAYERS, Family, refuse, shapes_of
from bert_jax.model.config import ARCHITECTURE, ModelConfig
from bert_jax.model.heads import MASKED_LM, Params
from bert_jax.model.seq2seq.network import Tying
from bert_jax.model.seq2seq.transformer import TransformerNetwork

_LAYER = "decoder.bert.encoder.layer.{n}.crossattention"
_CROSS = ("decoder", "layers", "cross")


def _moved(entries: Iterable[Entry], name: str, root: str) -> list[Entry]:
    """Rename entries of BERT and move them to another root of our parameter tree."""
    return [
        replace(e, name=name + e.name.removeprefix("bert."), path=(root, *e.path[1:]))
        for e in entries
    ]


_TABLE = (
    *_moved(BERT.encoder, "encoder.", "encoder"),
    *_moved(BERT.encoder, "decoder.bert.", "decoder"),
    *affine(f"{_LAYER}.self.query", *_CROSS, "query"),
    *affine(f"{_LAYER}.self.key", *_CROSS, "key"),
    *affine(f"{_LAYER}.self.value", *_CROSS, "value"),
    *affine(f"{_LAYER}.output.dense", *_CROSS, "output", num_inputs=2),
    *norm(f"{_LAYER}.output.LayerNorm", "decoder", "layers", "cross_norm"),
    *_moved(BERT.pretraining[MASKED_LM], "decoder.", "output"),
)
_TABLES = (
    "encoder.embeddings.word_embeddings.weight", "decoder.bert.embeddings.word_embeddings.weight",
    "decoder.cls.predictions.decoder.weight",
)  # fmt: skip
"""Names of the token tables of source, target and output."""
_POSITIONS = "decoder.bert.embeddings.position_embeddings.weight"
_TYPES = "decoder.bert.embeddings.token_type_embeddings.weight"
_SOURCE_TYPES = "encoder.embeddings.token_type_embeddings.weight"
_BIAS, _SECOND_BIAS = "decoder.cls.predictions.bias", "decoder.cls.predictions.decoder.bias"
_POOLER = ("encoder.pooler.dense.weight", "encoder.pooler.dense.bias")


class BertPair(Family):
    """`EncoderDecoderModel` of a `BertModel` and a `BertLMHeadModel`."""

    kind = "encoder-decoder"
    class_name = "EncoderDecoderModel"
    computes: ClassVar = {
        **LAYERS, "positions": "learned", "norm_order": "post", "embedding_norm": True,
        "head_transform": True, "head_bias": True, "head_activation": "",
        "scale_embeddings": False,
    }  # fmt: skip
    untrained = ("pooler",)

    @override
    def config(self, network: TransformerNetwork) -> dict[str, Any]:
        tied = network.tying != "none"
        sides = [
            {
                **config_to_huggingface("bert", side),
                "type_vocab_size": side.num_types or 1,
                "tie_word_embeddings": tied,
            }
            for side in (network.model, network.decoder)
        ]
        writes = {"is_decoder": True, "add_cross_attention": True}
        return {
            "model_type": self.kind,
            "is_encoder_decoder": True,
            "tie_word_embeddings": tied,
            "encoder": {**sides[0], "architectures": ["BertModel"]},
            "decoder": {**sides[1], **writes, "architectures": ["BertLMHeadModel"]},
        }

    @override
    def network(
        self, found: Mapping[str, Any], arrays: Mapping[str, np.ndarray], where: str
    ) -> TransformerNetwork:
        wrong = []
        for name in ("encoder", "decoder"):
            if not isinstance(found.get(name), dict):
                wrong.append(f"{name} is {show(found.get(name))}; the fields of a BERT are needed")
        refuse(where, wrong)
        decoder = dict(found["decoder"])
        for name in ("is_decoder", "add_cross_attention"):
            if decoder.pop(name, None) is not True:
                wrong.append(f"decoder.{name} is {show(found['decoder'].get(name))}, not true")
        model = _bert(found["encoder"], f"{where}: encoder")
        writer = _bert(decoder, f"{where}: decoder")
        wrong += [
            f"decoder: {name} is {getattr(writer, name)!r}, and {getattr(model, name)!r} of the "
            "encoder; they must be equal"
            for name in ("vocab_size", *ARCHITECTURE)
            if name not in ("num_layers", "num_types")
            and getattr(writer, name) != getattr(model, name)
        ]
        refuse(where, wrong)
        types = arrays.get(_SOURCE_TYPES)
        if model.num_types == 1 and types is not None and not np.any(types):
            model = replace(model, num_types=0)  # zeros that the class must have
        tying: Tying = "output" if decoder.get("tie_word_embeddings", True) else "none"
        tables = [arrays[name] for name in _TABLES[:2] if name in arrays]
        if tying == "output" and len(tables) == 2 and np.array_equal(tables[0], tables[1]):
            tying = "all"
        return TransformerNetwork(model, writer.num_layers, tying)

    @override
    def arrays(self, network: TransformerNetwork, params: Params) -> dict[str, np.ndarray]:
        found = to_tensors(params, network.model, _TABLE)
        width = network.model.hidden_dim
        zeros = {_TYPES: (1, width), _POOLER[0]: (width, width), _POOLER[1]: (width,)}
        if not network.model.num_types:
            zeros[_SOURCE_TYPES] = (1, width)
        found |= {name: np.zeros(shape, np.float32) for name, shape in zeros.items()}
        if network.tying == "all":
            found[_TABLES[1]] = found[_TABLES[0]].copy()
        if network.tying == "none":
            found[_SECOND_BIAS] = found[_BIAS].copy()
        return found

    @override
    def params(self, network: TransformerNetwork, arrays: Mapping[str, np.ndarray]) -> Params:
        found = dict(arrays)
        dropped = [*_POOLER, *([] if network.model.num_types else [_SOURCE_TYPES])]
        for name in dropped:
            found.pop(name, None)
        types = found.pop(_TYPES, None)
        if types is not None and np.any(types) and _POSITIONS in found:
            found[_POSITIONS] = found[_POSITIONS] + types[:1]  # the decoder has type 0 everywhere
        if _SECOND_BIAS in found:
            found.setdefault(_BIAS, found[_SECOND_BIAS])
        copies = {_SECOND_BIAS: _BIAS}
        if network.tying != "none":
            copies[_TABLES[2]] = _TABLES[1]
        if network.tying == "all":
            copies |= {_TABLES[1]: _TABLES[0], _TABLES[2]: _TABLES[0]}
        return read_tensors(_TABLE, shapes_of(network), found, network.model, copies)


def _bert(found: Mapping[str, Any], where: str) -> ModelConfig:
    if found.get("model_type") != "bert":
        raise unread(found, where=where)
    return config_from_huggingface(found, where=where)
