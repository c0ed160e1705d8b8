"""Attention over segment ids, and the choice of an implementation.

Padding and packing are one thing here: a query sees the keys whose segment id equals its own. The
(B, L, S) mask that follows from it is built inside an implementation and never leaves it.

| `attention_impl` | for | with dropout | memory of its own |
| --- | --- | --- | --- |
| `xla` | any device; the reference | yes | (B, H, L, S), several times |
| `fused` | TPU, rows up to 1024 | yes | (B, H, L) |
| `splash` | TPU, any length | no | (B, H, L) |
| `cudnn` | GPU since Ampere, even lengths | no | (B, L, S) |
"""

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from bert_jax.errors import UserError
from bert_jax.model.attention.xla import xla_attention
from bert_jax.model.dropout import DropoutStream
from bert_jax.model.layout import Layout

AttentionImpl = Literal["auto", "xla", "splash", "cudnn", "fused"]


class _Kernel(NamedTuple):
    platform: Literal["tpu", "gpu"]
    has_dropout: bool


_KERNELS: dict[AttentionImpl, _Kernel] = {
    "fused": _Kernel("tpu", True),
    "splash": _Kernel("tpu", False),
    "cudnn": _Kernel("gpu", False),
}
"""Implementations that `auto` tries on their platform, in this order, before `xla`."""
FUSED_FROM_LENGTH = 128
"""`auto` takes `fused` on TPU for rows at least this long.

Cycles of a step compiled for v5e with dropout 0.1, XLA's estimates plus the kernels' scheduled
bundles: 2 layers of base width, L=512, 16 rows, 21.8 M with `xla`, 16.2 + 1.9 M with `fused`; one
layer of width 512, L=128, 64 rows, 8.24 M and 7.69 + 0.26 M."""

_log = logging.getLogger("bert_jax")
_HEAD_AXES = ("batch", "length", "heads", "head_dim")


def attend(
    q: Float[Array, "B L H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H K"],
    q_segment_ids: Integer[Array, "B L"],
    kv_segment_ids: Integer[Array, "B S"],
    *,
    dropout_rate: float = 0.0,
    stream: DropoutStream | None = None,
    site: int | Integer[Array, ""] = 0,
    impl: AttentionImpl = "auto",
    layout: Layout | None = None,
    layers: int = 1,
) -> Float[Array, "B L H K"]:
    """Scaled dot-product attention among equal segment ids (Vaswani et al. 2017, section 3.2.1).

    A query whose id no key has gets the plain mean of all values (from `cudnn` some other finite
    vector): finite and without meaning.

    Args:
      q: queries.
      k: keys.
      v: values.
      q_segment_ids: segment of each query; 0 is padding, which sees padding only.
      kv_segment_ids: segment of each key.
      dropout_rate: rate of the dropout of the attention probabilities.
      stream: names of the dropout masks; None means no dropout.
      site: number of this dropout in the model.
      impl: the implementation; `auto` picks the fastest that can do what is asked. `fused` and
        `splash` run in Pallas's interpreter on a CPU, for tests.
      layout: layout of the arguments on a mesh; None on one device, and inside a shard_map.
      layers: layers whose scores `xla` keeps at a time, for the warning.

    Raises:
      UserError: the implementation cannot do it; says what can.
    """
    rate = 0.0 if stream is None else dropout_rate
    platform = _platform(layout)
    sizes = (q.shape, k.shape[1], q.dtype)
    when_kept = None
    if impl == "auto":
        impl = choose(platform, *sizes, rate)
        if impl == "xla" and (cause := _fell_back(platform, *sizes)):
            when_kept = partial(_warn_of_scores, cause, q.shape[1:3], k.shape[1], layers)
    elif impl != "xla":  # which takes everything, sizes that are not known yet included
        _refuse(impl, platform, *sizes, rate)
    arrays = [q, k, v, q_segment_ids, kv_segment_ids]
    if impl == "xla":
        return xla_attention(
            *arrays, dropout_rate=rate, stream=stream, site=site, when_kept=when_kept
        )

    from bert_jax.model.attention import cudnn, fused, splash  # Pallas takes its time to import

    axes: list[tuple[str | None, ...]] = [_HEAD_AXES] * 3 + [("batch", "length")] * 2
    run: Callable[..., Array] = {
        "fused": partial(fused.fused_attention, dropout_rate=rate),
        "splash": splash.splash_attention,
        "cudnn": cudnn.cudnn_attention,
    }[impl]
    if impl == "fused":
        arrays += [
            jnp.arange(q.shape[2], dtype=jnp.uint32),
            *(stream or (jnp.uint32(0), jnp.zeros(q.shape[0], jnp.uint32))),
            jnp.asarray(site, jnp.uint32),
        ]
        axes += [("heads",), (), ("batch",), ()]
    if layout is not None:
        run = layout.local(run, axes, _HEAD_AXES)
    return run(*arrays)


