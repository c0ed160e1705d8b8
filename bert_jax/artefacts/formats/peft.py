"""Adapters in PEFT's format: low-rank updates and heads, named after Transformers' modules.

adapter = read_adapter(directory)
arrays = adapter.applied(read_weights(adapter.base, model_class(adapter.config)))

The update of a module consists of the tensors `lora_A` (r, in) and `lora_B` (out, r): its weight W
becomes W + (alpha / r) B A. All other tensors in the file replace tensors of the base.
"""

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert_jax.artefacts.formats.entries import Entry, insert, lookup, tensors, to_tensors
from bert_jax.artefacts.formats.families import known_family
from bert_jax.artefacts.formats.huggingface_files import HEAD_FIELDS, MAX_CONFIG_BYTES
from bert_jax.errors import UserError, first_few
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.files.untrusted.safetensors_file import read_safetensors
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import Params
from bert_jax.model.lora import TARGETS, updates

CONFIG, WEIGHTS, LABELS = "adapter_config.json", "adapter_model.safetensors", "labels.json"
"""Files of an adapter. Only this package writes `labels.json`, which defines the labels."""
BASE = "base"  # the directory of the base model or a link to it, which the user makes
PREFIX = "base_model.model."
TASKS = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
}
"""Class-name suffixes by PEFT's `task_type`."""

_UPDATE = re.compile(r"(.+)\.lora_([AB])\.weight")
_COUNTED = re.compile(r"classifier\.(?:out_proj\.)?bias")
_PLAIN = {"fan_in_fan_out": False, "use_dora": False, "lora_bias": False, "use_bdlora": None,
          "layer_replication": None, "arrow_config": None, "alora_invocation_tokens": None,
          "trainable_token_indices": None}  # fmt: skip
"""Fields that would change what an adapter computes, with their values in plain LoRA."""
_CHANGE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")  # values of init_lora_weights


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter as its files describe it."""

    directory: Path
    base: Path
    """Directory of the base model, in Hugging Face's format."""
    config: dict[str, Any]
    """`config.json` of the base, with the adapter's class and labels, and without `HEAD_FIELDS`."""
    updates: Mapping[str, tuple[np.ndarray, np.ndarray, float]]
    """Matrices A (r, in), B (out, r) and a factor, by weight name; the update is factor x (B A)."""
    tensors: Mapping[str, np.ndarray]
    """Tensors that replace tensors of the base."""

    def applied(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the base's tensors with the adapter applied; raise UserError for a wrong base."""
        found, wrong = dict(arrays), []
        for name, (a, b, scale) in self.updates.items():
            there, own = _name_in(arrays, name), (len(b), a.shape[1])
            if there not in arrays or arrays[there].shape != own:
                shape = "lacks" if there not in arrays else f"has {arrays[there].shape} for"
                wrong.append(f"{self.base} {shape} {name} {own}")
                continue
            found[there] = arrays[there].astype(np.float32) + np.float32(scale) * (b @ a)
        if wrong:
            raise UserError(f"{self.directory} was made for another base model: {first_few(wrong)}")
        return found | {_name_in(arrays, name): array for name, array in self.tensors.items()}


def refuse_beside(directory: Path) -> None:
    """Raise a UserError if a model's directory has an adapter, which Transformers would apply."""
    if (directory / CONFIG).is_file():
        raise UserError(
            f"{directory} has {CONFIG}: Transformers would apply this adapter to the model, but "
            "bert_jax cannot. Move the adapter's files to another directory"
        )


def read_adapter(directory: Path, base: Path | None = None) -> Adapter:
    """Read an adapter that PEFT, or `bert-jax export --to peft`, has written.

    `base` is the directory of the base model. None means `BASE` in `directory` or, if that is
    missing, the directory that the adapter names, which must be inside `directory`. Raise a
    UserError if the adapter is malformed, is not plain LoRA, or has no base.
    """
    path = directory / CONFIG
    given = read_json_object(path, max_bytes=MAX_CONFIG_BYTES)
    if given.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {given.get('peft_type')!r:.40}; only LORA is read")
    for name, plain in _PLAIN.items():
        if (given.get(name) or None) != (plain or None):
            raise UserError(f"{path}: {name} is {given[name]!r:.40}; only plain LoRA is read")
    begun = given.get("init_lora_weights")
    if f"{begun}".lower().startswith(_CHANGE_BASE):
        raise UserError(
            f"{path}: init_lora_weights is {begun!r:.40}, with which PEFT also changes the base; "
            "in PEFT, merge the adapter with merge_and_unload"
        )
    base = _base(path, given) if base is None else base
    updates, tensors = _tensors(directory / WEIGHTS, path, given)
    found = read_json_object(base / "config.json", max_bytes=MAX_CONFIG_BYTES)
    config = {name: value for name, value in found.items() if name not in HEAD_FIELDS}
    task = given.get("task_type")
    if isinstance(task, str) and task in TASKS and (family := known_family(config)) is not None:
        config["architectures"] = [family.class_of(TASKS[task])]
    return Adapter(directory, base, config | _labels(directory, config, tensors), updates, tensors)


def _base(path: Path, given: Mapping[str, Any]) -> Path:
    name, link = given.get("base_model_name_or_path"), path.parent / BASE
    inside = isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts
    for place in (link, path.parent / f"{name}") if inside else (link,):
        config = place / "config.json"
        if config.is_file():
            if "bert_jax" not in read_json_object(config, max_bytes=MAX_CONFIG_BYTES):
                return place
            raise UserError(
                f"{place} is the work directory of a run; export it with `bert-jax export {place} "
                f"--to huggingface --out DIR` and link {link} to DIR"
            )
    raise UserError(
        f"{path}: base_model_name_or_path is {name!r:.200}, which is no model inside this "
        "directory; other models are not read or downloaded. Link the base model, a directory in "
        f"Hugging Face's format: ln -s MODEL {shlex.quote(str(link))}"
    )


def _tensors(
    weights: Path, path: Path, given: Mapping[str, Any]
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray, float]], dict[str, np.ndarray]]:
    if not weights.is_file():
        raise UserError(f"{weights.parent} has no {weights.name}; no other weights are read")
    pairs: dict[str, dict[str, np.ndarray]] = {}
    tensors: dict[str, np.ndarray] = {}
    for name, array in read_safetensors(weights).items():
        name = name.removeprefix(PREFIX).replace(".base_layer.bias", ".bias")
        if match := _UPDATE.fullmatch(name):
            pairs.setdefault(match[1], {})[match[2]] = array
        elif "lora_" in name:
            raise UserError(f"{weights}: {name} is not plain LoRA; only lora_A and lora_B are read")
        else:
            tensors[name] = array
    found = {}
    for module, pair in pairs.items():
        a, b = (pair.get(part) for part in "AB")
        if a is None or b is None or not a.ndim == b.ndim == 2 or not 0 < len(a) == b.shape[1]:
            shapes = {part: array.shape for part, array in pair.items()}
            raise UserError(
                f"{weights}: {module} has {shapes}; A (r, in) and B (out, r), r > 0, are needed"
            )
        rank, alpha = len(a), _alpha(path, given, module)
        scale = alpha / (math.sqrt(rank) if given.get("use_rslora") else rank)
        found[f"{module}.weight"] = (a.astype(np.float32), b.astype(np.float32), scale)
    return found, tensors


