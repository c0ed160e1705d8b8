"""Properties of the text and of the machine, from which `bert-jax start` chooses."""

import os
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple
from unicodedata import category, normalize

import jax

from bert_jax.data.corpus.datasheet import script_of

_SAMPLE_CHARS = 1_000_000
_UNSPACED = ("Thai", "Lao", "Khmer", "Myanmar", "Hiragana", "Katakana")
_VOCABULARIES = {20e6: 4096, 200e6: 8192, 2e9: 16_384, float("inf"): 32_768}


class Writing(NamedTuple):
    """Writing system of a text."""

    scripts: str
    """Scripts above 1% of the letters, with their shares."""
    spaced: bool
    """Whether words have spaces between them."""
    accents: bool
    """Whether words are spaced and have many accents or vowel signs, which tell words apart."""


def look_at(texts: Iterable[str]) -> Writing:
    """Read about a million characters, and find out how the text is written."""
    counts, accented, read = Counter[str](), 0, 0
    for text in texts:
        part = text[: _SAMPLE_CHARS - read]
        counts.update(map(script_of, filter(str.isalpha, part)))
        accented += sum(category(char) == "Mn" for char in normalize("NFD", part))
        read += len(text)
        if read >= _SAMPLE_CHARS:
            break
    total = max(1, counts.total())
    shares = [f"{name} {n / total:.0%}" for name, n in counts.most_common() if n > 0.01 * total]
    spaced = sum(counts[name] for name in _UNSPACED) < 0.2 * total
    return Writing(", ".join(shares), spaced, spaced and accented > 0.005 * total)


def vocabulary_size(text_bytes: int, spaced: bool = True) -> int:
    """Return a vocabulary size at which most tokens occur hundreds of times in the text."""
    size = next(size for bound, size in _VOCABULARIES.items() if text_bytes < bound)
    return size if spaced else max(8192, size)  # room for ideographs


def machine() -> str:
    """Describe the devices that train."""
    devices = jax.devices()
    kind = devices[0].device_kind
    return f"{os.cpu_count()} CPU cores" if kind == "cpu" else f"{len(devices)} x {kind}"
