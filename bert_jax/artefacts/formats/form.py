"""A model of another library as its files describe it, before conversion to our parameters.

form = form_of(found, arrays, where="config.json")
outputs = form.outputs()
params = form.params(None if outputs is None else outputs.head)

To fit our model, rows of embedding tables are dropped, repeated or added (as zeros). An encoder
that does not fit raises a `UserError`. A head that does not fit is left out, with a note.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.artefacts.formats.bert_families import BERT
from bert_jax.artefacts.formats.entries import Entry, in_model, read_tensors
from bert_jax.artefacts.formats.families import FAMILIES
from bert_jax.artefacts.formats.family import EMBEDDINGS, Family
from bert_jax.artefacts.formats.huggingface_files import (
    MULTIPLE_CHOICE,
    TASKS,
    TaskOutputs,
    head_from_huggingface,
    model_class,
)
from bert_jax.artefacts.formats.model_config import config_from_huggingface, first_position
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import Params, ReplacedHead, param_shapes
from bert_jax.model.task_heads import TaskHeadConfig, TaskModel

_BUFFER = re.compile(
    r".*(?:inv_freq|freqs_cis|position_ids|token_type_ids)|deberta.*position_emb.*"
)
"""Pattern for the names of buffers, which hold no learned values."""
_HEADS = ("cls.", "classifier.", "qa_outputs.", "discriminator_predictions.")
"""Prefixes of the names of BERT's heads; unknown tensors under these prefixes are ignored."""


@dataclass(frozen=True, eq=False)
class Form:
    """Content of a model's files. The tensors have the names in the tables of its `family`."""

    family: Family
    config: dict[str, Any]
    """Content of `config.json`."""
    model: ModelConfig
    arrays: dict[str, np.ndarray]
    dropped: tuple[str, ...] = ()
    """Names of the tensors that are not read."""
    notes: tuple[str, ...] = ()
    """Notes for the user, one sentence each."""
    files: Path | None = None
    """File or directory of the tokenizer, if it is known."""

    def outputs(self) -> TaskOutputs | None:
        """Return the fine-tuning head and the meaning of its logits, or None if no head is read."""
        family, found = self.family, {**self.family.defaults, **self.config}
        if (kind := family.head_of(found)) is None:
            return None
        fields = {ours: name for name, ours in family.fields.items()}
        layers = fields.get("hidden_dropout_rate", "hidden_dropout_prob")
        rates = (found.get(name) for name in (family.dropouts.get(kind, layers), layers))
        rate = next((rate for rate in rates if rate is not None), 0.0)
        bias = next(e.name for e in family.heads[kind] if e.path == ("head", "bias"))
        task = family.task_of(found)
        outputs = head_from_huggingface(task, found, self.arrays, bias=bias, rate=rate)
        poolings = family.poolings
        if kind != "classification" or not poolings:
            return outputs
        pooling = found.get("classifier_pooling")
        pooling = next(iter(poolings)) if pooling is None else pooling
        if not isinstance(pooling, str) or pooling not in poolings:
            raise UserError(
                f"config.json: classifier_pooling is {pooling!r:.80}; it must be one of "
                f"{', '.join(poolings)}"
            )
        return replace(outputs, head=replace(outputs.head, pooling=poolings[pooling]))

    def params(self, head: TaskHeadConfig | None, *, pretraining: bool = True) -> Params:
        """Read the parameters as float32: `encoder`, and each requested head that the file has.

        `head` is the fine-tuning head to read, if any; `pretraining` says whether to read
        pretraining heads. Without both, the part that all fine-tuning heads of the family share is
        still read. Raise a UserError that lists all faults: tensors that are missing, unexpected,
        of another shape or not finite, and copies, such as the tied decoder, that differ.
        """
        family, config, there = self.family, self.model, self.arrays.keys()
        shapes = param_shapes(config)
        if "rtd" in family.pretraining:
            shapes["rtd"] = param_shapes(config, ReplacedHead)
        # Only files of BERT-like families may have pretraining heads beside a fine-tuning head.
        both = family.like_bert or not (head or family.task_of(self.config) in TASKS)
        parts = self._parts(shapes) if pretraining and both else []
        copies = family.copies if "mlm" in parts and config.tied else {}
        table = family.table(parts, None if head is None else head.kind)
        if head is not None:
            task = param_shapes(config, TaskModel, head)
            shapes |= {part: tree for part, tree in task.items() if part != "encoder"}
        elif not pretraining:
            shapes = param_shapes(config, TaskModel, TaskHeadConfig("classification"))
            table += self._shared(shapes)
        if family.like_bert:  # a file may lack a pooler, or have one that its class does not read
            table += () if any("pooler" in entry.path for entry in table) else family.pooler
            poolers = [entry for entry in table if "pooler" in entry.path]
            if there.isdisjoint(entry.name for entry in poolers):
                table = [entry for entry in table if entry not in poolers]
        known = {entry.name for entry in table} | copies.keys()
        heads = family.table(family.pretraining)[len(family.encoder) :]
        heads += [entry for entries in family.heads.values() for entry in entries]
        others = {entry.name for entry in heads} | family.copies.keys()
        others = {n for n in others - known if not n.startswith(family.prefix)}
        found = {n: array for n, array in self.arrays.items() if n not in others}
        params = read_tensors(table, shapes, found, config, copies)
        return {"mlm": {}, **params} if "mlm" in parts else params

    def _parts(self, shapes: Params) -> list[str]:
        """Return the pretraining heads that the file has."""
        family, there = self.family, self.arrays.keys()
        found = [
            part
            for part, entries in family.pretraining.items()
            if not there.isdisjoint(entry.name for entry in entries)
            or (part == "mlm" and not there.isdisjoint(family.copies))
        ]
        if "mlm" in shapes:
            return found
        # All weights of the head are tied to the encoder's, so the file need not have any.
        return ["mlm"] if family.task_of(self.config) == "ForMaskedLM" else []

    def _shared(self, shapes: Params) -> list[Entry]:
        """Return the entries that all heads of the family share, if the file has all of them."""
        entries = {e.name: e for head in self.family.heads.values() for e in head}
        shared = in_model([e for e in entries.values() if e.path[0] != "head"], shapes)
        return shared if self.arrays.keys() >= {e.name for e in shared} else []


