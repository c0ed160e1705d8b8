"""Modern encoders in Hugging Face's format, by the tables of `modern_tables`.

form = modern_form(found, arrays, where="config.json")
config, outputs = form.model_config(where="config.json"), form.outputs()
params = form.params(config, outputs.head)
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from bert_jax.artefacts.formats.entries import Entry, in_model, read_tensors
from bert_jax.artefacts.formats.form import Form
from bert_jax.artefacts.formats.huggingface_config import (
    CLASSES,
    MULTIPLE_CHOICE,
    TaskOutputs,
    head_from_huggingface,
)
from bert_jax.artefacts.formats.huggingface_files import model_class
from bert_jax.artefacts.formats.modern_config import modern_config
from bert_jax.artefacts.formats.modern_tables import MODERN, Modern
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import Params, param_shapes
from bert_jax.model.pooling import Pooled
from bert_jax.model.task_heads import TaskHeadConfig, TaskModel

_BUFFER = re.compile(r".*(?:inv_freq|freqs_cis|position_ids)")
_HEADS = {**CLASSES, MULTIPLE_CHOICE: "classification"}
_TASKS = ("Model", "ForMaskedLM", *(name.removeprefix("Bert") for name in _HEADS))


class ModernForm(Form):
    """A model of a modern family, as its files have it."""

    @property
    def kind(self) -> str:
        """Field `model_type`."""
        kind: str = self.config["model_type"]
        return kind

    @property
    def modern(self) -> Modern:
        """Facts about the family."""
        return MODERN[self.kind]

    def model_config(self, *, where: str) -> ModelConfig:
        """Return the architecture; a UserError that begins with `where` says what does not fit."""
        return modern_config(self.config, where=where)

    def outputs(self) -> TaskOutputs | None:
        """Return the fine-tuning head and what its logits mean, if there is one.

        Raises:
            UserError: The labels, the problem or the pooling do not fit.
        """
        kind = self.head_kind
        if kind not in self.modern.heads:
            return None
        task = f"Bert{_task(self.modern, self.config)}"
        defaults = {"hidden_dropout_prob": 0.0}
        found = head_from_huggingface(
            {**defaults, **self.config, "architectures": [task]}, self.arrays
        )
        assert found is not None
        pooling = self.config.get("classifier_pooling")
        poolings = self.modern.poolings
        if found.head.kind != "classification" or not poolings:
            return found
        pooling = next(iter(poolings)) if pooling is None else pooling
        if not isinstance(pooling, str) or pooling not in poolings:
            raise UserError(
                f"config.json: classifier_pooling is {pooling!r:.80}; it must be one of "
                f"{', '.join(poolings)}"
            )
        return replace(found, head=replace(found.head, pooling=poolings[pooling]))

    @property
    def remark(self) -> str:
        """Words for messages about names of tensors."""
        return f" ({self.family})"

    @property
    def head_kind(self) -> str | None:
        """Kind of the head that the class of the file has."""
        return _HEADS.get(f"Bert{_task(self.modern, self.config)}")

    def params(
        self, config: ModelConfig, head: TaskHeadConfig | None, *, pretraining: bool = True
    ) -> Params:
        """Return our parameters: `encoder`, and the heads that are there and asked for.

        Raises:
            UserError: Names missing or unexpected, shapes that do not fit: all at once.
        """
        modern = self.modern
        masked_lm = {entry.name for entry in modern.masked_lm} | modern.copies.keys()
        shapes = param_shapes(config)
        there = not masked_lm.isdisjoint(self.arrays)
        if "mlm" not in shapes:  # the table is the decoder
            there = _task(modern, self.config) == "ForMaskedLM"
        table = modern_table(self.kind, None if head is None else head.kind)
        copies: dict[str, str] = {}
        if there := there and pretraining and self.head_kind is None and head is None:
            table = modern_table(self.kind, masked_lm=True)
            copies = modern.copies if config.tied else {}
        if head is not None:
            task = param_shapes(config, TaskModel, head)
            shapes |= {part: tree for part, tree in task.items() if part != "encoder"}
        elif not pretraining:
            shared, shapes = self._shared(config)
            table += shared
        known = {entry.name for entry in table} | copies.keys()
        found = {
            name: array
            for name, array in self.arrays.items()
            if name.startswith(modern.prefix) or name in known
        }
        params = read_tensors(table, shapes, found, config, copies)
        return {"mlm": {}, **params} if there else params

    def _shared(self, config: ModelConfig) -> tuple[list[Entry], Params]:
        """Return the entries of what heads of the family share, as far as they are all there.

        The second value has the shapes of a model with such a head.
        """
        shapes = param_shapes(config, TaskModel, TaskHeadConfig("classification"))
        entries = {e.name: e for head in self.modern.heads.values() for e in head}
        shared = [e for e in entries.values() if e.path[0] != "head"]
        shared = in_model(shared, shapes)
        return shared if self.arrays.keys() >= {e.name for e in shared} else [], shapes


def modern_form(
    found: Mapping[str, Any], arrays: Mapping[str, np.ndarray], *, where: str
) -> ModernForm:
    """Return a model of a modern family with its tensors under the names of the tables.

    Args:
        found: The content of its `config.json`, whose `model_type` is in `MODERN`; `where` names
            the file in messages.
        arrays: All of its tensors.

    Raises:
        UserError: Two tensors of one name.
    """
    kind: str = found["model_type"]
    modern = MODERN[kind]
    notes: list[str] = []
    if "auto_map" in found:
        notes.append("config.json names code of its own (auto_map), which was not run")
    task = _task(modern, found)
    heads = [*modern.masked_lm, *modern.heads.get(f"{_HEADS.get(f'Bert{task}')}", ())]
    known = {entry.name for entry in heads} | modern.copies.keys()
    if task not in (*_TASKS, "AutoModel"):  # where a head is called as another class calls its own
        known = set()
    known = {name for name in known if not name.startswith(modern.prefix)}
    renamed: dict[str, np.ndarray] = {}
    dropped: list[str] = []
    old = {name: _of_today(modern, name) for name in arrays}
    bare = not any(name.startswith(modern.prefix) for name in old.values())
    for name, new in old.items():
        new = f"{modern.prefix}{new}" if bare and new not in known else new
        if _BUFFER.fullmatch(name) or not (new in known or new.startswith(modern.prefix)):
            dropped.append(name)
        elif new in renamed:
            raise UserError(f"{where}: these weights have one parameter twice, {name} among them")
        else:
            renamed[new] = arrays[name]
    for copy, original in modern.copies.items():  # old files have the second name alone
        if copy in renamed and original not in renamed and copy.endswith(".bias"):
            renamed[original] = renamed[copy]
    lost = [name for name in dropped if not _BUFFER.fullmatch(name)]
    if lost:
        notes.append(f"not imported: {', '.join(lost[:12])}{', ...' if len(lost) > 12 else ''}")
    kinds = {f"{array.dtype}" for array in arrays.values() if array.dtype.kind != "i"} - {"float32"}
    if kinds:
        notes.append(f"weights of type {', '.join(sorted(kinds))} are written as float32")
    return ModernForm(modern.name, dict(found), renamed, tuple(dropped), tuple(notes))


def modern_table(kind: str, head: str | None = None, *, masked_lm: bool = False) -> list[Entry]:
    """Return the entries of a family's encoder, and of its masked-LM or fine-tuning head."""
    modern = MODERN[kind]
    table = [*modern.encoder, *(modern.masked_lm if masked_lm else ())]
    return table if head is None else [*table, *modern.heads[head]]


