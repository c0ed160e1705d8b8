"""SentencePiece (Kudo and Richardson 2018) with unigram or BPE models, using Google's library.

Text is NFKC-normalised, a space becomes "▁" at the start of the next piece, and all other
characters stay. With byte fallback, the default, a character without a piece is encoded as its
UTF-8 bytes, so that no text becomes [UNK]. The bytes take 256 entries of the vocabulary.
"""

import contextlib
import hashlib
import io
import json
import logging
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import sentencepiece
from typing_extensions import override

from bert_jax.errors import UserError
from bert_jax.files.untrusted.tensor_bundle import fields_of
from bert_jax.terminal import progress_bar
from bert_jax.tokenization import tokenizer as base
from bert_jax.tokenization.special_ids import SpecialIds

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_MASK = b"\x0a\x0a\x0a\x06[MASK]\x18\x03"
"""Protobuf field that adds a control piece [MASK] when it is appended to a model's bytes."""
_LINE_CHARS = 4096  # longest training line; longer lines are split, because the library drops them
_THREADS = 16  # training threads; fixed, since the file records them and rounding depends on them
_MOST_LINES = 500_000  # training lines in memory; if there are more, a sample is taken

_log = logging.getLogger(__name__)


class SentencePieceTokenizer(base.Tokenizer):
    """Tokenizer that runs a SentencePiece model.

    The span of a piece covers all characters of the given text from which the piece comes, without
    spaces at the ends: both pieces of a split "ﬁ" cover the ligature. A bare "▁" has an empty span.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, *, where: str = "SentencePiece model") -> None:
        """Load the content of a `.model` file, which `where` names in error messages.

        Raise a UserError if the file is not a model or has too many pieces, or if its special
        pieces are missing or match raw text.
        """
        self._model, self._fast = model, load_model(model, where)
        pieces: list[str] = []
        for id in range(self._fast.get_piece_size()):
            try:
                pieces.append(self._fast.id_to_piece(id))
            except UnicodeDecodeError as error:
                raise UserError(f"{where}: piece {id} is not UTF-8; the file is damaged") from error
        super().__init__(pieces)
        self.special_ids = self._find_specials(where)
        self._named = dict(zip(vars(self.special_ids).values(), base.SPECIAL_TOKENS, strict=True))
        self.continues_word = np.array([not piece.startswith(base.SPACE) for piece in pieces])
        self.continues_word[list(self._named)] = False
        self.continues_word[list(map(self._fast.is_control, range(len(pieces))))] = False
        self.fingerprint = hashlib.sha256(b"sentencepiece\0" + model).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return SentencePieceTokenizer, (self._model,)

    def _find_specials(self, where: str) -> SpecialIds:
        """Find the special ids; [PAD] and [UNK] may have other names, as in ALBERT's model."""
        named = [self._ids.get(token, -1) for token in base.SPECIAL_TOKENS[2:]]
        found = [self._fast.pad_id(), self._fast.unk_id(), *named]
        if missing := [t for t, id in zip(base.SPECIAL_TOKENS, found, strict=True) if id < 0]:
            raise UserError(
                f"{where} has no piece for {', '.join(missing)}; give a tokenizer.json, which "
                "transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes, or "
                "a model with these control symbols, as `bert-jax tokenizer` trains it"
            )
        for token, id in zip(base.SPECIAL_TOKENS[2:], found[2:], strict=True):
            if not self._fast.is_control(id):
                raise UserError(
                    f"{where}: {token} is not a control symbol, so text that spells it would "
                    "produce the special id; train the model with the token in control_symbols"
                )
        return SpecialIds(*found)

    @override
    def encode(self, text: str) -> base.Encoding:
        _, ids, spans = spans_of(self._fast, base.replace_surrogates(text))
        return base.Encoding(ids, spans)

    @override
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        texts = [base.replace_surrogates(text) for text in texts]
        return self._fast.encode(texts, return_type="numpy", num_threads=1)

    def normalised(self, text: str) -> str:
        """Return a text as the model reads it, with "▁" before each word."""
        return self._fast.normalize(text)

    def _spell(self, tokens: list[str]) -> str:
        return self._fast.decode_pieces(tokens)

    def _files(self) -> dict[str, bytes]:
        config = {"kind": self.kind, **dict(zip(base.ROLES, base.SPECIAL_TOKENS, strict=True))}
        text = json.dumps(config, indent=1) + "\n"
        return {"tokenizer.model": self._model, base.CONFIG_NAME: text.encode()}


