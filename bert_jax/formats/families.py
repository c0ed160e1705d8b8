"""Other families of encoders under BERT's names: RoBERTa, ELECTRA, DistilBERT; and why not ALBERT.

bert = to_bert(config, arrays, where="config.json")
model = bert.model_config(where="config.json")
params = parts_from_huggingface(bert.arrays, model, head)
config, arrays = from_bert("electra", bert.config, bert.arrays)

Nothing is computed here beyond dropping rows and adding zeros: a family fits where it computes what
a BERT computes with the same numbers, the activation of the pooler aside. What does not fit is a
`UserError` where it is the encoder, and is dropped with a note where it is a head.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bert_jax.errors import UserError
from bert_jax.formats.family_tables import (
    BERT,
    DISTILBERT,
    ELECTRA,
    FAMILIES,
    SAME,
    TOKEN_HEADS,
    Family,
    Patterns,
)
from bert_jax.formats.huggingface_config import MAX_SIZE, model_config_from_huggingface
from bert_jax.formats.huggingface_files import model_class
from bert_jax.formats.huggingface_head import CLASSES
from bert_jax.formats.huggingface_names import DUPLICATES, canonical_names
from bert_jax.model.config import ModelConfig

_UNLIKE = {"ForMultipleChoice": "no head here compares rows"}
"""Classes of every family, without their prefix, whose head is none of ours, and why."""

_EXACT_GELU_HEAD = "its masked-LM head has the exact GELU whatever the encoder has, BERT's follows"

_ALBERT = (
    "an ALBERT is no BERT with other names, and none is imported: {}. Take a BERT or RoBERTa of "
    "that language, or pretrain one with its tokenizer (spiece.model)"
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
    """Names of the arrays that have no place."""
    notes: tuple[str, ...]
    """Remarks for people, a sentence each."""
    pooler_activation: Literal["tanh", "relu", "gelu"] = "tanh"
    """Activation of the pooler, of which BERT's configuration does not speak."""
    files: Path | None = None
    """File or directory of the tokenizer, where the reader knows it."""
    embedding_dim: int = 0
    """Width of the embedding tables where it is not that of the layers; BERT has one width."""

    def model_config(self, *, where: str) -> ModelConfig:
        """Return the architecture; a UserError that begins with `where` says what does not fit."""
        config = model_config_from_huggingface(self.config, where=where)
        return replace(
            config,
            pooler_activation=self.pooler_activation,
            embedding_dim=self.embedding_dim,
        )


def to_bert(found: Mapping[str, Any], arrays: Mapping[str, np.ndarray], *, where: str) -> BertForm:
    """Return a model of any family under BERT's names; a BERT loses unknown heads only.

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
    why = _UNLIKE.get(task)
    if why is not None:
        config["architectures"] = ["BertModel"]
        notes.append(f"{made_by}: the head is not imported, the encoder is: {why}")
    elif task != made_by:
        config["architectures"] = [f"Bert{task}"]
    head = CLASSES.get(model_class(config))
    if family is DISTILBERT and head != "classification":  # the other heads have `dropout`
        del config["classifier_dropout"]
    renamed, dropped = _rename(family, arrays, model_class(config), where)
    if family.first_position is not None:
        _drop_positions(renamed, found, family)
        notes.append(
            f"positions count from {_first_position(found, family)} in a {family.name}, after the "
            "id of padding; the rows of the table before that are never read and are left out"
        )
    _single_type(family, config, renamed, head, notes)
    _check_mlm(family, config, renamed, arrays, dropped, notes)
    heads = [name for name in dropped if not re.fullmatch(family.skipped, name)]
    if heads:
        notes.append(f"not imported: {', '.join(heads[:12])}{', ...' if len(heads) > 12 else ''}")
    kinds = {f"{array.dtype}" for array in arrays.values() if array.dtype.kind != "i"} - {"float32"}
    if kinds:
        notes.append(f"weights of type {', '.join(sorted(kinds))} are written as float32")
    width = config.pop("embedding_size", 0) if family is ELECTRA else 0
    width = 0 if width == config.get("hidden_size") else width
    # A narrow table is ELECTRA's alone, and so is then the classifier that fine-tuning adds.
    pooler = family.pooler_activation if width or head == "classification" else "tanh"
    return BertForm(
        family.name, config, renamed, tuple(dropped), tuple(notes), pooler, embedding_dim=width
    )


def from_bert(
    kind: str, task: str, config: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the content of `config.json` and the tensors of a model of another family.

    Args:
        kind: A value of `WRITTEN`.
        task: One of the family's `tasks`.
        config: The content of a BERT's `config.json`.
        arrays: The tensors of BERT's class of that task.
    """
    family = FAMILIES[kind]
    theirs = {bert: name for name, bert in family.fields.items()}
    fields = {theirs.get(name, name): value for name, value in config.items()}
    fields |= {"model_type": kind, "architectures": [class_written(kind, task)]}
    if "embedding_size" in family.defaults:
        fields.setdefault("embedding_size", config["hidden_size"])
    heads = {**TOKEN_HEADS, "classification": family.written_classifier}
    patterns = (*family.written, *heads.get(CLASSES.get(f"Bert{task}", ""), ()))
    names = {name: _renamed(name, patterns) for name in arrays}
    return fields, {new: arrays[name] for name, new in names.items() if new is not None}


