"""Other families of encoders under BERT's names: RoBERTa, ELECTRA, DistilBERT; and why not ALBERT.

bert = to_bert(config, arrays, where="config.json")
config = model_config_from_huggingface(bert.config, where="config.json")
params = parts_from_huggingface(bert.arrays, config, head)

Nothing is computed here beyond dropping rows and adding zeros: a family fits where it computes what
a BERT computes with the same numbers. What does not fit is a `UserError` where it is the encoder,
and is dropped with a note where it is a head.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bert_jax.convert.huggingface_config import MAX_SIZE
from bert_jax.convert.huggingface_files import model_class
from bert_jax.convert.huggingface_head import CLASSES
from bert_jax.convert.huggingface_names import DUPLICATES, canonical_names
from bert_jax.errors import UserError

_UNLIKE = {"ForMultipleChoice": "no head here compares rows"}
"""Classes of every family, without their prefix, whose head is none of ours, and why."""

Patterns = tuple[tuple[str, str], ...]
"""(regular expression over a whole name, its replacement); the first that matches counts."""

_EXACT_GELU_HEAD = "its masked-LM head has the exact GELU whatever the encoder has, BERT's follows"


@dataclass(frozen=True)
class Family:
    """What a family calls what BERT has."""

    name: str
    classes: str
    """Their classes' names begin so, where BERT's begin with Bert."""
    defaults: Mapping[str, Any]
    """Fields of their configuration that BERT's has with another default, or not at all."""
    fields: Mapping[str, str]
    """Their fields to BERT's, where the names differ."""
    patterns: Patterns
    """Their parameters to BERT's names."""
    skipped: str = "(?!)"
    """Names of buffers, which hold nothing that was learned."""
    first_position: int | None = None
    """None: positions count from 0. Else they count from padding's id + this."""
    exact_gelu_head: bool = False
    """The masked-LM head has the exact GELU whatever the encoder has."""
    unlike: Mapping[str, str] = field(default_factory=dict)
    """Their classes, without the prefix, whose head is none of BERT's, and why."""


_SAME: Patterns = (
    (r"bert\..+", r"\g<0>"),
    (r"cls\..+", r"\g<0>"),
    (r"(classifier|qa_outputs)\.(weight|bias)", r"\g<0>"),
)

_ROBERTA = Family(
    name="RoBERTa",
    classes="Roberta|XLMRoberta|Camembert",
    defaults={"pad_token_id": 1, "max_position_embeddings": 512},
    fields={},
    patterns=(
        (r"(?:roberta\.)?((?:embeddings|encoder|pooler)\..+)", r"bert.\1"),
        (r"lm_head\.dense\.(.+)", r"cls.predictions.transform.dense.\1"),
        (r"lm_head\.layer_norm\.(.+)", r"cls.predictions.transform.LayerNorm.\1"),
        (r"lm_head\.bias", "cls.predictions.bias"),
        (r"lm_head\.decoder\.(.+)", r"cls.predictions.decoder.\1"),
        # A map, tanh and a map of the first token's state: BERT's pooler and its classifier.
        (r"classifier\.dense\.(.+)", r"bert.pooler.dense.\1"),
        (r"classifier\.out_proj\.(.+)", r"classifier.\1"),
        *_SAME[2:],
    ),
    skipped=r"(?:roberta\.)?embeddings\.(?:position_ids|token_type_ids)",
    first_position=1,
    exact_gelu_head=True,
)

