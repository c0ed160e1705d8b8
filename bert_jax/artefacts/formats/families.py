"""Table of encoder families, definitions of modern families, and errors for unsupported families.

A definition says what a family computes, and maps the fields and names in its files to ours.
Entries for parameters that a model lacks, such as biases, are skipped. Sources: the classes of
Transformers 5; for NeoBERT, Le Breton et al. 2025 and the names in its published file.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from bert_jax.artefacts.formats.bert_families import BERT, BERTS, TOKENS, classifier_on
from bert_jax.artefacts.formats.entries import Entry, affine, norm
from bert_jax.artefacts.formats.family import (
    ATTENTION,
    BERT_FIELDS,
    EMBEDDINGS,
    LAYERS,
    MLP,
    NOT_QUANTISED,
    SIZES,
    Family,
    decoder_of,
    masked_lm,
    show,
    token_table,
)
from bert_jax.artefacts.formats.huggingface_files import TASKS
from bert_jax.errors import UserError
from bert_jax.model.heads import MASKED_LM

_QKV = ("query", "key", "value")


def maps(name: str, under: tuple[str, ...], parts: Iterable[str] = _QKV) -> list[Entry]:
    """Return the entries of some linear maps of a layer; `parts` are the maps' names in our tree.

    If each map is a tensor in the file, `name` contains `{part}` or `{first}` (the first letter of
    the part). Otherwise, one tensor in the file has the rows of all maps.
    """
    names = {part: name.replace("{part}", part).replace("{first}", part[0]) for part in parts}
    return [entry for part, theirs in names.items() for entry in affine(theirs, *under, part)]


_COMMON = {"positions": "rope", "scale_embeddings": False, "gated": True, "embedding_dim": 0}
_PRE = {**_COMMON, "norm_order": "pre", "num_types": 0, "pooler": False}
_RMS = {
    **_PRE, "norm": "rms", "embedding_norm": False, "first_norm": True, "attention_pattern": "G",
    "head_transform": False,
}  # fmt: skip
_ONLY = {**NOT_QUANTISED, "rope_scaling": (None, "only null is supported")}
_TIED = {"tie_word_embeddings": (True, "in this family, the decoder is the embedding table")}

_LAYER = "model.layers.{n}"
_MODERNBERT = Family(
    name="ModernBERT",
    classes="ModernBert",
    prefix="model.",
    encoder=(
        token_table("model.embeddings.tok_embeddings"),
        *norm("model.embeddings.norm", *EMBEDDINGS, "norm"),
        *norm(f"{_LAYER}.attn_norm", *LAYERS, "attention_norm"),
        *maps(f"{_LAYER}.attn.Wqkv", ATTENTION),
        *affine(f"{_LAYER}.attn.Wo", *ATTENTION, "output", num_inputs=2),
        *norm(f"{_LAYER}.mlp_norm", *LAYERS, "mlp_norm"),
        *maps(f"{_LAYER}.mlp.Wi", MLP, ("gate", "up")),
        *affine(f"{_LAYER}.mlp.Wo", *MLP, "down"),
        *norm("model.final_norm", "encoder", "final_norm"),
    ),
    pretraining={MASKED_LM: masked_lm("head.dense", "head.norm", "decoder", "decoder")},
    computes={
        **_PRE, "norm": "layer", "embedding_norm": True, "first_norm": False, "num_kv_heads": 0,
        "head_transform": True,
    },
    fields={
        **SIZES, "hidden_activation": "activation", "norm_eps": "norm_eps",
        "norm_bias": "norm_bias", "attention_bias": "attention_bias", "mlp_bias": "mlp_bias",
        "decoder_bias": "decoder_bias", "tie_word_embeddings": "tied",
        "attention_dropout": "attention_dropout_rate", "mlp_dropout": "mlp_dropout_rate",
        "embedding_dropout": "embedding_dropout_rate", "classifier_bias": "head_bias",
        "classifier_activation": "head_activation",
    },
    only=_ONLY,
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
    compares=True,
    poolings={"cls": "cls", "mean": "mean"},
    follows={"hidden_dropout_rate": "attention_dropout_rate"},
    local=True,
)  # fmt: skip

_EUROBERT = Family(
    name="EuroBERT",
    classes="EuroBert",
    prefix="model.",
    encoder=(
        token_table("model.embed_tokens"),
        *norm(f"{_LAYER}.input_layernorm", *LAYERS, "attention_norm"),
        *maps(f"{_LAYER}.self_attn.{{first}}_proj", ATTENTION),
        *affine(f"{_LAYER}.self_attn.o_proj", *ATTENTION, "output", num_inputs=2),
        *norm(f"{_LAYER}.post_attention_layernorm", *LAYERS, "mlp_norm"),
        *maps(f"{_LAYER}.mlp.{{part}}_proj", MLP, ("gate", "up", "down")),
        *norm("model.norm", "encoder", "final_norm"),
    ),
    pretraining={MASKED_LM: decoder_of("lm_head", "lm_head")},
    computes=_RMS,
    fields={
        **SIZES, "hidden_act": "activation", "rms_norm_eps": "norm_eps",
        "num_key_value_heads": "num_kv_heads", "attention_bias": "attention_bias",
        "mlp_bias": "mlp_bias", "tie_word_embeddings": "tied",
        "attention_dropout": "attention_dropout_rate",
    },
    only={**_ONLY, "clf_pooling": ("late", "rename this old field to classifier_pooling")},
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
_NOMIC = Family(
    name="Nomic BERT",
    classes="NomicBert",
    prefix="nomic_bert.",
    encoder=(
        token_table("nomic_bert.embeddings.word_embeddings"),
        Entry("nomic_bert.embeddings.token_type_embeddings.weight", (*EMBEDDINGS, "type")),
        *norm("nomic_bert.emb_ln", *EMBEDDINGS, "norm"),
        *maps(f"{_NOMIC_LAYER}.attn.Wqkv", ATTENTION),
        *affine(f"{_NOMIC_LAYER}.attn.out_proj", *ATTENTION, "output", num_inputs=2),
        *norm(f"{_NOMIC_LAYER}.norm1", *LAYERS, "attention_norm"),
        *affine(f"{_NOMIC_LAYER}.mlp.fc11", *MLP, "up"),
        *affine(f"{_NOMIC_LAYER}.mlp.fc12", *MLP, "gate"),
        *affine(f"{_NOMIC_LAYER}.mlp.fc2", *MLP, "down"),
        *norm(f"{_NOMIC_LAYER}.norm2", *LAYERS, "mlp_norm"),
    ),
    pretraining={
        MASKED_LM: masked_lm(
            "cls.predictions.transform.dense", "cls.predictions.transform.layer_norm",
            "cls.predictions.decoder", "cls.predictions",
        )
    },
    computes={
        **_COMMON, "norm": "layer", "norm_order": "post", "norm_bias": True,
        "embedding_norm": True, "attention_pattern": "G", "num_kv_heads": 0,
        "attention_bias": False, "mlp_bias": False, "head_transform": True, "head_bias": True,
        "head_activation": "", "decoder_bias": True, "tied": True,
    },
    fields=BERT_FIELDS,
    only={**_ONLY, **_TIED},
    sets={"activation": "silu", "hidden_dropout_rate": 0.0, "attention_dropout_rate": 0.0},
    heads={
        "classification": classifier_on("nomic_bert.pooler.dense"),
        "tagging": tuple(affine("classifier", "head")),
    },
    classifies={"pooler_activation": "tanh"},
    aliases={"bert.": "nomic_bert."},
    refuses=lambda config: [] if config.num_types else ["model.num_types is 0, not at least 1"],
    theta=1000.0,
)  # fmt: skip

_NEOBERT_LAYER = "model.transformer_encoder.{n}"
_NEOBERT = Family(
    name="NeoBERT",
    classes="NeoBERT",
    prefix="model.",
    encoder=(
        token_table("model.encoder"),
        *(
            Entry(
                f"{_NEOBERT_LAYER}.qkv.weight", (*ATTENTION, part, "kernel"), "kernel",
                by_head=True, pairs=part != "value",
            )
            for part in _QKV
        ),
        *affine(f"{_NEOBERT_LAYER}.wo", *ATTENTION, "output", num_inputs=2),
        *maps(f"{_NEOBERT_LAYER}.ffn.w12", MLP, ("gate", "up")),
        *affine(f"{_NEOBERT_LAYER}.ffn.w3", *MLP, "down"),
        *norm(f"{_NEOBERT_LAYER}.attention_norm", *LAYERS, "attention_norm"),
        *norm(f"{_NEOBERT_LAYER}.ffn_norm", *LAYERS, "mlp_norm"),
        *norm("model.layer_norm", "encoder", "final_norm"),
    ),
    pretraining={MASKED_LM: decoder_of("decoder", "decoder")},
    computes={
        **_RMS, "num_kv_heads": 0, "activation": "silu", "attention_bias": False,
        "mlp_bias": False, "decoder_bias": True, "tied": False, "rope_theta": 10000.0,
    },
    fields={
        **{theirs: ours for theirs, ours in SIZES.items() if theirs != "max_position_embeddings"},
        "max_length": "num_positions", "norm_eps": "norm_eps", "decoder_init_range": "init_std",
    },
    only={
        **_ONLY,
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

_DEBERTA_LAYER = "deberta.encoder.layer.{n}"
_DEBERTA_SELF = f"{_DEBERTA_LAYER}.attention.self"
_RELATIVE = (*EMBEDDINGS, "relative")
_DEBERTA = Family(
    name="DeBERTa",
    classes="DebertaV2",
    prefix="deberta.",
    encoder=(
        token_table("deberta.embeddings.word_embeddings"),
        *norm("deberta.embeddings.LayerNorm", *EMBEDDINGS, "norm"),
        Entry("deberta.encoder.rel_embeddings.weight", (*_RELATIVE, "table")),
        *norm("deberta.encoder.LayerNorm", *_RELATIVE, "norm"),
        *maps(f"{_DEBERTA_SELF}.{{part}}_proj", ATTENTION),
        *maps(f"{_DEBERTA_SELF}.pos_{{part}}_proj", (*ATTENTION, "relative"), _QKV[:2]),
        *affine(f"{_DEBERTA_LAYER}.attention.output.dense", *ATTENTION, "output", num_inputs=2),
        *norm(f"{_DEBERTA_LAYER}.attention.output.LayerNorm", *LAYERS, "attention_norm"),
        *affine(f"{_DEBERTA_LAYER}.intermediate.dense", *MLP, "up"),
        *affine(f"{_DEBERTA_LAYER}.output.dense", *MLP, "down"),
        *norm(f"{_DEBERTA_LAYER}.output.LayerNorm", *LAYERS, "mlp_norm"),
    ),
    pretraining={MASKED_LM: BERT.pretraining[MASKED_LM]},
    computes={**BERT.computes, "positions": "relative", "embedding_dim": 0, "num_types": 0},
    fields={
        **{theirs: ours for theirs, ours in BERT_FIELDS.items() if ours != "num_types"},
        "embedding_size": "embedding_dim", "position_buckets": "relative_buckets",
        "max_relative_positions": "relative_distance", "pos_att_type": "relative_terms",
        "share_att_key": "relative_shared", "norm_rel_ebd": "relative_norm",
    },
    only={
        **NOT_QUANTISED, **_TIED,
        "relative_attention": (True, "without relative positions, it is not supported"),
        "position_biased_input": (False, "positions that are added to tokens are not supported"),
        "type_vocab_size": (0, "token types are not supported"),
        "conv_kernel_size": (0, "a convolution (DeBERTa-v2 xlarge) is not supported"),
        "legacy": (True, "only the masked-LM head cls.predictions is read"),
        "pooler_hidden_act": ("gelu", "only 'gelu' is supported"),
        "pooler_dropout": (0, "dropout before the pooler is not supported"),
    },
    defaults={
        "relative_attention": False, "position_biased_input": True, "position_buckets": -1,
        "share_att_key": False, "norm_rel_ebd": "none", "hidden_dropout_prob": 0.1,
        "pos_att_type": [],
    },
    sets={"norm_eps": 1e-7, "pooler_activation": "gelu"},
    heads={"classification": classifier_on("pooler.dense"), **TOKENS},
    compares=True,
    classifies={"pooler_activation": "gelu"},
    dropouts={
        **dict.fromkeys(TASKS.values(), "classifier_dropout"), "classification": "cls_dropout",
    },
)  # fmt: skip

MODERN: Mapping[str, Family] = {
    "modernbert": _MODERNBERT, "eurobert": _EUROBERT, "nomic_bert": _NOMIC, "neobert": _NEOBERT,
    "deberta-v2": _DEBERTA,
}  # fmt: skip
FAMILIES: Mapping[str, Family] = {**BERTS, **MODERN}
"""Families by `model_type`, a field of `config.json`."""

_OWN_CODE = (
    "names code of its own (auto_map), which defines what the model computes and is never run; "
    "only models whose classes are part of Transformers are imported"
)


def known_family(found: Mapping[str, Any]) -> Family | None:
    """Return the family of a `config.json`, or None if the family is unknown."""
    kind = found.get("model_type")
    return FAMILIES.get(kind) if isinstance(kind, str) else None


def family_to_import(found: Mapping[str, Any], *, where: str) -> Family:
    """Return the family of a `config.json`; `where` names the file in messages.

    Raise a UserError if the family is unknown, or the model needs its own code (`auto_map`).
    """
    if found.get("model_type") == "albert":
        raise UserError(
            f"{where}: an ALBERT cannot be imported: its layers share their parameters, and "
            "training here would not keep them equal. Import a BERT or RoBERTa of the same "
            "language, or pretrain one with the ALBERT's tokenizer.json"
        )
    family = known_family(found)
    if family is None:
        raise UserError(
            f"{where}: model_type is {found.get('model_type')!r:.80}; it must be one of "
            f"{', '.join(FAMILIES)} (not albert: see docs/import.md)"
        )
    if "auto_map" in found and family.like_bert:
        raise UserError(f"{where} {_OWN_CODE}")
    return family


def is_read(found: Mapping[str, Any]) -> bool:
    """Return true if the model of a `config.json` can be read without `bert-jax import`."""
    family = known_family(found)
    if family is None or family.written is None:
        return family is not None
    return family.task_of(found) in family.written and "auto_map" not in found


def unread(found: Mapping[str, Any], *, where: str) -> UserError:
    """Return the error for a model that cannot be read without `bert-jax import`."""
    kind = found.get("model_type")
    if known_family(found) and "auto_map" in found:
        return UserError(f"{where} {_OWN_CODE}")
    if kind is None:
        return UserError(
            f"{where} has no field model_type, and the names of the weights cannot tell a BERT "
            'from a RoBERTa. If the model is a BERT, add "model_type": "bert"'
        )
    return UserError(
        f"{where}: model_type is {show(kind)}, and this class is not read directly. Use a 'bert', "
        "or convert a RoBERTa, ELECTRA or DistilBERT with `bert-jax import`"
    )
