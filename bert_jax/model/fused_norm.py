"""The end of a post-norm sublayer as Triton kernels for GPUs: bias, dropout, residual sum, norm.

XLA's kernels for the gradients of bias, scale and shift read arrays (B, L, D) a second time. Here,
one kernel for each pass reads and writes each array once. The masks are the masks of `dropout`.
Sums over tokens have a fixed order, so that the same inputs give the same bits.
"""

import operator
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from bert_jax.model.attention import library
from bert_jax.model.attention.triton import plgpu
from bert_jax.model.dropout import DropoutStream, Number, Stream, dropout, keep_at
from bert_jax.model.layers import Affine, Norm, add_bias, layer_norm
from bert_jax.model.layout import OnMesh


class Tile(NamedTuple):
    """Sizes of one kernel's programs."""

    entries: int
    """Number of entries, padding included, that a program holds at a time, in whole tokens."""
    warps: int
    programs: int | None = None
    """Number of programs, which take turns at blocks of tokens; None for a program per block."""


FORWARD = Tile(4096, 4)
BACKWARD = Tile(4096, 4, 512)


class _Plan(NamedTuple):
    """Constants for which a kernel is compiled."""

    rate: float
    """Dropout rate."""
    eps: float


def supports(x: Float[Array, "B L D"], norm: Norm, layout: OnMesh) -> bool:
    """Return true if the kernels run on the GPUs of `layout`, for activations like `x`.

    The kernels need half precision, an NVIDIA GPU since Ampere and a layer norm with a bias. They do
    not run where the compiler splits arrays, as it does along the mesh axis `tensor`.
    """
    local = layout is None or layout.is_local
    is_half = x.dtype in (jnp.bfloat16, jnp.float16)
    if plgpu is None or norm.bias is None or not is_half or not local:
        return False
    return library.before_ampere(library.local_gpu().capability) is None


def normed_residual(
    residual: Float[Array, "B L D"],
    y: Float[Array, "B L D"],
    affine: Affine,
    norm: Norm,
    rate: float,
    stream: Stream,
    site: Number,
) -> Float[Array, "B L D"]:
    """Return norm(residual + dropout(y + bias)) on one device, with the bias of `affine`.

    Only a differentiated call runs the kernels. XLA computes any other call, and keeps no sum.
    """
    if stream is None:
        rate, stream = 0.0, DropoutStream(jnp.uint32(0), jnp.zeros(len(y), jnp.uint32))
    words = jnp.stack([stream.seed, jnp.asarray(site)]).astype(jnp.uint32)
    bias = None if affine.bias is None else affine.bias[...]
    vectors = bias, norm.scale[...], norm.bias[...]
    return _normed(_Plan(rate, norm.eps), residual, y, *vectors, words, stream.row_index)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normed(plan: _Plan, residual, y, bias, scale, shift, words, row_index):
    y = y if bias is None else add_bias(y, bias)
    y = dropout(y, plan.rate, DropoutStream(words[0], row_index), words[1])
    return layer_norm(residual + y, scale, shift, plan.eps)


def _forward(plan: _Plan, residual, y, bias, scale, shift, words, row_index):
    """Return the result and the residuals, of which only the sum has the size of `y`."""
    operands = (residual, y, bias, scale, shift, words, row_index)
    whole = jax.ShapeDtypeStruct(y.shape, y.dtype)
    token = jax.ShapeDtypeStruct(y.shape[:2], jnp.float32)
    shapes = [whole, whole, token, token]
    out, *kept = _call(plan, FORWARD, _forward_kernel, "norm_forward", operands, shapes)
    return out, (*kept, bias, scale, words, row_index)


def _backward(plan: _Plan, residuals, gradient):
    whole = jax.ShapeDtypeStruct(gradient.shape, gradient.dtype)
    sums = jax.ShapeDtypeStruct((BACKWARD.programs, 3, gradient.shape[-1]), jnp.float32)
    operands = (gradient, *residuals)
    shapes = [whole, whole, sums]
    dx, dy, sums = _call(plan, BACKWARD, _backward_kernel, "norm_backward", operands, shapes)
    dscale, dshift, dbias = sums.sum(0)
    return dx, dy, None if residuals[3] is None else dbias, dscale, dshift, None, None


_normed.defvjp(_forward, _backward)


