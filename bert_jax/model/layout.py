"""Placement of activations on a device mesh; the model itself knows only logical axes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

LogicalAxes = tuple[str | None, ...]


class Layout(NamedTuple):
    """A mesh and the rules that place logical axes on it.

    In a `jax.shard_map` over some mesh axes, the layout handles only the remaining mesh axes.
    """

    mesh: Mesh
    spec: Callable[[LogicalAxes], PartitionSpec]
    """Function from an array's logical axes to its partition over the whole mesh."""
    gather: Callable[[Any], Any] | None = None
    """Function that gathers one layer's parameters (a nested dict) from the devices' shards; None
    if not needed. The model calls it inside each layer, so that copies are freed early."""
    inner: Mapping[str, "Layout"] = MappingProxyType({})
    """Layouts of the parameters' entries by name; other entries use this layout (see `of`)."""
    gather_rows: Callable[[Any], Any] | None = None
    """Function that gathers rows (axis 0) from all devices; None if each device has all rows."""
    frozen_layers: int = 0
    """Number of bottom layers that are not trained: no gradient flows through or below them."""

    def of(self, name: str) -> "Layout":
        """Return the layout of the parameters' entry `name`, by default this layout."""
        return self.inner.get(name, self)

    def without_gather(self) -> "Layout":
        """Return this layout for parameters that are already gathered."""
        inner = {name: layout.without_gather() for name, layout in self.inner.items()}
        return self._replace(gather=None, inner=inner)

    def all_rows(self, rows: Any) -> Any:
        """Gather rows (axis 0) from all devices over which gradients are summed."""
        return rows if self.gather_rows is None else self.gather_rows(rows)

    def constrain(self, x: Array, *axes: str | None) -> Array:
        """Constrain the placement of `x`, whose logical axes are `axes`; for use inside jit."""
        manual = self._by_hand()
        if not manual:
            return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.spec(axes)))
        if manual == set(self.mesh.axis_names):
            return x
        return jax.lax.with_sharding_constraint(x, without_axes(self.spec(axes), manual))

    def local(
        self, f: Callable[..., Any], in_axes: Sequence[LogicalAxes], out_axes: LogicalAxes
    ) -> Callable[..., Any]:
        """Wrap `f`, which XLA cannot partition, so that each device runs it on its shards.

        `in_axes` are the logical axes of each argument, `out_axes` the logical axes of the result.
        """
        if self.is_local:
            return f
        manual = self._by_hand()
        return jax.shard_map(
            f,
            mesh=None if manual else self.mesh,  # None: the mesh of the enclosing shard_map
            in_specs=tuple(without_axes(self.spec(axes), manual) for axes in in_axes),
            out_specs=without_axes(self.spec(out_axes), manual),
            axis_names=set(self.mesh.axis_names) - manual,
            check_vma=False,  # Pallas calls do not say how their results vary over the mesh
        )

    @property
    def is_local(self) -> bool:
        """Whether the code already runs per device, so that the compiler partitions nothing."""
        return self._by_hand() == set(self.mesh.axis_names)

    def _by_hand(self) -> set[str]:
        """Return the mesh axes that the enclosing shard_map handles; all for a single device."""
        if self.mesh.size == 1:
            return set(self.mesh.axis_names)
        return set(jax.sharding.get_abstract_mesh().manual_axes)


OnMesh = Layout | None
"""Layout on a mesh; None if all arrays are on one device."""


def platform(layout: OnMesh) -> str:
    """Return the platform (tpu, gpu or cpu) that runs the step; another platform may trace it."""
    kind = device_kind(layout)
    if kind is None:
        return jax.default_backend()
    return "tpu" if kind.startswith("tpu") else "cpu" if kind == "cpu" else "gpu"


def device_kind(layout: OnMesh) -> str | None:
    """Return the kind of a mesh's devices, in lower case; None if there is no mesh."""
    mesh = jax.sharding.get_abstract_mesh() if layout is None else layout.mesh
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh.devices.flat[0].device_kind.lower()
    # Inside a shard_map the mesh is abstract and records the kind of its devices.
    if mesh.abstract_device is None:
        return None
    return mesh.abstract_device.device_kind.lower()


def without_axes(spec: PartitionSpec, dropped: Collection[str]) -> PartitionSpec:
    """Return `spec` without the mesh axes in `dropped`."""

    def one(entry: Any) -> Any:
        names = (entry,) if isinstance(entry, str) else entry or ()
        left = tuple(name for name in names if name not in dropped)
        return left[0] if len(left) == 1 else left or None

    return PartitionSpec(*map(one, spec))


def all_but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """Tell whether `jax.checkpoint` keeps a value: true, except for gathered parameters.

    Gathers are recognised by their primitive. Marking the gathered arrays with `checkpoint_name`
    would not be enough: the name applies to a copy, and JAX could still keep the gather's output.
    """
    if primitive.name == "shard_map":
        return all(each.primitive.name != "all_gather" for each in parameters["jaxpr"].eqns)
    return primitive.name != "all_gather"