_ELECTRA = Family(
    name="ELECTRA",
    classes="Electra",
    defaults={
        "embedding_size": 128, "hidden_size": 256, "num_attention_heads": 4,
        "intermediate_size": 1024,
    },
    fields={},
    patterns=(
        (r"(?:electra\.)?((?:embeddings|encoder)\..+)", r"bert.\1"),
        (r"generator_predictions\.dense\.(.+)", r"cls.predictions.transform.dense.\1"),
        (r"generator_predictions\.LayerNorm\.(.+)", r"cls.predictions.transform.LayerNorm.\1"),
        (r"generator_lm_head\.weight", "cls.predictions.decoder.weight"),
        (r"generator_lm_head\.bias", "cls.predictions.bias"),
        *_SAME[2:],
    ),
    skipped=r"(?:electra\.)?embeddings\.(?:position_ids|token_type_ids)",
    exact_gelu_head=True,
    unlike={
        "ForPreTraining": "it tells replaced tokens from original ones, which no BERT head does",
        "ForSequenceClassification": "it has GELU between two maps of the first token's state, "
        "where BERT has tanh",
    },
)  # fmt: skip

_DISTILBERT_LAYER = r"(?:distilbert\.)?transformer\.layer\.(\d+)\."
_DISTILBERT = Family(
    name="DistilBERT",
    classes="DistilBert",
    defaults={"n_layers": 6},
    fields={
        "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
        "hidden_dim": "intermediate_size", "activation": "hidden_act",
        "dropout": "hidden_dropout_prob", "attention_dropout": "attention_probs_dropout_prob",
    },
    patterns=(
        (r"(?:distilbert\.)?embeddings\.(.+)", r"bert.embeddings.\1"),
        *(
            (_DISTILBERT_LAYER + re.escape(theirs) + r"\.(.+)", rf"bert.encoder.layer.\1.{bert}.\2")
            for theirs, bert in {
                "attention.q_lin": "attention.self.query",
                "attention.k_lin": "attention.self.key",
                "attention.v_lin": "attention.self.value",
                "attention.out_lin": "attention.output.dense",
                "sa_layer_norm": "attention.output.LayerNorm",
                "ffn.lin1": "intermediate.dense",
                "ffn.lin2": "output.dense",
                "output_layer_norm": "output.LayerNorm",
            }.items()
        ),
        (r"vocab_transform\.(.+)", r"cls.predictions.transform.dense.\1"),
        (r"vocab_layer_norm\.(.+)", r"cls.predictions.transform.LayerNorm.\1"),
        (r"vocab_projector\.weight", "cls.predictions.decoder.weight"),
        (r"vocab_projector\.bias", "cls.predictions.bias"),
        *_SAME[2:],
    ),
    skipped=r"(?:distilbert\.)?embeddings\.position_ids",
    unlike={
        "ForSequenceClassification": "it has ReLU between two maps of the first token's state, "
        "where BERT has tanh",
    },
)  # fmt: skip

_BERT = Family(
    name="BERT",
    classes="Bert",
    defaults={},
    fields={},
    patterns=_SAME,
)

FAMILIES: Mapping[str, Family] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "electra": _ELECTRA,
    "distilbert": _DISTILBERT,
}
"""By the field `model_type`."""

_ALBERT = (
    "an ALBERT is no BERT with other names, and none is imported: between its embeddings and its "
    "first layer lies a learned map (embedding_hidden_mapping_in{embeddings}) for which BERT has "
    "no place, after a normalisation, so that it cannot be multiplied into the table; {layers}; "
    "its masked-LM head predicts from embedding_size numbers. Take a BERT or RoBERTa of that "
    "language, or pretrain one with its tokenizer (spiece.model)"
)


@dataclass(frozen=True, eq=False)
class BertForm:
    """A model as if it had been saved as a BERT."""

    family: str
    config: dict[str, Any]
    """The content of `config.json`."""
    arrays: dict[str, np.ndarray]
    """Under the names of `huggingface_names`."""
    dropped: tuple[str, ...]
    """Their names of the arrays that have no place."""
    notes: tuple[str, ...]
    """What a person should know, a sentence each."""


