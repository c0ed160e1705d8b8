"""Heads for fine-tuning a pretrained encoder.

    config = TaskHeadConfig("classification", num_labels=2)
    params = init_task_params(model, config, key, encoder=pretrained["encoder"])
    hidden = encode(model, params, tokens, type_ids, segment_ids)
    logits = head_logits(model, config, params, hidden, segment_ids)

Parameters are a nested dict with the entries `encoder` and `head`. A head is dropout followed by a
network of `NETWORKS`. For classification, tagging and span the network is an affine map (Devlin et
al. 2018, section 4). If the model has no pooler, there may be an entry `transform`, a dense layer
before the head (Warner et al. 2024, ModernBERT). For parsing the network is a `BiaffineHead`, which
scores for each pair of words the arc (the second word is the syntactic head of the first) and each
relation of the arc (Dozat and Manning 2017, Deep Biaffine Attention, section 2).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from bert_jax.config.bounds import Bounded, Count, Rate
from bert_jax.errors import UserError
from bert_jax.model import heads
from bert_jax.model.config import ModelConfig
from bert_jax.model.dropout import Stream, dropout
from bert_jax.model.embedding import Pooled, pool_tokens
from bert_jax.model.encoder import Encoder
from bert_jax.model.layers import ACTIVATIONS, Affine, Norm, einsum_float32, output_std

ARC_WIDTH, RELATION_WIDTH = 512, 128
"""Widths of the vectors that score arcs and relations; the paper has 500 and 100."""
SLOPE = 0.1  # slope of the leaky rectifier below 0
_SITE = 1 << 16
"""Dropout site of the head, greater than every site of an encoder."""


class BiaffineHead(nnx.Module):
    """Scores of arcs, and of the arcs' relations, between any two positions of a row."""

    def __init__(self, config: ModelConfig, num_relations: int, rngs: nnx.Rngs):
        def vectors(width: int) -> Affine:
            return Affine(config, {"embed": config.hidden_dim}, {None: width}, rngs)

        self.num_relations = num_relations
        self.arc_word, self.arc_head = vectors(ARC_WIDTH), vectors(ARC_WIDTH)
        self.relation_word, self.relation_head = vectors(RELATION_WIDTH), vectors(RELATION_WIDTH)
        # The biases of `arc` and `relation` add scores that depend only on the head.
        self.arc = Affine(config, {None: ARC_WIDTH}, {None: ARC_WIDTH}, rngs)
        size = num_relations * RELATION_WIDTH
        self.relation = Affine(config, {None: RELATION_WIDTH}, {None: size}, rngs)
        self.relation_of_word = Affine(config, {None: RELATION_WIDTH}, {None: num_relations}, rngs)

    def __call__(self, hidden: Float[Array, "B L D"]) -> Float[Array, "B L L C"]:
        """Score position j as the head of position i, in float32.

        On the last axis, entry 0 is the score of the arc, and entry 1 + r the score of relation r.
        """
        rectified = partial(jax.nn.leaky_relu, negative_slope=SLOPE)
        word, head = rectified(self.arc_word(hidden)), rectified(self.arc_head(hidden))
        arcs = einsum_float32("bie,bje->bij", self.arc(word), head)
        word, head = rectified(self.relation_word(hidden)), rectified(self.relation_head(hidden))
        mapped = self.relation(word).reshape(*word.shape[:-1], self.num_relations, RELATION_WIDTH)
        relations = einsum_float32("bire,bje->bijr", mapped, head)
        relations += self.relation_of_word(word).astype(jnp.float32)[:, :, None]
        return jnp.concatenate([arcs[..., None], relations], axis=-1)


HeadNetwork = Literal["classification", "tagging", "span", "parsing"]
NETWORKS: Mapping[HeadNetwork, heads.Build] = {
    "classification": heads.LinearHead, "tagging": heads.LinearHead, "span": heads.LinearHead,
    "parsing": BiaffineHead,
}  # fmt: skip
"""Network classes, constructed with (config, num_labels, rngs). A network maps states (B, L, D), or
(B, D) if they are pooled for classification, to float32 logits."""


