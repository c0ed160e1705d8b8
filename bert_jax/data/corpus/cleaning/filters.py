"""Named filters, which set bounds for a measure of a document, and named edits of its lines.

Sources: Rae et al. 2021, "Scaling Language Models: Methods, Analysis & Insights from Training
Gopher", A.1.1 and table A1; Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a
Unified Text-to-Text Transformer" (C4), section 2.2.

A line or n-gram counts as repeated if it occurs earlier in the document; only `top_ngram` also
counts the first occurrence. Measures of n-grams count the characters of words, without spaces.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bert_jax.data.corpus.overlap.ngrams import covered_words, ngram_hashes, word_hashes
from bert_jax.data.corpus.sentences import split_fast
from bert_jax.errors import UserError, suggestion


def repeated_lines(lines: Sequence[str], *, characters: bool = False) -> float:
    """Return the fraction of lines that are repeated, counted by lines or by `characters`."""
    seen: set[str] = set()
    total = repeated = 0
    for line in lines:
        weight = len(line) if characters else 1
        total += weight
        if line in seen:
            repeated += weight
        seen.add(line)
    return repeated / max(total, 1)


def top_ngram(hashes: np.ndarray, lengths: np.ndarray, size: int) -> float:
    """Return the largest fraction of characters that one n-gram makes up; 0 if none is repeated.

    `hashes`, (n,) uint64, and `lengths`, (n,) int64, are the words' hashes and character counts.
    """
    grams = ngram_hashes(hashes, size)
    if not _repeats(grams):
        return 0.0
    _, first, counts = np.unique(grams, return_index=True, return_counts=True)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    characters = (ends[first + size] - ends[first]) * counts
    return float(characters[counts > 1].max() / ends[-1])


def repeated_ngrams(hashes: np.ndarray, lengths: np.ndarray, size: int) -> float:
    """Return the fraction of characters in repeated n-grams; for the arguments see `top_ngram`."""
    grams = ngram_hashes(hashes, size)
    if not _repeats(grams):
        return 0.0
    repeated = np.ones(len(grams), bool)
    repeated[np.unique(grams, return_index=True)[1]] = False
    covered = covered_words(len(hashes), [(size, np.flatnonzero(repeated))])
    return float(lengths[covered].sum() / lengths.sum())


def _repeats(grams: np.ndarray) -> bool:
    """Return true if any two n-grams are equal. For most documents, this quick test is enough."""
    ordered = np.sort(grams)
    return bool((ordered[1:] == ordered[:-1]).any())


_GOPHER = "Rae et al. 2021, A.1.1"
_TABLE_A1 = "Rae et al. 2021, table A1"
_C4 = "Raffel et al. 2020, 2.2"
_STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
_BULLETS = ("\u2022", "\u2023", "\u25cf", "\u25aa", "\u25e6", "-", "*")
_ELLIPSES = ("...", "\u2026")
_LETTER = re.compile(r"[^\W\d_]")
_STRIPPED = ".,;:!?\"'()[]"
_CITATION = re.compile(r"\[(\d+|edit|citation needed)\]", re.IGNORECASE)
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies",
             "use cookies")  # fmt: skip
_TERMINAL = (".", "!", "?", '"', "\u201d")


class Prose:
    """A document, of one paragraph per line, with the properties that filters measure."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.split("\n")

    @functools.cached_property
    def words(self) -> list[str]:
        """Words of the text, with their punctuation."""
        return self.text.split()

    @functools.cached_property
    def hashes(self) -> np.ndarray:
        """Hashes of the words, (n,) uint64."""
        return word_hashes(self.words)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Number of characters of each word, (n,) int64."""
        return np.fromiter(map(len, self.words), np.int64, len(self.words))

    def share(self, count: int) -> float:
        """Return a count divided by the number of words."""
        return count / max(len(self.words), 1)

    def share_of_lines(self, holds: Callable[[str], bool]) -> float:
        """Return the fraction of the lines for which `holds` is true."""
        return sum(map(holds, self.lines)) / len(self.lines)


@dataclass(frozen=True)
class Filter:
    """A measure with bounds; a document whose value is outside the bounds is dropped."""

    measure: Callable[[Prose], float]
    what: str
    """Readable name of the measure."""
    source: str
    low: int | float = -math.inf
    high: int | float = math.inf

    def reason(self, prose: Prose) -> str | None:
        """Return the reason for dropping a document; None if the document is kept."""
        value = self.measure(prose)
        if self.low <= value <= self.high:
            return None
        side = f"below {self.low:g}" if value < self.low else f"above {self.high:g}"
        return f"{self.what}: {value:.4g}, {side}"

    def record(self) -> dict[str, int | float | str | None]:
        """Return the bounds (None for an infinite bound) and their source."""
        bounds = {"low": self.low, "high": self.high}
        finite = {name: each if math.isfinite(each) else None for name, each in bounds.items()}
        return {**finite, "source": self.source}


def _unless(unwanted: Callable[[str], bool]) -> Callable[[str], str]:
    return lambda line: "" if unwanted(line) else line


FILTERS: dict[str, Filter] = {
    "words": Filter(lambda p: len(p.words), "words", _GOPHER, 50, 100_000),
    "word-length": Filter(
        lambda p: p.share(sum(map(len, p.words))), "mean characters in a word", _GOPHER, 3, 10
    ),
    "symbols": Filter(
        lambda p: p.share(max(p.text.count("#"), sum(map(p.text.count, _ELLIPSES)))),
        "hash signs or ellipses per word", _GOPHER, high=0.1,
    ),
    "bullets": Filter(
        lambda p: p.share_of_lines(lambda line: line.startswith(_BULLETS)),
        "share of lines that begin with a bullet", _GOPHER, high=0.9,
    ),
    "ellipses": Filter(
        lambda p: p.share_of_lines(lambda line: line.endswith(_ELLIPSES)),
        "share of lines that end with an ellipsis", _GOPHER, high=0.3,
    ),
    "alphabetic": Filter(
        lambda p: p.share(sum(1 for word in p.words if word.isalpha() or _LETTER.search(word))),
        "share of words with a letter", _GOPHER, 0.8,
    ),
    "stop-words": Filter(
        lambda p: len(_STOP_WORDS & {word.strip(_STRIPPED).lower() for word in p.words}),
        "different words among the, be, to, of, and, that, have, with", _GOPHER, 2,
    ),
    "repeated-lines": Filter(
        lambda p: repeated_lines(p.lines), "share of repeated lines", _TABLE_A1, high=0.3
    ),
    "repeated-line-characters": Filter(
        lambda p: repeated_lines(p.lines, characters=True),
        "share of characters in repeated lines", _TABLE_A1, high=0.2,
    ),
    **{
        f"top-{size}-gram": Filter(
            lambda p, size=size: top_ngram(p.hashes, p.lengths, size),  # type: ignore[misc]
            f"share of characters in the most frequent {size}-gram", _TABLE_A1, high=high,
        )
        for size, high in ((2, 0.2), (3, 0.18), (4, 0.16))
    },
    **{
        f"repeated-{size}-grams": Filter(
            lambda p, size=size: repeated_ngrams(p.hashes, p.lengths, size),  # type: ignore[misc]
            f"share of characters in repeated {size}-grams", _TABLE_A1, high=high,
        )
        for size, high in ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.1))
    },
    "sentences": Filter(
        lambda p: sum(len(split_fast(line)) for line in p.lines), "sentences", _C4, 3
    ),
    "lorem-ipsum": Filter(
        lambda p: p.text.lower().count("lorem ipsum"), "occurrences of lorem ipsum", _C4, high=0
    ),
    "braces": Filter(lambda p: p.text.count("{"), "curly braces", _C4, high=0),
}  # fmt: skip

Edit = Callable[[str], str]
EDITS: dict[str, Edit] = {
    "citation-marks": lambda line: _CITATION.sub("", line).strip(),
    "terminal-punctuation": _unless(
        lambda line: not line.endswith(_TERMINAL) or line.endswith(_ELLIPSES)
    ),
    "short-lines": _unless(lambda line: len(line.split()) < 5),
    "javascript": _unless(lambda line: "javascript" in line.lower()),
    "policies": _unless(lambda line: any(each in line.lower() for each in _POLICIES)),
}
"""Changes of a line (C4) by name. Lines that become empty are removed before filters apply."""

_REPEATING = tuple(name for name, each in FILTERS.items() if each.source == _TABLE_A1)
_QUALITY = tuple(name for name, each in FILTERS.items() if each.source == _GOPHER)
GROUPS: dict[str, tuple[str, ...]] = {
    "gopher": _QUALITY + _REPEATING,
    "gopher-quality": _QUALITY,
    "gopher-repetition": _REPEATING,
    "c4": (*EDITS, *(name for name, each in FILTERS.items() if each.source == _C4)),
}


def resolve_filters(specs: Iterable[str]) -> tuple[dict[str, Edit], dict[str, Filter]]:
    """Return the edits and the filters that `specs` name, in the order of `EDITS` and `FILTERS`.

    A specification is the name of a filter, an edit or a group, or it is NAME=LOW:HIGH, which gives
    a filter other bounds. Either bound may be empty. If a filter is named twice, the last counts.
    Raise a UserError if a name is unknown or takes no bounds, or bounds are not ascending numbers.
    """
    chosen: dict[str, Filter | None] = {}
    for spec in specs:
        chosen.update(_resolve(spec))
    filters = {name: found for name in FILTERS if (found := chosen.get(name)) is not None}
    return {name: each for name, each in EDITS.items() if name in chosen}, filters


def _resolve(spec: str) -> Iterator[tuple[str, Filter | None]]:
    name, equals, bounds = spec.partition("=")
    names = GROUPS.get(name, (name,))
    known = (*GROUPS, *FILTERS, *EDITS)
    if name not in known:
        hint = suggestion(name, known)
        raise UserError(f"--filter {spec!r}: there is no filter {name!r}.{hint} Filters are "
                        f"{', '.join(known)}.")  # fmt: skip
    if not equals:
        yield from ((each, FILTERS.get(each)) for each in names)
        return
    if name not in FILTERS:
        raise UserError(f"--filter {spec!r}: {name} has no bounds; only a filter has bounds.")
    low, colon, high = bounds.partition(":")
    try:
        values = float(low or -math.inf), float(high or math.inf)
    except ValueError:
        values = math.nan, math.nan
    if not (colon and values[0] <= values[1]):
        raise UserError(
            f"--filter {spec!r}: the bounds {bounds!r} are not LOW:HIGH. Give two numbers, the "
            f"lower first, or leave one out: {name}=3:10, {name}=3: or {name}=:10."
        )
    yield name, replace(FILTERS[name], low=values[0], high=values[1])