def choose(
    platform: str, q_shape: tuple[int, ...], num_keys: int, dtype: np.dtype, rate: float
) -> AttentionImpl:
    """Choose the implementation for `auto`.

    Args:
      platform: "cpu", "gpu" or "tpu".
      q_shape: (B, L, H, K).
      num_keys: S.
      dtype: type of queries, keys and values.
      rate: rate of the attention dropout that is to be applied.
    """
    if platform == "tpu" and min(q_shape[1], num_keys) < FUSED_FROM_LENGTH:
        return "xla"
    for impl, reason in _obstacles(platform, q_shape, num_keys, dtype).items():
        if reason is None and (not rate or _KERNELS[impl].has_dropout):
            return impl
    return "xla"


def _obstacles(
    platform: str, q_shape: tuple[int, ...], num_keys: int, dtype: np.dtype
) -> dict[AttentionImpl, str | None]:
    """Say of each kernel of a platform why it cannot take these arrays, or None."""
    return {
        impl: _unsupported(impl, q_shape, num_keys, dtype)
        for impl, kernel in _KERNELS.items()
        if kernel.platform == platform
    }


def _unsupported(impl: str, q_shape: tuple[int, ...], num_keys: int, dtype: np.dtype) -> str | None:
    """Say why `impl` cannot take arrays of these shapes on its platform; None if it can."""
    from bert_jax.model.attention import cudnn, fused, splash

    _, length, _, head_dim = q_shape
    if impl == "cudnn":
        return cudnn.unsupported(length, num_keys, head_dim, dtype)
    if impl == "splash":
        return splash.unsupported(length, num_keys)
    return fused.unsupported(length, num_keys, head_dim)


def _fell_back(
    platform: str, q_shape: tuple[int, ...], num_keys: int, dtype: np.dtype
) -> str | None:
    """Say why `auto` has taken `xla`, and what avoids it; None where nothing is lost."""
    if min(q_shape[1], num_keys) < FUSED_FROM_LENGTH:
        return None
    reasons = _obstacles(platform, q_shape, num_keys, dtype)
    for impl, reason in reasons.items():
        if reason is None:  # the dropout alone stands in the way
            return f"{impl!r} has no dropout: model.attention_dropout_rate=0 takes it"
    return "; ".join(f"{impl!r} wants {reason}" for impl, reason in reasons.items())


@lru_cache
def _warn_of_scores(cause: str, queries: tuple[int, int], keys: int, layers: int) -> None:
    """Say once what the scores that `xla` keeps take; `queries` are L and H."""
    length, heads = queries
    size = layers * heads * length * keys * 4 / 2**30
    kept = "model.remat=full keeps one layer's" if layers > 1 else "of one layer at a time"
    _log.warning(
        "attention takes 'xla', which keeps %.2g GiB of scores for each row of %d tokens until the "
        "backward pass (%s). %s", size, length, kept, cause,
    )  # fmt: skip


def _refuse(
    impl: AttentionImpl,
    platform: str,
    q_shape: tuple[int, ...],
    num_keys: int,
    dtype: np.dtype,
    rate: float,
) -> None:
    """Raise a UserError where `impl` cannot do what is asked."""
    where = f"model.attention_impl is {impl!r}, which"
    instead = "set it to 'auto' or 'xla'"
    kernel = _KERNELS[impl]
    if platform != kernel.platform and "gpu" in (platform, kernel.platform):
        raise UserError(
            f"{where} runs on {kernel.platform.upper()}s; this is a {platform.upper()}: {instead}"
        )
    if rate and not kernel.has_dropout:
        other = "'xla'" if platform == "gpu" else "'fused' or 'xla'"
        raise UserError(
            f"{where} has no dropout, and model.attention_dropout_rate is {rate}: set "
            f"model.attention_dropout_rate to 0, or model.attention_impl to 'auto', {other}"
        )
    reason = _unsupported(impl, q_shape, num_keys, dtype)
    if reason is not None:
        raise UserError(f"{where} wants {reason}: {instead}")


def _platform(layout: Layout | None) -> str:
    """Return the platform where the step will run: not always the one where it is traced."""
    mesh = jax.sharding.get_abstract_mesh() if layout is None else layout.mesh
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh.devices.flat[0].platform
    # Inside a shard_map, with a layout or without: the mesh says what it is made of.
    if mesh.abstract_device is None:
        return jax.default_backend()
    kind = mesh.abstract_device.device_kind.lower()
    return "tpu" if kind.startswith("tpu") else "cpu" if kind == "cpu" else "gpu"
