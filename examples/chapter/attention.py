"""Station 4: at each digit, the writer looks back at all words that were read.

    python examples/chapter/attention.py

Six networks whose states have 32 numbers do the task of station 3: three scores (dot,
multiplicative, additive), each with the state before a step as the query, and the state after.
"""

from typing import Any

import number_words as task
import numpy as np
from station import Asked, asked

from bert_jax.files.pictures import new_figure, write_picture

WIDTH = 32
SCORES = ("dot", "multiplicative", "additive")
WIRINGS = ("before", "after")
SHOWN = [97, 805]


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
    words, signs = ["[CLS]", *task.spelled(SHOWN), "[SEP]"], [*task.in_digits(SHOWN), "[SEP]"]
    print("\nmost looked at, additive, before")
    for sign, weights in zip(signs, looks["additive", "before"], strict=True):
        best = weights[: len(words)].argmax()
        print(f"  {sign:6} {words[best]:10} {weights[best]:.0%}")
    draw(looks, words, signs, asked)


def looked(network: task.Network, params: Any) -> np.ndarray:
    """Compute the weight of each word for each sign of `SHOWN`, and for its end (signs, words)."""
    pairs = task.pairs_of([SHOWN])
    cross = network.weights(params, pairs.source, pairs.target).cross
    return np.asarray(cross[0, 0, 0, : len(task.in_digits(SHOWN)) + 1])


def draw(
    looks: dict[tuple[str, str], np.ndarray], words: list[str], signs: list[str], asked: Asked
) -> None:
    """Draw a map for each network: a row for each sign, a column for each word."""
    figure = new_figure((9.5, 7))
    axes = figure.subplots(len(WIRINGS), len(SCORES))
    for column, score in enumerate(SCORES):
        for row, wiring in enumerate(WIRINGS):
            axis, found = axes[row][column], looks[score, wiring]
            axis.imshow(found[:, : len(words)], cmap="Blues", vmin=0, vmax=1, aspect="auto")
            axis.set_xticks(range(len(words)), words, rotation=90, fontsize=8)
            axis.set_yticks(range(len(signs)), signs, fontsize=8)
            axis.set_title(f"{score}, state {wiring} the step", fontsize=9)
    write_picture(figure, asked.pictures / "attention.png")


if __name__ == "__main__":
    main(asked(__doc__, steps=600))
