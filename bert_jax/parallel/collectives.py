"""What devices say to each other in a step: parameters gathered where used, gradients reduced.

A step on a mesh runs inside a `jax.shard_map` over `data` and `fsdp` (`on_local_rows`): each device
sees its own rows and its own part of the parameters, and nothing crosses those two axes but what is
written here. `tensor` stays with the compiler, which places the rest by the parameters' shardings
(Shoeybi et al. 2019: two all-reduces per layer in each direction).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from bert_jax.model.layout import Layout, without_axes
from bert_jax.parallel.sharding import partition_spec

BY_HAND = ("data", "fsdp")
"""Mesh axes over which the step is written out; `tensor` is the compiler's."""


def on_local_rows(
    f: Callable[..., Any], mesh: Mesh, in_specs: Sequence[Any], out_specs: Any
) -> Callable[..., Any]:
    """`f` run by every device (or `tensor` group of devices) on its own part of the arguments.

    Specs may name `tensor`, which is left out: that axis is not split by hand. One device: `f`.
    """
    if mesh.size == 1:
        return f
    return jax.shard_map(
        f,
        mesh=mesh,
        in_specs=jax.tree.map(_by_hand, tuple(in_specs), is_leaf=_is_spec),
        out_specs=jax.tree.map(_by_hand, out_specs, is_leaf=_is_spec),
        axis_names=set(mesh.axis_names if mesh.shape["tensor"] == 1 else BY_HAND),
        check_vma=False,  # would make jax.grad reduce where each gradient arises
    )


def local_layout(mesh: Mesh, layer_specs: Any, dtype: Any) -> Layout:
    """What the model is told inside `on_local_rows`.

    Args:
        mesh: The mesh.
        layer_specs: PartitionSpec per parameter of the stacked layers.
        dtype: Compute type of the model.
    """
    specs = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), layer_specs, is_leaf=_is_spec)
    splits = mesh.shape["fsdp"] > 1
    return Layout(
        mesh,
        partition_spec,
        partial(gather, specs=specs, mesh=mesh, dtype=dtype) if splits else None,
    )


def gather(params: Any, specs: Any, mesh: Mesh, dtype: Any) -> Any:
    """Parameters as they are used: whole over `fsdp`; matrices travel in the compute type.

    The gradient of each that `fsdp` splits is reduced to the device's own part, summed over `fsdp`,
    where it arises; all other sums are left to `reduce_gradients`.
    """

    def one(path: Any, param: jax.Array, spec: PartitionSpec) -> jax.Array:
        name = path[-1].key
        if name == "kernel":
            travels = used = dtype
        elif name == "token" and _is_split(spec, mesh):
            # Looked up and multiplied by: float32, so that both gradients are added in it before
            # they are reduced once, and the sum over a frequent token's places is not in bfloat16.
            travels, used = dtype, param.dtype
        else:
            travels = used = param.dtype
        return _gather(param, mesh, spec, travels, used)

    return jax.tree_util.tree_map_with_path(one, params, specs)


def _whole(x: jax.Array, mesh: Mesh, spec: PartitionSpec, travels: Any, used: Any) -> jax.Array:
    x = x.astype(travels)
    if _is_split(spec, mesh):
        gather = partial(jax.lax.all_gather, axis_name="fsdp", axis=spec.index("fsdp"), tiled=True)
        x = over_tensor(gather, mesh, without_axes(spec, BY_HAND))(x)
    return x.astype(used)


_gather = jax.custom_vjp(_whole, nondiff_argnums=(1, 2, 3, 4))


def _gather_forward(x, *how):
    return _whole(x, *how), None


def _gather_backward(mesh, spec, travels, used, _, g):
    g = g.astype(jnp.float32)
    if _is_split(spec, mesh):
        part = partial(_reduce_scatter, axis=spec.index("fsdp"), mesh=mesh)
        g = over_tensor(part, mesh, without_axes(spec, BY_HAND))(g)
    return (g,)


_gather.defvjp(_gather_forward, _gather_backward)


def _is_split(spec: PartitionSpec, mesh: Mesh) -> bool:
    return mesh.shape["fsdp"] > 1 and "fsdp" in spec


def _reduce_scatter(x: jax.Array, axis: int, mesh: Mesh) -> jax.Array:
    """The device's part, along `axis`, of the sum over `fsdp`.

    Over all devices of a TPU slice XLA makes an all-reduce of the whole and takes a part: twice the
    bytes. Two reduce-scatters over groups of about sqrt(n) move the bytes of one over n.
    """
    size = mesh.shape["fsdp"]
    inner = max(d for d in range(1, math.isqrt(size) + 1) if size % d == 0)
    scatter = partial(jax.lax.psum_scatter, axis_name="fsdp", scatter_dimension=0, tiled=True)
    # Along the first axis: where a part is narrower than a tile's 128 lanes, XLA again falls back.
    x = jnp.moveaxis(x, axis, 0)
    if mesh.size > size or inner == 1:
        x = scatter(x)
    else:
        ranks = np.arange(size).reshape(-1, inner)
        x = scatter(x, axis_index_groups=ranks.T.tolist())
        x = scatter(x, axis_index_groups=ranks.tolist())
    return jnp.moveaxis(x, 0, axis)


def gather_outside_layers(params: Any, specs: Any, mesh: Mesh, dtype: Any) -> Any:
    """`gather` for everything but the stacked layers, which gather their own."""
    encoder, encoder_specs = dict(params["encoder"]), dict(specs["encoder"])
    layers = encoder.pop("layers")
    del encoder_specs["layers"]
    rest = gather({**params, "encoder": encoder}, {**specs, "encoder": encoder_specs}, mesh, dtype)
    return {**rest, "encoder": {**rest["encoder"], "layers": layers}}


def reduce_gradients(grads: Any, specs: Any, mesh: Mesh) -> Any:
    """Gradients of local rows summed over the mesh, each device keeping its own part."""
    leaves, tree = jax.tree.flatten(grads)
    specs = jax.tree.leaves(specs, is_leaf=_is_spec)

    def add(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(
            jax.lax.psum(leaf, ("data",) if "fsdp" in spec else BY_HAND)
            for leaf, spec in zip(leaves, specs, strict=True)
        )

    kept = tuple(without_axes(spec, BY_HAND) for spec in specs)
    return jax.tree.unflatten(tree, over_tensor(add, mesh, kept)(*leaves))


def reduce_sums(sums: Any) -> Any:
    """Scalars of local rows summed over the mesh."""
    return jax.lax.psum(sums, BY_HAND)


def over_tensor(f: Callable[..., Any], mesh: Mesh, specs: Any) -> Callable[..., Any]:
    """`f` run by every device on its part over `tensor` too; results lie as the arguments.

    XLA's partitioner would gather the operand of a collective over the axes that are its own.
    """
    if mesh.shape["tensor"] == 1:
        return f
    return jax.shard_map(
        f,
        in_specs=specs if isinstance(specs, tuple) and not _is_spec(specs) else (specs,),
        out_specs=specs,
        axis_names={"tensor"},
        check_vma=False,
    )


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _by_hand(spec: PartitionSpec) -> PartitionSpec:
    return without_axes(spec, ("tensor",))
