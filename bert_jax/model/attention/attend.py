"""Attention within segments, and the choice of its implementation.

One rule covers padding and packing: a query sees the keys whose segment id equals its own. Each
implementation makes the mask (B, L, S) from the segment ids itself.

Only `xla` has relative positions.

| `attention_impl` | for | with dropout | causal | extra memory |
| --- | --- | --- | --- | --- |
| `xla` | any device; the reference | yes | yes | several (B, H, L, S) arrays |
| `xla` with a window | any device | no | yes | several (B, H, L, 3 window) arrays |
| `fused` | TPU, lengths in multiples of 128 up to 8192 | yes | no | (B, H, L) |
| `splash` | TPU, lengths in multiples of 128 | no | yes, skips blocks | (B, H, L) |
| `cudnn` | GPU since Ampere, even lengths | no | yes, skips blocks | (B, L, S) |
| `triton` | GPU since Ampere, lengths in multiples of 64 | yes | no | (B, H, L) |
"""

import logging
from functools import lru_cache, partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bert_jax.errors import UserError
from bert_jax.model.attention.xla import Asked, banded_attention, is_banded, xla_attention
from bert_jax.model.dropout import DropoutStream
from bert_jax.model.layout import OnMesh, device_kind, platform
from bert_jax.model.rotation import rotate

AttentionImpl = Literal["auto", "xla", "splash", "cudnn", "fused", "triton"]


_PLATFORMS: dict[AttentionImpl, str] = {
    "fused": "tpu", "splash": "tpu", "cudnn": "gpu", "triton": "gpu",
}  # fmt: skip
"""Platform of each kernel; `auto` tries a platform's kernels in this order, then `xla`."""
_HAS_DROPOUT = ("fused", "triton")
FUSED_FROM_LENGTH = 128
"""Smallest length of queries and of keys for which `auto` takes a kernel on a TPU.

From this length on, a training step compiled for v5e with dropout 0.1 takes fewer estimated cycles
with `fused`. The numbers for `fused` are XLA's estimate plus the scheduled bundles of the kernels.
Two layers of width 768, 16 rows of L=512: `xla` 21.8 M, `fused` 16.2 + 1.9 M. One layer of width
512, 64 rows of L=128: `xla` 8.24 M, `fused` 7.69 + 0.26 M."""

_SMALL_VMEM = ("tpu v3", "tpu v4")
"""TPU kinds whose VMEM (16 MiB) is too small for the rotation angles of a long row."""

log = logging.getLogger("bert_jax.attention")
"""Logger of warnings about the chosen implementation; a run copies them to `events.jsonl`."""

_HEAD_AXES = ("batch", "length", "heads", "head_dim")

TRITON_TO_LENGTH = 1024
"""Largest length at which `auto` prefers `triton` to cuDNN if there is no dropout.

Forward and backward on an H200, 12 heads of 64, bfloat16: `triton` takes 0.57 times cuDNN's time at
L=128, 0.92 at L=512 and 0.96 at L=1024 (docs/benchmarks.md)."""


def attend(
    asked: Asked, impl: AttentionImpl = "auto", layout: OnMesh = None, layers: int = 1
) -> Float[Array, "B L H K"]:
    """Attend from each query to the keys with its segment id (Vaswani et al. 2017, section 3.2.1).

    `auto` picks the fastest implementation that supports `asked`. On a CPU, `fused` and `splash`
    run in Pallas's interpreter, for tests. `layout` may be None on one device and in a shard_map.
    `layers` is the number of layers whose scores `xla` keeps at a time, for a warning.
    Raise a UserError if `impl` does not support `asked` here. The message names alternatives.
    """
    if asked.stream is None:
        asked = asked._replace(dropout_rate=0.0)
    q, k, v = asked[:3]
    here = platform(layout)
    keeps_half = here == "gpu" and np.dtype(q.dtype).itemsize == 2
    in_band, when_kept = is_banded(asked), None
    if impl == "auto":
        impl = choose(here, asked)
        if impl == "xla" and not in_band and (cause := _fell_back(here, asked)):
            when_kept = partial(_warn_once, _scores_kept(cause, asked, keeps_half, layers))
    elif impl != "xla":  # `xla` supports everything, even sizes that are still symbolic
        _refuse(impl, here, asked)
    if impl == "cudnn" and in_band:
        impl = "xla"
        _warn_once(
            "attention_impl is 'cudnn', whose window covers only one side of a query, so "
            "local layers use 'xla', block by block"
        )
    kind = device_kind(layout) or jax.devices()[0].device_kind.lower()
    rotates_inside = impl == "fused" and kind not in _SMALL_VMEM
    if asked.angles is not None and not rotates_inside:
        q, k = (rotate(x, *asked.angles) for x in (q, k))
        asked = asked._replace(angles=None)
    if k.shape[2] != q.shape[2]:
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    asked = asked._replace(q=q, k=k, v=v)
    if impl == "xla":
        if in_band:
            return banded_attention(asked, keeps_half)
        return xla_attention(asked, when_kept, keeps_half)

    from bert_jax.model.attention import fused, library, triton  # importing Pallas is slow

    arrays = list(asked[:5])
    axes: list[tuple[str | None, ...]] = [_HEAD_AXES] * 3 + [("batch", "length")] * 2
    if impl in _HAS_DROPOUT:
        arrays += [
            jnp.arange(q.shape[2], dtype=jnp.uint32),
            *(asked.stream or (jnp.uint32(0), jnp.zeros(q.shape[0], jnp.uint32))),
            jnp.asarray(asked.site, jnp.uint32),
            *(asked.angles or ()),
        ]
        axes += [("heads",), (), ("batch",), ()]
        axes += [("batch", "length", None)] * len(asked.angles or ())

    def run(q: Array, k: Array, v: Array, q_ids: Array, kv_ids: Array, *others: Array) -> Array:
        """Attend on one device, with the device's shards of the arrays."""
        mine = asked._replace(q=q, k=k, v=v, q_segment_ids=q_ids, kv_segment_ids=kv_ids)
        if impl == "splash":
            return library.splash_attention(mine)
        if impl == "cudnn":
            return library.cudnn_attention(mine)
        heads, seed, row_index, site, *angles = others
        mine = mine._replace(stream=DropoutStream(seed, row_index), site=site)
        if angles:
            mine = mine._replace(angles=(angles[0], angles[1]))
        attention = fused.fused_attention if impl == "fused" else triton.triton_attention
        return attention(mine, heads)

    return (run if layout is None else layout.local(run, axes, _HEAD_AXES))(*arrays)


