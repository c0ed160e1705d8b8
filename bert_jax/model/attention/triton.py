"""Attention as Triton kernels for GPUs, forward and backward, with BERT's dropout.

The module `fused` explains the need for kernels. cuDNN cannot replace these kernels: its dropout
masks are not a pure function of seed and positions (see `model.dropout`).

A program holds a block of queries or keys of one head; its scores and masks stay in registers.

Arrays are read as the projections write them, (B, L, H, K). Sums over blocks have a fixed order,
without atomics, so equal inputs give equal bits. Source: Dao 2023 (FlashAttention-2), section 3.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, UInt32

from bert_jax.model.attention import library
from bert_jax.model.attention.fused_plan import LOG2_E, NN, product
from bert_jax.model.attention.xla import MASKED_SCORE, Asked
from bert_jax.model.dropout import keep_at
from bert_jax.model.layers import differentiable

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # JAX has announced that it will remove this backend
    plgpu = None  # type: ignore[assignment]

_UNIT = 64
"""Integer that must divide the number of queries and the number of keys."""
_HEAD_DIMS = (16, 32, 64, 128)

_product = partial(product, dimensions=NN)


class Tile(NamedTuple):
    """Sizes of one kernel's program."""

    own: int
    """Number of queries, or of keys, that a program holds."""
    step: int
    """Number of keys in one product, or of queries if the program holds keys."""
    warps: int
    stages: int
    """Number of steps whose loads are in flight."""


_FORWARD = Tile(64, 32, 4, 2)
_BY_KEYS = Tile(64, 32, 4, 2)
_BY_QUERIES = Tile(64, 64, 4, 2)
"""Tiles of the three kernels, the fastest in docs/experiments.md at L=128 and L=512 on an H100."""


class Plan(NamedTuple):
    """Constants for which a kernel is compiled."""

    rate: float
    """Dropout rate."""
    scale: float
    """Factor of the scores, 1 / sqrt(K)."""
    window: int | None

    @property
    def grow(self) -> float:
        """Factor by which dropout multiplies the entries that it keeps."""
        return 1 / (1 - self.rate)


class Names(NamedTuple):
    """Integers that determine the dropout masks of a call; in a kernel, references to them."""

    step: Any
    """Seed of the step's dropout masks, and index of the attention call in the model."""
    heads: Any
    """Index of each head in the model."""
    rows: Any
    """Position of each row in the stream of examples."""


