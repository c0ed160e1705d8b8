"""The model that a pretraining run starts from, instead of random parameters."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bert_jax.artefacts.formats.huggingface_files import MAX_CONFIG_BYTES
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.runs import read_record
from bert_jax.config.mapping import build
from bert_jax.distributed.checkpoint import saved_steps
from bert_jax.distributed.checkpoint.agreement import by_first
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir
from bert_jax.files.untrusted.json_file import read_json_object, short
from bert_jax.model.config import ARCHITECTURE, ModelConfig
from bert_jax.training.pretrain.config import PretrainConfig

GROWTH_FILE = "growth.json"
"""File beside a model that `bert-jax grow` made."""


def with_architecture(config: PretrainConfig, model: ModelConfig) -> PretrainConfig:
    """Return the configuration with the architecture of `model`.

    The vocabulary size, the dropout rates and the computation of a step stay as configured.
    """
    fields = {name: getattr(model, name) for name in ARCHITECTURE}
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **fields))
    config.check_thetas()
    return config


def resolve_init(
    config: PretrainConfig,
    work: WorkDir,
    read: Callable[[], SavedModel] | None,
    tokenizer_fingerprint: str,
    branches_from: PretrainConfig | None = None,
) -> tuple[PretrainConfig, SavedModel | None]:
    """Return the configuration with the initial model's architecture, and the initial model.

    A run that has saved no longer calls `read`, since the model may be gone; nor does a branch of a
    run with the configuration `branches_from`.

    Raises:
        UserError: The model has another tokenizer than the corpus, or `read` is missing.
    """
    if not config.init:
        return config, None

    def saved_config() -> dict[str, Any] | None:
        if saved_steps(work.checkpoints) and (work.local / "config.json").exists():
            config: dict[str, Any] = read_record(work.local, "pretrain")["config"]
            return config
        return None

    if saved := by_first(saved_config):
        return with_architecture(config, build(PretrainConfig, saved).model), None
    if branches_from is not None:
        return with_architecture(config, branches_from.model), None
    if read is None:
        raise UserError(f"init is {config.init!r}; pass what reads it as the argument initial")
    initial = read()
    check_tokenizer(initial, tokenizer_fingerprint, "init", config.init)
    laid_out = config.objective.laid_out(initial.config, initial.params)
    initial = dataclasses.replace(initial, params=laid_out)
    return with_architecture(config, initial.config), initial


def check_tokenizer(model: SavedModel, fingerprint: str, where: str, directory: str) -> None:
    """Refuse a model whose tokenizer has another fingerprint than a corpus.

    In the message `where` names the field or option, and `directory` the model's directory.
    """
    there = model.tokenizer.fingerprint
    if there != fingerprint:
        raise UserError(
            f"{where}: the tokenizer of {model.name} ({there[:12]}) is not "
            f"that of the corpus ({fingerprint[:12]}). Build the corpus with `bert-jax "
            f"corpus --tokenizer {directory}`, or where that is a run, {directory}/tokenizer"
        )


def starting_line(initial: SavedModel, wanted: Any) -> str:
    """Name the model that a run starts from, and the arrays of `wanted` that are copied or fresh.

    An entry stands for all arrays below it.
    """
    copied, fresh = _origins(wanted, initial.params)
    said = f"starts from {initial.name}"
    if fresh:
        said += f": {_counted(copied, 'copied')}; {_counted(fresh, 'fresh')}"
    return said + _growth(initial)


def _growth(initial: SavedModel) -> str:
    """Name the source of a grown model, and the losses of both models before any step."""
    if initial.origin.kind != "huggingface":
        return ""
    path = initial.tokenizer_files / GROWTH_FILE
    if not path.is_file():
        return ""
    found = read_json_object(path, max_bytes=MAX_CONFIG_BYTES)
    loss, before, said = found.get("loss"), found.get("source_loss"), ""
    if isinstance(loss, float) and isinstance(before, float):
        said = f"; on held-out text its loss was {loss:.3f}, and {before:.3f} of its source"
    return f"; grown from {short(found.get('source'))}{said}"


_Entries = dict[str, int]
"""Paths of entries, and the numbers of arrays in them."""


def _origins(wanted: Any, found: Any, path: str = "") -> tuple[_Entries, _Entries]:
    """Return the largest entries of `wanted` that `found` has, and the entries that it lacks."""
    copied: _Entries = {}
    fresh: _Entries = {}
    for name, entry in wanted.items():
        if name not in found:
            fresh[path + name] = len(jax.tree.leaves(entry))
        elif not isinstance(entry, dict):
            copied[path + name] = 1
        else:
            below, lacking = _origins(entry, found[name], f"{path}{name}/")
            fresh |= lacking
            copied |= below if lacking else {path + name: sum(below.values())}
    return copied, fresh


def _counted(entries: _Entries, word: str) -> str:
    return f"{sum(entries.values())} arrays {word} ({', '.join(entries) or 'none'})"


def initial_params(initial: SavedModel, fresh: Any, axes: Any) -> Any:
    """Return the parameters of `initial` in the layout of `fresh`, which fills in missing ones.

    Args:
        initial: Model of the same architecture. Vocabulary rows without room in `fresh` stand
            for no token and are left out.
        fresh: Parameters from `Objective.init`, on a mesh; where none is lacking, their shapes and
            shardings are enough.
        axes: Logical axes of each parameter.
    """
    found = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(initial.params)
    }

    def take(path: Any, leaf: Any, axes: tuple[str | None, ...]) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if name not in found:
            return leaf
        array = np.asarray(found[name])
        if axes[0] == "vocab":
            rows, kept = np.zeros(leaf.shape, array.dtype), min(len(array), len(leaf))
            rows[:kept] = array[:kept]
            array = rows
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: np.asarray(array[index], leaf.dtype)
        )

    return jax.tree_util.tree_map_with_path(take, fresh, axes)
