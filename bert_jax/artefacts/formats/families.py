"""Other families of encoders under BERT's names: RoBERTa, ELECTRA, DistilBERT; and why not ALBERT.

bert = to_bert(config, arrays, where="config.json")
model = bert.model_config(where="config.json")
params = from_huggingface(bert.arrays, model, head)
config, arrays = from_bert("electra", bert.config, bert.arrays)

Nothing is computed here beyond dropping rows and adding zeros: a family fits where it computes what
a BERT computes with the same numbers, the activation of the pooler aside. What does not fit is a
`UserError` where it is the encoder, and is dropped with a note where it is a head.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from bert_jax.artefacts.formats.config_fields import MAX_SIZE
from bert_jax.artefacts.formats.family_tables import BERT, BUFFERS, FAMILIES, TOKEN_HEADS, Family
from bert_jax.artefacts.formats.form import Form
from bert_jax.artefacts.formats.huggingface_config import (
    CLASSES,
    TaskOutputs,
    head_from_huggingface,
    model_config_from_huggingface,
)
from bert_jax.artefacts.formats.huggingface_files import model_class
from bert_jax.artefacts.formats.huggingface_names import (
    DUPLICATES,
    canonical_names,
    from_huggingface,
    of_today,
)
from bert_jax.artefacts.formats.modern import ModernForm, modern_form
from bert_jax.artefacts.formats.modern_tables import MODERN
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import Params
from bert_jax.model.task_heads import TaskHeadConfig

_EMBEDDINGS = "bert.embeddings.{}_embeddings.weight"
_UNLIKE = {"ForMultipleChoice": "multiple choice is read of a BERT alone"}
"""Classes of families other than BERT, without their prefix, whose head is not read, and why."""

_EXACT_GELU_HEAD = "its masked-LM head has the exact GELU whatever the encoder has, BERT's follows"

_ALBERT = (
    "an ALBERT is no BERT with other names, and none is imported: {}. Take a BERT or RoBERTa of "
    "that language, or pretrain one with its tokenizer (spiece.model)"
)


@dataclass(frozen=True, eq=False)
class BertForm(Form):
    """A model as if it had been saved as a BERT: tensors under the names of `huggingface_names`."""

    pooler_activation: Literal["tanh", "relu", "gelu"] = "tanh"
    """Activation of the pooler, of which BERT's configuration does not speak."""
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

    def outputs(self) -> TaskOutputs | None:
        """Return the fine-tuning head and what its logits mean; see `head_from_huggingface`."""
        return head_from_huggingface(self.config, self.arrays)

    def params(
        self, config: ModelConfig, head: TaskHeadConfig | None, *, pretraining: bool = True
    ) -> Params:
        """Return our parameters; see `from_huggingface`."""
        return from_huggingface(self.arrays, config, head, pretraining=pretraining)

    @property
    def remark(self) -> str:
        """Words for messages about names of tensors, which may not be those of the file."""
        return "" if self.family == "BERT" else f" ({self.family}, under the names of BERT)"


def form_of(
    found: Mapping[str, Any], arrays: Mapping[str, np.ndarray], *, where: str
) -> BertForm | ModernForm:
    """Return a model of any family in the form from which ours is made; see `to_bert`."""
    if found.get("model_type") in MODERN:
        return modern_form(found, arrays, where=where)
    return to_bert(found, arrays, where=where)


