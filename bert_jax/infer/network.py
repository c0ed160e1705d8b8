"""A model laid out for forward passes: what is read of the last layer is all that it computes.

Layers lie apart, not stacked: XLA on CPU copies a layer out of a stack each time it is used, a
fifth of the time of a batch of BERT-base (docs/experiments.md).
"""

import dataclasses
from functools import lru_cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from bert_jax.errors import UserError
from bert_jax.model.attention.attend import attend
from bert_jax.model.config import ModelConfig
from bert_jax.model.encoder import Embeddings, Layer, Pooler
from bert_jax.model.heads import MlmHead
from bert_jax.model.layers import Affine
from bert_jax.saved.model import SavedModel
from bert_jax.tasks.rows import Batch

Pooling = Literal["mean", "max", "cls", "pooler"]

_TASKS = {
    "class": "classify", "classes": "classify", "score": "classify", "tags": "tag", "span": "answer"
}  # fmt: skip


class Network:
    """A saved model on one device.

    Args:
        saved: From `read_model`; its arrays are not kept.

    Attributes:
        config: The architecture.
        tokenizer: The model's own.
        outputs: What the head is and means; None where there is none.
        max_length: Tokens in a row at most.
        name: For messages.
        origin: How the model came to be.
    """

    def __init__(self, saved: SavedModel) -> None:
        # A straight pass keeps nothing for a backward one.
        self.config = dataclasses.replace(saved.config, remat="none")
        self.tokenizer = saved.tokenizer
        self.outputs = saved.outputs
        self.max_length = saved.max_length
        self.name = saved.name
        self.origin = saved.origin
        encoder = saved.params["encoder"]
        layers = [
            jax.tree.map(lambda leaf, n=n: np.asarray(leaf)[n], encoder["layers"])
            for n in range(saved.config.num_layers)
        ]
        heads = {name: saved.params[name] for name in ("mlm", "head") if name in saved.params}
        self.weights: dict[str, Any] = jax.device_put(
            {**encoder, **heads, "layers": layers}, jax.devices()[0]
        )

    @property
    def verbs(self) -> tuple[str, ...]:
        """What can be asked of it."""
        task = () if self.outputs is None else (_TASKS[self.outputs.objective],)
        return (*task, *(("fill-mask",) if "mlm" in self.weights else ()), "embed")

    def require(self, verb: str, what: str) -> None:
        """Refuses a model that was not made for a verb.

        Raises:
            UserError: Says what the directory is and what it can do.
        """
        if verb not in self.verbs:
            raise UserError(
                f"{self.name}: this model cannot {verb}, for it has no {what}; it can "
                f"{' and '.join(self.verbs)}"
            )

    def row_logits(self, batch: Batch) -> Array:
        """(B, C) logits of a classification, in float32."""
        return _row_logits(self.config, self._num_labels, self.weights, *self._inputs(batch))

    def token_logits(self, batch: Batch) -> Array:
        """(B, L, C) logits of tags or spans, in float32."""
        return _token_logits(self.config, self._num_labels, self.weights, *self._inputs(batch))

    def top_tokens(
        self, batch: Batch, places: Int[np.ndarray, "B P"], top: int, banned: np.ndarray
    ) -> tuple[Array, Array]:
        """Probabilities, over the whole vocabulary, and ids of the `top` tokens not banned.

        Args:
            batch: The rows.
            places: Positions in them.
            top: How many.
            banned: (V,) 0, or -inf for a token that is not to be among them.
        """
        return _top_tokens(self.config, top, self.weights, *self._inputs(batch), places, banned)

    def pooled(
        self, batch: Batch, pooling: Pooling, layers: tuple[int, ...], special_tokens: bool
    ) -> Array:
        """(B, D) one vector a row, in float32.

        Args:
            batch: The rows.
            pooling: Which of the states make it.
            layers: Mean over these, 0 is the embeddings, ascending.
            special_tokens: Whether [CLS] and [SEP] count in mean and max.
        """
        ids = self.tokenizer.special_ids
        ignored = () if special_tokens else (ids.cls, ids.sep)
        return _pooled(
            self.config, pooling, layers, ignored, self.weights, *self._inputs(batch)
        )  # fmt: skip

    @property
    def _num_labels(self) -> int:
        assert self.outputs is not None  # of `require`
        return self.outputs.head.num_labels

    def _inputs(self, batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        types = np.minimum(batch["type_ids"], np.int32(self.config.num_types - 1))
        return batch["tokens"], types, batch["segment_ids"]


@partial(jax.jit, static_argnums=(0, 1))
def _row_logits(
    config: ModelConfig,
    num_labels: int,
    weights: Any,
    tokens: Int[Array, "B L"],
    type_ids: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"],
) -> Float[Array, "B C"]:
    pooled = _pooler(config, weights, _first_states(config, weights, tokens, type_ids, segment_ids))
    return _head(config, num_labels, weights, pooled)


@partial(jax.jit, static_argnums=(0, 1))
def _token_logits(
    config: ModelConfig,
    num_labels: int,
    weights: Any,
    tokens: Int[Array, "B L"],
    type_ids: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"],
) -> Float[Array, "B L C"]:
    *_, last = _states(config, weights, tokens, type_ids, segment_ids, config.num_layers)
    return _head(config, num_labels, weights, last)


@partial(jax.jit, static_argnums=(0, 1))
def _top_tokens(
    config: ModelConfig,
    top: int,
    weights: Any,
    tokens: Int[Array, "B L"],
    type_ids: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"],
    places: Int[Array, "B P"],
    banned: Float[Array, " V"],
) -> tuple[Float[Array, "B P top"], Int[Array, "B P top"]]:
    hidden = _states_at(config, weights, tokens, type_ids, segment_ids, places)
    head = nnx.merge(_graph(MlmHead, config), weights["mlm"])
    logits = head(hidden, weights["embeddings"]["token"])
    _, ids = jax.lax.top_k(logits + banned, top)
    return jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), ids, axis=-1), ids


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _pooled(
    config: ModelConfig,
    pooling: Pooling,
    layers: tuple[int, ...],
    ignored: tuple[int, ...],
    weights: Any,
    tokens: Int[Array, "B L"],
    type_ids: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"],
) -> Float[Array, "B D"]:
    if pooling in ("cls", "pooler") and layers == (config.num_layers,):
        first = _first_states(config, weights, tokens, type_ids, segment_ids)
        return (_pooler(config, weights, first) if pooling == "pooler" else first).astype(
            jnp.float32
        )
    states = _states(config, weights, tokens, type_ids, segment_ids, layers[-1])
    wanted = [states[n].astype(jnp.float32) for n in layers]
    hidden = sum(wanted[1:], wanted[0]) / len(wanted)
    if pooling == "cls":
        return hidden[:, 0]
    counts = segment_ids > 0
    for id in ignored:
        counts &= tokens != id
    if pooling == "max":
        greatest = jnp.where(counts[..., None], hidden, -jnp.inf).max(1)
        return jnp.where(counts.any(1, keepdims=True), greatest, 0.0)
    total = jnp.where(counts[..., None], hidden, 0.0).sum(1)
    return total / jnp.maximum(counts.sum(1, keepdims=True), 1)


