"""How activations lie on a mesh, told to the model without its knowing which mesh that is."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

LogicalAxes = tuple[str | None, ...]


class Layout(NamedTuple):
    """A mesh and the rules that place logical axes on it (`training.sharding.activation_layout`).

    Functions take `Layout | None`: None on one device, and inside a shard_map, where all is local.
    """

    mesh: Mesh
    spec: Callable[[LogicalAxes], PartitionSpec]
    """Where an array with these logical axes lies."""

    def constrain(self, x: Array, *axes: str | None) -> Array:
        """`x`, which has these logical axes, laid out by the rules; for use inside jit."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.spec(axes)))

    def local(
        self, f: Callable[..., Any], in_axes: Sequence[LogicalAxes], out_axes: LogicalAxes
    ) -> Callable[..., Any]:
        """`f` run by every device on its own part of the arguments: a kernel XLA cannot split.

        Args:
          f: takes arrays, returns one array; it must not need another device's part.
          in_axes: logical axes of each argument.
          out_axes: of the result.
        """
        return jax.shard_map(
            f,
            mesh=self.mesh,
            in_specs=tuple(self.spec(axes) for axes in in_axes),
            out_specs=self.spec(out_axes),
            check_vma=False,  # Pallas calls do not say how their results vary over the mesh
        )
