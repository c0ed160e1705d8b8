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
from bert_jax.model.dropout import DropoutStream, Number, Stream, dropout, keep_at
from bert_jax.model.layers import Affine, Norm, add_bias, layer_norm
from bert_jax.model.layout import OnMesh

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # see `attention.triton`
    plgpu = None  # type: ignore[assignment]


class Tile(NamedTuple):
    """Sizes of one kernel's programs."""

    entries: int
    """Number of entries, padding included, that a program holds at a time, in whole tokens."""
    warps: int
    programs: int | None = None
    """Number of programs, which take turns at blocks of tokens; None for a program per block."""


FORWARD, BACKWARD = Tile(4096, 4), Tile(4096, 4, 512)

_Array = Float[Array, "B L D"]


def supports(x: _Array, norm: Norm, layout: OnMesh) -> bool:
    """Return true if the kernels run on the GPUs of `layout`, for activations like `x`.

    The kernels need half precision, a GPU since Ampere and a layer norm with a bias. They do not
    run where the compiler splits arrays, as it does along the mesh axis `tensor`.
    """
    local, is_half = layout is None or layout.is_local, x.dtype in (jnp.bfloat16, jnp.float16)
    if plgpu is None or norm.bias is None or not local or not is_half:
        return False
    return library.before_ampere(library.local_gpu().capability) is None


def normed_residual(
    x: _Array, y: _Array, affine: Affine, norm: Norm, rate: float, stream: Stream, site: Number
) -> _Array:
    """Return norm(x + dropout(y + bias)) on one device, with the bias of `affine`.

    The kernels run only if the call is differentiated. Otherwise XLA runs, and stores no sum.
    """
    if stream is None:
        rate, stream = 0.0, DropoutStream(jnp.uint32(0), jnp.zeros(len(y), jnp.uint32))
    words = jnp.stack([stream.seed, jnp.asarray(site)]).astype(jnp.uint32)
    vectors = (None if v is None else v[...] for v in (affine.bias, norm.scale, norm.bias))
    return _normed(rate, norm.eps, x, y, *vectors, words, stream.row_index)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normed(rate, eps, x, y, bias, scale, shift, words, row_index):
    y = y if bias is None else add_bias(y, bias)
    y = dropout(y, rate, DropoutStream(words[0], row_index), words[1])
    return layer_norm(x + y, scale, shift, eps)


def _forward(rate, eps, x, y, bias, scale, shift, words, row_index):
    """Return the result and the residuals; only one residual, the sum, has the size of `y`."""
    shapes = [(y.shape, y.dtype)] * 2 + [(y.shape[:2], jnp.float32)] * 2
    kernel, operands = partial(_forward_kernel, rate, eps), (x, y, bias, scale, shift)
    out, *kept = _call(FORWARD, kernel, "norm_forward", (*operands, words, row_index), shapes)
    return out, (*kept, bias, scale, words, row_index)


def _backward(rate, eps, residuals, gradient):
    shapes = [(gradient.shape, gradient.dtype)] * 2
    shapes += [((BACKWARD.programs, 3, gradient.shape[-1]), jnp.float32)]
    kernel, operands = partial(_backward_kernel, rate), (gradient, *residuals)
    dx, dy, sums = _call(BACKWARD, kernel, "norm_backward", operands, shapes)
    dscale, dshift, dbias = sums.sum(0)
    return dx, dy, None if residuals[3] is None else dbias, dscale, dshift, None, None


_normed.defvjp(_forward, _backward)


