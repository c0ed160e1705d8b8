"""Station 4: at each digit, the writer looks back at all words that were read.

    python examples/chapter/attention.py

Six networks whose states have 32 numbers do the task of station 3: three scores (dot,
multiplicative, additive), each with the state before a step as the query, and the state after.
"""

from typing import NamedTuple

import number_words as task
import numpy as np
from station import Asked, asked

from bert_jax.files.pictures import new_figure, write_picture

WIDTH = 32
SCORES = ("dot", "multiplicative", "additive")
WIRINGS = ("before", "after")
SHOWN = [97, 805]


class Looked(NamedTuple):
    """Where a network looked while it wrote."""

    written: str
    weights: np.ndarray
    """Weight of each word of the source (columns) for each digit and for the end (rows)."""


def main(asked: Asked) -> None:
    """Train the networks, print how long a list may be, and draw where they look."""
    task.print_header("attention, wiring")
    looks = {}
    for score in SCORES:
        for wiring in WIRINGS:
            network = task.recurrent(WIDTH, attention=score, wiring=wiring)
            params, _ = task.trained(network, asked.steps)
            task.print_shares(f"{score}, {wiring}", task.exact(network, params))
            looks[score, wiring] = looked(network, params)
    words = ["[CLS]", *task.spelled(SHOWN), "[SEP]"]
    print("\nmost looked at, additive, before")
    found = looks["additive", "before"]
    for sign, weights in zip([*found.written, "[SEP]"], found.weights, strict=False):
        best = weights[: len(words)].argmax()
        print(f"  {sign:6} {words[best]:10} {weights[best]:.0%}")
    draw(looks, words, asked)


def looked(network: task.Network, params: object) -> Looked:
    """Let a network write `SHOWN`, and compute where it looks while it writes that."""
    pairs = task.pairs_of([SHOWN])
    (written,) = task.written(network, params, pairs.source)
    target = task.side([["[CLS]", *written]], task.MOST_SIGNS + 2)
    cross = network.weights(params, pairs.source, target).cross
    return Looked(written, np.asarray(cross[0, 0, 0, : len(written) + 1]))


def draw(looks: dict[tuple[str, str], Looked], words: list[str], asked: Asked) -> None:
    """Draw a map for each network: a row for each digit, a column for each word."""
    figure = new_figure((9.5, 7))
    axes = figure.subplots(len(WIRINGS), len(SCORES))
    for column, score in enumerate(SCORES):
        for row, wiring in enumerate(WIRINGS):
            axis, found = axes[row][column], looks[score, wiring]
            axis.imshow(found.weights[:, : len(words)], cmap="Blues", vmin=0, vmax=1, aspect="auto")
            axis.set_xticks(range(len(words)), words, rotation=90, fontsize=8)
            axis.set_yticks(range(len(found.written) + 1), [*found.written, "[SEP]"], fontsize=8)
            axis.set_title(f"{score}, state {wiring} the step", fontsize=9)
    write_picture(figure, asked.pictures / "attention.png")


if __name__ == "__main__":
    main(asked(__doc__, steps=600))
