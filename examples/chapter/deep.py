"""Station 5: many layers that still learn, and a picture in place of a sentence.

    python examples/chapter/deep.py

Stacks of six layers on each side do the task of stations 3 and 4, with and without residuals. Then
a network reads drawings of a digit, as a grid of windows, and writes where which digit stands.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import drawings as task
import jax
import jax.numpy as jnp
import number_words
import numpy as np
import optax
from station import Asked, asked, learn

from bert_jax.files.pictures import dress, new_figure, write_picture
from bert_jax.model.config import ModelConfig
from bert_jax.model.seq2seq.search import SearchConfig, search
from bert_jax.model.seq2seq.transformer import TransformerNetwork
from bert_jax.objectives.losses import cross_entropy
from bert_jax.objectives.translation import next_tokens

LAYERS, STACKS = 6, {"without residuals": 0, "with residuals": 3}
"""Layers of a stack, and the first layer with a residual."""
STACK_SHARE = 5
"""Steps of the network for drawings for each step of a stack, which takes longer."""
ROWS, NUM_UNSEEN = 64, 200
NETWORK = TransformerNetwork(
    ModelConfig(
        vocab_size=len(task.WORDS), num_positions=task.NUM_WINDOWS, num_types=0, hidden_dim=48,
        num_layers=1, num_heads=4, mlp_dim=96, hidden_dropout_rate=0.0, attention_dropout_rate=0.0,
        norm_order="pre", embedding_norm=False, pooler=False, head_transform=False, init_std=0.1,
        dtype="float32",
    ),
    tying="output",
    feature_dim=task.WINDOW**2,
)  # fmt: skip


def main(asked: Asked) -> None:
    """Train stacks and the network that describes drawings; print and draw what they learned."""
    curves = {}
    print(f"{LAYERS} + {LAYERS} layers of LSTM, loss of the last steps in nats per token")
    for name, residual_from in STACKS.items():
        curves[name] = stacked(residual_from, max(1, asked.steps // STACK_SHARE))
        print(f"  {name:18}{curves[name][-20:].mean():.2f}")
    params = described(asked.steps)
    random = np.random.default_rng(1)
    unseen = [task.drawn(random) for _ in range(NUM_UNSEEN)]
    answers = written(params, unseen)
    right = [answer == drawing.text for answer, drawing in zip(answers, unseen, strict=True)]
    print(
        f"\n{np.mean(right):.1%} of {NUM_UNSEEN} unseen drawings described without mistake, such as"
    )
    for answer in answers[:3]:
        print(f"  {' '.join(answer)}")
    draw(curves, unseen[1], looked(params, unseen[1]), asked)


def stacked(residual_from: int, num_steps: int) -> np.ndarray:
    """Train a deep network on lists of numbers; return its losses."""
    network = number_words.recurrent(
        32, LAYERS, cell="lstm", attention="additive", residual_from=residual_from
    )
    return number_words.trained(network, num_steps)[1]


def described(num_steps: int) -> Any:
    """Train the network on new drawings at each step; return its parameters."""

    def loss(params: Any, batch: Any) -> Any:
        source, target = batch
        labels = next_tokens(*target, task.SEP)
        surprise, _ = cross_entropy(NETWORK.logits(params, source, target), labels)
        real = target.segment_ids > 0
        return jnp.sum(surprise * real) / jnp.sum(real)

    def batches() -> Iterator[Any]:
        random = np.random.default_rng(0)
        for _ in range(num_steps):
            drawings = [task.drawn(random) for _ in range(ROWS)]
            yield task.grids(drawings), task.texts(drawings)

    adam = optax.adam(optax.cosine_decay_schedule(3e-3, num_steps))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)
    return learn(loss, NETWORK.init(jax.random.key(0)), batches(), optimizer)[0]


def written(params: Any, drawings: Sequence[task.Drawing]) -> list[tuple[str, ...]]:
    """Describe drawings by greedy search."""
    most = task.MOST_WORDS + 1
    found = search(
        NETWORK, params, task.grids(drawings), np.full(len(drawings), most),
        settings=SearchConfig(num_beams=1), max_length=most, begin=task.CLS, end=task.SEP,
    )  # fmt: skip
    rows = np.asarray(found.tokens[:, 0]).tolist()
    return [tuple(task.WORDS[id] for id in row if id > task.SEP) for row in rows]


def looked(params: Any, drawing: task.Drawing) -> np.ndarray:
    """Compute the weight of each point (words, SIZE, SIZE) for each word, a mean of all heads."""
    cross = NETWORK.weights(params, task.grids([drawing]), task.texts([drawing])).cross
    weights = np.asarray(cross[-1, 0]).mean(0)[: len(drawing.text)]
    points = np.zeros((len(weights), task.SIZE, task.SIZE))
    for window in range(task.NUM_WINDOWS):
        top, left = (task.STRIDE * place for place in divmod(window, task.GRID))
        part = points[:, top : top + task.WINDOW, left : left + task.WINDOW]
        part += weights[:, window, None, None]
    return points


def draw(
    curves: dict[str, np.ndarray], drawing: task.Drawing, looks: np.ndarray, asked: Asked
) -> None:
    """Draw the losses of the stacks and, below, where the network looked for each word."""
    figure = new_figure((9.5, 5.2))
    above, below = figure.subfigures(2, 1, height_ratios=(3, 2))
    axis = above.subplots()
    for name, curve in curves.items():
        axis.plot(curve, label=name)
    axis.set(xlabel="steps", ylabel="loss, nats per token", ylim=(1, 3))
    axis.legend(fontsize=8, frameon=False)
    dress(axis)
    axes = below.subplots(1, len(drawing.text) + 1)
    axes[0].set_title("the drawing", fontsize=9)
    axes[0].imshow(drawing.points, cmap="gray_r")
    for axis, word, look in zip(axes[1:], drawing.text, looks, strict=True):
        axis.set_title(word, fontsize=9)
        axis.imshow(look, cmap="Oranges", vmin=0, vmax=1)
        axis.imshow(np.where(drawing.points > 0.6, 0.0, np.nan), cmap="gray")  # strokes alone
    for axis in axes:
        axis.set(xticks=[], yticks=[])
    write_picture(figure, asked.pictures / "deep.png")


if __name__ == "__main__":
    main(asked(__doc__, steps=1400))