@dataclass(frozen=True)
class TaskHeadConfig(Bounded, section="head"):
    """Kind and size of a head."""

    kind: HeadNetwork
    """Kind of head. `classification` gives logits for a row (regression has one label), `tagging`
    logits for each token. `span` scores each token as the start and as the end of an answer.
    `parsing` scores, for each pair of tokens, the second token as the head of the first."""
    num_labels: Count = 2
    dropout_rate: Rate = 0.1
    """Dropout rate before the network; published span heads have 0."""
    pooling: Pooled = "cls"
    """Input of a classification head. The field has no effect if the encoder has a pooler."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "span" and self.num_labels != 2:
            raise UserError(
                f"head.num_labels is {self.num_labels}, but a span head has 2 outputs, start and "
                "end; expected 2"
            )


class TaskTransform(nnx.Module):
    """Dense layer and activation, followed by a norm if `head_transform` is true."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        width = config.hidden_dim
        self.activation = config.head_activation or config.activation
        self.dense = Affine(
            config, {"embed": width}, {None: width}, rngs, bias=config.head_bias,
            std=output_std(config),
        )  # fmt: skip
        self.norm = Norm(config) if config.head_transform else None

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Transform the states of each position."""
        x = ACTIVATIONS[self.activation](self.dense(x))
        return x if self.norm is None else self.norm(x)


def has_transform(config: ModelConfig, head: TaskHeadConfig) -> bool:
    """Return true if there is a dense layer before the head (`transform`)."""
    return not config.pooler and (config.head_transform or head.kind == "classification")


def reads_all_tokens(config: ModelConfig, head: TaskHeadConfig) -> bool:
    """Return true if a head reads tokens other than the first."""
    return head.kind != "classification" or not (config.pooler or head.pooling == "cls")


class TaskModel(nnx.Module):
    """Encoder and head."""

    def __init__(self, config: ModelConfig, head: TaskHeadConfig, rngs: nnx.Rngs):
        self.encoder = Encoder(config, pools=config.pooler, rngs=rngs)
        if has_transform(config, head):
            self.transform = TaskTransform(config, rngs)
        self.head = NETWORKS[head.kind](config, head.num_labels, rngs)


def init_task_params(
    config: ModelConfig, head: TaskHeadConfig, key: Array, *, encoder: heads.Params | None = None
) -> heads.Params:
    """Make fresh parameters; the entries of a pretrained `encoder` replace the fresh entries."""
    params = heads.init_params(config, key, TaskModel, head)
    return {**params, "encoder": {**params["encoder"], **(encoder or {})}}


def starting_params(
    config: ModelConfig, head: TaskHeadConfig, params: heads.Params
) -> heads.Params:
    """Select the entries of a model's parameters from which the training of a new head starts.

    The entries are `encoder` and, if the new head has a transform, `transform`: the old head's
    transform or else the dense layer and the norm of the masked-LM head, if these exist and fit.
    Transformers also loads this layer and norm, because their names match.
    """
    start = {"encoder": params["encoder"]}
    maps = config.head_transform and not config.projects_embeddings
    if has_transform(config, head) and "transform" in params:
        start["transform"] = params["transform"]
    elif has_transform(config, head) and heads.MASKED_LM in params and maps:
        start["transform"] = {part: params[heads.MASKED_LM][part] for part in ("dense", "norm")}
    return start


def head_logits(
    config: ModelConfig,
    head: TaskHeadConfig,
    params: heads.Params,
    hidden: Float[Array, "B P D"],
    segment_ids: Integer[Array, "B L"],
    stream: Stream = None,
) -> Float[Array, "B ..."]:
    """Compute a head's float32 logits: (B, C) for classification, (B, L, ...) for other heads.

    `hidden` are the last states of all tokens, or of only the first token (P = 1) if
    `reads_all_tokens` is false. For classification, a row must be one segment with an id above 0.
    """
    x, pooling = hidden, head.pooling if head.kind == "classification" else None
    if pooling and config.pooler:
        x = heads.pool(config, params, hidden)
    elif pooling == "cls":
        x = hidden[:, 0]
    elif pooling == "mean":
        x = pool_tokens("mean", hidden, segment_ids > 0).astype(hidden.dtype)
    if has_transform(config, head):
        x = heads.with_params(params["transform"], TaskTransform, config)(x)
    x = dropout(x, head.dropout_rate, stream, _SITE)
    network = heads.with_params(params["head"], NETWORKS[head.kind], config, head.num_labels)
    logits: Array = network(x)
    late = pooling == "late" and not config.pooler
    return pool_tokens("mean", logits, segment_ids > 0) if late else logits
