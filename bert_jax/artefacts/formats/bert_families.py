"""BERT, and the families with BERT's architecture whose fields and tensors have other names."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from bert_jax.artefacts.formats.entries import Entry, affine, norm
from bert_jax.artefacts.formats.family import (
    ATTENTION,
    BERT_FIELDS,
    EMBEDDINGS,
    LAYERS,
    MLP,
    NOT_QUANTISED,
    Family,
    masked_lm,
    token_table,
)
from bert_jax.model.config import ModelConfig

_DEFAULT = ModelConfig()
_COMPUTES = {
    name: getattr(_DEFAULT, name)
    for name in (
        "num_kv_heads", "gated", "norm", "norm_bias", "norm_order", "embedding_norm", "positions",
        "attention_pattern", "attention_bias", "mlp_bias", "head_transform", "head_bias",
        "head_activation", "decoder_bias", "tied", "scale_embeddings",
    )
}  # fmt: skip
_ONLY: Mapping[str, tuple[Any, str]] = {
    "position_embedding_type": ("absolute", "only learned absolute positions are supported"),
    "is_decoder": (False, "a decoder, which attends only to the past, is not supported"),
    "add_cross_attention": (False, "cross-attention is not supported"),
    "pruned_heads": ({}, "layers with fewer heads than the others are not supported"),
    **NOT_QUANTISED,
}
_LAYER = (
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
    "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm",
)  # fmt: skip


def _encoder(
    root: str, layer: str = "encoder.layer", parts: Sequence[str] = _LAYER
) -> tuple[Entry, ...]:
    """Return an encoder's entries; `parts` are the names of a layer's parts, as in `_LAYER`."""
    embeddings = f"{root}.embeddings"
    query, key, value, output, attention_norm, up, down, mlp_norm = (
        f"{root}.{layer}.{{n}}.{part}" for part in parts
    )
    return (
        token_table(f"{embeddings}.word_embeddings"),
        Entry(f"{embeddings}.position_embeddings.weight", (*EMBEDDINGS, "position")),
        Entry(f"{embeddings}.token_type_embeddings.weight", (*EMBEDDINGS, "type")),
        *norm(f"{embeddings}.LayerNorm", *EMBEDDINGS, "norm"),
        *affine(f"{root}.embeddings_project", *EMBEDDINGS, "project"),
        *affine(query, *ATTENTION, "query"),
        *affine(key, *ATTENTION, "key"),
        *affine(value, *ATTENTION, "value"),
        *affine(output, *ATTENTION, "output", num_inputs=2),
        *norm(attention_norm, *LAYERS, "attention_norm"),
        *affine(up, *MLP, "up"),
        *affine(down, *MLP, "down"),
        *norm(mlp_norm, *LAYERS, "mlp_norm"),
    )


def pooler(name: str) -> tuple[Entry, ...]:
    """Return the entries of a pooler."""
    return tuple(affine(name, "encoder", "pooler", "dense"))


def classifier_on(name: str) -> tuple[Entry, ...]:
    """Return the entries of a classification head: the pooler `name` and a linear map."""
    return (*pooler(name), *affine("classifier", "head"))


TOKENS = {
    "tagging": tuple(affine("classifier", "head")),
    "span": tuple(affine("qa_outputs", "head")),
}
"""Heads whose tensors have the same names in all families like BERT, and in DeBERTa."""
_TWO_MAPS = (*pooler("classifier.dense"), *affine("classifier.out_proj", "head"))
"""Classification head of two linear maps on the first token, which are our pooler and our head."""
_PREDICTIONS = "cls.predictions"
_like_bert = partial(Family, computes=_COMPUTES, only=_ONLY, like_bert=True)

BERT = _like_bert(
    name="BERT",
    classes="Bert",
    prefix="bert.",
    encoder=_encoder("bert"),
    pooler=pooler("bert.pooler.dense"),
    pretraining={
        "mlm": masked_lm(
            f"{_PREDICTIONS}.transform.dense",
            f"{_PREDICTIONS}.transform.LayerNorm",
            f"{_PREDICTIONS}.decoder",
            _PREDICTIONS,
        ),
        "nsp": tuple(affine("cls.seq_relationship", "nsp")),
    },
    heads={"classification": classifier_on("bert.pooler.dense"), **TOKENS},
    compares=True,
    fields=BERT_FIELDS,
    defaults={"hidden_dropout_prob": 0.1},
)

_ROBERTA = _like_bert(
    name="RoBERTa",
    classes="Roberta|XLMRoberta|Camembert",
    prefix="roberta.",
    encoder=_encoder("roberta"),
    pooler=pooler("roberta.pooler.dense"),
    pretraining={
        "mlm": masked_lm("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head")
    },
    heads={"classification": _TWO_MAPS, **TOKENS},
    fields={name: ours for name, ours in BERT_FIELDS.items() if ours != "num_positions"},
    defaults={"pad_token_id": 1, "max_position_embeddings": 512, "hidden_dropout_prob": 0.1},
    written=(),
    doubles_type=True,
    first_position=1,
    exact_gelu_head=True,
)

_ELECTRA = _like_bert(
    name="ELECTRA",
    classes="Electra",
    prefix="electra.",
    encoder=_encoder("electra"),
    pretraining={
        "mlm": masked_lm(
            "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head",
            "generator_lm_head",
        ),
        "rtd": (
            *affine("discriminator_predictions.dense", "rtd", "dense"),
            *affine("discriminator_predictions.dense_prediction", "rtd", "score"),
        ),
    },
    heads={"classification": _TWO_MAPS, **TOKENS},
    fields={**BERT_FIELDS, "embedding_size": "embedding_dim"},
    defaults={
        "embedding_size": 128, "hidden_size": 256, "num_attention_heads": 4,
        "intermediate_size": 1024, "hidden_dropout_prob": 0.1,
    },
    classifies={"pooler_activation": "gelu"},
    written=(
        "Model", "ForPreTraining", "ForMaskedLM", "ForSequenceClassification",
        "ForTokenClassification", "ForQuestionAnswering",
    ),
    doubles_type=True,
    exact_gelu_head=True,
)  # fmt: skip

_DISTILBERT = _like_bert(
    name="DistilBERT",
    classes="DistilBert",
    prefix="distilbert.",
    encoder=_encoder(
        "distilbert", "transformer.layer",
        (
            "attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin",
            "sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm",
        ),
    ),
    pretraining={
        "mlm": masked_lm(
            "vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector"
        )
    },
    heads={"classification": classifier_on("pre_classifier"), **TOKENS},
    fields={
        "vocab_size": "vocab_size", "max_position_embeddings": "num_positions",
        "dim": "hidden_dim", "n_layers": "num_layers", "n_heads": "num_heads",
        "hidden_dim": "mlp_dim", "initializer_range": "init_std", "activation": "activation",
        "dropout": "hidden_dropout_rate", "attention_dropout": "attention_dropout_rate",
    },
    defaults={"n_layers": 6, "dropout": 0.1, "seq_classif_dropout": 0.2},
    synonyms={
        "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    },
    classifies={"pooler_activation": "relu"},
    dropouts={"classification": "seq_classif_dropout"},
    written=("ForSequenceClassification",),
    has_types=False,
)  # fmt: skip

BERTS: Mapping[str, Family] = {
    "bert": BERT, "roberta": _ROBERTA, "xlm-roberta": _ROBERTA, "camembert": _ROBERTA,
    "electra": _ELECTRA, "distilbert": _DISTILBERT,
}  # fmt: skip
"""Families by `model_type`, a field of `config.json`."""
