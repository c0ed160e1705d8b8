"""Positions of tokens in their segments, encoded as rotations of queries and keys or as sinusoids.

Sources: Su et al. 2021 (RoFormer), section 3.4.2, with entry i of a head paired with entry i + K/2
as in GPT-NeoX; Vaswani et al. 2017, section 3.5.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import Stream
from bert_jax.model.layout import OnMesh

Rotation = tuple[Float[Array, "B L J"], Float[Array, "B L J"]]
"""Cosines and sines of the angles of each token, in float32; J = K / 2."""


class Context(NamedTuple):
    """Inputs that embeddings and all layers share in a forward pass."""

    segment_ids: Integer[Array, "B L"]
    """Segment of each token, numbered from 1; 0 is padding. A token sees only its own segment."""
    positions: Integer[Array, "B L"] | None
    """Positions of the tokens; None means that positions count from 0 in each segment."""
    rotations: dict[str, Rotation]
    """Rotation for each kind of layer (G, L); empty unless `config.positions` is `rope`."""
    stream: Stream
    layout: OnMesh
    relative: Float[Array, "R D"] | None = None
    """Embeddings of distances, if `config.positions` is `relative` (see `Embeddings.shared`)."""


def make_context(
    config: ModelConfig,
    segment_ids: Integer[Array, "B L"],
    positions: Integer[Array, "B L"] | None = None,
    stream: Stream = None,
    layout: OnMesh = None,
) -> Context:
    """Make the inputs that all layers share; call this once per forward pass."""
    segment_ids = segment_ids.astype(jnp.int32)
    rotations = {}
    if config.positions == "rope":
        at = restarting_positions(segment_ids) if positions is None else positions
        bases = thetas(config).items()
        rotations = {letter: rotation(at, theta, config.head_dim) for letter, theta in bases}
    return Context(segment_ids, positions, rotations, stream, layout)


def thetas(config: ModelConfig) -> dict[str, float]:
    """Return the RoPE base (theta) of each kind of layer in `attention_pattern`."""
    both = {"G": config.rope_theta, "L": config.local_rope_theta}
    return {letter: both[letter] for letter in sorted(set(config.attention_pattern))}


def frequencies(theta: float, head_dim: int) -> Float[np.ndarray, " J"]:
    """Return theta^(-2 i / K), the angle from one token to the next, for each pair i of a head."""
    return (theta ** -(np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)


def restarting_positions(segment_ids: Integer[Array, "B L"]) -> Integer[Array, "B L"]:
    """Return the position of each token inside its run of equal segment ids, from 0."""
    index = jax.lax.broadcasted_iota(jnp.int32, segment_ids.shape, 1)
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def rotation(positions: Integer[Array, "B L"], theta: float, head_dim: int) -> Rotation:
    """Compute cosines and sines of position * theta^(-2 i / K) for the K/2 pairs of a head."""
    # Multiply element by element in float32: in a matrix product or in bfloat16, the angles of far
    # positions would lose all their bits.
    angles = positions[..., None].astype(jnp.float32) * frequencies(theta, head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "B L H K"], cos: Float[Array, "B L J"], sin: Float[Array, "B L J"]
) -> Float[Array, "B L H K"]:
    """Rotate the pairs (i, i + K/2) of each head, in float32; the result has the type of `x`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def sinusoids(positions: Integer[Array, "..."], width: int) -> Float[Array, "... D"]:
    """Encode position p as sin(p f) at index 2 i, cos(p f) at 2 i + 1; f = 10000^(-2 i / width)."""
    angles = positions[..., None].astype(jnp.float32) * frequencies(10000.0, width)
    return jnp.stack((jnp.sin(angles), jnp.cos(angles)), axis=-1).reshape(*positions.shape, width)