def to_bert(found: Mapping[str, Any], arrays: Mapping[str, np.ndarray], *, where: str) -> BertForm:
    """A model of any family under BERT's names; one of BERT's itself loses unknown heads only.

    Args:
        found: The content of its `config.json`.
        arrays: All of its tensors.
        where: Names the configuration in messages.

    Raises:
        UserError: A family that is not known or does not fit, a configuration that does not fit,
            or names that are of no such model: all at once.
    """
    kind = found.get("model_type")
    if kind == "albert":
        raise UserError(f"{where}: {_albert(found)}")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UserError(
            f"{where}: model_type is {kind!r:.80}; what can be imported is "
            f"{', '.join(FAMILIES)} (and albert cannot: see docs/import.md)"
        )
    if "auto_map" in found:
        raise UserError(
            f"{where} names code of its own (auto_map), which says what this model computes and "
            "which is never run; only models of the classes of Transformers itself are imported"
        )
    config = _config(family, found, where)
    notes: list[str] = []
    made_by = model_class(found)
    task = re.sub(f"^(?:{family.classes})(?=For|Model)", "", made_by)
    why = family.unlike.get(task, _UNLIKE.get(task))
    if why is not None:
        config["architectures"] = ["BertModel"]
        notes.append(f"{made_by}: the head is not imported, the encoder is: {why}")
    elif task != made_by:
        config["architectures"] = [f"Bert{task}"]
    renamed, dropped = _rename(family, arrays, config, where)
    if family.first_position is not None:
        _drop_positions(renamed, found, family)
        notes.append(
            f"positions count from {_first_position(found, family)} in a {family.name}, after the "
            "id of padding; the rows of the table before that are never read and are left out"
        )
    _single_type(family, config, renamed, notes)
    _check_mlm(family, config, renamed, arrays, dropped, notes)
    heads = [name for name in dropped if not re.fullmatch(family.skipped, name)]
    if heads:
        notes.append(f"not imported: {', '.join(heads[:12])}{', ...' if len(heads) > 12 else ''}")
    kinds = {f"{array.dtype}" for array in arrays.values() if array.dtype.kind != "i"} - {"float32"}
    if kinds:
        notes.append(f"weights of type {', '.join(sorted(kinds))} are written as float32")
    return BertForm(family.name, config, renamed, tuple(dropped), tuple(notes))