# Parts of a forward pass, while one is traced


@lru_cache(maxsize=64)
def _graph(kind: type, config: ModelConfig, *arguments: Any) -> Any:
    """Graph definition of a module."""
    built = nnx.eval_shape(lambda: kind(config, *map(dict, arguments), nnx.Rngs(params=0)))
    return nnx.split(built)[0]


def _states(
    config: ModelConfig,
    weights: Any,
    tokens: Array,
    type_ids: Array,
    segment_ids: Array,
    count: int,
) -> list[Array]:
    """(B, L, D) after the embeddings and after each of the first `count` layers."""
    embeddings = nnx.merge(_graph(Embeddings, config), weights["embeddings"])
    states = [embeddings(tokens, type_ids, segment_ids, None)]
    for params in weights["layers"][:count]:
        layer = nnx.merge(_graph(Layer, config), params)
        states.append(layer(states[-1], segment_ids, None, 0))
    return states


def _states_at(
    config: ModelConfig, weights: Any, tokens: Array, type_ids: Array, segment_ids: Array,
    places: Array,
) -> Array:  # fmt: skip
    """(B, P, D) last states of some places alone: a layer less, nearly."""
    *_, x = _states(config, weights, tokens, type_ids, segment_ids, config.num_layers - 1)
    layer = nnx.merge(_graph(Layer, config), weights["layers"][-1])
    at = jnp.take_along_axis(x, places[..., None], axis=1)
    attention = layer.attention
    attended = attend(
        attention.query(at),
        attention.key(x),
        attention.value(x),
        q_segment_ids=jnp.take_along_axis(segment_ids, places, axis=1),
        kv_segment_ids=segment_ids,
        impl="xla",  # the kernels are for many queries
    )
    at = layer.attention_norm(at + attention.output(attended))
    return layer.mlp_norm(at + layer.mlp(at))


def _first_states(
    config: ModelConfig, weights: Any, tokens: Array, type_ids: Array, segment_ids: Array
) -> Array:
    """(B, D) last states of the first tokens."""
    places = jnp.zeros((tokens.shape[0], 1), jnp.int32)
    return _states_at(config, weights, tokens, type_ids, segment_ids, places)[:, 0]


def _pooler(config: ModelConfig, weights: Any, first: Array) -> Array:
    return nnx.merge(_graph(Pooler, config), weights["pooler"])(first[:, None])


def _head(config: ModelConfig, num_labels: int, weights: Any, x: Array) -> Array:
    sizes = (("embed", config.hidden_dim),), ((None, num_labels),)
    logits: Array = nnx.merge(_graph(Affine, config, *sizes), weights["head"])(x)
    return logits.astype(jnp.float32)