def _call(plan: _Plan, tile: Tile, kernel, name: str, operands, shapes):
    """Run a kernel over blocks of tokens; without CUDA, Pallas interprets it."""
    rows, length, width = shapes[0].shape
    block = max(1, tile.entries // pl.next_power_of_2(width))
    blocks = pl.cdiv(rows * length, block)
    programs = tile.programs or blocks

    def run(*refs):
        """Run the kernel with a function from a step to the indices of the step's entries."""
        program = pl.program_id(0)

        def at(step):
            first = (program + step * programs) * block
            tokens = first + jnp.arange(block)[:, None]
            features = jnp.arange(pl.next_power_of_2(width))[None, :]
            row, position = (f(tokens, np.int32(length)) for f in (jax.lax.div, jax.lax.rem))
            return row, position, features

        kernel(plan, at, pl.cdiv(blocks, programs), *refs)

    call = partial(pl.pallas_call, run, grid=(programs,), out_shape=shapes, name=name)
    # Choose at lowering, because a step compiled ahead of time is traced elsewhere.
    params = plgpu.CompilerParams(num_warps=tile.warps)
    return jax.lax.platform_dependent(
        *operands, cuda=call(compiler_params=params), default=call(interpret=True)
    )


def _forward_kernel(plan: _Plan, at, steps, *refs):
    """Write the normalised sum, the sum, and its mean and inverse standard deviation."""
    residual, y, bias, scale, shift, *names, out_ref, x_ref, mean_ref, inverse_ref = refs
    row, position, features = here = at(0)
    width = x_ref.shape[-1]
    y = _load(y, *here)
    y = y if bias is None else y + _vector(bias)
    y = _dropped(plan, y, names, here)
    x = (_load(residual, *here) + y).astype(x_ref.dtype)
    wide = x.astype(jnp.float32)
    mean = wide.sum(1, keepdims=True) / width
    centred = jnp.where(features < width, wide - mean, 0.0)
    inverse = jax.lax.rsqrt((centred * centred).sum(1, keepdims=True) / width + plan.eps)
    out = centred * (inverse * _vector(scale)) + _vector(shift)
    _store(out_ref, out, *here)
    _store(x_ref, x, *here)
    _store(mean_ref, mean, row, position)
    _store(inverse_ref, inverse, row, position)


def _backward_kernel(plan: _Plan, at, steps, *refs):
    """Write the gradients of `residual` and `y`, and this program's sums for the vectors."""
    gradients, xs, means, inverses, _, scales, *names, dx_ref, dy_ref, sums_ref = refs
    width, features = sums_ref.shape[-1], at(0)[2]
    scale = _vector(scales)

    def add(step, sums):
        row, position, _ = here = at(step)
        gradient, x = (_load(ref, *here).astype(jnp.float32) for ref in (gradients, xs))
        mean, inverse = (_load(ref, row, position) for ref in (means, inverses))
        normal, scaled = (x - mean) * inverse, gradient * scale
        mean = scaled.sum(1, keepdims=True) / width
        slope = (scaled * normal).sum(1, keepdims=True) / width
        dx = (scaled - mean - normal * slope) * inverse
        dy = _dropped(plan, dx, names, here)
        _store(dx_ref, dx, *here)
        _store(dy_ref, dy, *here)
        parts = gradient * normal, gradient, dy
        return [total + part.sum(0) for total, part in zip(sums, parts, strict=True)]

    program, start = pl.program_id(0), [jnp.zeros(features.shape[1], jnp.float32)] * 3
    for n, total in enumerate(jax.lax.fori_loop(0, steps, add, start)):
        _store(sums_ref, total[None, :], program, n, features)


def _dropped(plan: _Plan, y, names, at):
    """Apply dropout with the mask of `keep_mask` (B, L, D)."""
    if not plan.rate:
        return y
    words, row_index = names
    row, *places = at
    places = [place.astype(jnp.uint32) for place in places]
    kept = keep_at(plan.rate, words[0], words[1], _load(row_index, row), *places)
    return jnp.where(kept, y * np.float32(1 / (1 - plan.rate)), 0.0)


def _load(ref, *at):
    """Load the entries at these indices, and zeros for indices beyond the array."""
    return plgpu.load(ref.at[at], mask=_inside(ref, at), other=0)


def _vector(ref):
    return _load(ref, jnp.arange(pl.next_power_of_2(ref.shape[0])))[None, :]


def _store(ref, x, *at):
    """Store entries of `x` whose indices are in the array, in the type of the array."""
    plgpu.store(ref.at[at], x.astype(ref.dtype), mask=_inside(ref, at))


def _inside(ref, at):
    return reduce(operator.and_, (n < size for n, size in zip(at, ref.shape, strict=True)))
