"""Communication between devices in a training step: gathering parameters, reducing gradients.

On a mesh, a step runs inside a `jax.shard_map` over `data` and `fsdp` (`on_local_rows`). Each
device sees only its rows and its part of the parameters. Along these two axes, devices communicate
only by the collectives of this module. Along `tensor`, the compiler derives the collectives from
the shardings of the parameters (Shoeybi et al. 2019: two all-reduces per layer and direction).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from bert_jax.distributed.parallel.sharding import TRIAL, divisors, num_batch_shards, partition_spec
from bert_jax.model.layers import differentiable
from bert_jax.model.layout import Layout, without_axes

BY_HAND = ("data", "fsdp")
"""Mesh axes along which this module communicates. The compiler handles `tensor`."""


def on_local_rows(
    f: Callable[..., Any], mesh: Mesh, in_specs: Sequence[Any], out_specs: Any, shared: int = 0
) -> Callable[..., Any]:
    """Wrap `f` so that each device (or `tensor` group) runs `f` on its part of the arguments.

    On one device, return `f`. The axis `tensor` in specs has no effect, because the compiler splits
    along it. On a mesh of trials, arguments and results have the trial as axis 0, which the specs
    omit. The last `shared` arguments have no such axis, because all trials share them.
    """
    if mesh.size == 1:
        return f

    def by_hand(spec: PartitionSpec, trials: bool) -> PartitionSpec:
        spec = without_axes(spec, ("tensor",))
        return PartitionSpec(TRIAL, *spec) if trials and TRIAL in mesh.axis_names else spec

    own = len(in_specs) - shared
    return jax.shard_map(
        f,
        mesh=mesh,
        in_specs=tuple(
            jax.tree.map(partial(by_hand, trials=number < own), spec)
            for number, spec in enumerate(in_specs)
        ),
        out_specs=jax.tree.map(partial(by_hand, trials=True), out_specs),
        axis_names=set(mesh.axis_names) - ({"tensor"} if mesh.shape["tensor"] > 1 else set()),
        check_vma=False,  # True: jax.grad would reduce each gradient as soon as it is computed
    )


def each_trial(f: Callable[..., Any], mesh: Mesh, shared: int = 0) -> Callable[..., Any]:
    """Wrap `f` to run for each trial of a device. All trials share the last `shared` arguments."""
    if TRIAL not in mesh.axis_names:
        return f

    def all_trials(*trees: Any) -> Any:
        own = len(trees) - shared
        if jax.tree.leaves(trees[0])[0].shape[0] > 1:
            return jax.vmap(f, in_axes=(0,) * own + (None,) * shared)(*trees)
        first = jax.tree.map(lambda x: x[0], trees[:own])
        return jax.tree.map(lambda x: x[None], f(*first, *trees[own:]))

    return all_trials


def local_layout(mesh: Mesh, specs: Any, dtype: Any) -> Layout:
    """Make a model's layout in `on_local_rows`. Specs in `layers` have the layer on axis 0."""
    gather_layer = None
    if mesh.shape["fsdp"] > 1 and "layers" in specs:
        layer = specs_of_one_layer(specs["layers"])
        gather_layer = partial(gather, specs=layer, mesh=mesh, dtype=dtype)
    inner = {
        name: local_layout(mesh, entry, dtype)
        for name, entry in specs.items()
        if name != "layers" and isinstance(entry, dict)
    }
    gather_rows = None
    if num_batch_shards(mesh) > 1:
        gather_rows = partial(jax.tree.map, lambda x: _gather_rows(x, mesh))
    return Layout(mesh, partition_spec, gather_layer, inner, gather_rows)


def specs_of_one_layer(specs: Any) -> Any:
    """Return the specs of one layer from the specs of stacked layers."""
    return jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), specs)


def gather(params: Any, specs: Any, mesh: Mesh, dtype: Any, *, layers: bool = False) -> Any:
    """Gather the parts of parameters over `fsdp`. Matrices are sent and used in `dtype`.

    Stacked layers stay split unless `layers` is set, because each layer gathers its parameters when
    it runs. The backward pass sums the gradient of a gathered parameter over `fsdp` and returns the
    device's part of the sum. `reduce_gradients` computes all other sums.
    """

    def one(path: Any, param: jax.Array, spec: PartitionSpec) -> jax.Array:
        name = path[-1].key
        if not layers and any(entry.key == "layers" for entry in path):
            return param
        travels = used = param.dtype
        if name == "kernel":
            travels = used = dtype
        elif name == "token" and _is_split(spec, mesh):
            # The table is sent as `dtype` but used as float32, so that its gradients (from lookup
            # and output, and many for a frequent token) are added in float32 and reduced once.
            travels = dtype
        return _gather(param, mesh, spec, travels, used)

    return jax.tree_util.tree_map_with_path(one, params, specs)


