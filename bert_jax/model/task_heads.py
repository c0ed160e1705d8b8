"""Heads for fine-tuning, each on the encoder that pretraining made.

    config = TaskHeadConfig("classification", num_labels=2)
    params = init_task_params(model, config, key, encoder=pretrained["encoder"])
    logits = apply_task(model, config, params, tokens, type_ids, segment_ids)

Parameters are a nested dict with the entries `encoder` and `head`. All three heads are dropout and
one affine map (Devlin et al. 2018, section 4); they differ in what they look at.
"""

from dataclasses import dataclass
from typing import Literal

from flax import nnx
from jaxtyping import Array, Float, Integer

from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import DropoutStream, dropout
from bert_jax.model.encoder import PooledEncoder
from bert_jax.model.heads import LinearHead, Params, encode, init_params, pool, with_params
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
    """Rate of the dropout before the affine map; 0 for span heads as published."""

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
        self.encoder = PooledEncoder(config, rngs)
        self.head = LinearHead(config, head.num_labels, rngs)


def init_task_params(
    config: ModelConfig, head: TaskHeadConfig, key: Array, *, encoder: Params | None = None
) -> Params:
    """Make fresh parameters, but for the entries of `encoder`.

    `encoder` comes from pretrained parameters; an entry that it lacks (a pooler) is fresh. The
    head's numbers do not depend on whether an encoder is given.
    """
    params = init_params(config, key, TaskModel, head)
    return {**params, "encoder": {**params["encoder"], **(encoder or {})}}


def apply_task(
    config: ModelConfig,
    head: TaskHeadConfig,
    params: Params,
    tokens: Integer[Array, "B L"],
    type_ids: Integer[Array, "B L"],
    segment_ids: Integer[Array, "B L"],
    stream: DropoutStream | None = None,
    layout: Layout | None = None,
) -> Float[Array, "B C"] | Float[Array, "B L C"]:
    """Compute the logits in float32: (B, C) of a classification, else (B, L, C).

    `params` come from `init_task_params`; the arrays and what follows are those of `heads.encode`.
    """
    hidden = encode(config, params, tokens, type_ids, segment_ids, stream, layout)
    x = pool(config, params, hidden) if head.kind == "classification" else hidden
    return apply_head(config, head, params, dropout(x, head.dropout_rate, stream, _SITE))


def apply_head(
    config: ModelConfig, head: TaskHeadConfig, params: Params, x: Float[Array, "... D"]
) -> Float[Array, "... C"]:
    """Compute the logits from pooled first tokens or states; `params` has a `head`."""
    logits: Array = with_params(params["head"], LinearHead, config, head.num_labels)(x)
    return logits
