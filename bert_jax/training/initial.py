"""Parameters that a pretraining run starts from, in place of random ones."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bert_jax.checkpoint import saved_steps
from bert_jax.checkpoint.agreement import by_first
from bert_jax.config.mapping import build, to_dict
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir
from bert_jax.model.config import ARCHITECTURE, ModelConfig
from bert_jax.saved.model import SavedModel
from bert_jax.training.config import PretrainConfig
from bert_jax.training.workdir import read_config


def with_architecture(config: PretrainConfig, model: ModelConfig) -> PretrainConfig:
    """Return the configuration with the architecture of `model`, but its own vocabulary size.

    What says how a step is computed, and the dropout rates, stay.
    """
    fields = {name: getattr(model, name) for name in ARCHITECTURE}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **fields))


def resolve_init(
    config: PretrainConfig,
    place: WorkDir,
    read: Callable[[], SavedModel] | None,
    tokenizer_fingerprint: str,
) -> tuple[PretrainConfig, SavedModel | None]:
    """Return the configuration with the architecture of the initial model, and that model.

    A run that has saved does not need the model any more: it may be gone, and is not read.

    Args:
        config: Configuration of the run.
        place: Its work directory.
        read: Reads what `config.init` names.
        tokenizer_fingerprint: Fingerprint of the corpus's tokenizer.

    Raises:
        UserError: The model has another tokenizer than the corpus, or `read` is missing.
    """
    if not config.init:
        return config, None
    if saved := by_first(lambda: _saved_config(place)):
        return with_architecture(config, build(PretrainConfig, saved).model), None
    if read is None:
        raise UserError(f"init is {config.init!r}; pass what reads it as the argument initial")
    initial = read()
    there = initial.tokenizer.fingerprint
    if there != tokenizer_fingerprint:
        raise UserError(
            f"init: the tokenizer of {initial.name} ({there[:12]}) is not "
            f"that of the corpus ({tokenizer_fingerprint[:12]}). Build the corpus with `bert-jax "
            f"corpus --tokenizer {config.init}`, or where that is a run, {config.init}/tokenizer"
        )
    return with_architecture(config, initial.config), initial


def _saved_config(place: WorkDir) -> dict[str, Any] | None:
    if saved_steps(place.checkpoints) and (place.local / "config.json").exists():
        return to_dict(read_config(place.local))
    return None


def missing(wanted: Any, found: Any) -> list[str]:
    """Name the parts of the parameters `wanted` that `found` lacks."""
    names = [name for name in wanted if name not in found]
    for name, entry in wanted.items():
        if name in found and isinstance(entry, dict):
            names += missing(entry, found[name])
    return names


def started_from(initial: SavedModel, fresh: Any, axes: Any) -> Any:
    """Parameters laid out as `fresh`, of `initial` where it has them, else those of `fresh`.

    Args:
        initial: Model of the same architecture. Vocabulary rows without room in `fresh` stand
            for no token and are left out.
        fresh: Parameters from `Objective.init`, on a mesh.
        axes: Logical axes of each parameter.
    """
    found = {jax.tree_util.keystr(path): leaf
             for path, leaf in jax.tree_util.tree_leaves_with_path(initial.params)}  # fmt: skip

    def take(path: Any, leaf: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
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