def _config(family: Family, found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fields under BERT's names, with the family's defaults; refused where the encoder differs."""
    theirs = {**family.defaults, **found}
    config = {family.fields.get(name, name): value for name, value in theirs.items()}
    wrong: list[str] = []
    if family is _ELECTRA and theirs["embedding_size"] != theirs.get("hidden_size"):
        wrong.append(
            f"embedding_size is {theirs['embedding_size']!r:.40} and hidden_size "
            f"{theirs.get('hidden_size')!r:.40}: embeddings of another width go through a learned "
            "map after their normalisation, for which BERT has no place. Models of one width fit "
            "(electra-base-discriminator and electra-large-discriminator)"
        )
    if family is _DISTILBERT:
        config |= {"type_vocab_size": 1, "layer_norm_eps": 1e-12}
    if family.first_position is not None:
        rows, pad = theirs["max_position_embeddings"], theirs["pad_token_id"]
        if (
            type(rows) is not int
            or type(pad) is not int
            or not (pad >= 0 and pad + family.first_position < rows <= MAX_SIZE)
        ):
            wrong.append(
                f"max_position_embeddings is {rows!r:.40} and pad_token_id {pad!r:.40}; positions "
                "begin after the id of padding, so that more rows than that are needed"
            )
        else:
            config["max_position_embeddings"] = rows - pad - family.first_position
    if wrong:
        raise UserError(f"{where}: {'; '.join(wrong)}")
    config["model_type"] = "bert"
    return config


def _rename(
    family: Family, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any], where: str
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Arrays under BERT's names, and the names of those that have none."""
    if family is _BERT:
        renamed = canonical_names(arrays)
        strange = [n for n in renamed if not any(re.fullmatch(p, n) for p, _ in _SAME)]
        return {n: renamed[n] for n in renamed if n not in strange}, strange
    # Heads that BERT has not are dropped before names are compared: theirs may be BERT's names.
    wanted = CLASSES.get(model_class(config))
    renamed, dropped, from_name = {}, [], dict[str, str]()
    for name, array in arrays.items():
        plain = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
        plain = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", plain)
        new = next(
            (re.sub(p, to, plain) for p, to in family.patterns if re.fullmatch(p, plain)), None
        )
        head = re.match(r"(classifier|qa_outputs)\.", name)
        unwanted = head and (
            wanted is None
            or (head[1] == "qa_outputs") != (wanted == "span")
            or (".dense." in name or ".out_proj." in name) != (wanted == "classification")
        )
        if new is None or unwanted or re.fullmatch(family.skipped, name):
            dropped.append(name)
        elif new in renamed:
            # Files of old versions hold the pooler that the class does not read.
            loser = next((n for n in (name, from_name[new]) if ".pooler." in n), None)
            if loser is None:
                raise UserError(f"{where}: {from_name[new]} and {name} are one parameter of a BERT")
            dropped.append(loser)
            if loser != name:
                renamed[new], from_name[new] = array, name
        else:
            renamed[new], from_name[new] = array, name
    return renamed, dropped


def _first_position(found: Mapping[str, Any], family: Family) -> int:
    return int(found.get("pad_token_id", family.defaults["pad_token_id"])) + (
        family.first_position or 0
    )


def _drop_positions(
    renamed: dict[str, np.ndarray], found: Mapping[str, Any], family: Family
) -> None:
    name = "bert.embeddings.position_embeddings.weight"
    if name in renamed and renamed[name].ndim == 2:
        renamed[name] = renamed[name][_first_position(found, family) :]


def _single_type(
    family: Family, config: dict[str, Any], renamed: dict[str, np.ndarray], notes: list[str]
) -> None:
    """Two equal types in place of one or none: rows of two texts then compute what theirs do."""
    if family is _BERT or config.get("type_vocab_size") != 1:
        return
    name = "bert.embeddings.token_type_embeddings.weight"
    words = renamed.get("bert.embeddings.word_embeddings.weight")
    if family is _DISTILBERT and words is not None and words.ndim == 2:
        renamed[name] = np.zeros((2, words.shape[1]), np.float32)
    elif name in renamed and renamed[name].shape[:1] == (1,):
        renamed[name] = np.repeat(renamed[name], 2, axis=0)
    config["type_vocab_size"] = 2
    notes.append(
        f"{family.name} does not mark the second text of a pair: both token types are "
        f"{'zeros' if family is _DISTILBERT else 'its one type'}, until training makes them differ"
    )


def _check_mlm(
    family: Family,
    config: Mapping[str, Any],
    renamed: dict[str, np.ndarray],
    arrays: Mapping[str, np.ndarray],
    dropped: list[str],
    notes: list[str],
) -> None:
    """Drops a masked-LM head that has another activation, and halves of one."""
    heads = [n for n in renamed if n.startswith("cls.predictions.")]
    if family is _BERT or not heads:
        return
    why = ""
    if family.exact_gelu_head and config.get("hidden_act", "gelu") != "gelu":
        why = f"hidden_act is {config['hidden_act']!r:.40}: {_EXACT_GELU_HEAD}"
    elif DUPLICATES.issuperset(heads):
        why = "only the copy of its table is there"
    if why:
        for name in heads:
            del renamed[name]
        pattern = re.compile(r"(lm_head|generator_|vocab_)")
        dropped += [name for name in arrays if pattern.match(name) and name not in dropped]
        notes.append(f"the masked-LM head is not imported: {why}")


def _albert(found: Mapping[str, Any]) -> str:
    width, hidden = found.get("embedding_size", 128), found.get("hidden_size", 4096)
    groups, layers = found.get("num_hidden_groups", 1), found.get("num_hidden_layers", 12)
    sizes = f", from {width} to {hidden}" if type(width) is type(hidden) is int else ""
    shared = "its layers share their parameters, which training here would not keep equal"
    if type(groups) is type(layers) is int:
        shared = f"its {layers} layers share {groups} set{'s' * (groups > 1)} of parameters, "
        shared += "which training here would not keep equal"
    return _ALBERT.format(embeddings=sizes, layers=shared)
