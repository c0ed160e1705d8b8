"""Station 6: a sequence of digits looks at itself, without any cells.

    python examples/chapter/self_attention.py

Small networks of self-attention read rows of random digits. Each place answers three questions:
which digit of the row is marked, which digit stands three places before, and which comes next. The
networks differ in how they know where a digit stands, and in what a place may see.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from formulas.self_attention import sinusoids
from station import Asked, asked, learn

from bert_jax.files.pictures import new_figure, write_picture
from bert_jax.model.config import ModelConfig
from bert_jax.model.encoder import Layer, Stack
from bert_jax.model.heads import LinearHead, init_params, with_params
from bert_jax.model.rotation import make_context
from bert_jax.model.seq2seq.decoder import CausalSelfAttention

DIGITS, LENGTH, LAG = 10, 24, 3
WIDTH, HEADS, ROWS, NUM_UNSEEN = 64, 4, 32, 500
QUESTIONS = ("marked", f"{LAG} before", "next")
SHOWN = [3, 1, 4, 1, 5, 9, 2, 6, DIGITS + 8, 3, 7, 9]
"""Digits of the picture; the 8 is marked."""


class Batch(NamedTuple):
    """Rows of digits."""

    tokens: np.ndarray
    """Digits (B, L); a marked digit is 10 higher."""
    labels: np.ndarray
    """Answers (B, L, 3) to the questions; -1 if there is none."""


class Reader(NamedTuple):
    """A kind of network."""

    positions: str
    """How it knows where a digit stands: `none`, `learned`, `sinusoidal` or `rope` (rotary)."""
    num_layers: int = 1
    causal: bool = False
    """Whether a place sees only itself and the places before it."""
    window: int = 0
    """Number of places that a place sees to each side; 0 means all."""

    @property
    def config(self) -> ModelConfig:
        """Sizes of the network."""
        return ModelConfig(
            vocab_size=2 * DIGITS, num_positions=2 * LENGTH, num_types=0, hidden_dim=WIDTH,
            num_layers=self.num_layers, num_heads=HEADS, mlp_dim=2 * WIDTH, hidden_dropout_rate=0.0,
            attention_dropout_rate=0.0, norm_order="pre", embedding_norm=False, pooler=False,
            positions="rope" if self.positions == "none" else self.positions, init_std=0.1,
            attention_pattern="L" if self.window else "G", local_window=self.window,
            dtype="float32",
        )  # fmt: skip


READERS = {
    "no positions": Reader("none"),
    "learned positions": Reader("learned"),
    "sinusoids": Reader("sinusoidal"),
    "rotary positions": Reader("rope"),
    "rotary, sees only what is before": Reader("rope", causal=True),
    "rotary, sees 2 to each side": Reader("rope", window=2),
    "the same with two layers": Reader("rope", num_layers=2, window=2),
}


class CausalLayer(Layer):
    """Layer in which a place sees only itself and the places before it."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.attention = CausalSelfAttention(config, rngs)


class Network(nnx.Module):
    """Layers of self-attention, and scores of the answers at each place."""

    def __init__(self, config: ModelConfig, causal: bool, rngs: nnx.Rngs):
        self.stack = Stack(config, CausalLayer if causal else Layer, True, rngs)
        self.head = LinearHead(config, len(QUESTIONS) * DIGITS, rngs)


def main(asked: Asked) -> None:
    """Train the networks, print what they get right, and draw where they look."""
    print(f"{'right answers':33}", *(f"{question:>9}" for question in QUESTIONS), "  longer rows")
    maps = {}
    for name, reader in READERS.items():
        params = trained(reader, asked.steps)
        shares = right(reader, params, LENGTH)
        twice = right(reader, params, 2 * LENGTH)[1]
        print(f"{name:33}", *(f"{share:9.1%}" for share in shares), f"{twice:13.1%}")
        maps[name] = looked(reader, params)
    draw(maps, asked)