def _alpha(path: Path, given: Mapping[str, Any], module: str) -> float:
    """Return the entry of `alpha_pattern` for a module or, if there is none, `lora_alpha`."""
    alpha, patterns = given.get("lora_alpha"), given.get("alpha_pattern") or {}
    if isinstance(patterns, Mapping):
        for name, own in patterns.items():
            if not re.fullmatch(r"[\w.]+", name):
                raise UserError(
                    f"{path}: alpha_pattern has the key {name!r:.80}, a regular expression; only "
                    "names of modules are supported"
                )
            if module == name or module.endswith(f".{name}"):
                alpha = own
                break
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not alpha > 0:
        raise UserError(
            f"{path}: lora_alpha of {module} is {alpha!r:.40}; a number above 0 is needed"
        )
    return float(alpha)


def _labels(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Return the fields about labels that the adapter changes in the base's `config.json`."""
    if (directory / LABELS).is_file():
        return read_json_object(directory / LABELS, max_bytes=MAX_CONFIG_BYTES)
    count = next((len(a) for name, a in tensors.items() if _COUNTED.fullmatch(name)), None)
    known = config.get("id2label")
    if count is None or (isinstance(known, Mapping) and len(known) == count):
        return {}
    names = {str(n): f"LABEL_{n}" for n in range(count)}
    return {"id2label": names, "label2id": {name: int(n) for n, name in names.items()}}


def _name_in(arrays: Mapping[str, np.ndarray], name: str) -> str:
    """Return a tensor's name in the base, which may have or lack the family's prefix."""
    longer = (each for each in arrays if each.partition(".")[2] == name)
    return next((each for each in (name, name.partition(".")[2], *longer) if each in arrays), name)


class Update(NamedTuple):
    """Update of one tensor of the base."""

    a: np.ndarray
    """Matrix A (R, in)."""
    b: np.ndarray
    """Matrix B (out, R)."""
    maps: int
    """Number of maps in the tensor that have updates. R is `maps` times the rank of an update."""


def lora_tensors(
    lora: Params, layers: Params, config: ModelConfig, table: Iterable[Entry]
) -> dict[str, Update]:
    """Return the updates of a run, by the tensor names of the class that the export writes.

    `layers` is the entry `encoder/layers` of the parameters; only its shapes are read.
    `table` has the entries of the class. If a tensor holds several maps, their matrices A are
    stacked by rows, and each matrix B has its own columns, with zeros in the rows of other maps.
    """
    pairs = {
        ("encoder", "layers", TARGETS[name], name, "kernel"): pair for name, pair in updates(lora)
    }
    rank = next(iter(pairs.values()))["b"].shape[1]
    known: Params = {"encoder": {"layers": layers}}
    found: dict[str, Update] = {}
    for name, _, entries in tensors(table, known, config):
        own = [entry.path for entry in entries if entry.path in pairs]
        if not own:
            continue
        parts = [np.asarray(pairs[path]["a"]) for path in own]
        rows = np.concatenate([part.reshape(len(part), -1, rank) for part in parts], axis=-1)
        tree: Params = {}
        for entry in entries:
            kernel = lookup(known, entry.path)
            outs = kernel.shape[1 + entry.num_inputs :]
            columns = np.zeros((len(kernel), rank * len(own), *outs), np.float32)
            if entry.path in pairs:
                start = rank * own.index(entry.path)
                columns[:, start : start + rank] = pairs[entry.path]["b"]
            insert(tree, entry.path, columns)
        b = to_tensors(tree, config, [replace(entry, num_inputs=1) for entry in entries])
        for n, each in enumerate(rows):
            one = name.format(n=n)
            found[one] = Update(np.ascontiguousarray(each.T), b[one], len(own))
    return found
