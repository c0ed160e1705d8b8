"""Detection of corruption that no loss shows: steps are computed twice, and replicas compared.

A digest of 32 bits stands for all arrays of a device. The flip of any single bit changes the
digest. Digests are computed where the arrays are; only the digests travel between devices.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, UInt32

from bert_jax.distributed.parallel.sharding import replicated
from bert_jax.model.counter_hash import hash_u32
from bert_jax.training.steps.bad_step import listed_devices
from bert_jax.training.steps.state import StepConfig, state_shardings

GRADIENT_DIGESTS = "gradient_digests"
"""Name of a metric of a step, if steps are rechecked: a digest of each device's gradients before
devices add them up (with gather=layer, those along fsdp have). Shape (data * fsdp,); on a mesh of
trials, trials come first."""
_ROWS = ("data", "fsdp")


class SilentCorruptionError(RuntimeError):
    """Error about a device that computed or kept wrong bits. No state with these bits is saved."""

    exit_code = 9


def digest(tree: Any) -> UInt32[Array, ""]:
    """Reduce all arrays of a tree to a digest of 32 bits.

    Each word is multiplied by an odd number, a hash of the word's index, and all products are added
    modulo 2^32. So the order of addition does not matter, and a change of any one word is detected.
    """
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        word = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
        bits = jax.lax.bitcast_convert_type(leaf, word).astype(jnp.uint32)
        place = jnp.zeros(leaf.shape, jnp.uint32)
        for axis, size in enumerate(leaf.shape):
            along = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
            place = place * np.uint32(size) + along
        odd = jnp.asarray(hash_u32(place)) | np.uint32(1)
        total = total * np.uint32(0x9E3779B1) + jnp.sum(bits * odd, dtype=jnp.uint32)
    return total


class Recheck:
    """Checks of the steps of a run, on all devices of a mesh. All processes call each method."""

    def __init__(self, config: StepConfig, mesh: Mesh, newest: Callable[[], str]):
        """Prepare the checks; `newest` returns the path of the newest save for messages."""
        self._every, self._mesh, self._newest = config.guard.recheck_every, mesh, newest
        self._sums_early = config.gather == "layer"
        specs = jax.tree.map(lambda each: each.spec, state_shardings(config, mesh))
        leaves = jax.tree.leaves(specs)
        self._splits = sorted({_axes(spec) for spec in leaves})

        def of_device(state: Any) -> UInt32[Array, "..."]:
            arrays = jax.tree.leaves(state)
            held = [
                [array for array, spec in zip(arrays, leaves, strict=True) if _axes(spec) == split]
                for split in self._splits
            ]
            found = jnp.stack([digest(each) for each in held])
            return found.reshape(*([1] * mesh.devices.ndim), -1)

        self._digests = jax.jit(
            jax.shard_map(
                of_device, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(*mesh.axis_names),
                check_vma=False,
            ),
            out_shardings=replicated(mesh),
        )  # fmt: skip
        self._copy = jax.jit(lambda state: jax.tree.map(jnp.copy, state))

    def step(self, number: int, step: Callable[..., Any], state: Any, *inputs: Any) -> Any:
        """Compute step `number`; if a check is due, compute the step twice and compare.

        Raise a SilentCorruptionError if the two results, or replicas of the new state, differ.
        """
        if not self._every or number % self._every:
            return step(state, *inputs)
        before = self._copy(state)
        after, metrics = step(state, *inputs)
        found = jax.device_get((self._digests(after), metrics))
        again = step(before, *inputs)
        self._compare(number, found, jax.device_get((self._digests(again[0]), again[1])))
        self._agree(number, found[0])
        return after, metrics

    def replicas(self, number: int, state: Any) -> None:
        """Compare the replicas of the state after step `number`, if steps are rechecked.

        Raise a SilentCorruptionError if replicas differ.
        """
        if self._every:
            self._agree(number, jax.device_get(self._digests(state)))

    def _compare(self, number: int, first: Any, second: Any) -> None:
        where = np.any(first[0] != second[0], axis=-1)
        differ = [
            name for name, value in first[1].items() if value.tobytes() != second[1][name].tobytes()
        ]
        if not where.any() and not differ:
            return
        if GRADIENT_DIGESTS in differ:  # name only devices whose own gradients differ
            of_rows = first[1][GRADIENT_DIGESTS] != second[1][GRADIENT_DIGESTS]
            shape = [size if name != "tensor" else 1 for name, size in self._mesh.shape.items()]
            of_rows = of_rows.reshape(shape[0], -1, *shape[1:]).any(axis=1)  # over trials
            if self._sums_early:  # devices along fsdp have added up their gradients by then
                of_rows = of_rows.any(axis=-2, keepdims=True)
            where = np.broadcast_to(of_rows, self._mesh.devices.shape)
        gpu = self._mesh.devices.flat[0].platform == "gpu"
        self._fail(
            f"step {number:,}, computed twice from the same state, gave different "
            f"{'gradients' if GRADIENT_DIGESTS in differ else 'results'}",
            where,
            " GPU kernels may add in a different order each time, which is no fault: set "
            "XLA_FLAGS=--xla_gpu_deterministic_ops=true to check steps on GPUs." * gpu,
        )

    def _agree(self, number: int, digests: UInt32[np.ndarray, "..."]) -> None:
        """Compare the digests of devices that hold the same parts of the state."""
        where = np.zeros(self._mesh.devices.shape, bool)
        for group, split in enumerate(self._splits):
            same = tuple(n for n, name in enumerate(self._mesh.axis_names) if name not in split)
            where |= minority(digests[..., group], same)
        if where.any():
            self._fail(f"after step {number:,}, replicas of the state differ", where)

    def _fail(self, what: str, where: Bool[np.ndarray, "..."], more: str = "") -> None:
        suspects: Any = self._mesh.devices[where] if where.any() else self._mesh.devices.flat
        devices = sorted(suspects, key=lambda each: each.id)
        raise SilentCorruptionError(
            f"{what}: suspect the hardware ({listed_devices(devices)}). The run stops, and nothing "
            f"of this state is saved.{more} The last save that was checked: "
            f"{self._newest() or 'none'}. Start the command again to continue from there; if the "
            "same device is named again, leave its machine out"
        )


def minority(values: np.ndarray, axes: Sequence[int]) -> Bool[np.ndarray, "..."]:
    """Mask the values that differ from the majority along `axes`; without a majority, mask all."""
    moved = np.moveaxis(values, axes, range(len(axes)))
    rows = moved.reshape(int(np.prod(moved.shape[: len(axes)], dtype=int)), -1)
    marked = np.zeros(rows.shape, bool)
    for column in np.flatnonzero((rows != rows[0]).any(axis=0)):
        found, counts = np.unique(rows[:, column], return_counts=True)
        prevails = 2 * counts.max() > len(rows)
        marked[:, column] = rows[:, column] != found[counts.argmax()] if prevails else True
    return np.moveaxis(marked.reshape(moved.shape), range(len(axes)), axes)


def _axes(spec: PartitionSpec) -> tuple[str, ...]:
    parts = [(part,) if isinstance(part, str) else part or () for part in spec]
    return tuple(sorted({name for part in parts for name in part}))