def to_bert(found: Mapping[str, Any], arrays: Mapping[str, np.ndarray], *, where: str) -> BertForm:
    """Return a model of any family under BERT's names; a BERT loses unknown heads only.

    Args:
        found: The content of its `config.json`; `where` names the file in messages.
        arrays: All of its tensors.

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
            f"{', '.join([*FAMILIES, *MODERN])} (and albert cannot: see docs/import.md)"
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
    why = None if family is BERT else _UNLIKE.get(task)
    if why is not None:
        config["architectures"] = ["BertModel"]
        notes.append(f"{made_by}: the head is not imported, the encoder is: {why}")
    elif task != made_by:
        config["architectures"] = [f"Bert{task}"]
    head = CLASSES.get(model_class(config))
    if "seq_classif_dropout" in family.fields and head != "classification":
        del config["classifier_dropout"]  # the other heads have `dropout`
    origins, dropped = _rename(family, arrays, model_class(config), where)
    renamed = {name: arrays[theirs] for name, theirs in origins.items()}
    if family.first_position is not None:
        first = _first_position(family, found)
        name = _EMBEDDINGS.format("position")
        if name in renamed and renamed[name].ndim == 2:
            renamed[name] = renamed[name][first:]
        notes.append(
            f"positions count from {first} in a {family.name}, after the "
            "id of padding; the rows of the table before that are never read and are left out"
        )
    if family is not BERT:
        if config.get("type_vocab_size") == 1:
            notes.append(_two_types(family, config, renamed, head))
        if why := _unlike_masked_lm(family, config, renamed):
            for name in [name for name in renamed if name.startswith("cls.predictions.")]:
                del renamed[name]
                dropped.append(origins[name])
            notes.append(f"the masked-LM head is not imported: {why}")
    heads = [name for name in dropped if not re.fullmatch(BUFFERS, name)]
    if heads:
        notes.append(f"not imported: {', '.join(heads[:12])}{', ...' if len(heads) > 12 else ''}")
    kinds = {f"{array.dtype}" for array in arrays.values() if array.dtype.kind != "i"} - {"float32"}
    if kinds:
        notes.append(f"weights of type {', '.join(sorted(kinds))} are written as float32")
    width = config.pop("embedding_size", 0) if "embedding_size" in family.defaults else 0
    width = 0 if width == config.get("hidden_size") else width
    # A narrow table is ELECTRA's alone, and so is then the classifier that fine-tuning adds.
    pooler = family.pooler_activation if width or head == "classification" else "tanh"
    return BertForm(
        family.name,
        config,
        renamed,
        tuple(dropped),
        tuple(notes),
        pooler_activation=pooler,
        embedding_dim=width,
    )


def from_bert(
    kind: str, task: str, config: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the content of `config.json` and the tensors of a model of another family.

    Args:
        kind: A value of `WRITTEN`.
        task: One of the family's `tasks`.
        config: The content of a BERT's `config.json`.
        arrays: The tensors of BERT's class of that task; what the family lacks is left out.
    """
    family = FAMILIES[kind]
    theirs = {bert: name for name, bert in family.fields.items()}
    fields = {theirs.get(name, name): value for name, value in config.items()}
    fields |= {"model_type": kind, "architectures": [class_written(kind, task)]}
    if "embedding_size" in family.defaults:
        fields.setdefault("embedding_size", config["hidden_size"])
    rename = _renamer(family, f"Bert{task}", back=True)
    types = () if family.has_types else (_EMBEDDINGS.format("token_type"),)
    names = {name: rename(name) for name in arrays if name not in types}
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
    rename = _renamer(FAMILIES[kind], f"Bert{task}")
    return {f"{rename(name)}": name for name in names}


def _renamer(family: Family, bert_class: str, *, back: bool = False) -> Callable[[str], str | None]:
    """Return the function from a family's names to BERT's, or back; None for a name of no place.

    Of the heads the one of `bert_class` counts: a family's name for its head may be BERT's for
    another.
    """
    heads = {**TOKEN_HEADS, "classification": family.classifier}
    patterns = []
    for names in (*family.names, *heads.get(CLASSES.get(bert_class, ""), ())):
        first, second = reversed(names) if back else names
        pattern = re.escape(first).replace(r"\{n\}", r"(?P<n>\d+)")
        if not back and first.startswith(family.prefix):
            pattern = f"(?:{re.escape(family.prefix)})?" + pattern[len(re.escape(family.prefix)) :]
        rest = "(?P<rest>.+)" if first.endswith(".") else "(?P<rest>)"
        patterns.append((re.compile(pattern + rest), second))

    def rename(name: str) -> str | None:
        for pattern, new in patterns:
            if match := pattern.fullmatch(name):
                return new.format(**match.groupdict()) + match["rest"]
        return None

    return rename