def drawn(random: np.random.Generator, length: int, rows: int) -> Batch:
    """Draw rows of digits, one of which is marked, and the answers."""
    tokens = random.integers(0, DIGITS, (rows, length))
    labels = np.full((rows, length, len(QUESTIONS)), -1)
    at = np.arange(rows), random.integers(0, length, rows)
    labels[..., 0] = tokens[at][:, None]
    labels[:, LAG:, 1] = tokens[:, :-LAG]
    labels[:, :-1, 2] = tokens[:, 1:]
    tokens[at] += DIGITS
    return Batch(tokens, labels)


def scored(reader: Reader, params: Any, tokens: Any) -> tuple[Any, Any]:
    """Score the answers (B, L, 3, 10); also return the first layer's weights (B, heads, L, L)."""
    config, ones = reader.config, jnp.ones(tokens.shape, jnp.int32)
    network = with_params(params, Network, config, reader.causal)
    # Without positions, every digit stands at place 0.
    context = make_context(config, ones, 0 * ones if reader.positions == "none" else None)
    x = network.stack.embeddings(tokens, 0 * ones, context)
    (states,) = network.stack.run(x, context, lambda layer, x, *at: layer(x, context, *at))
    scores = network.head(states).reshape(*tokens.shape, len(QUESTIONS), DIGITS)
    graph, layers = nnx.split(network.stack.layers)
    first = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], layers))
    return scores, first.weights(x, context, config.layer_kind(0))


def trained(reader: Reader, num_steps: int) -> Any:
    """Train on new rows at each step; return the parameters."""

    def loss(params: Any, batch: Batch) -> Any:
        scores, labels = scored(reader, params, batch.tokens)[0], jnp.asarray(batch.labels)
        each = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.maximum(labels, 0))
        return jnp.sum(each * (labels >= 0)) / jnp.sum(labels >= 0)

    def batches() -> Iterator[Batch]:
        random = np.random.default_rng(0)
        for _ in range(num_steps):
            yield drawn(random, LENGTH, ROWS)

    adam = optax.adam(optax.cosine_decay_schedule(3e-3, num_steps))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)
    params = init_params(reader.config, jax.random.key(0), Network, reader.causal)
    return learn(loss, params, batches(), optimizer)[0]


def right(reader: Reader, params: Any, length: int) -> list[float]:
    """Return, for each question, the share of places of unseen rows with the right answer."""
    tokens, labels = drawn(np.random.default_rng(1), length, NUM_UNSEEN)
    scores, _ = jax.jit(lambda tokens: scored(reader, params, tokens))(tokens)
    answers = np.asarray(scores).argmax(-1)
    return [
        float(np.mean((answers == labels)[..., n][labels[..., n] >= 0]))
        for n in range(len(QUESTIONS))
    ]


def looked(reader: Reader, params: Any) -> np.ndarray:
    """Compute how much each place of `SHOWN` looks at each other place (heads, L, L)."""
    _, weights = jax.jit(lambda tokens: scored(reader, params, tokens))(jnp.asarray([SHOWN]))
    return np.asarray(weights[0])


def draw(maps: dict[str, np.ndarray], asked: Asked) -> None:
    """Draw the sinusoids and, below, all heads of two networks, with and without the mask."""
    figure = new_figure((9.5, 7.4))
    grid = figure.add_gridspec(3, HEADS, height_ratios=(2, 3, 3))
    axis = figure.add_subplot(grid[0, :])
    axis.imshow(sinusoids(2 * LENGTH, 32).T, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    axis.set_xlabel("place", fontsize=9)
    axis.set_ylabel("number of the vector", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.set_title("sinusoids: the vector of each place is a column", fontsize=9)
    names = [str(token % DIGITS) + "*" * (token >= DIGITS) for token in SHOWN]
    for row, (title, name) in enumerate(zip(("rotary", "causal"), list(READERS)[3:5], strict=True)):
        for number, weights in enumerate(maps[name]):
            axis = figure.add_subplot(grid[row + 1, number])
            axis.imshow(weights, cmap="Blues", vmin=0, vmax=1)
            axis.set_title(f"{title}, head {number + 1}", fontsize=9)
            axis.set_xticks(range(len(names)), names, fontsize=7)
            axis.set_yticks(range(len(names)), names, fontsize=7)
    write_picture(figure, asked.pictures / "self_attention.png")


if __name__ == "__main__":
    main(asked(__doc__, steps=400))
