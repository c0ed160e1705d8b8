"""The part of the parameters that a step changes, as a tree of its own.

Gradients, moments, saves of a run and the best parameters have the shape of this part.
"""

from typing import Any

import jax

from bert_jax.objectives.objective import Objective, Tree

_STACK = ("encoder", "layers")


def trained(objective: Objective, tree: Tree) -> Tree:
    """Return the part that a step changes, of a tree shaped like one run's parameters.

    Leaves are arrays, shapes, or anything that knows no shape (axes, shardings). Of the stack of
    the encoder's layers the lower `frozen_layers` are cut off. Dicts that become empty are left
    out.
    """

    def part(entry: Any, path: tuple[str, ...]) -> Any:
        if not isinstance(entry, dict):
            return _upper(entry, objective.frozen_layers) if path[:2] == _STACK else entry
        parts = {
            name: part(inner, (*path, name))
            for name, inner in entry.items()
            if "/".join((*path, name)) not in objective.frozen
        }
        return {name: p for name, p in parts.items() if not isinstance(p, dict) or p}

    return part(tree, ())


def with_trained(objective: Objective, whole: Tree, part: Tree) -> Tree:
    """Merge `part`, updated trainable parameters, into one run's full parameters `whole`."""

    def fill(whole: Any, part: Any, path: tuple[str, ...]) -> Any:
        if isinstance(part, dict) and isinstance(whole, dict):
            return {**whole, **{n: fill(whole[n], part[n], (*path, n)) for n in part}}
        if objective.frozen_layers and path[:2] == _STACK:
            return jax.lax.dynamic_update_slice_in_dim(whole, part, objective.frozen_layers, 0)
        return part

    return fill(whole, part, ())


def trains_all(objective: Objective) -> bool:
    """Say whether a step changes all parameters."""
    return not (objective.frozen or objective.frozen_layers)


def _upper(leaf: Any, count: int) -> Any:
    """Cut the lower layers off a stack, if the leaf has a shape."""
    if not count or not hasattr(leaf, "shape"):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((leaf.shape[0] - count, *leaf.shape[1:]), leaf.dtype)
    return leaf[count:]