def choose(platform: str, asked: Asked) -> AttentionImpl:
    """Choose the implementation for `auto` on a platform.

    On a GPU, if a window excludes most scores, the choice is `xla`, which computes only blocks that
    overlap the window. cuDNN, whose window covers one side of a query, would compute all scores.
    """
    if platform == "gpu" and is_banded(asked):
        return "xla"
    if platform == "tpu" and min(asked.q.shape[1], asked.k.shape[1]) < FUSED_FROM_LENGTH:
        return "xla"
    obstacles = _obstacles(platform, asked)
    if obstacles.get("triton", "") is None and asked.k.shape[1] <= TRITON_TO_LENGTH:
        return "triton"
    for impl, reason in obstacles.items():
        if reason is None and (not asked.dropout_rate or impl in _HAS_DROPOUT):
            return impl
    return "xla"


def _obstacles(platform: str, asked: Asked) -> dict[AttentionImpl, str | None]:
    """Map each kernel of the platform to the reason why it does not support `asked`, or to None."""
    return {impl: _unsupported(impl, asked) for impl in _PLATFORMS if _PLATFORMS[impl] == platform}


def _unsupported(impl: AttentionImpl, asked: Asked) -> str | None:
    """Name the requirement of `impl` that `asked` does not meet, or return None if all are met."""
    from bert_jax.model.attention import fused, library, triton

    if asked.relative is not None:
        return "attention without relative positions (model.positions)"
    sizes = asked.q.shape[1], asked.k.shape[1], asked.q.shape[3]
    if impl == "cudnn":
        return library.cudnn_unsupported(*sizes, asked.q.dtype)
    if impl == "splash":
        return library.splash_unsupported(*sizes[:2])
    if asked.causal:
        return "queries that also see later keys, not the causal queries of a decoder"
    if impl == "triton":
        return triton.unsupported(*sizes, asked.q.dtype)
    return fused.unsupported(*sizes)


def _fell_back(platform: str, asked: Asked) -> str | None:
    """Return the reasons why `auto` chose `xla` and no kernel, for a warning.

    The result is None for short rows, where a kernel gains nothing, and "" if there is no kernel.
    """
    if min(asked.q.shape[1], asked.k.shape[1]) < FUSED_FROM_LENGTH:
        return None
    reasons = _obstacles(platform, asked)
    for impl, reason in reasons.items():
        if reason is None:  # only dropout rules the kernel out
            return f"{impl!r} has no dropout: set attention_dropout_rate to 0 to use it"
    return "; ".join(f"{impl!r} needs {reason}" for impl, reason in reasons.items())


def _scores_kept(cause: str, asked: Asked, keeps_half: bool, layers: int) -> str:
    _, queries, heads, _ = asked.q.shape
    size = layers * heads * queries * asked.k.shape[1] * (2 if keeps_half else 4) / 2**30
    stored = f"probabilities in {np.dtype(asked.q.dtype).name}" if keeps_half else "scores"
    kept = "remat=full keeps only one layer's" if layers > 1 else "one layer at a time"
    return (
        f"attention uses 'xla', which computes scores in float32 and keeps {size:.2g} GiB of "
        f"{stored} for each row of {queries} tokens until the backward pass ({kept}). {cause}"
    )


@lru_cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


def _refuse(impl: AttentionImpl, here: str, asked: Asked) -> None:
    where = f"attention_impl is {impl!r}, which"  # in section model (fine-tuning: training)
    instead = "set attention_impl to 'auto' or 'xla'"
    wanted = _PLATFORMS[impl]
    if here != wanted and "gpu" in (here, wanted):
        raise UserError(f"{where} runs on {wanted.upper()}s; this is a {here.upper()}: {instead}")
    if asked.dropout_rate and impl not in _HAS_DROPOUT:
        other = "'triton' or 'xla'" if here == "gpu" else "'fused' or 'xla'"
        raise UserError(
            f"{where} has no dropout, but attention_dropout_rate is {asked.dropout_rate}: set it "
            f"(in fine-tuning, training.dropout_rate) to 0, or attention_impl to 'auto', {other}"
        )
    if reason := _unsupported(impl, asked):
        raise UserError(f"{where} needs {reason}: {instead}")