def _gather_forward(
    x: jax.Array, mesh: Mesh, spec: PartitionSpec, travels: Any, used: Any
) -> tuple[jax.Array, None]:
    x = x.astype(travels)
    if _is_split(spec, mesh):
        gather = partial(jax.lax.all_gather, axis_name="fsdp", axis=spec.index("fsdp"), tiled=True)
        x = over_tensor(gather, mesh, without_axes(spec, BY_HAND))(x)
    return x.astype(used), None


def _gather_backward(mesh, spec, travels, used, _, g):
    g = g.astype(jnp.float32)
    if _is_split(spec, mesh):
        part = partial(_reduce_scatter, axis=spec.index("fsdp"), mesh=mesh)
        g = over_tensor(part, mesh, without_axes(spec, BY_HAND))(g)
    return (g,)


_gather = differentiable(_gather_forward, _gather_backward, static=(1, 2, 3, 4))


def _gather_rows_forward(x: jax.Array, mesh: Mesh) -> tuple[jax.Array, None]:
    gather = partial(jax.lax.all_gather, axis_name=BY_HAND, axis=0, tiled=True)
    return over_tensor(gather, mesh, PartitionSpec())(x), None


def _gather_rows_backward(mesh, _, g):
    scatter = partial(jax.lax.psum_scatter, axis_name=BY_HAND, scatter_dimension=0, tiled=True)
    return (over_tensor(scatter, mesh, PartitionSpec())(g),)


_gather_rows = differentiable(_gather_rows_forward, _gather_rows_backward, static=(1,))


def _is_split(spec: PartitionSpec, mesh: Mesh) -> bool:
    return mesh.shape["fsdp"] > 1 and "fsdp" in spec


def _reduce_scatter(x: jax.Array, axis: int, mesh: Mesh) -> jax.Array:
    """Sum over `fsdp`, and return the device's part of the sum along `axis`.

    If `fsdp` spans a complete TPU slice, XLA replaces a single reduce-scatter by an all-reduce,
    which moves twice as many bytes. Two reduce-scatters over smaller groups of devices avoid this.
    """
    size = mesh.shape["fsdp"]
    inner = max(d for d in divisors(size) if d * d <= size)
    scatter = partial(jax.lax.psum_scatter, axis_name="fsdp", scatter_dimension=0, tiled=True)
    # Scatter along the first axis: XLA also uses an all-reduce for parts of less than 128 lanes.
    x = jnp.moveaxis(x, axis, 0)
    if mesh.size > size or inner == 1:
        x = scatter(x)
    else:
        ranks = np.arange(size).reshape(-1, inner)
        x = scatter(x, axis_index_groups=ranks.T.tolist())
        x = scatter(x, axis_index_groups=ranks.tolist())
    return jnp.moveaxis(x, 0, axis)


def reduce_gradients(
    grads: Any, specs: Any, mesh: Mesh, dtype: Any = jnp.float32, *, whole: bool = False
) -> Any:
    """Sum the gradients of local rows over the mesh; return each device's part of the sums.

    Gradients are summed as `dtype`. If `whole`, each gradient is for a complete parameter. If not,
    the backward pass of `gather` has summed and cut the gradients of split parameters over `fsdp`.
    """
    leaves, tree = jax.tree.flatten(grads)
    specs = jax.tree.leaves(specs)

    def add(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        sums = []
        for leaf, spec in zip(leaves, specs, strict=True):
            axes = ("data",) if "fsdp" in spec and not whole else BY_HAND
            sums.append(jax.lax.psum(leaf.astype(dtype), axes))
            if "fsdp" in spec and whole:
                axis = spec.index("fsdp")
                size = leaf.shape[axis] // mesh.shape["fsdp"]
                start = jax.lax.axis_index("fsdp") * size
                sums[-1] = jax.lax.dynamic_slice_in_dim(sums[-1], start, size, axis)
        return tuple(total.astype(leaf.dtype) for total, leaf in zip(sums, leaves, strict=True))

    kept = tuple(without_axes(spec, BY_HAND) for spec in specs)
    return jax.tree.unflatten(tree, over_tensor(add, mesh, kept)(*leaves))


def reduce_sums(sums: Any) -> Any:
    """Sum over the mesh the scalars that each device computed from its rows."""
    return jax.lax.psum(sums, BY_HAND)


def of_each_device(value: jax.Array, mesh: Mesh) -> jax.Array:
    """Gather the scalars of all devices along `data` and `fsdp`; return them as (data * fsdp,)."""
    alone = mesh.size == mesh.shape.get(TRIAL, 1)
    return value[None] if alone else jax.lax.all_gather(value, BY_HAND)


def over_tensor(f: Callable[..., Any], mesh: Mesh, specs: Any) -> Callable[..., Any]:
    """Wrap `f` to run on each device's part along `tensor`. `specs` split arguments and results.

    Without this wrapper, XLA would first gather the operand of a collective over `tensor`.
    """
    if mesh.shape["tensor"] == 1:
        return f
    return jax.shard_map(
        f, in_specs=specs if isinstance(specs, tuple) else (specs,), out_specs=specs,
        axis_names={"tensor"}, check_vma=False,
    )  # fmt: skip
