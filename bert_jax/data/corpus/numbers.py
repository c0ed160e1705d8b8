"""Numbers in French words and in digits: text pairs with exactly one correct translation.

Spelling follows France (soixante-dix, quatre-vingt-dix) before the reform of 1990: hyphens
join only tens and units (vingt-deux), except where "et" joins them (vingt et un).
"""

from typing import NamedTuple

import numpy as np

LIMIT = 1_000_000
"""Exclusive upper bound of the numbers that can be spelled."""

_UNITS = (
    "zéro", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf", "dix", "onze",
    "douze", "treize", "quatorze", "quinze", "seize",
)  # fmt: skip
_TENS = {2: "vingt", 3: "trente", 4: "quarante", 5: "cinquante", 6: "soixante"}


class Numbers(NamedTuple):
    """Numbers for training, and different numbers for the test."""

    train: np.ndarray
    """Numbers for training, (n,) int64, in random order."""
    unseen: np.ndarray
    """Numbers for the test, (m,) int64; none of them is in `train`."""


def french_words(number: int) -> str:
    """Spell a number from 0 to 999,999 in French; raise a ValueError for other numbers."""
    if not 0 <= number < LIMIT:
        raise ValueError(f"the number is {number}; expected 0 to {LIMIT - 1:,}")
    thousands, rest = divmod(number, 1000)
    words = []
    if thousands:
        # One thousand is "mille"; vingt and cent lose their s before mille.
        words = [_below_thousand(thousands, plural=False)] * (thousands > 1) + ["mille"]
    if rest or not thousands:
        words.append(_below_thousand(rest, plural=True))
    return " ".join(words)


def draw_numbers(num_train: int, num_unseen: int, seed: int, first: int) -> Numbers:
    """Draw numbers below `LIMIT` without repetition; all numbers below `first` are for training."""
    if num_train < first:
        raise ValueError(f"num_train is {num_train}; it must be at least first, which is {first}")
    random = np.random.default_rng(seed)
    drawn = first + random.choice(LIMIT - first, num_train - first + num_unseen, replace=False)
    train = np.concatenate([np.arange(first), drawn[num_unseen:]])
    return Numbers(random.permutation(train), drawn[:num_unseen])


def _below_thousand(number: int, plural: bool) -> str:
    """Spell a number below 1,000; with `plural`, a multiplied vingt or cent at the end has an s."""
    hundreds, rest = divmod(number, 100)
    words = []
    if hundreds:
        cent = "cents" if plural and hundreds > 1 and not rest else "cent"
        words = [_UNITS[hundreds]] * (hundreds > 1) + [cent]
    if rest or not hundreds:
        words.append(_below_hundred(rest, plural))
    return " ".join(words)


def _below_hundred(number: int, plural: bool) -> str:
    """Spell a number below 100: by tens below 60, by twenties from 60 on."""
    if number < len(_UNITS):
        return _UNITS[number]
    if number >= 80:
        rest = number - 80
        if not rest:
            return "quatre-vingts" if plural else "quatre-vingt"
        return f"quatre-vingt-{_below_hundred(rest, plural)}"
    tens = min(number // 10, 6)
    rest = number - 10 * tens
    if number < 20:
        return f"dix-{_UNITS[rest]}"
    if not rest:
        return _TENS[tens]
    if rest in (1, 11):  # soixante et onze, too
        return f"{_TENS[tens]} et {_UNITS[rest]}"
    return f"{_TENS[tens]}-{_below_hundred(rest, plural)}"
