"""Heads for fine-tuning, each on the encoder that pretraining made.

    config = TaskHeadConfig("classification", num_labels=2)
    params = init_task_params(model, config, key, encoder=pretrained["encoder"])
    logits = apply_task(model, config, params, tokens, type_ids, segment_ids)

Parameters are a nested dict with the entries `encoder` and `head`. A head is dropout and a network
of `NETWORKS`; the first three are one affine map (Devlin et al. 2018, section 4) and differ in what
they look at. Encoders without a pooler have an entry `transform` too, a map before that (Warner et
al. 2024, ModernBERT).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flax import nnx
from jaxtyping import Array, Float, Integer

from bert_jax.errors import UserError
from bert_jax.model.biaffine import BiaffineHead
from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import DropoutStream, dropout
from bert_jax.model.encoder import Encoder, PooledEncoder
from bert_jax.model.heads import (
    Build,
    LinearHead,
    Params,
    encode,
    has_vocabulary_head,
    init_params,
    pool,
    vocabulary_transform,
    with_params,
)
from bert_jax.model.layers import ACTIVATIONS, Affine, Norm, output_std
from bert_jax.model.layout import Layout
from bert_jax.model.pooling import Pooled, pool_tokens

_SITE = 1 << 16
"""Number of the head's dropout, beyond any encoder's numbers."""

HeadNetwork = Literal["classification", "tagging", "span", "parsing"]
NETWORKS: Mapping[HeadNetwork, Build] = {
    "classification": LinearHead, "tagging": LinearHead, "span": LinearHead,
    "parsing": BiaffineHead,
}  # fmt: skip
"""Networks that end a head: `module(config, num_labels, rngs)` maps the states (B, D) of
classifications, (B, L, D) of all others, to logits in float32."""


@dataclass(frozen=True)
class TaskHeadConfig:
    """Kind and size of a head."""

    kind: HeadNetwork
    """classification: from the pooled first token (regression too, with one label); tagging: from
    each token; span: two scores a token, that the answer starts there and that it ends there;
    parsing: scores of each pair of tokens, that one is the head of the other."""
    num_labels: int = 2
    dropout_rate: float = 0.1
    """Rate of the dropout before the affine map; 0 for span heads as published."""
    pooling: Pooled = "cls"
    """Choice of a classification without a pooler."""

    def __post_init__(self) -> None:
        """Refuse a head without outputs."""
        if self.num_labels < 1:
            raise UserError(f"the head has {self.num_labels} labels; it needs at least 1")
        if self.kind == "span" and self.num_labels != 2:
            raise UserError(f"a span head has 2 outputs, start and end, not {self.num_labels}")
        if not 0 <= self.dropout_rate < 1:
            raise UserError(f"the head's dropout_rate is {self.dropout_rate}; it must be in [0, 1)")


class TaskTransform(nnx.Module):
    """Map, activation and norm, like the masked-LM head's.

    Where that head has none, only classifications have a map and an activation.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        width = config.hidden_dim
        self.activation = config.head_activation or config.activation
        self.dense = Affine(
            config, {"embed": width}, {None: width}, rngs, bias=config.head_bias,
            std=output_std(config),
        )  # fmt: skip
        self.norm = Norm(config) if config.head_transform else None

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Position by position."""
        x = ACTIVATIONS[self.activation](self.dense(x))
        return x if self.norm is None else self.norm(x)


def has_transform(config: ModelConfig, head: TaskHeadConfig) -> bool:
    """Say whether a head begins with a map of its own."""
    return not config.pooler and (config.head_transform or head.kind == "classification")


def reads_all_tokens(config: ModelConfig, head: TaskHeadConfig) -> bool:
    """Say whether a head reads other tokens than the first one."""
    return head.kind != "classification" or not (config.pooler or head.pooling == "cls")


class TaskModel(nnx.Module):
    """Encoder and head."""

    def __init__(self, config: ModelConfig, head: TaskHeadConfig, rngs: nnx.Rngs):
        self.encoder = PooledEncoder(config, rngs) if config.pooler else Encoder(config, rngs)
        if has_transform(config, head):
            self.transform = TaskTransform(config, rngs)
        self.head = NETWORKS[head.kind](config, head.num_labels, rngs)


def init_task_params(
    config: ModelConfig, head: TaskHeadConfig, key: Array, *, encoder: Params | None = None
) -> Params:
    """Make fresh parameters, but for the entries of `encoder`.

    `encoder` comes from pretrained parameters; an entry that it lacks (a pooler) is fresh. The
    head's numbers do not depend on whether an encoder is given.
    """
    params = init_params(config, key, TaskModel, head)
    return {**params, "encoder": {**params["encoder"], **(encoder or {})}}


def starting_params(config: ModelConfig, head: TaskHeadConfig, params: Params) -> Params:
    """Return the parts of a model's parameters with which the training of a head begins.

    The parts are `encoder` and, where the model has one, `transform`: that of an earlier head or of
    the masked-LM head, whose map and norm it is (as in Transformers, whose classes name both
    alike).
    """
    start = {"encoder": params["encoder"]}
    if not has_transform(config, head):
        return start
    if "transform" in params:
        return {**start, "transform": params["transform"]}
    if has_vocabulary_head(params) and config.head_transform and not config.projects_embeddings:
        return {**start, "transform": vocabulary_transform(params)}
    return start


def apply_task(
    config: ModelConfig,
    head: TaskHeadConfig,
    params: Params,
    tokens: Integer[Array, "B L"],
    type_ids: Integer[Array, "B L"],
    segment_ids: Integer[Array, "B L"],
    stream: DropoutStream | None = None,
    layout: Layout | None = None,
) -> Float[Array, "B ..."]:
    """Compute the logits in float32: (B, C) of a classification, else (B, L, ...).

    `params` come from `init_task_params`; the other arguments are `heads.encode`'s.
    """
    hidden = encode(config, params, tokens, type_ids, segment_ids, stream, layout)
    return head_logits(config, head, params, hidden, segment_ids, stream)


def head_logits(
    config: ModelConfig,
    head: TaskHeadConfig,
    params: Params,
    hidden: Float[Array, "B P D"],
    segment_ids: Integer[Array, "B L"],
    stream: DropoutStream | None = None,
) -> Float[Array, "B ..."]:
    """Compute the logits of `apply_task` from the last states.

    The first token's states are enough where `reads_all_tokens` says no. A row of a classification
    is one segment; its tokens are those whose segment id is not 0.
    """
    x, pooling = hidden, head.pooling if head.kind == "classification" else None
    if pooling and config.pooler:
        x = pool(config, params, hidden)
    elif pooling == "cls":
        x = hidden[:, 0]
    elif pooling == "mean":
        x = pool_tokens("mean", hidden, segment_ids > 0).astype(hidden.dtype)
    if has_transform(config, head):
        x = with_params(params["transform"], TaskTransform, config)(x)
    x = dropout(x, head.dropout_rate, stream, _SITE)
    logits: Array = with_params(params["head"], NETWORKS[head.kind], config, head.num_labels)(x)
    late = pooling == "late" and not config.pooler
    return pool_tokens("mean", logits, segment_ids > 0) if late else logits
