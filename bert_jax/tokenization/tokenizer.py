"""The interface of tokenizers, and their files on disk.

A tokenizer never encodes text as one of the five special ids: the characters "[MASK]" in a corpus
become ordinary tokens. Otherwise, a text could put masks and separators into training examples.
Code that needs a special id takes the id from `special_ids` and inserts it.
"""

import logging
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from tokenizers import AddedToken

from bert_jax.errors import UserError
from bert_jax.files.staging import write_synced
from bert_jax.tokenization.special_ids import SpecialIds

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Names of the special tokens, in the order of the fields of `SpecialIds`."""

SPACE = "▁"  # character for a space in SentencePiece pieces
MAX_TOKENS = 1_000_000  # largest vocabulary; the largest published for BERT has 501,153
MAX_FILE_BYTES = 64 << 20
"""Largest tokenizer file that is read, in bytes; Gemma's, with 256,000 tokens, has 34 MB."""
KIND_FILES = {
    "wordpiece": ("tokenizer.json", "vocab.txt"),
    "sentencepiece": ("tokenizer.model",),
    "fast": ("tokenizer.json", "vocab.json", "merges.txt"),
    "marian": ("source.spm", "target.spm", "vocab.json"),
}

MAX_SPECIAL = 4  # largest number of special tokens in a `TokenRow`
MAX_TOKEN_CHARS = 1000  # characters in a token; also the largest `max_input_chars_per_word`

_log = logging.getLogger(__name__)

Id = int | np.integer  # a token id that callers may pass

CONFIG_NAME = "tokenizer_config.json"
ROLES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
"""Fields of `CONFIG_NAME` that name the special tokens, in the order of `SPECIAL_TOKENS`."""
ADDED_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # AddedToken's flags


def added_fields(token: AddedToken) -> dict[str, Any]:
    """Return the entry of an added token in a `tokenizer.json`, without its id."""
    return {name: getattr(token, name) for name in ("content", *ADDED_FLAGS)}


class Encoding(NamedTuple):
    """The tokens of a text, without special tokens."""

    ids: np.ndarray
    """(n,) int32."""
    offsets: np.ndarray
    """(n, 2) int32: start and end (exclusive) of each token, in characters of the given text."""


class Tokenizer(ABC):
    """Base class of tokenizers, which convert text to ids and back."""

    kind: ClassVar[str]
    """`wordpiece`, `sentencepiece`, `fast` or `marian`."""
    special_ids: SpecialIds
    fingerprint: str
    """SHA-256 (hex) of everything that determines ids; the same after `save` and load."""
    continues_word: np.ndarray
    """(vocab_size,) bool: whether each token continues a word; False for special tokens."""
    word_prefix = ""
    """Prefix with which a word is encoded as inside a sentence: a space or nothing."""
    num_between = 1
    """Number of separators between two texts: 1, 2 as in RoBERTa and XLM-R, or 0 as in Marian."""
    mask_strips_space = False
    """Whether the mask stands for a word and the space before it, as RoBERTa's mask does."""

    def __init__(self, vocab: Iterable[str], added: Iterable[AddedToken] = ()) -> None:
        self.vocab = tuple(vocab)
        self.vocab_size = len(self.vocab)
        self._ids = {token: id for id, token in enumerate(self.vocab)}
        self.added = tuple(sorted(added, key=lambda token: self._ids[token.content]))
        """Tokens that are matched in a text before the rest of the text is split."""
        self._named: dict[int, str] = {}
        """Special tokens by id; `decode` separates them by spaces from the text around them."""

    def _added_entries(self, roles: Iterable[AddedToken] = ()) -> list[dict[str, Any]]:
        """Return the field `added_tokens` of a `tokenizer.json`."""
        tokens = {token.content: token for token in (*self.added, *roles)}.values()
        entries = [{"id": self._ids[token.content], **added_fields(token)} for token in tokens]
        return sorted(entries, key=lambda entry: entry["id"])

    def _pieces(self) -> tuple[str, ...]:
        """Return the vocabulary without the added tokens at its end, which are not word pieces."""
        names, size = {token.content for token in self.added}, self.vocab_size
        while size and self.vocab[size - 1] in names:
            size -= 1
        return self.vocab[:size]

    @property
    def target(self) -> "Tokenizer":
        """Tokenizer of translations, with the same ids; only Marian's differs from `self`."""
        return self

    @abstractmethod
    def encode(self, text: str) -> Encoding:
        """Return the ids and offsets of a text's tokens; starts and ends never decrease."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, (n,) int32, as `encode` does, but faster.

        The arrays may be read-only. All work is done in the calling thread.
        """

    def encode_words(self, words: Sequence[str]) -> list[np.ndarray]:
        """Return the ids, (n,) int32, that each word has inside a sentence, after a space."""
        return self.encode_batch([self.word_prefix + word for word in words])

    @abstractmethod
    def _spell(self, tokens: list[str]) -> str:
        """Return the text of ordinary tokens."""

    @abstractmethod
    def _files(self) -> dict[str, bytes]:
        """Return the contents, by name, of the files that `load_tokenizer` reads."""

    def decode(self, ids: Iterable[Id]) -> str:
        """Return readable text, in which special tokens appear by name.

        Case, accents and spacing may be lost. An id that is out of range raises an IndexError.
        """
        parts: list[str] = []
        for is_named, run in groupby(map(int, ids), self._named.__contains__):
            if is_named:
                parts += [self._named[id] for id in run]
            else:
                parts.append(self._spell([self.id_to_token(id) for id in run]))
        return " ".join(parts)

    def id_to_token(self, id: Id) -> str:
        """Return the vocabulary's entry for an id; raise IndexError for an id out of range."""
        if not 0 <= id < self.vocab_size:
            raise IndexError(f"token id {id} is outside the vocabulary of {self.vocab_size}")
        return self.vocab[id]

    def token_to_id(self, token: str) -> int | None:
        """Return a token's id, or None if the vocabulary lacks the token."""
        return self._ids.get(token)

    def save(self, directory: Path) -> None:
        """Write the files that `load_tokenizer` reads.

        If the directory is missing, either all files appear in it or none. Otherwise, each file
        replaces the file of the same name. Raise a UserError if the directory has a file that
        only another kind of tokenizer has, or cannot be written.
        """
        directory = Path(directory)
        for name in sorted({*chain(*KIND_FILES.values())} - {*KIND_FILES[self.kind]}):
            if (directory / name).exists():
                why = f"holds a tokenizer of another kind ({name}); choose another directory"
                raise UserError(f"{directory} {why}")
        exists, files = directory.is_dir(), self._files()
        # An existing directory is not replaced: a user may be in it, or a disk mounted there.
        place = directory if exists else directory.parent
        temporary = place / f"{directory.name}.tmp-{os.getpid()}"
        try:
            temporary.mkdir(parents=True)
            for name, content in files.items():
                write_synced(temporary / name, content)
            if exists:
                for name in files:
                    os.replace(temporary / name, directory / name)
            else:
                os.rename(temporary, directory)
        except OSError as error:
            why = f"{directory}: the tokenizer cannot be written: {error.strerror}"
            raise UserError(why) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