def form_of(
    found: Mapping[str, Any], arrays: Mapping[str, np.ndarray], *, where: str, marked: bool = True
) -> Form:
    """Recognise the family of a model; name its tensors as the family's own files name them.

    `found` is the content of `config.json`, which `where` names in messages; its `model_type` is in
    `FAMILIES`. `arrays` has all tensors of the model. For `marked`, see `marks_second`.
    """
    family = FAMILIES[found["model_type"]]
    model = config_from_huggingface(found, where=where)
    task, notes = family.task_of(found), list[str]()
    if "auto_map" in found and not family.like_bert:
        notes.append("config.json names code of its own (auto_map), which was not run")
    if task == MULTIPLE_CHOICE and family.like_bert and not family.compares:
        notes.append(
            f"{model_class(found)}: only the encoder is imported, because heads for multiple "
            "choice are read only from BERT, ModernBERT and DeBERTa"
        )
    origins, dropped = _names(family, found, arrays, where)
    renamed = {name: arrays[theirs] for name, theirs in origins.items()}
    for copy, original in family.copies.items():  # old files may have only the second name
        if copy in renamed and original not in renamed and copy.endswith(".bias"):
            renamed[original] = renamed[copy]
    notes += _fitted(family, found, model.num_types, marked, renamed)
    if why := _unlike_masked_lm(family, found, renamed):
        for entry in family.pretraining["mlm"]:
            if renamed.pop(entry.name, None) is not None and entry.name in origins:
                dropped.append(origins[entry.name])
        notes.append(f"the masked-LM head is not imported: {why}")
    lost = [name for name in dropped if not _BUFFER.fullmatch(name)]
    if lost:
        notes.append(f"not imported: {', '.join(lost[:12])}{', ...' if len(lost) > 12 else ''}")
    kinds = {f"{array.dtype}" for array in arrays.values() if array.dtype.kind != "i"} - {"float32"}
    if kinds:
        notes.append(f"weights of type {', '.join(sorted(kinds))} are written as float32")
    return Form(family, dict(found), model, renamed, tuple(dropped), tuple(notes))