def unsupported(queries: int, keys: int, head_dim: int, dtype: np.dtype) -> str | None:
    """Name the requirement that the arrays do not meet; None if all are met."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"model.dtype 'bfloat16', not {np.dtype(dtype).name}"
    if head_dim not in _HEAD_DIMS:
        return f"a head_dim of {', '.join(map(str, _HEAD_DIMS))}, not {head_dim}"
    if queries % _UNIT or keys % _UNIT:
        return f"lengths that are multiples of {_UNIT}, not {queries} and {keys}"
    if plgpu is None:
        return f"Pallas's Triton backend, which JAX {jax.__version__} lacks"
    return library.before_ampere(library.local_gpu().capability)


def triton_attention(asked: Asked, head_index: UInt32[Array, " H"]) -> Float[Array, "B L H K"]:
    """Attend on one device, as `fused.fused_attention` does; `unsupported` must return None."""
    assert asked.stream is not None
    plan = Plan(asked.dropout_rate, 1 / math.sqrt(asked.q.shape[-1]), asked.window)
    step = jnp.stack([asked.stream.seed, jnp.asarray(asked.site)]).astype(jnp.uint32)
    names = Names(step, head_index, asked.stream.row_index)
    ids = (x.astype(jnp.int32) for x in asked[3:5])
    return _attention(plan, *asked[:3], *ids, names)


def _forward(plan: Plan, q, k, v, q_ids, kv_ids, names: Names):
    shapes = [
        jax.ShapeDtypeStruct(q.shape, v.dtype),
        jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32),
    ]
    operands = {"q": q, "k": k, "v": v, "q_ids": q_ids, "kv_ids": kv_ids}
    run = partial(_call, plan, _forward_kernel, "attention_forward", names, out_shapes=shapes)
    # The second output is log2 of each query's sum of exponentials.
    out, log_sum = run(operands, tile=_FORWARD, split=("q", "q_ids"))
    return out, (operands, names, log_sum, out)


def _backward(plan: Plan, residuals, gradient):
    operands, names, log_sum, out = residuals
    operands = operands | {"log_sum": log_sum, "out": out, "gradient": gradient}
    dk, dv, dq = (jax.ShapeDtypeStruct(operands[n].shape, operands[n].dtype) for n in "kvq")
    run = partial(_call, plan, names=names, operands=operands)
    dk, dv = run(
        _key_kernel, "attention_backward_keys", out_shapes=[dk, dv],
        tile=_BY_KEYS, split=("k", "v", "kv_ids"),
    )  # fmt: skip
    (dq,) = run(
        _query_kernel, "attention_backward_queries", out_shapes=[dq],
        tile=_BY_QUERIES, split=("q", "q_ids", "log_sum", "out", "gradient"),
    )  # fmt: skip
    return dq, dk, dv, None, None, None


_attention = differentiable(_forward, _backward, static=(0,))


def _call(
    plan: Plan,
    kernel,
    name: str,
    names: Names,
    operands: dict[str, Array],
    *,
    tile: Tile,
    split: tuple[str, ...],
    out_shapes: list[jax.ShapeDtypeStruct],
):
    """Run a kernel on a grid of (blocks and heads, rows); without CUDA, Pallas interprets it.

    A program gets its block of the outputs and of the operands in `split`, and all positions of the
    other operands. Triton's third grid axis remains free for `jax.vmap` over the runs of a sweep.
    """
    rows, length, heads, _ = operands[split[0]].shape

    def spec(shape: tuple[int, ...], is_split: bool) -> pl.BlockSpec:
        def at(n):
            return n // heads if is_split else 0

        if len(shape) == 4:  # (B, L, H, K)
            sizes = (None, tile.own if is_split else shape[1], None, shape[3])
            return pl.BlockSpec(sizes, lambda n, b: (b, at(n), n % heads, 0))
        part = tile.own if is_split else shape[-1]
        if len(shape) == 3:  # (B, H, L)
            return pl.BlockSpec((None, None, part), lambda n, b: (b, n % heads, at(n)))
        return pl.BlockSpec((None, part), lambda n, b: (b, at(n)))

    specs = {name: spec(x.shape, name in split) for name, x in operands.items()}
    word_specs = Names(
        pl.BlockSpec((2,), lambda n, b: (0,)),
        pl.BlockSpec((1,), lambda n, b: (n % heads,)),
        pl.BlockSpec((1,), lambda n, b: (b,)),
    )
    call = partial(
        pl.pallas_call,
        partial(kernel, plan, tile, heads),
        grid=(length // tile.own * heads, rows),
        in_specs=[word_specs, specs],
        out_specs=[spec(x.shape, True) for x in out_shapes],
        out_shape=out_shapes,
        name=name,
    )
    # Choose at lowering, because a step compiled ahead of time is traced elsewhere.
    params = plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages)
    on_cuda, elsewhere = call(compiler_params=params), call(interpret=True)
    return jax.lax.platform_dependent(names, operands, cuda=on_cuda, default=elsewhere)


def _forward_kernel(plan: Plan, tile: Tile, heads: int, names: Names, refs, out_ref, log_sum_ref):
    """Attend from one block of queries to the keys that it sees, with a running softmax."""
    q, ids = refs["q"][...], refs["q_ids"][...]
    first = pl.program_id(0) // heads * tile.own

    def over(index, sums):
        out, top, total = sums
        part = pl.ds(index * tile.step, tile.step)
        visible = _visible(plan, ids, refs["kv_ids"][part], first, index * tile.step)
        scores = _product(q, refs["k"][part, :].T) * (plan.scale * LOG2_E)
        scores = jnp.where(visible, scores, MASKED_SCORE)
        highest = jnp.maximum(top, scores.max(-1))
        shrink, weights = jnp.exp2(top - highest), jnp.exp2(scores - highest[:, None])
        total = total * shrink + weights.sum(-1)
        weights = _kept(plan, weights, names, first, index * tile.step)
        v = refs["v"][part, :]
        return out * shrink[:, None] + _product(weights.astype(v.dtype), v), highest, total

    start = (
        jnp.zeros(q.shape, jnp.float32),
        jnp.full(tile.own, -jnp.inf, jnp.float32),
        jnp.zeros(tile.own, jnp.float32),
    )
    out, top, total = _loop(plan, tile, first, refs["kv_ids"].shape[0], over, start)
    out_ref[...] = (out * (plan.grow / total)[:, None]).astype(out_ref.dtype)
    log_sum_ref[...] = top + jnp.log2(total)


def _key_kernel(plan: Plan, tile: Tile, heads: int, names: Names, refs, dk_ref, dv_ref):
    k, v, ids = refs["k"][...], refs["v"][...], refs["kv_ids"][...]
    first = pl.program_id(0) // heads * tile.own

    def over(index, sums):
        dk, dv = sums
        part = pl.ds(index * tile.step, tile.step)
        q, gradient = refs["q"][part, :], refs["gradient"][part, :]
        at = index * tile.step, first
        visible = _visible(plan, refs["q_ids"][part], ids, *at, keys_first=True)
        scores = _product(k, q.T) * (plan.scale * LOG2_E) - refs["log_sum"][part][None, :]
        weights = jnp.where(visible, jnp.exp2(scores), 0.0)
        kept = _kept(plan, weights, names, *at, keys_first=True)
        dv = dv + _product(kept.astype(gradient.dtype), gradient)
        dweights = _kept(plan, _product(v, gradient.T), names, *at, keys_first=True) * plan.grow
        mean = _row_products(gradient, refs["out"][part, :])
        dscores = (weights * (dweights - mean[None, :])).astype(q.dtype)
        return dk + _product(dscores, q), dv

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = _loop(plan, tile, first, refs["q_ids"].shape[0], over, (zeros, zeros))
    dk_ref[...] = (dk * plan.scale).astype(dk_ref.dtype)
    dv_ref[...] = (dv * plan.grow).astype(dv_ref.dtype)


def _query_kernel(plan: Plan, tile: Tile, heads: int, names: Names, refs, dq_ref):
    q, gradient, ids = refs["q"][...], refs["gradient"][...], refs["q_ids"][...]
    first, log_sum = pl.program_id(0) // heads * tile.own, refs["log_sum"][...]
    mean = _row_products(gradient, refs["out"][...])

    def over(index, dq):
        part = pl.ds(index * tile.step, tile.step)
        k, at = refs["k"][part, :], (first, index * tile.step)
        visible = _visible(plan, ids, refs["kv_ids"][part], *at)
        scores = _product(q, k.T) * (plan.scale * LOG2_E) - log_sum[:, None]
        weights = jnp.where(visible, jnp.exp2(scores), 0.0)
        dweights = _product(gradient, refs["v"][part, :].T)
        dweights = _kept(plan, dweights, names, *at) * plan.grow
        return dq + _product((weights * (dweights - mean[:, None])).astype(k.dtype), k)

    dq = _loop(plan, tile, first, refs["kv_ids"].shape[0], over, jnp.zeros(q.shape, jnp.float32))
    dq_ref[...] = (dq * plan.scale).astype(dq_ref.dtype)


def _loop(plan: Plan, tile: Tile, first, length: int, over, start):
    """Run `over` in steps of `tile.step` over the positions that the block at `first` can see."""
    if plan.window is None:
        return jax.lax.fori_loop(0, length // tile.step, over, start)
    lowest = jnp.maximum(first - plan.window, 0) // tile.step
    highest = jnp.minimum(first + tile.own + plan.window - 1, length - 1) // tile.step
    return jax.lax.fori_loop(lowest, highest + 1, over, start)


def _visible(plan: Plan, q_ids, kv_ids, q_first, kv_first, *, keys_first: bool = False):
    """Return the mask of keys that each query sees; with `keys_first`, keys are on axis 0."""
    queries, keys = _axes(q_ids, kv_ids, keys_first)
    visible = queries == keys
    if plan.window is None:
        return visible
    places = (q_first + jnp.arange(len(q_ids)), kv_first + jnp.arange(len(kv_ids)))
    queries, keys = _axes(*places, keys_first)
    return visible & (jnp.abs(queries - keys) <= plan.window)


def _kept(plan: Plan, x, names: Names, q_first, kv_first, *, keys_first: bool = False):
    """Zero the entries of `x` that `keep_mask` (B, H, L, S) drops, without scaling the others."""
    if not plan.rate:
        return x
    num_queries, num_keys = x.shape[::-1] if keys_first else x.shape
    queries, keys = _axes(
        (q_first + jnp.arange(num_queries)).astype(jnp.uint32),
        (kv_first + jnp.arange(num_keys)).astype(jnp.uint32),
        keys_first,
    )
    words = names.step[0], names.step[1], names.rows[0], names.heads[0]
    return jnp.where(keep_at(plan.rate, *words, queries, keys), x, 0.0)


def _axes(queries, keys, keys_first: bool):
    """Put queries and keys on separate axes, keys on axis 0 if `keys_first`."""
    if keys_first:
        return queries[None, :], keys[:, None]
    return queries[:, None], keys[None, :]


def _row_products(a, b):
    """Return the inner product of each row of `a` and the same row of `b`, in float32."""
    return (a.astype(jnp.float32) * b.astype(jnp.float32)).sum(-1)