def _config(family: Family, found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fields under BERT's names, with the family's defaults; refused where the encoder differs."""
    theirs = {**family.defaults, **found}
    config = {family.fields.get(name, name): value for name, value in theirs.items()}
    if "embedding_size" in family.defaults:
        width = theirs["embedding_size"]
        if type(width) is not int or not 1 <= width <= MAX_SIZE:
            raise UserError(
                f"{where}: embedding_size is {width!r:.40}; it must be from 1 to {MAX_SIZE:,}"
            )
    if not family.has_types:
        config |= {"type_vocab_size": 1, "layer_norm_eps": 1e-12}
    if family.first_position is not None:
        rows, pad = theirs["max_position_embeddings"], theirs["pad_token_id"]
        if (
            type(rows) is not int
            or type(pad) is not int
            or not (pad >= 0 and pad + family.first_position < rows <= MAX_SIZE)
        ):
            raise UserError(
                f"{where}: max_position_embeddings is {rows!r:.40} and pad_token_id {pad!r:.40}; "
                "positions begin after the id of padding, so that more rows than that are needed"
            )
        config["max_position_embeddings"] = rows - _first_position(family, found)
    config["model_type"] = "bert"
    return config


def _first_position(family: Family, found: Mapping[str, Any]) -> int:
    pad: int = {**family.defaults, **found}["pad_token_id"]
    return pad + (family.first_position or 0)


def _rename(
    family: Family, arrays: Mapping[str, np.ndarray], made_by: str, where: str
) -> tuple[dict[str, str], list[str]]:
    """Return BERT's names of the arrays, to theirs, and the names of the arrays that have none."""
    rename = _renamer(family, made_by)
    if family is BERT:
        found: dict[str, str] = canonical_names({name: name for name in arrays})
        strange = [name for name in found if rename(name) is None]
        return {new: name for new, name in found.items() if new not in strange}, strange
    origins: dict[str, str] = {}
    dropped: list[str] = []
    for name in arrays:
        new = rename(of_today(name))
        if new is None or re.fullmatch(BUFFERS, name):
            dropped.append(name)
        elif new not in origins:
            origins[new] = name
        # Files of old versions hold the pooler that the class does not read.
        elif ".pooler." in name:
            dropped.append(name)
        elif ".pooler." in origins[new]:
            dropped.append(origins[new])
            origins[new] = name
        else:
            raise UserError(f"{where}: {origins[new]} and {name} are one parameter of a BERT")
    return origins, dropped


def _two_types(
    family: Family, config: dict[str, Any], renamed: dict[str, np.ndarray], head: str | None
) -> str:
    """Make two equal types of one or none: rows of two texts then compute what theirs do.

    A classifier of DistilBERT has one type: its class, under which it is written, has no other.
    Returns a note.
    """
    name, words = _EMBEDDINGS.format("token_type"), renamed.get(_EMBEDDINGS.format("word"))
    if not family.has_types and words is not None and words.ndim == 2:
        number = 1 if head == "classification" else 2
        renamed[name] = np.zeros((number, words.shape[1]), np.float32)
        if number == 1:
            return f"{family.name} does not mark the second text of a pair, nor does this model"
    elif name in renamed and renamed[name].shape[:1] == (1,):
        renamed[name] = np.repeat(renamed[name], 2, axis=0)
    config["type_vocab_size"] = 2
    return (
        f"{family.name} does not mark the second text of a pair: both token types are "
        f"{'its one type' if family.has_types else 'zeros'}, until training makes them differ"
    )


def _unlike_masked_lm(
    family: Family, config: Mapping[str, Any], renamed: Mapping[str, np.ndarray]
) -> str:
    """Say why a masked-LM head has no place: another activation, or half of a head; or ""."""
    heads = [name for name in renamed if name.startswith("cls.predictions.")]
    if heads and family.exact_gelu_head and config.get("hidden_act", "gelu") != "gelu":
        return f"hidden_act is {config['hidden_act']!r:.40}: {_EXACT_GELU_HEAD}"
    if heads and DUPLICATES.issuperset(heads):
        return "only the copy of its table is there"
    return ""


def _albert(found: Mapping[str, Any]) -> str:
    groups, layers = found.get("num_hidden_groups", 1), found.get("num_hidden_layers", 12)
    shared = "its layers share their parameters"
    if type(groups) is type(layers) is int:
        shared = f"its {layers} layers share {groups} set{'s' * (groups > 1)} of parameters"
    return _ALBERT.format(f"{shared}, which training here would not keep equal")