def class_written(kind: str, task: str) -> str:
    """Return the class of a model that `from_bert` makes; of BERT itself, BERT's."""
    return f"{FAMILIES[kind].classes}{task}"


def is_written(found: Mapping[str, Any]) -> bool:
    """Say whether a `config.json` is of a class that `from_bert` makes."""
    kind = found.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    return family is not None and model_class(found) in [
        class_written(f"{kind}", task) for task in family.tasks
    ]


def bert_names(kind: str, task: str, names: Iterable[str]) -> dict[str, str]:
    """Return BERT's names of the tensors that `from_bert` makes, to theirs."""
    patterns = (*FAMILIES[kind].patterns, *_head_patterns(FAMILIES[kind], f"Bert{task}"))
    return {f"{_renamed(name, patterns)}": name for name in names}


def _head_patterns(family: Family, bert_class: str) -> Patterns:
    """Patterns of one head alone: a family's name for its head may be BERT's for another."""
    heads = {**TOKEN_HEADS, "classification": family.classifier}
    return heads.get(CLASSES.get(bert_class, ""), ())


def _renamed(name: str, patterns: Patterns) -> str | None:
    return next((re.sub(p, to, name) for p, to in patterns if re.fullmatch(p, name)), None)


def _config(family: Family, found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fields under BERT's names, with the family's defaults; refused where the encoder differs."""
    theirs = {**family.defaults, **found}
    config = {family.fields.get(name, name): value for name, value in theirs.items()}
    wrong: list[str] = []
    if family is ELECTRA:
        width = theirs["embedding_size"]
        if type(width) is not int or not 1 <= width <= MAX_SIZE:
            wrong.append(f"embedding_size is {width!r:.40}; it must be from 1 to {MAX_SIZE:,}")
    if family is DISTILBERT:
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
    family: Family, arrays: Mapping[str, np.ndarray], made_by: str, where: str
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Arrays under BERT's names, and the names of those that have none."""
    if family is BERT:
        renamed = canonical_names(arrays)
        strange = [n for n in renamed if not any(re.fullmatch(p, n) for p, _ in SAME)]
        return {n: renamed[n] for n in renamed if n not in strange}, strange
    patterns = (*family.patterns, *_head_patterns(family, made_by))
    renamed, dropped, from_name = {}, [], dict[str, str]()
    for name, array in arrays.items():
        plain = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
        plain = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", plain)
        new = _renamed(plain, patterns)
        if new is None or re.fullmatch(family.skipped, name):
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
    family: Family,
    config: dict[str, Any],
    renamed: dict[str, np.ndarray],
    head: str | None,
    notes: list[str],
) -> None:
    """Two equal types in place of one or none: rows of two texts then compute what theirs do.

    A classifier of DistilBERT has one type: its class, under which it is written, has no other.
    """
    if family is BERT or config.get("type_vocab_size") != 1:
        return
    name = "bert.embeddings.token_type_embeddings.weight"
    words = renamed.get("bert.embeddings.word_embeddings.weight")
    if family is DISTILBERT and words is not None and words.ndim == 2:
        number = 1 if head == "classification" else 2
        renamed[name] = np.zeros((number, words.shape[1]), np.float32)
        if number == 1:
            notes.append("DistilBERT does not mark the second text of a pair, nor does this model")
            return
    elif name in renamed and renamed[name].shape[:1] == (1,):
        renamed[name] = np.repeat(renamed[name], 2, axis=0)
    config["type_vocab_size"] = 2
    notes.append(
        f"{family.name} does not mark the second text of a pair: both token types are "
        f"{'zeros' if family is DISTILBERT else 'its one type'}, until training makes them differ"
    )


def _check_mlm(
    family: Family,
    config: Mapping[str, Any],
    renamed: dict[str, np.ndarray],
    arrays: Mapping[str, np.ndarray],
    dropped: list[str],
    notes: list[str],
) -> None:
    """Drop a masked-LM head that has another activation, and halves of one."""
    heads = [n for n in renamed if n.startswith("cls.predictions.")]
    if family is BERT or not heads:
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
    groups, layers = found.get("num_hidden_groups", 1), found.get("num_hidden_layers", 12)
    shared = "its layers share their parameters, which training here would not keep equal"
    if type(groups) is type(layers) is int:
        shared = f"its {layers} layers share {groups} set{'s' * (groups > 1)} of parameters, "
        shared += "which training here would not keep equal"
    return _ALBERT.format(shared)
