"""Extension of the vocabulary of an existing model: bert-jax import --add-tokens.

saved = read_model("work/bert")
saved = add_tokens(saved, new_tokens(saved.tokenizer, ["angioplasty", "stent"]))

A new token starts as the mean of the pieces that the old tokenizer splits it into; the model's
outputs for old tokens stay the same.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tokenizers import pre_tokenizers

from bert_jax.artefacts.formats.entries import VOCABULARY_PATHS, insert, lookup
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.errors import UserError, first_few
from bert_jax.files.untrusted.whole_file import read_text
from bert_jax.model.heads import Params
from bert_jax.tokenization.fast_tokenizer import FastTokenizer
from bert_jax.tokenization.tokenizer import MAX_TOKEN_CHARS, Tokenizer
from bert_jax.tokenization.wordpiece import CONTINUATION, WordPieceTokenizer

MAX_FILE_BYTES = 1 << 24
_MAX_SHOWN = 20


class NewTokens(NamedTuple):
    """Tokens to add from a list, and counts of the other tokens."""

    tokens: tuple[str, ...]
    """Tokens to add, as the tokenizer normalises them."""
    existing: int
    """Number of tokens that the vocabulary already has."""
    repeated: int
    """Number of repeated tokens."""
    normalised: int
    """Number of tokens that normalisation changes, such as upper case or accents."""
    unknown: int
    """Number of tokens with [UNK] among their pieces."""

    def __str__(self) -> str:
        were = "was" if self.existing == 1 else "were"
        parts = (
            (self.existing, f"{were} there already"),
            (self.repeated, "are repetitions"),
            (self.normalised, "are added as the tokenizer normalises text"),
            (self.unknown, "start, at least in part, as [UNK]"),
        )
        new = f"{len(self.tokens)} tokens are new"
        if self.tokens:
            new += ", each begins as the mean of the pieces that it had"
        return "; ".join([new, *(f"{number} {said}" for number, said in parts if number)])


def read_lines(path: Path) -> list[str]:
    """Read a file of one token per line; keep blank lines, so that line numbers stay right."""
    lines = read_text(path, max_bytes=MAX_FILE_BYTES).split("\n")
    if not any(line.strip() for line in lines):
        raise UserError(f"{path} has no tokens; write one a line")
    return lines


def new_tokens(
    tokenizer: Tokenizer, lines: Sequence[str], *, where: str = "tokens, entry {}"
) -> NewTokens:
    """Return the tokens of a list that a tokenizer lacks.

    Lines are whole words; blank lines are skipped. `where` formats a line number for messages.

    Raises:
        UserError: The tokenizer is of an unsupported kind, or entries are not one word: lists all.
    """
    if not isinstance(tokenizer, WordPieceTokenizer | FastTokenizer):
        raise UserError(
            "tokens are added to WordPiece vocabularies and to those of a tokenizer.json; this "
            f"model's tokenizer is of the kind {tokenizer.kind}, whose scores a list of words does "
            "not give"
        )
    wordpiece = isinstance(tokenizer, WordPieceTokenizer)
    check = _wordpiece_check(tokenizer) if wordpiece else _json_check(tokenizer)
    found: dict[str, None] = {}
    wrong: list[str] = []
    existing = repeated = normalised = unknown = 0
    for number, line in enumerate(lines, 1):
        word = line.strip()
        if not word:
            continue
        form, fault = check(word)
        if fault:
            wrong.append(f"{where.format(number)}: {word[:80]!r} {fault}")
        elif form in found:
            repeated += 1
        elif _is_there(tokenizer, form):
            existing += 1
        else:
            found[form] = None
            normalised += form != word
            unknown += tokenizer.special_ids.unk in tokenizer.encode(form).ids
    if wrong:
        raise UserError(
            f"{first_few(wrong, _MAX_SHOWN)}. Each token is one word, without white space, and in "
            "a WordPiece vocabulary without punctuation"
        )
    return NewTokens(tuple(found), existing, repeated, normalised, unknown)


def _wordpiece_check(tokenizer: Any) -> Callable[[str], tuple[str, str]]:
    """Return a function from an entry to its normalised word and a reason to refuse it, or ""."""
    normalizer, splitter = tokenizer.options.normalizer(), pre_tokenizers.BertPreTokenizer()
    limit = tokenizer.options.max_word_chars

    def check(word: str) -> tuple[str, str]:
        try:
            parts = [p for p, _ in splitter.pre_tokenize_str(normalizer.normalize_str(word))]
        except (TypeError, UnicodeEncodeError):  # a lone surrogate
            parts = []
        if len(parts) != 1:
            piece = "; pieces of words cannot be added" if word.startswith(CONTINUATION) else ""
            return "", _cut(parts) + piece
        if len(parts[0]) > limit:
            return "", f"is longer than {limit} characters, the tokenizer's limit"
        return parts[0], ""

    return check


def _json_check(tokenizer: Any) -> Callable[[str], tuple[str, str]]:
    """Return the function of `_wordpiece_check` for a tokenizer in a `tokenizer.json`."""
    special = {tokenizer.id_to_token(id) for id in vars(tokenizer.special_ids).values()}
    special |= {token.content for token in tokenizer.added if token.special}

    def check(word: str) -> tuple[str, str]:
        try:
            parts = tokenizer.normalised(word).split()
        except (TypeError, UnicodeEncodeError):
            parts = []
        if len(parts) != 1:
            return "", _cut(parts)
        if len(parts[0]) > MAX_TOKEN_CHARS:
            return "", f"is longer than {MAX_TOKEN_CHARS:,} characters, the limit"
        if parts[0] in special:
            return "", "is a special token of this tokenizer"
        return parts[0], ""

    return check


def _cut(parts: Sequence[str]) -> str:
    if not parts:
        return "has no character that stays to this tokenizer"
    return f"is {len(parts)} words ({' '.join(parts)[:80]!r}) to this tokenizer"


def _is_there(tokenizer: Tokenizer, form: str) -> bool:
    """Whether a word is an entry of the vocabulary, or one token inside a sentence."""
    if tokenizer.token_to_id(form) is not None:
        return True
    ids = tokenizer.encode_words([form])[0]
    return len(ids) == 1 and int(ids[0]) != tokenizer.special_ids.unk


def add_tokens(saved: SavedModel, new: NewTokens) -> SavedModel:
    """Return a model with a larger vocabulary; `saved` is unchanged.

    A new token's row in the embedding table and in an untied decoder, and its masked-LM bias, are
    means over the pieces that the old tokenizer gives inside a sentence. New ids follow the old
    tokenizer's; unused rows of the model are filled first. `tokenizer_files` still point to the old
    tokenizer.

    Raises:
        UserError: The vocabulary would exceed the largest supported size.
    """
    old = saved.tokenizer
    if not new.tokens:
        return saved
    tokenizer: Tokenizer
    if isinstance(old, WordPieceTokenizer):
        tokenizer = WordPieceTokenizer(
            (*old.vocab, *new.tokens),
            old.options,
            old.added,
            where="the vocabulary with the new tokens, entry {}",
        )
    else:
        assert isinstance(old, FastTokenizer)
        tokenizer = old.with_words(new.tokens)
    config = dataclasses.replace(
        saved.config, vocab_size=max(saved.config.vocab_size, tokenizer.vocab_size)
    )
    pieces = old.encode_words(new.tokens)
    params: Params = jax.tree.map(lambda leaf: leaf, saved.params)
    for path in VOCABULARY_PATHS:
        if (rows := lookup(params, path)) is not None:
            insert(params, path, _grown(rows, old.vocab_size, config.padded_vocab_size, pieces))
    return dataclasses.replace(
        saved,
        config=config,
        params=params,
        tokenizer=tokenizer,
        name=f"{saved.name}, with {len(new.tokens)} more tokens",
    )


def _grown(rows: np.ndarray, first: int, padded: int, pieces: list[np.ndarray]) -> np.ndarray:
    """Return `padded` rows: old rows and, from `first` on, the mean row of each of `pieces`."""
    old = np.asarray(rows)
    grown = np.zeros((padded, *old.shape[1:]), np.float32)
    grown[: len(old)] = old
    for row, ids in enumerate(pieces, first):
        grown[row] = old[ids].mean(axis=0, dtype=np.float64)
    return grown
