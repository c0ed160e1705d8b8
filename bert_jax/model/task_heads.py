"""Heads for fine-tuning, each on the encoder that pretraining made.

    config = TaskHeadConfig("classification", num_labels=2)
    params = init_task_params(model, config, key, encoder=pretrained["encoder"])
    logits = apply_task(model, config, params, tokens, type_ids, segment_ids)

Parameters are a nested dict with the entries `encoder` and `head`. All three heads are dropout and
one affine map (Devlin et al. 2018, section 4); they differ in what they look at.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer, UInt32

from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import dropout
from bert_jax.model.encoder import Encoder
from bert_jax.model.heads import Params, axes_of, encode
from bert_jax.model.layers import Affine
from bert_jax.model.layout import Layout

_SITE = 1 << 16
"""Number of the head's dropout, beyond those of any encoder."""


@dataclass(frozen=True)
class TaskHeadConfig:
    """Kind and size of a head."""

    kind: Literal["classification", "tagging", "span"]
    """classification: from the pooled first token (regression too, with one label); tagging: from
    each token; span: two scores a token, that the answer starts there and that it ends there."""
    num_labels: int = 2
    dropout_rate: float = 0.1
    """Before the affine map; 0 for span heads as published."""

    def __post_init__(self) -> None:
        """Refuse a head without outputs."""
        if self.num_labels < 1:
            raise UserError(f"the head has {self.num_labels} labels; it needs at least 1")
        if self.kind == "span" and self.num_labels != 2:
            raise UserError(f"a span head has 2 outputs, start and end, not {self.num_labels}")
        if not 0 <= self.dropout_rate < 1:
            raise UserError(f"the head's dropout_rate is {self.dropout_rate}; it must be in [0, 1)")


class TaskModel(nnx.Module):
    """Encoder and head."""

    def __init__(self, config: ModelConfig, head: TaskHeadConfig, rngs: nnx.Rngs):
        self.encoder = Encoder(config, rngs)
        self.head = _head(config, head, rngs)


def init_task_params(
    config: ModelConfig, head: TaskHeadConfig, key: Array, *, encoder: Params | None = None
) -> Params:
    """Fresh parameters, those of `encoder` kept where they are given.

    Args:
        config: The architecture.
        head: The head.
        key: Key of the random numbers; the head's do not depend on whether an encoder is given.
        encoder: The entry `encoder` of pretrained parameters. What it lacks (a pooler) is fresh.
    """
    params = _fresh(config, head, key)
    return {**params, "encoder": {**params["encoder"], **(encoder or {})}}


@partial(jax.jit, static_argnums=(0, 1))
def _fresh(config: ModelConfig, head: TaskHeadConfig, key: Array) -> Params:
    return nnx.to_pure_dict(nnx.state(TaskModel(config, head, nnx.Rngs(params=key)), nnx.Param))


def task_logical_axes(config: ModelConfig, head: TaskHeadConfig) -> Params:
    """Name the logical axes of each array of `init_task_params`."""
    return axes_of(nnx.eval_shape(lambda: nnx.state(TaskModel(config, head, nnx.Rngs(params=0)))))


def apply_task(
    config: ModelConfig,
    head: TaskHeadConfig,
    params: Params,
    tokens: Integer[Array, "B L"],
    type_ids: Integer[Array, "B L"],
    segment_ids: Integer[Array, "B L"],
    *,
    dropout_seed: UInt32[Array, ""] | None = None,
    row_index: UInt32[Array, " B"] | None = None,
    layout: Layout | None = None,
) -> Float[Array, "B C"] | Float[Array, "B L C"]:
    """Logits in float32: (B, num_labels) of a classification, else (B, L, num_labels).

    Args:
        config: The architecture.
        head: The head.
        params: Parameters, as from `init_task_params`.
        tokens: Token ids, below `vocab_size` (not checked here).
        type_ids: Sentence types.
        segment_ids: 1, and 0 for padding.
        dropout_seed: Different at every step; None switches dropout off.
        row_index: Names the rows of the batch; needed with `dropout_seed`.
        layout: Layout of the batch on a mesh; None on one device.
    """
    hidden, pooled = encode(
        config, params, tokens, type_ids, segment_ids,
        dropout_seed=dropout_seed, row_index=row_index, layout=layout,
    )  # fmt: skip
    x = pooled if head.kind == "classification" else hidden
    if dropout_seed is not None and row_index is not None:
        x = dropout(x, head.dropout_rate, dropout_seed, _SITE, row_index)
    return apply_head(config, head, params["head"], x)


def apply_head(
    config: ModelConfig, head: TaskHeadConfig, params: Params, x: Float[Array, "... D"]
) -> Float[Array, "... C"]:
    """Compute the logits, in float32, from what the head reads.

    Args:
        config: The architecture.
        head: The head.
        params: The entry `head` of the parameters.
        x: Pooled first tokens of a classification, else the states of tokens.
    """
    logits: Array = nnx.merge(nnx.graphdef(_abstract_head(config, head)), params)(x)
    return logits.astype(jnp.float32)


def _head(config: ModelConfig, head: TaskHeadConfig, rngs: nnx.Rngs) -> Affine:
    return Affine(config, {"embed": config.hidden_dim}, {None: head.num_labels}, rngs)


@lru_cache(maxsize=32)
def _abstract_head(config: ModelConfig, head: TaskHeadConfig) -> Affine:
    built: Affine = nnx.eval_shape(lambda: _head(config, head, nnx.Rngs(params=0)))
    return built


def head_shapes(config: ModelConfig, head: TaskHeadConfig) -> Params:
    """Make the entry `head` of `init_task_params` with shapes in place of arrays."""
    shapes: Params = nnx.to_pure_dict(nnx.state(_abstract_head(config, head), nnx.Param))
    return shapes
