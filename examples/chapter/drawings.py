"""Task of station 5: a drawing of a digit, and a text that says which digit it is and where."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from formulas.deep import windows

from bert_jax.model.seq2seq.network import Side

SIZE, REGION, WINDOW, STRIDE = 30, 10, 10, 5
GRID = (SIZE - WINDOW) // STRIDE + 1
NUM_WINDOWS = GRID * GRID
"""Windows of a drawing, of WINDOW x WINDOW points each, in GRID rows."""
STROKES = (
    ".###. #...# #..## #.#.# ##..# #...# .###.", "..#.. .##.. ..#.. ..#.. ..#.. ..#.. .###.",
    ".###. #...# ....# ...#. ..#.. .#... #####", "##### ...#. ..#.. ...#. ....# #...# .###.",
    "...#. ..##. .#.#. #..#. ##### ...#. ...#.", "##### #.... ####. ....# ....# #...# .###.",
    "..##. .#... #.... ####. #...# #...# .###.", "##### ....# ...#. ..#.. .#... .#... .#...",
    ".###. #...# #...# .###. #...# #...# .###.", ".###. #...# #...# .#### ....# ...#. .##..",
)  # fmt: skip
DIGITS = np.array([[[p == "#" for p in row] for row in each.split()] for each in STROKES])
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PLACES = (
    "at the top left", "at the top", "at the top right", "at the left", "in the middle",
    "at the right", "at the bottom left", "at the bottom", "at the bottom right",
)  # fmt: skip
PAD, CLS, SEP = range(3)
WORDS = ("[PAD]", "[CLS]", "[SEP]", "a", *NAMES, *sorted({w for p in PLACES for w in p.split()}))
ID = {word: id for id, word in enumerate(WORDS)}
MOST_WORDS = 6


class Drawing(NamedTuple):
    """A digit somewhere in a noisy picture."""

    points: np.ndarray
    """Brightness (SIZE, SIZE)."""
    text: tuple[str, ...]


def drawn(random: np.random.Generator) -> Drawing:
    """Draw a digit, a place, a shift of some points, the brightness of the strokes, and noise."""
    digit, place = random.integers(len(NAMES)), random.integers(len(PLACES))
    points = random.normal(0, 0.15, (SIZE, SIZE))
    top, left = REGION * (place // 3), REGION * (place % 3)
    top, left = top + random.integers(0, 4), left + random.integers(0, 6)
    points[top : top + 7, left : left + 5] += DIGITS[digit] * random.uniform(0.7, 1.3)
    return Drawing(points, ("a", NAMES[digit], *PLACES[place].split()))


def grids(drawings: Sequence[Drawing]) -> Side:
    """Cut each drawing into its windows: vectors in place of tokens."""
    cut = [windows(drawing.points, WINDOW, STRIDE) for drawing in drawings]
    return Side(jnp.asarray(cut, jnp.float32), jnp.ones((len(cut), NUM_WINDOWS), jnp.int32))


def texts(drawings: Sequence[Drawing]) -> Side:
    """Make the rows of ids of the texts: [CLS] and the words."""
    tokens, segments = np.zeros((2, len(drawings), MOST_WORDS + 1), np.int32)
    for row, drawing in enumerate(drawings):
        ids = [CLS, *(ID[word] for word in drawing.text)]
        tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
    return Side(jnp.asarray(tokens), jnp.asarray(segments))
