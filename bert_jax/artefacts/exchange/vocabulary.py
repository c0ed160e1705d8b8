"""Extension of the vocabulary of an existing model: bert-jax import --add-tokens.

saved = read_model("work/bert")
saved = add_tokens(saved, new_tokens(saved.tokenizer, ["angioplasty", "stent"]))

The embedding of a new token starts as the mean of the embeddings of its pieces in the old
tokenizer. For texts without new tokens, the model's outputs for old tokens stay the same.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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
    """New tokens from a list, in normalised form, and counts of the list's entries."""

    tokens: tuple[str, ...]
    existing: int
    """Number of entries that the vocabulary already has."""
    repeated: int
    normalised: int
    """Number of new tokens that normalisation has changed, such as words with accents."""
    unknown: int
    """Number of new tokens with [UNK] among their pieces."""

    def __str__(self) -> str:
        were = "was" if self.existing == 1 else "were"
        parts = (
            (self.existing, f"{were} in the vocabulary already"),
            (self.repeated, "are repetitions"),
            (self.normalised, "are added in normalised form"),
            (self.unknown, "start, at least in part, as [UNK]"),
        )
        new = f"{len(self.tokens)} tokens are new"
        if self.tokens:
            new += "; each begins as the mean of its former pieces"
        return "; ".join([new, *(f"{number} {said}" for number, said in parts if number)])


def read_lines(path: Path) -> list[str]:
    """Read a file with one token per line; keep blank lines, so that line numbers stay correct."""
    lines = read_text(path, max_bytes=MAX_FILE_BYTES).split("\n")
    if not any(line.strip() for line in lines):
        raise UserError(f"{path} has no tokens; write one per line")
    return lines


def new_tokens(
    tokenizer: Tokenizer, lines: Sequence[str], *, where: str = "tokens, entry {}"
) -> NewTokens:
    """Return the tokens of a list that a tokenizer lacks.

    Blank lines are skipped. `where` is a format string for the line number. Raise a UserError if
    the tokenizer takes no tokens, or an entry is a special token, a piece of words, too long, or
    not one word.
    """
    if not isinstance(tokenizer, WordPieceTokenizer | FastTokenizer):
        raise UserError(
            "tokens can be added only to a WordPiece vocabulary or a tokenizer.json; this model's "
            f"tokenizer is of the kind {tokenizer.kind}, in which each token needs a score"
        )
    last, added = tokenizer.vocab[-1], {token.content for token in tokenizer.added}
    if isinstance(tokenizer, WordPieceTokenizer) and last in added:
        raise UserError(
            f"the vocabulary ends with the added token {last!r}; tokens behind {last!r} would make "
            f"{last!r} a piece of words. Use a vocabulary that ends with an ordinary token"
        )
    found: dict[str, None] = {}
    wrong: list[str] = []
    existing = repeated = normalised = unknown = 0
    for number, line in enumerate(lines, 1):
        word = line.strip()
        if not word:
            continue
        form, fault = _form(tokenizer, word)
        if fault:
            wrong.append(f"{where.format(number)}: {word[:80]!r} {fault}")
        elif form in found:
            repeated += 1
        elif _is_token(tokenizer, form):
            existing += 1
        elif tokenizer.token_to_id(form) is not None:
            wrong.append(
                f"{where.format(number)}: {word[:80]!r} exists as a piece of words; leave it out"
            )
        else:
            found[form] = None
            normalised += form != word
            unknown += tokenizer.special_ids.unk in tokenizer.encode(form).ids
    if wrong:
        raise UserError(
            f"{first_few(wrong, _MAX_SHOWN)}. Each token must be one word without white space and, "
            "in a WordPiece vocabulary, without punctuation"
        )
    return NewTokens(tuple(found), existing, repeated, normalised, unknown)


def _form(tokenizer: WordPieceTokenizer | FastTokenizer, word: str) -> tuple[str, str]:
    """Return an entry in normalised form, and the reason why it cannot be added, or ""."""
    limit, special, hint = MAX_TOKEN_CHARS, set[str](), ""
    try:
        if isinstance(tokenizer, WordPieceTokenizer):
            limit = tokenizer.options.max_word_chars
            hint = "; pieces of words cannot be added" * word.startswith(CONTINUATION)
            text = tokenizer.options.normalizer().normalize_str(word)
            parts = [p for p, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(text)]
        else:
            special = {token.content for token in tokenizer.added if token.special}
            special |= {*tokenizer.pipeline.roles}
            parts = tokenizer.normalised(word).split()
    except (TypeError, UnicodeEncodeError):  # a lone surrogate
        parts = []
    if not parts:
        return "", f"has no character that this tokenizer keeps{hint}"
    if len(parts) > 1:
        return "", f"is {len(parts)} words ({' '.join(parts)[:80]!r}) to this tokenizer{hint}"
    if len(parts[0]) > limit:
        return "", f"is longer than {limit:,} characters, the limit of this tokenizer"
    return parts[0], "is a special token of this tokenizer" if parts[0] in special else ""


def _is_token(tokenizer: Tokenizer, form: str) -> bool:
    """Return true if the tokenizer reads a word inside a sentence as one known token."""
    ids = tokenizer.encode_words([form])[0].tolist()
    return len(ids) == 1 and ids != [tokenizer.special_ids.unk]


def add_tokens(saved: SavedModel, new: NewTokens) -> SavedModel:
    """Return a model with a larger vocabulary; `saved` is unchanged.

    The old tokenizer splits a new token, inside a sentence, into pieces. The token's embedding, row
    in an untied decoder, masked-LM bias and weight in static queries are means over these pieces.
    New ids follow the old ids, and so first use spare rows. `tokenizer_files` does not change.
    Raise a UserError if the vocabulary would be too large.
    """
    old = saved.tokenizer
    if not new.tokens:
        return saved
    tokenizer: Tokenizer
    if isinstance(old, WordPieceTokenizer):
        where = "the vocabulary with the new tokens, entry {}"
        vocab = (*old.vocab, *new.tokens)
        tokenizer = WordPieceTokenizer(vocab, old.options, old.added, where=where)
    else:
        assert isinstance(old, FastTokenizer)
        tokenizer = old.with_words(new.tokens)
    size = max(saved.config.vocab_size, tokenizer.vocab_size)
    config = dataclasses.replace(saved.config, vocab_size=size)
    pieces = old.encode_words(new.tokens)
    params: Params = jax.tree.map(lambda leaf: leaf, saved.params)
    for path in (*VOCABULARY_PATHS, ("queries",)):
        if (rows := lookup(params, path)) is not None:
            count = config.vocab_size if path == ("queries",) else config.padded_vocab_size
            grown = np.zeros((count, *rows.shape[1:]), np.float32)
            grown[: len(rows)] = rows
            for row, ids in enumerate(pieces, old.vocab_size):
                grown[row] = np.asarray(rows)[ids].mean(axis=0, dtype=np.float64)
            insert(params, path, grown)
    name = f"{saved.name}, with {len(new.tokens)} more tokens"
    network = saved.network and dataclasses.replace(saved.network, model=config)
    return dataclasses.replace(
        saved, config=config, network=network, params=params, tokenizer=tokenizer, name=name
    )
