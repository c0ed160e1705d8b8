"""The models that a run reads before its first step: initial models and a teacher.

Pretraining and fine-tuning both use this module. A restart takes only frozen parameters from these
models, because the checkpoint contains the trained parameters.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np

from bert_jax.artefacts.saved.model import SavedModel, digest_of
from bert_jax.distributed.checkpoint.record import named_leaves
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.objectives.distillation import TEACHER
from bert_jax.training.steps.state import TrainState

RANDOM = "random"
"""Name of the initialisation with random parameters."""


@dataclass(frozen=True, eq=False)
class Start:
    """Models from which a run takes parameters; their arrays are in host memory."""

    initial: SavedModel | None = None
    """Model named by `init`; None if the parameters are random or come from a checkpoint."""
    teacher: SavedModel | None = None
    """Teacher. The run uses its parameters, but never saves them."""
    inits: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that a sweep starts from, by name of the initialisation; {} for random weights."""

    @property
    def parts(self) -> tuple[Any, ...]:
        """Parameters of each initialisation, together with the teacher's parameters."""
        taught = {TEACHER: self.teacher.params} if self.teacher else {}
        return tuple({**given, **taught} for given in self.inits.values())

    @cached_property
    def teacher_digest(self) -> str:
        """Digest of the teacher's parameters; empty without a teacher."""
        return digest_of(self.teacher.params) if self.teacher else ""

    def first_params(self, fresh: Any, axes: Any) -> Any:
        """Return the initial model's parameters; take missing parameters from `fresh`."""
        return fresh if self.initial is None else initial_params(self.initial, fresh, axes)

    def with_teacher(self, state: TrainState, abstract: TrainState, axes: Any) -> TrainState:
        """Put the parameters of the teacher, if any, into a state on a mesh.

        `abstract` gives shape, type and sharding of each array of a state with a teacher, `axes`
        each parameter's logical axes. Raise a UserError if the teacher lacks parameters.
        """
        if (teacher := self.teacher) is None:
            return state
        wanted = abstract.params[TEACHER]
        if missing := sorted(set(named_leaves(wanted)) - set(named_leaves(teacher.params))):
            raise UserError(
                f"distil.teacher: {teacher.name} lacks the parameters {', '.join(missing)}. Give a "
                "teacher with all parameters of its architecture"
            )
        placed = initial_params(teacher, wanted, axes[TEACHER])
        return state._replace(params={**state.params, TEACHER: placed})

    def lines(self, wanted: Any) -> list[str]:
        """Describe the teacher and the initial model, and which arrays of `wanted` are copied."""
        lines = []
        if teacher := self.teacher:
            count = sum(leaf.size for leaf in jax.tree.leaves(teacher.params))
            lines.append(
                f"learns from {teacher.name}: {count:,} parameters, {teacher.config.num_layers} "
                f"layers, {teacher.config.hidden_dim} wide; checkpoints do not contain them"
            )
        if initial := self.initial:
            copied, fresh = _origins(wanted, initial.params)
            said = f": {_counted(copied, 'copied')}; {_counted(fresh, 'fresh')}" if fresh else ""
            lines.append(f"starts from {initial.name}{said}")
        return lines


def without_teacher(state: TrainState) -> TrainState:
    """Return a state without the teacher's parameters, which are not saved."""
    kept = {name: entry for name, entry in state.params.items() if name != TEACHER}
    return state._replace(params=kept)


def with_positions(teacher: SavedModel, longest: int, rows: str) -> ModelConfig:
    """Return a teacher's architecture, with enough positions for rows of `longest` tokens.

    Raise a UserError if the teacher has too few learned positions. The message ends with `rows`,
    which names the rows that are too long and a remedy.
    """
    model = teacher.config
    if longest <= model.num_positions:
        return model
    if model.positions != "rope":
        raise UserError(
            f"distil.teacher: {teacher.name} has {model.num_positions} positions, but {rows}"
        )
    return dataclasses.replace(model, num_positions=longest)


_Entries = dict[str, int]
"""Number of arrays in each entry of a parameter tree, by the path of the entry."""


def _origins(wanted: Any, found: Any, path: str = "") -> tuple[_Entries, _Entries]:
    """Return the largest subtrees of `wanted` that `found` has, and the subtrees that it lacks."""
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
    """Lay out the parameters of `initial` like `fresh`; take missing parameters from `fresh`.

    `initial` has the same architecture, but its vocabulary may be padded to another number of rows:
    surplus rows belong to no token and are left out, and missing rows become zero. `fresh` comes
    from `Objective.init`, on a mesh; if `initial` has all parameters, abstract arrays with
    shardings are enough. `axes` has the logical axes of each parameter.
    """
    found = named_leaves(initial.params)

    def take(path: Any, leaf: Any, axes: tuple[str | None, ...]) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name not in found:
            return leaf
        array, padded = np.asarray(found[name]), axes[:1] == ("vocab",)
        if array.shape[padded:] != leaf.shape[padded:]:
            raise UserError(
                f"{initial.name}: the parameter {name} has the shape {array.shape}; expected "
                f"{leaf.shape}, as in the model of this run"
            )
        if padded:
            rows, kept = np.zeros(leaf.shape, array.dtype), min(len(array), len(leaf))
            rows[:kept] = array[:kept]
            array = rows
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: np.asarray(array[index], leaf.dtype)
        )

    return jax.tree_util.tree_map_with_path(take, fresh, axes)
