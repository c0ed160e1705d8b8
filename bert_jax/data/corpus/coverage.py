"""Coverage of text by a tokenizer, script by script."""

import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from bert_jax.tokenization.tokenizer import Tokenizer

OTHER = "digits and signs"
"""Name of what has no letter."""
_HAN = ("CJK", "IDEOGRAPHIC", "KANGXI")
_WIDTHS = ("FULLWIDTH", "HALFWIDTH")
_NO_SCRIPT = ("COMBINING", "MATHEMATICAL", "MODIFIER", "DOUBLE-STRUCK", "SCRIPT", "BLACK-LETTER")
_REPLACEMENT = "\ufffd"


@dataclass
class ScriptCounts:
    """Words of one script and the tokens that they became."""

    words: int = 0
    """Tokens that begin a word."""
    tokens: int = 0
    unknown: int = 0
    fallback: int = 0
    """Tokens that are single bytes, or another part of a character."""

    def add(self, other: Mapping[str, Any]) -> None:
        """Add other counts by name, such as what `as_json` made of them."""
        for name in vars(self):
            setattr(self, name, getattr(self, name) + other[name])

    def as_json(self) -> dict[str, Any]:
        """Return the counts and their ratio as JSON values."""
        return {**vars(self), "tokens_per_word": self.tokens / self.words if self.words else None}


@lru_cache(maxsize=1 << 16)
def script_of(char: str) -> str:
    """Return the script of a letter, such as Latin or Han; empty for everything else.

    The name is the first word of the character's name in Unicode.
    """
    if unicodedata.category(char)[0] not in "LM":
        return ""
    words = unicodedata.name(char, "").split()
    if words and words[0] in _WIDTHS:
        words = words[1:]
    if not words or words[0] in _NO_SCRIPT:
        return ""
    return "Han" if words[0] in _HAN else words[0].capitalize()


def text_script(text: str) -> str:
    """Return the script of a text's first letter; `OTHER` where there is none."""
    return next((script for char in text if (script := script_of(char))), OTHER)


def find_fallback(tokenizer: Tokenizer) -> Callable[[int], bool]:
    """Return a function of an id: whether the token is a byte, or another part of a character."""

    @cache
    def is_part(id: int) -> bool:
        name = tokenizer.id_to_token(id)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return True
        return _REPLACEMENT not in name and _REPLACEMENT in tokenizer.decode([id])

    return is_part


def measure_coverage(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, ScriptCounts]:
    """Tokenize texts and count words, tokens, [UNK] and byte fallback by script.

    A token belongs to the script of its first letter in the text.
    """
    counts: dict[str, ScriptCounts] = defaultdict(ScriptCounts)
    is_part, unknown = find_fallback(tokenizer), tokenizer.special_ids.unk
    for each in texts:
        text = tokenizer.word_prefix + each  # as a build has it: sentences follow one another
        encoding = tokenizer.encode(text)
        ids, offsets = encoding.ids.tolist(), encoding.offsets.tolist()
        for id, (begin, end) in zip(ids, offsets, strict=True):
            one = counts[text_script(text[begin:end])]
            one.tokens += 1
            one.words += not tokenizer.continues_word[id]
            one.unknown += id == unknown
            one.fallback += id != unknown and is_part(id)
    return counts


def vocabulary_scripts(tokenizer: Tokenizer, counts: np.ndarray) -> dict[str, ScriptCounts]:
    """Divide (vocab_size,) occurrences of ids by the scripts of the vocabulary's entries.

    No text is read. [UNK] and parts of characters have no script and stand by themselves.
    """
    found: dict[str, ScriptCounts] = defaultdict(ScriptCounts)
    is_part, unknown = find_fallback(tokenizer), tokenizer.special_ids.unk
    for id in np.flatnonzero(counts).tolist():
        number = int(counts[id])
        if id == unknown:
            script = "[UNK]"
        elif is_part(id):
            script = "parts of characters"
        else:
            script = text_script(tokenizer.decode([id]))
        one = found[script]
        one.tokens += number
        one.words += number * (not tokenizer.continues_word[id])
        one.unknown += number * (id == unknown)
        one.fallback += number * (script == "parts of characters")
    return found


def scripts_as_json(counts: Mapping[str, ScriptCounts]) -> dict[str, dict[str, Any]]:
    """Return the counts as JSON values, the script with most tokens first."""
    order = sorted(counts, key=lambda script: -counts[script].tokens)
    return {script: counts[script].as_json() for script in order}
