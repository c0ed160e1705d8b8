"""The device mesh, and how training shards each of its arrays over the mesh."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import jax
import numpy as np
import optax
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bert_jax.config.bounds import AtLeast, Bounded, Natural, Or
from bert_jax.errors import UserError
from bert_jax.model.layout import LogicalAxes

AXES = ("data", "fsdp", "tensor")
TRIAL = "trial"
"""First mesh axis in a sweep, over which the trials of the sweep are distributed."""

RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "length": (),
    "layers": (),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}
"""Mesh axes that split each logical axis. All sharding in the package follows this table."""

_SIZES = {
    "embed": "the hidden width", "heads": "the number of (key) heads", "mlp": "the MLP's width",
    "vocab": "the padded vocabulary",
}  # fmt: skip


AxisSize = Annotated[int, AtLeast(1), Or(-1, "the devices that the other axes leave")]


@dataclass(frozen=True)
class MeshConfig(Bounded, section="mesh"):
    """Shape of the device mesh. data x fsdp x tensor must equal the number of devices.

    `(n, 1, 1)` is plain data parallelism. `fsdp` also splits parameters and optimizer state by
    their embed axis. `tensor` splits heads, MLP and vocabulary (Megatron). One of the three may be
    -1. Its value is then the number of devices divided by the product of the other two.
    """

    data: AxisSize = -1
    """Number of device groups that split the batch. Each group holds all parameters."""
    fsdp: AxisSize = 1
    """Number of devices that split the batch, parameters and optimizer state."""
    tensor: AxisSize = 1
    """Number of devices that split heads, MLP and vocabulary."""
    num_slices: Natural = 0
    """Number of TPU slices, which a slower network connects. 0 means the slices that JAX reports. A
    positive number divides the devices, in order, into that many equal groups."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(getattr(self, name) == -1 for name in AXES) > 1:
            raise UserError(f"{self}: only one of mesh.data, mesh.fsdp, mesh.tensor may be -1")

    @property
    def fields(self) -> str:
        """The three sizes as text, for messages."""
        return ", ".join(f"mesh.{name}={getattr(self, name)}" for name in AXES)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Create the mesh of `config` over `devices`, by default all devices.

    Raise a UserError if the product of the sizes differs from the number of devices, an axis other
    than `data` would cross slices, or the slices cannot have equal sizes.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = [getattr(config, name) for name in AXES]
    fixed = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and len(devices) % fixed == 0:
        sizes[sizes.index(-1)] = len(devices) // fixed
    if math.prod(sizes) != len(devices):
        raise UserError(
            f"{config.fields} do not fill {len(devices)} devices; the product of the three must be "
            f"{len(devices)}. If one is -1, the product of the other two must be one of "
            f"{_divisors(len(devices))}"
        )
    slices = _slices(devices, config.num_slices)
    if sizes[0] % len(slices):
        per_slice = len(devices) // len(slices)
        raise UserError(
            f"mesh.data is {sizes[0]} on {len(slices)} slices of {per_slice} devices; it must be a "
            f"multiple of {len(slices)}, because mesh.fsdp and mesh.tensor must not cross slices. "
            f"mesh.fsdp x mesh.tensor = {sizes[1] * sizes[2]}; the product must be one of "
            f"{_divisors(per_slice)}"
        )
    sizes[0] //= len(slices)
    # Order the devices of a slice to suit the network between chips. Unlike jax.make_mesh, this
    # allows a mesh axis along a part of a network dimension (tensor=2 of 4x4x8).
    parts = [create_device_mesh(sizes, part, allow_split_physical_axes=True) for part in slices]
    # The training step relies on the compiler to propagate shardings (Auto). The default, Explicit,
    # would make the sharding of every intermediate array a part of its type.
    return Mesh(np.concatenate(parts), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def make_trial_mesh(
    config: MeshConfig, num_trials: int, devices: Sequence[Any] | None = None
) -> Mesh:
    """Create a mesh (trial, data, fsdp, tensor) of all devices for a sweep of `num_trials`.

    The trial axis is as long as the devices allow, but its length divides `num_trials`. Raise a
    UserError if the sizes in `config` do not fit the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = [max(1, getattr(config, name)) for name in AXES]
    count, rest = divmod(len(devices), math.prod(sizes))
    if rest:
        raise UserError(
            f"{config.fields} do not divide {len(devices)} devices; let their product be one of "
            f"{_divisors(len(devices))}"
        )
    trials = math.gcd(num_trials, count)
    size = len(devices) // trials
    if -1 not in (config.data, config.fsdp, config.tensor) and math.prod(sizes) != size:
        raise UserError(
            f"{config.fields} take {math.prod(sizes)} devices per trial, but with {num_trials} "
            f"trials on {len(devices)} devices, each trial has {size}; leave mesh.data at -1"
        )
    if (slices := config.num_slices) % trials and trials % slices:
        raise UserError(
            f"mesh.num_slices is {slices}, but {trials} trials train at a time; one of the two "
            "numbers must divide the other"
        )
    config = replace(config, num_slices=-(-slices // trials))
    groups = np.reshape(devices, (trials, -1)).tolist()
    parts = [make_mesh(config, group).devices for group in groups]
    return Mesh(np.stack(parts), (TRIAL, *AXES), axis_types=(AxisType.Auto,) * (1 + len(AXES)))


def _slices(devices: list[Any], count: int) -> list[list[Any]]:
    """Group `devices` by TPU slice. `count` is `MeshConfig.num_slices`."""
    if count:
        if len(devices) % count:
            raise UserError(
                f"mesh.num_slices is {count}, which does not divide {len(devices)} devices; "
                f"{_divisors(len(devices))} would work"
            )
        return np.reshape(devices, (count, -1)).tolist()
    groups: dict[int, list[Any]] = {}
    for device in devices:
        # On other platforms, slice_index may count hosts, which are not slices.
        index = getattr(device, "slice_index", 0) if device.platform == "tpu" else 0
        groups.setdefault(index, []).append(device)
    return [groups[index] for index in sorted(groups)]


def partition_spec(axes: LogicalAxes, *, parameter: bool = False) -> PartitionSpec:
    """Return the partition spec of an array with these logical axes, with an entry per dimension.

    A mesh axis splits only one dimension: the first, if `RULES` names it for two (a D x D kernel).
    A parameter with one dimension besides layers and positions (a bias, a norm, a
    position table) is not split over `fsdp`: that would save little memory, but cost a collective.
    """
    is_vector = parameter and sum(axis not in ("layers", "length") for axis in axes) < 2
    taken = {"fsdp"} if is_vector else set[str]()
    entries: list[str | tuple[str, ...] | None] = []
    for axis in axes:
        names = RULES[axis] if axis is not None else ()
        mesh_axes = tuple(name for name in names if name not in taken)
        taken.update(mesh_axes)
        entries.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
    return PartitionSpec(*entries)


def param_shardings(logical_axes: Any, shapes: Any, mesh: Mesh) -> Any:
    """Return a NamedSharding for each parameter, as a tree like `shapes`.

    `logical_axes` has a tuple of axis names for each parameter. Raise a UserError if a dimension
    cannot be split equally. The message names sizes that would work.
    """

    def one(path: Any, shape: Any, axes: LogicalAxes) -> NamedSharding:
        spec = partition_spec(axes, parameter=True)
        # Split the rows of the token table over `fsdp`, unless `tensor` splits the rows. The
        # gradient is a scatter with the columns innermost in memory. If the columns were split, XLA
        # would reduce the full gradient and then cut it, which moves twice the bytes.
        divides = mesh.shape["tensor"] == 1 and shape.shape[0] % mesh.shape["fsdp"] == 0
        if axes == ("vocab", "embed") and divides:
            spec = PartitionSpec("fsdp", None)
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        if len(spec) != len(shape.shape):
            raise AssertionError(f"{where}: shape {shape.shape} does not match axes {axes}")
        for size, axis, entry in zip(shape.shape, axes, spec, strict=True):
            names = (entry,) if isinstance(entry, str) else entry or ()
            parts = math.prod(mesh.shape[name] for name in names)
            if size % parts:
                assert axis is not None
                field = _SIZES.get(axis, f"axis {axis} of {where}")
                mesh_field = " x ".join(f"mesh.{name}" for name in names)
                raise UserError(
                    f"{field} is {size}, not a multiple of {mesh_field} = {parts} (parameter "
                    f"{where}); {_nearest_multiples(size, parts)} would work, or set {mesh_field} "
                    f"to one of {_divisors(size)}"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(one, shapes, logical_axes)


def opt_state_shardings(
    optimizer: optax.GradientTransformation, param_shapes: Any, shardings: Any, mesh: Mesh
) -> Any:
    """Return the state's shardings: moments like their parameters, all other arrays replicated."""

    def is_hole(leaf: Any) -> bool:  # a parameter without state in this part of the optimizer
        return isinstance(leaf, optax.MaskedNode)

    return optax.tree_map_params(
        optimizer, lambda leaf, sharding: leaf if is_hole(leaf) else sharding,
        jax.eval_shape(optimizer.init, param_shapes), shardings,
        transform_non_params=lambda _: replicated(mesh), is_leaf=is_hole,
    )  # fmt: skip


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding that places a complete copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


ROW_SPEC = partition_spec(("batch",))
"""Partition spec of arrays with the rows of a batch on axis 0."""


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch: rows over `data` and `fsdp`, after the trial axis, if any."""
    trials = (TRIAL,) if TRIAL in mesh.axis_names else ()
    return NamedSharding(mesh, PartitionSpec(*trials, *ROW_SPEC))


def num_batch_shards(mesh: Mesh) -> int:
    """Return the number of parts into which the rows of a batch are split."""
    return math.prod(mesh.shape[name] for name in RULES["batch"])


def check_batch_size(
    batch_size: int, mesh: Mesh | int, accumulation: int = 1, where: str = "batch_size"
) -> None:
    """Raise a UserError if the mesh (or number of shards) cannot split a micro-batch equally."""
    shards = mesh if isinstance(mesh, int) else num_batch_shards(mesh)
    unit = shards * accumulation
    if batch_size < 1 or batch_size % unit:
        raise UserError(
            f"{where} is {batch_size}; it must be a multiple of {unit} (mesh.data x mesh.fsdp = "
            f"{shards}, times {accumulation} micro-batches per step): "
            f"{_nearest_multiples(batch_size, unit)} would work"
        )


def data_shard(mesh: Mesh) -> tuple[int, int]:
    """Return (index, count): this process loads slice `index` of a batch cut into `count` slices.

    Slices are contiguous. Processes that hold the same rows (because `tensor` spans them) get the
    same index. The global array may order rows differently, which does not change a training step.
    Raise a UserError if two processes hold some, but not all, of their rows in common.
    """
    # One row per shard: any batch that divides over the mesh is split in the same proportions.
    num_rows = num_batch_shards(mesh)
    rows_of: dict[int, set[int]] = {}
    device: Any
    for device, (rows,) in batch_sharding(mesh).devices_indices_map((num_rows,)).items():
        rows_of.setdefault(device.process_index, set()).add(rows.indices(num_rows)[0])
    groups = sorted({tuple(sorted(rows)) for rows in rows_of.values()})
    if sum(len(group) for group in groups) != len(set().union(*groups)):
        raise UserError(
            f"mesh {dict(mesh.shape)} gives processes overlapping parts of a batch; mesh.tensor "
            "must divide a process's number of devices or be a multiple of it"
        )
    return groups.index(tuple(sorted(rows_of[jax.process_index()]))), len(groups)


def place_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Make a batch's global arrays from this process's rows, the slice given by `data_shard`."""
    sharding = batch_sharding(mesh)
    if jax.process_count() == 1:
        check_batch_size(len(next(iter(batch.values()))), mesh, where="the batch")
    return {
        name: jax.make_array_from_process_local_data(sharding, np.ascontiguousarray(rows))
        for name, rows in batch.items()
    }


def _nearest_multiples(size: int, unit: int) -> str:
    below, above = size // unit * unit, -(-size // unit) * unit
    return f"{below} or {max(above, unit)}" if below and below != above else f"{max(above, unit)}"


def divisors(number: int) -> list[int]:
    """List the divisors of a number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def _divisors(number: int) -> str:
    some = [str(n) for n in divisors(number)]
    return ", ".join(some if len(some) <= 12 else [*some[:12], "..."])