class TokenRow(NamedTuple):
    """One or two texts with special tokens around them."""

    ids: np.ndarray
    """(n,) int32."""
    second_start: int
    """Position where the second text begins; n if there is no second text."""


def make_row(tokenizer: Tokenizer, first: np.ndarray, second: np.ndarray | None = None) -> TokenRow:
    """Make [CLS] first [SEP], or [CLS] first [SEP] * num_between second [SEP], from ids (n,).

    Some tokenizers have no [CLS] (see `SpecialIds.opens`).
    """
    special = tokenizer.special_ids
    cls, sep = np.array([special.cls] * special.opens, np.int32), np.array([special.sep], np.int32)
    if second is None:
        return TokenRow(np.concatenate([cls, first, sep]), len(cls) + len(first) + 1)
    between = np.repeat(sep, tokenizer.num_between)
    row = np.concatenate([cls, first, between, second, sep])
    return TokenRow(row, len(cls) + len(first) + len(between))


def num_special(tokenizer: Tokenizer, pair: bool) -> int:
    """Return the number of special tokens that `make_row` adds to one text, or to a pair."""
    return tokenizer.special_ids.opens + 1 + pair * tokenizer.num_between


def replace_surrogates(text: str) -> str:
    """Replace each lone surrogate by U+FFFD, which keeps lengths and offsets.

    Lone surrogates can come from escapes in JSON; both tokenizer libraries raise errors for them.
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def check_vocab_size(vocab_size: int, reserved: int, what: str, advice: str) -> None:
    """Raise a UserError, with `advice`, unless `reserved` < `vocab_size` <= `MAX_TOKENS`."""
    if vocab_size > MAX_TOKENS:
        raise UserError(f"vocab_size is {vocab_size:,}; the limit is {MAX_TOKENS:,}")
    if vocab_size <= reserved:
        raise UserError(f"vocab_size is {vocab_size}; {what} alone take {reserved}. {advice}")


def warn_of_few(found: int, asked: int, why: str) -> None:
    """Log a warning if training yielded fewer tokens than were asked for."""
    if found < asked:
        _log.warning(
            "the vocabulary has %d of the %d tokens that were asked for: %s; use more text, or ask "
            "for fewer tokens", found, asked, why,
        )  # fmt: skip