def with_mask(model: bytes) -> bytes:
    """Return a model with the piece [MASK], which Microsoft's `spm.model` of DeBERTa lacks."""
    return model if _MASK[2:-2] in model else model + _MASK


def load_model(model: bytes, where: str) -> sentencepiece.SentencePieceProcessor:
    """Load the content of a model's file; raise a UserError, with `where`, if it is not a model."""
    # Check the number of pieces first, because the library makes an object for each piece.
    if _count_pieces(model, base.MAX_TOKENS) > base.MAX_TOKENS:
        raise UserError(f"{where} has more than {base.MAX_TOKENS:,} pieces, which is the limit")
    loaded = sentencepiece.SentencePieceProcessor()
    try:
        loaded.load_from_serialized_proto(model)
    except Exception as error:  # the binding raises several types
        raise UserError(f"{where} is not a SentencePiece model: {error}") from error
    return loaded


def spans_of(
    model: sentencepiece.SentencePieceProcessor, text: str
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the pieces of a text, their ids (n,) int32, and their spans (n, 2) int32."""
    found = model.encode(text, return_type="offset_mapping")
    pieces = found["pieces"]
    # Character i of `normal` comes from the characters of `text` from `starts[i]` to the next
    # larger value in `starts`. Several characters of `normal` that come from the same
    # characters of `text`, such as the letters of a ligature, have the same start.
    normal, offsets = model.normalize(text, with_offsets=True)
    starts = np.array(offsets, np.int64)
    # A "▁" that shares its source with another character is no space: U+00B4 is "▁" plus accent.
    shared = np.append(starts[:-2] == starts[1:-1], False)  # with the next character
    shared[1:] |= shared[:-1]
    is_space = np.array([char == base.SPACE for char in normal], bool) & ~shared
    is_space[:1] |= normal[:1] == base.SPACE  # the "▁" before the first word has no source
    following = np.searchsorted(starts, starts[:-1], side="right")
    ends = np.append(starts, len(text))[following]
    char_of_byte = np.repeat(np.arange(len(normal)), [len(char.encode()) for char in normal])
    sizes = [1 if _BYTE.fullmatch(piece) else len(piece.encode()) for piece in pieces]
    if sum(sizes) != len(char_of_byte):
        raise RuntimeError(f"pieces do not spell out the normalised text of {text[:80]!r}")
    spans = np.zeros((len(pieces), 2), np.int32)
    at = 0
    for i, size in enumerate(sizes):
        first, last = char_of_byte[at], char_of_byte[at + size - 1]
        at += size
        while first <= last and is_space[first]:
            first += 1
        while last > first and is_space[last]:
            last -= 1
        if first > last:  # a bare "▁" has an empty span before the next character
            spans[i] = starts[first]
            continue
        start, end = int(starts[first]), int(ends[last])
        while end > start + 1 and text[end - 1].isspace():
            end -= 1
        spans[i] = start, end
    return pieces, np.array(found["ids"], np.int32), spans


def _count_pieces(model: bytes, limit: int) -> int:
    """Count a model's pieces (protobuf field 1); stop at `limit` + 1 or the first invalid byte."""
    count = 0
    with contextlib.suppress(UserError):  # raised at the first invalid byte
        for number, value in fields_of(model, ""):
            count += number == 1 and isinstance(value, bytes)
            if count > limit:
                break
    return count


def train_sentencepiece(
    texts: Iterable[str],
    vocab_size: int,
    *,
    model: Literal["unigram", "bpe"] = "unigram",
    lowercase: bool = False,
    byte_fallback: bool = True,
    character_coverage: float = 0.9995,
    progress: bool = False,
) -> SentencePieceTokenizer:
    """Train a model; the same texts in the same order give the same bytes.

    If the texts yield too few pieces, a warning is logged. Raise a UserError if there is no text,
    an option is out of range, or `vocab_size` has no room for special pieces, bytes and alphabet.

    Args:
        texts: Texts, which are read once. Each line is a training sentence.
        vocab_size: Number of pieces, including 5 special ones and, with `byte_fallback`, 256 bytes.
        byte_fallback: Whether characters without a piece become bytes instead of [UNK].
        character_coverage: Fraction of the characters in the texts that must have a piece; the
            most frequent characters get pieces first. Use 1.0 for small alphabets.
    """
    if not 0.98 <= character_coverage <= 1:
        raise UserError(f"character_coverage is {character_coverage}; it must be from 0.98 to 1")
    reserved = len(base.SPECIAL_TOKENS) + 256 * byte_fallback
    what, advice = f"{len(base.SPECIAL_TOKENS)} special tokens", "Ask for several times as many"
    if byte_fallback:
        what, advice = f"{what} and 256 bytes", f"{advice}, or train without byte_fallback"
    base.check_vocab_size(vocab_size, reserved, what, advice)
    texts = iter(progress_bar(texts, of="tokenizer", unit="texts", shown=progress))
    lines = _sample(_lines(texts), _MOST_LINES)
    if not lines:
        raise UserError("the texts to train a SentencePiece model on are empty; give some text")
    pad, unk, cls, sep, mask = base.SPECIAL_TOKENS
    out = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=out,
            model_type=model,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            normalization_rule_name="nmt_nfkc_cf" if lowercase else "nmt_nfkc",
            byte_fallback=byte_fallback,
            character_coverage=character_coverage,
            max_sentence_length=4 * _LINE_CHARS,
            num_threads=_THREADS,
            # Control symbols never match text; "user defined" symbols would.
            pad_id=0, unk_id=1, bos_id=2, eos_id=3,
            pad_piece=pad, unk_piece=unk, bos_piece=cls, eos_piece=sep, control_symbols=[mask],
            minloglevel=2,
        )  # fmt: skip
    except RuntimeError as error:
        if (small := re.search(r"(\d+) vs (\d+)", str(error))) is None:
            raise UserError(f"sentencepiece cannot train on these texts: {error}") from error
        raise UserError(
            f"vocab_size is {vocab_size}, but {reserved} special tokens and bytes and the "
            f"characters of the texts need {small[2]} entries. Set vocab_size above {small[2]}, or "
            f"lower character_coverage (now {character_coverage})"
        ) from error
    made = SentencePieceTokenizer(out.getvalue())
    base.warn_of_few(made.vocab_size, vocab_size, "the texts have no more pieces")
    return made


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield lines with single spaces; split lines longer than `_LINE_CHARS`, if possible at spaces.

    NUL, tabs and U+2585 become spaces: the trainer uses them internally and drops lines with them.
    """
    for text in texts:
        for line in base.replace_surrogates(text).split("\n"):
            line = " ".join(line.replace("\u2585", " ").replace("\0", " ").split())
            while line:
                cut = len(line)
                if cut > _LINE_CHARS:
                    cut = line.rfind(" ", 1, _LINE_CHARS)
                    cut = _LINE_CHARS if cut < 0 else cut
                yield line[:cut]
                line = line[cut:].lstrip()


def _sample(lines: Iterable[str], size: int) -> list[str]:
    """Return a uniform, reproducible sample in bounded memory (Vitter 1985, algorithm R)."""
    rng = random.Random(0)
    kept: list[str] = []
    total = 0
    for total, line in enumerate(lines, 1):
        if len(kept) < size:
            kept.append(line)
        elif (at := rng.randrange(total)) < size:
            kept[at] = line
    if total > size:
        _log.warning("training on a sample of %d of %d lines", size, total)
    return kept
