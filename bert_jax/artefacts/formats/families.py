"""The table of foreign encoder families, and why there is no ALBERT.

A family is one entry: the computation, and the fields and names in its files, mapped to ours.
"""

from collections.abc import Mapping
from typing import Any

from bert_jax.artefacts.formats.bert_families import BERTS
from bert_jax.artefacts.formats.config_fields import show
from bert_jax.artefacts.formats.family import Family
from bert_jax.artefacts.formats.modern_families import MODERN
from bert_jax.errors import UserError

FAMILIES: Mapping[str, Family] = {**BERTS, **MODERN}
"""Families by `model_type`, a field of `config.json`."""

_ALBERT = (
    "an ALBERT is no BERT with other names, and none is imported: {}. Take a BERT or RoBERTa of "
    "that language, or pretrain one with its tokenizer (spiece.model)"
)

_OWN_CODE = (
    "names code of its own (auto_map), which says what this model computes and which is never run; "
    "only models of the classes of Transformers itself are imported"
)


def known_family(found: Mapping[str, Any]) -> Family | None:
    """Return the family of a `config.json`; None if the family is unknown."""
    kind = found.get("model_type")
    return FAMILIES.get(kind) if isinstance(kind, str) else None


def family_to_import(found: Mapping[str, Any], *, where: str) -> Family:
    """Return the family of a `config.json`; `where` names the file in messages.

    Raises:
        UserError: The family is unknown, or the model needs its own code (`auto_map`).
    """
    if found.get("model_type") == "albert":
        raise UserError(f"{where}: {_albert(found)}")
    family = known_family(found)
    if family is None:
        raise UserError(
            f"{where}: model_type is {found.get('model_type')!r:.80}; what can be imported is "
            f"{', '.join(FAMILIES)} (and albert cannot: see docs/import.md)"
        )
    if "auto_map" in found and family.like_bert:
        raise UserError(f"{where} {_OWN_CODE}")
    return family


def is_read(found: Mapping[str, Any]) -> bool:
    """Whether files of the class in a `config.json` can be read directly, without an import."""
    family = known_family(found)
    if family is None or family.written is None:
        return family is not None
    return family.task_of(found) in family.written and "auto_map" not in found


def unread(found: Mapping[str, Any], *, where: str) -> UserError:
    """Return the error for a `config.json` whose class cannot be read directly."""
    kind = found.get("model_type")
    if known_family(found) and "auto_map" in found:
        return UserError(f"{where} {_OWN_CODE}")
    if kind is None:
        return UserError(
            f"{where} has no field model_type, so that it may be of any kind of model (RoBERTa's "
            'weights have the names of BERT\'s). If it is a BERT, add "model_type": "bert"'
        )
    return UserError(
        f"{where}: model_type is {show(kind)}; only 'bert' is supported. `bert-jax import` "
        "makes one of a RoBERTa, ELECTRA or DistilBERT"
    )


def _albert(found: Mapping[str, Any]) -> str:
    groups, layers = found.get("num_hidden_groups", 1), found.get("num_hidden_layers", 12)
    shared = "its layers share their parameters"
    if type(groups) is type(layers) is int:
        shared = f"its {layers} layers share {groups} set{'s' * (groups > 1)} of parameters"
    return _ALBERT.format(f"{shared}, which training here would not keep equal")