def _call(tile: Tile, kernel, name: str, operands, shapes):
    """Run a kernel over blocks of tokens; without CUDA, Pallas interprets it."""
    rows, length, width = shapes[0][0]
    block = max(1, tile.entries // pl.next_power_of_2(width))
    blocks = pl.cdiv(rows * length, block)
    programs = tile.programs or blocks

    def run(*refs):
        program = pl.program_id(0)

        def at(step):
            """Return the indices of the entries of this program's block number `step`."""
            tokens = (program + step * programs) * block + jnp.arange(block)[:, None]
            row, position = (f(tokens, np.int32(length)) for f in (jax.lax.div, jax.lax.rem))
            return row, position, jnp.arange(pl.next_power_of_2(width))[None, :]

        kernel(at, pl.cdiv(blocks, programs), *refs)

    shapes = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    call = partial(pl.pallas_call, run, grid=(programs,), out_shape=shapes, name=name)
    # Choose at lowering, because a step compiled ahead of time is traced elsewhere.
    compiled = call(compiler_params=plgpu.CompilerParams(num_warps=tile.warps))
    return jax.lax.platform_dependent(*operands, cuda=compiled, default=call(interpret=True))


def _forward_kernel(rate, eps, at, _, *refs):
    """Write the normalised sum, the sum, and its mean and inverse standard deviation."""
    x, y, bias, scale, shift, *names, out_ref, sum_ref, mean_ref, inverse_ref = refs
    row, position, features = here = at(0)
    width = x.shape[-1]
    y = _load(y, *here) if bias is None else _load(y, *here) + _vector(bias)
    wide = _load(x, *here).astype(jnp.float32) + _dropped(rate, y, names, here)
    mean = wide.sum(1, keepdims=True) / width
    centred = jnp.where(features < width, wide - mean, 0.0)
    inverse = jax.lax.rsqrt((centred * centred).sum(1, keepdims=True) / width + eps)
    _store(out_ref, centred * (inverse * _vector(scale)) + _vector(shift), *here)
    _store(sum_ref, wide, *here)
    _store(mean_ref, mean, row, position)
    _store(inverse_ref, inverse, row, position)


def _backward_kernel(rate, at, steps, *refs):
    """Write the gradients of `x` and `y`, and this program's sums for scale, shift and bias."""
    gradients, xs, means, inverses, _, scale, *names, dx_ref, dy_ref, sums_ref = refs
    program, scale, width = pl.program_id(0), _vector(scale), xs.shape[-1]

    def add(step, sums):
        row, position, _ = here = at(step)
        gradient, x = (_load(ref, *here).astype(jnp.float32) for ref in (gradients, xs))
        mean, inverse = (_load(ref, row, position) for ref in (means, inverses))
        normal, scaled = (x - mean) * inverse, gradient * scale
        slope = (scaled * normal).sum(1, keepdims=True) / width
        dx = (scaled - scaled.sum(1, keepdims=True) / width - normal * slope) * inverse
        dy = _dropped(rate, dx, names, here)
        _store(dx_ref, dx, *here)
        _store(dy_ref, dy, *here)
        parts = gradient * normal, gradient, dy
        return [total + part.sum(0) for total, part in zip(sums, parts, strict=True)]

    start = [jnp.zeros(scale.shape[1], jnp.float32)] * 3
    for n, total in enumerate(jax.lax.fori_loop(0, steps, add, start)):
        _store(sums_ref, total[None, :], program, n, at(0)[2])


def _dropped(rate, y, names, at):
    """Apply dropout with the mask of `keep_mask` (B, L, D)."""
    if not rate:
        return y
    words, row_index = names
    places = (place.astype(jnp.uint32) for place in at[1:])
    kept = keep_at(rate, words[0], words[1], _load(row_index, at[0]), *places)
    return jnp.where(kept, y * np.float32(1 / (1 - rate)), 0.0)


def _vector(ref):
    # If the load had two axes, Triton would convert the layout of whole blocks.
    return _load(ref, jnp.arange(pl.next_power_of_2(ref.shape[0])))[None, :]


def _load(ref, *at):
    """Load the entries at these indices, and zeros for indices beyond the array."""
    return plgpu.load(ref.at[at], mask=_inside(ref, at), other=0)


def _store(ref, x, *at):
    """Store the entries whose indices are in the array, in the type of the array."""
    plgpu.store(ref.at[at], x.astype(ref.dtype), mask=_inside(ref, at))


def _inside(ref, at):
    return reduce(operator.and_, (n < size for n, size in zip(at, ref.shape, strict=True)))
