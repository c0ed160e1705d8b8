"""Station 3: one network reads number words, another writes digits, and one vector joins them.

    python examples/chapter/one_vector.py

Networks whose vectors have 32, 64 and 128 numbers read lists of one to four numbers below 1,000 in
French words, and write them in digits.
"""

from typing import Any

import number_words as task
import numpy as np
from station import Asked, asked

from bert_jax.files.pictures import dress, new_figure, write_picture

WIDTHS = (32, 64, 128)
TENS = np.arange(1000) // 10 % 10
SHOWN = [[97], [97, 805], [97, 805, 416], [97, 805, 416, 72]]


def main(asked: Asked) -> None:
    """Train the networks, print and draw how long a list may be, and what the vectors hold."""
    task.print_header("one vector of")
    shares = {}
    for width in WIDTHS:
        network = task.recurrent(width, attention="none", bidirectional=False)
        params, _ = task.trained(network, asked.steps)
        shares[width] = task.exact(network, params)
        task.print_shares(f"{width} numbers", shares[width])
    print(f"\nwritten from one vector of {WIDTHS[-1]} numbers")
    pairs = task.pairs_of(SHOWN)
    for each, answer in zip(SHOWN, task.written(network, params, pairs.source), strict=True):
        print(f"  {' '.join(task.spelled(each))}\n    {answer}")
    draw(shares, places(network, params), asked)


def places(network: Any, params: Any) -> np.ndarray:
    """Map the vectors of 0 to 999 to the plane (1000, 2) in which the tens lie furthest apart."""
    source = task.pairs_of([[number] for number in range(1000)]).source
    vectors = np.asarray(network.start(params, source, 1, 1).shared)[:, 0]
    centred = vectors - vectors.mean(0)
    means = np.stack([centred[ten == TENS].mean(0) for ten in range(10)])
    _, _, directions = np.linalg.svd(means, full_matrices=False)
    return centred @ directions[:2].T


def draw(shares: dict[int, list[float]], places: np.ndarray, asked: Asked) -> None:
    """Draw the shares by the length of the list and, beside them, the vectors of all numbers."""
    figure = new_figure((9, 3.8))
    left, right = figure.subplots(1, 2)
    for width, values in shares.items():
        left.plot(range(1, len(values) + 1), values, "o-", label=f"vector of {width} numbers")
    left.set(xlabel="numbers in the list", ylabel="lists without mistake", ylim=(0, 1.05))
    left.set_xticks(range(1, task.MOST_NUMBERS + 1))
    left.legend(fontsize=8, frameon=False)
    right.scatter(*places.T, c=TENS, cmap="tab10", s=4)
    for ten in range(10):
        at = places[ten == TENS].mean(0)
        right.text(
            *at, f"{ten}0s", weight="bold", ha="center", bbox={"color": "white", "alpha": 0.7}
        )
    right.set(xlabel="vectors of 0 to 999, by their tens", xticks=[], yticks=[])
    dress(left)
    write_picture(figure, asked.pictures / "one_vector.png")


if __name__ == "__main__":
    main(asked(__doc__, steps=600))