def _names(
    family: Family, found: Mapping[str, Any], arrays: Mapping[str, Any], where: str
) -> tuple[dict[str, str], list[str]]:
    """Map the family's names of tensors to the file's names; list the tensors that are not read.

    In files of BERT itself, unknown tensors outside heads are kept, for `Form.params` to reject.
    """
    task, kind = family.task_of(found), family.head_of(found)
    head = () if kind is None else family.heads[kind]
    known = {entry.name for entries in (*family.pretraining.values(), head) for entry in entries}
    known |= family.copies.keys()
    if not (family.like_bert or task in (*TASKS, "Model", "ForMaskedLM", "AutoModel")):
        known = set()  # the head of an unknown class may have the names of a known head
    poolers = head if any("pooler" in entry.path for entry in head) else family.pooler
    known |= {entry.name for entry in poolers if "pooler" in entry.path}
    encoder = (*family.encoder, *family.pooler)
    roots = {e.name.removeprefix(family.prefix).partition(".")[0] for e in encoder}
    old = {name: _of_today(family, name) for name in arrays}
    bare = not any(name.startswith(family.prefix) for name in old.values())
    origins: dict[str, str] = {}
    dropped: list[str] = []
    for name, new in old.items():
        outside = bare if not family.like_bert else new.partition(".")[0] in roots
        if outside and new not in known:
            new = f"{family.prefix}{new}"
        inside = new.startswith(family.prefix) or (family is BERT and not new.startswith(_HEADS))
        spare = family.like_bert and new.startswith(f"{family.prefix}pooler.")
        if _BUFFER.fullmatch(new) or not (new in known or (inside and not spare)):
            dropped.append(name)
        elif new in origins:
            raise UserError(
                f"{where}: the weights have one parameter under two names, {origins[new]} and "
                f"{name}; remove one of them"
            )
        else:
            origins[new] = name
    return origins, dropped


def _of_today(family: Family, name: str) -> str:
    """Return the current name of a parameter; older files use other names."""
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
    for old, new in family.aliases.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _fitted(
    family: Family, found: Mapping[str, Any], types: int, marked: bool, renamed: dict[str, Any]
) -> list[str]:
    """Fit the tables of positions and of `types` token types to our model, and return notes.

    Our encoder gives second texts type 1; the fitted tables keep the outputs for pairs equal to the
    source's. A DistilBERT classifier keeps its class's only type. For `marked`, see `marks_second`.
    """
    notes = []
    if family.first_position is not None:
        first = first_position(family, found)
        name = family.name_of(*EMBEDDINGS, "position")
        if name in renamed and renamed[name].ndim == 2:
            renamed[name] = renamed[name][first:]
        notes.append(
            f"positions count from {first} in a {family.name}, after the padding id; earlier rows "
            "of the position table are never read and are left out"
        )
    single = family.doubles_type and found.get("type_vocab_size") == 1
    if family.has_types and not single and (marked or types < 2):
        return notes
    name = family.name_of(*EMBEDDINGS, "type")
    words = renamed.get(family.name_of(*EMBEDDINGS, "token"))
    if not family.has_types and words is not None and words.ndim == 2:
        renamed[name] = np.zeros((types, words.shape[1]), np.float32)
    elif name in renamed and renamed[name].shape[:1] == (1 if single else types,):
        renamed[name] = np.repeat(renamed[name][:1], types, axis=0)
    said = f"{family.name if marked else 'the tokenizer'} does not mark the second text of a pair"
    if types == 1:
        return [*notes, f"{said}, nor does this model"]
    same = "row 0 of the source's table" if family.has_types else "zeros"
    return [*notes, f"{said}: all rows of the type table are {same} until training changes them"]


def _unlike_masked_lm(
    family: Family, found: Mapping[str, Any], renamed: Mapping[str, np.ndarray]
) -> str:
    """Explain why the masked-LM head of the file cannot be read; return "" if it can be."""
    names = {entry.name for entry in family.pretraining["mlm"]} | family.copies.keys()
    if not family.like_bert or names.isdisjoint(renamed):
        return ""
    if family.exact_gelu_head and found.get("hidden_act", "gelu") != "gelu":
        return (
            f"hidden_act is {found['hidden_act']!r:.40}, but this family's masked-LM head always "
            "has the exact GELU, while BERT's head has the encoder's activation"
        )
    if family.copies.keys() >= names & renamed.keys():
        return "the file has no tensors of the head but copies of tied tensors"
    return ""