def pooling_to_huggingface(kind: str, pooling: str) -> dict[str, str]:
    """Return the field of a `config.json` that says what a classification reads."""
    poolings = MODERN[kind].poolings if kind in MODERN else {}
    names = [theirs for theirs, ours in poolings.items() if ours == pooling]
    return {"classifier_pooling": names[0]} if names else {}


def pooling_from_huggingface(
    found: Mapping[str, Any],
) -> Pooled | None:
    """Return what a classification reads by a `config.json`; None where no known field says."""
    kind, pooling = found.get("model_type"), found.get("classifier_pooling")
    if not (isinstance(kind, str) and kind in MODERN and isinstance(pooling, str)):
        return None
    return MODERN[kind].poolings.get(pooling)


def unlike_head(kind: str, config: ModelConfig, head: TaskHeadConfig) -> str:
    """Say why a family's classes do not compute a head, or ""."""
    modern = MODERN[kind]
    if head.kind not in modern.heads:
        return f"they have none for {head.kind}"
    if head.kind != "classification":
        return ""
    poolings = modern.poolings.values()
    if poolings and head.pooling not in poolings:
        return f"the head's pooling is {head.pooling!r}, not {' or '.join(map(repr, poolings))}"
    config = replace(config, head_activation=config.head_activation or config.activation)
    found = ((name, getattr(config, name), value) for name, value in modern.classifies.items())
    return "; ".join(f"model.{name} is {a!r}, not {b!r}" for name, a, b in found if a != b)


def _task(modern: Modern, found: Mapping[str, Any]) -> str:
    """Return the class of a file without its family, such as ForMaskedLM."""
    name = model_class(found)
    return next((task for task in _TASKS if modern.class_of(task) == name), name)


def _of_today(modern: Modern, name: str) -> str:
    for old, new in modern.aliases.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
