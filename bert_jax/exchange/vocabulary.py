"""A larger vocabulary for a model that has one: bert-jax import --add-tokens.

saved = read_model("work/bert")
saved = add_tokens(saved, new_tokens(saved.tokenizer, ["angioplasty", "stent"]))

A new token starts as the mean of what the model has for it, the pieces that the old tokenizer cuts
it into, and what the model says of the old tokens stays as it was.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from tokenizers import pre_tokenizers

from bert_jax.errors import UserError, first_few
from bert_jax.formats.entries import VOCABULARY_PATHS, insert, lookup
from bert_jax.model.heads import Params
from bert_jax.saved.model import SavedModel
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.tokenization.wordpiece import CONTINUATION, WordPieceTokenizer
from bert_jax.untrusted.whole_file import read_text

MAX_FILE_BYTES = 1 << 24
_MAX_SHOWN = 20


class NewTokens(NamedTuple):
    """Tokens of a list to add, and numbers of the others."""

    tokens: tuple[str, ...]
    """Tokens, as text looks after the tokenizer's normalisation."""
    existing: int
    """Number of tokens that were in the vocabulary."""
    repeated: int
    """Number of repetitions."""
    normalised: int
    """Number of tokens that the list writes otherwise, with upper case or accents."""
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
    """Return the lines of a file with a token a line, blank ones too, so that numbers are right."""
    lines = read_text(path, max_bytes=MAX_FILE_BYTES).split("\n")
    if not any(line.strip() for line in lines):
        raise UserError(f"{path} has no tokens; write one a line")
    return lines


def new_tokens(
    tokenizer: Tokenizer, lines: Sequence[str], *, where: str = "tokens, entry {}"
) -> NewTokens:
    """Return the tokens of a list that a tokenizer would have to learn.

    Lines are whole words; blank ones do not count. `where` names a line in messages by its number.

    Raises:
        UserError: A tokenizer of another kind, entries that are not one word to it: all of them.
    """
    if not isinstance(tokenizer, WordPieceTokenizer):
        raise UserError(
            f"tokens are added to WordPiece vocabularies alone; this model's tokenizer is of the "
            f"kind {tokenizer.kind}, whose scores or merges a list of words does not give"
        )
    normalizer, splitter = tokenizer.options.normalizer(), pre_tokenizers.BertPreTokenizer()
    limit = tokenizer.options.max_word_chars
    found: dict[str, None] = {}
    wrong: list[str] = []
    existing = repeated = normalised = unknown = 0
    for number, line in enumerate(lines, 1):
        word = line.strip()
        if not word:
            continue
        try:
            parts = [p for p, _ in splitter.pre_tokenize_str(normalizer.normalize_str(word))]
        except (TypeError, UnicodeEncodeError):  # half of a surrogate pair
            parts = []
        entry = f"{where.format(number)}: {word[:80]!r}"
        if len(parts) != 1:
            split = " ".join(parts)[:80]
            cut = f"is {len(parts)} words ({split!r})" if parts else "has no character that stays"
            piece = "; pieces of words cannot be added" if word.startswith(CONTINUATION) else ""
            wrong.append(f"{entry} {cut} to this tokenizer{piece}")
        elif len(parts[0]) > limit:
            wrong.append(f"{entry} is longer than {limit} characters, the tokenizer's limit")
        elif parts[0] in found:
            repeated += 1
        elif tokenizer.token_to_id(parts[0]) is not None:
            existing += 1
        else:
            found[parts[0]] = None
            normalised += parts[0] != word
            unknown += tokenizer.special_ids.unk in tokenizer.encode(parts[0]).ids
    if wrong:
        raise UserError(
            f"{first_few(wrong, _MAX_SHOWN)}. Each token is one word, without white space "
            "or punctuation"
        )
    return NewTokens(tuple(found), existing, repeated, normalised, unknown)


def add_tokens(saved: SavedModel, new: NewTokens) -> SavedModel:
    """Return a model whose vocabulary has more words; `saved` stays as it is.

    The row of a new token in the embedding table, and its bias in the masked-LM head, are the means
    of those of the pieces that the old tokenizer gives. Ids follow the old tokenizer's; rows that a
    model has beyond them, of no token, are used first. `tokenizer_files` are still those of the old
    tokenizer.

    Raises:
        UserError: The vocabulary becomes larger than any may be.
    """
    old = saved.tokenizer
    if not new.tokens:
        return saved
    assert isinstance(old, WordPieceTokenizer)
    tokenizer = WordPieceTokenizer(
        (*old.vocab, *new.tokens),
        old.options,
        old.added,
        where="the vocabulary with the new tokens, entry {}",
    )
    config = dataclasses.replace(
        saved.config, vocab_size=max(saved.config.vocab_size, tokenizer.vocab_size)
    )
    pieces = old.encode_batch(new.tokens)
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
    """Return `padded` rows: old rows, and from `first` on the means of the rows of `pieces`."""
    old = np.asarray(rows)
    grown = np.zeros((padded, *old.shape[1:]), np.float32)
    grown[: len(old)] = old
    for row, ids in enumerate(pieces, first):
        grown[row] = old[ids].mean(axis=0, dtype=np.float64)
    return grown
