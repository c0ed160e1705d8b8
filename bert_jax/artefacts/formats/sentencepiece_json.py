"""Conversion of a SentencePiece model to a `tokenizer.json` of `tokenizers`, with equal ids.

`tokenizers` has both algorithms (unigram and BPE), but different steps around them. SentencePiece
normalises by a table in the model, trims and merges spaces, puts a space before the text, and
writes "▁" for each space. Unlike `tokenizers`, it never encodes text as a control or byte piece.
"""

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors

from bert_jax.errors import UserError
from bert_jax.tokenization.fast_tokenizer import piece_decoder
from bert_jax.tokenization.sentencepiece import SentencePieceTokenizer
from bert_jax.tokenization.tokenizer import SPACE
from bert_jax.tokenization.tokenizer_parts import AT_END, AT_START

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_UNIGRAM, _BPE = 1, 2
_DROPPED = "\x01"
"""Control character that keeps neighbouring characters apart in the input of the normaliser.
SentencePiece's tables delete this character, so it leaves no trace in the normalised text."""


def tokenizer_json(tokenizer: SentencePieceTokenizer) -> bytes:
    """Return the content of a `tokenizer.json` that gives the ids of `tokenizer.encode`.

    A text becomes `[CLS] text [SEP]`, and a pair `[CLS] first [SEP] second [SEP]`. The five special
    tokens are added tokens with their names in the model. Unlike `tokenizer`, the result encodes
    such a name in a text as the special token, unless `encode_special_tokens` is set.
    Raise a UserError if the format cannot express a feature of the model.
    """
    made = _pipeline(tokenizer)
    special = tokenizer.special_ids
    names = [tokenizer.id_to_token(id) for id in vars(special).values()]
    made.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in names])
    cls, sep = tokenizer.id_to_token(special.cls), tokenizer.id_to_token(special.sep)
    made.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(cls, special.cls), (sep, special.sep)],
    )
    return made.to_str(pretty=True).encode()


def is_tie(tokenizer: SentencePieceTokenizer, first: Sequence[int], second: Sequence[int]) -> bool:
    """Return true if two lists of ids spell one text and are equally probable in a unigram model.

    For example, "..." is "." and "..", or ".." and ".". SentencePiece adds log-probabilities in
    float32, but `tokenizers` in float64, so that rounding may make them choose different splits.
    """
    model = _parse(tokenizer)
    if model.trainer_spec.model_type != _UNIGRAM:
        return False
    a, b = ([model.pieces[id] for id in ids] for ids in (first, second))
    if "".join(piece.piece for piece in a) != "".join(piece.piece for piece in b):
        return False
    scores = [sum(piece.score for piece in row) for row in (a, b)]
    return abs(scores[0] - scores[1]) <= 1e-5 * max(1.0, abs(scores[0]))


def _pipeline(tokenizer: SentencePieceTokenizer) -> tokenizers.Tokenizer:
    model = _parse(tokenizer)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    kinds = {piece.type for piece in model.pieces}
    features = {
        "a model_type that is neither unigram nor bpe": trainer.model_type not in (_UNIGRAM, _BPE),
        "user-defined pieces, which match before anything else": _USER_DEFINED in kinds,
        "unused pieces, which are cut again": _UNUSED in kinds,
        "spaces at the end of words (treat_whitespace_as_suffix)":
            trainer.treat_whitespace_as_suffix,
        "spaces left as they are (escape_whitespaces is off)": not normalizer.escape_whitespaces,
    }  # fmt: skip
    if wrong := [name for name, there in features.items() if there]:
        raise _refusal(f"it has {'; '.join(wrong)}")
    algorithm: Any = _bpe(model) if trainer.model_type == _BPE else models.Unigram(
        [(piece.piece, float(piece.score)) for piece in model.pieces],
        unk_id=next(n for n, piece in enumerate(model.pieces) if piece.type == _UNKNOWN),
        byte_fallback=trainer.byte_fallback,
    )  # fmt: skip
    made = tokenizers.Tokenizer(algorithm)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    steps: list[normalizers.Normalizer] = []
    if normalizer.precompiled_charsmap:
        # Strip the "▁" that SentencePiece puts before a text.
        table = normalizer.precompiled_charsmap
        steps += _table(table, lambda text: processor.normalize(text).lstrip(SPACE))
    if normalizer.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(Regex(AT_START), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
            normalizers.Replace(Regex(AT_END), ""),  # the table may have turned spaces into "▁"
        ]
    if normalizer.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if trainer.model_type == _UNIGRAM:
        made.pre_tokenizer = _splitter(model)
    made.decoder = piece_decoder()
    return made


def _refusal(why: str) -> UserError:
    return UserError(f"this SentencePiece model cannot be written as a tokenizer.json: {why}")


def _parse(tokenizer: SentencePieceTokenizer) -> Any:
    from sentencepiece import sentencepiece_model_pb2  # imported here, because it takes 0.1 s

    _, (data,) = tokenizer.__reduce__()
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(data)
    return model


def _table(table: bytes, normalize: Callable[[str], str]) -> list[normalizers.Normalizer]:
    """Return normalisers that apply the replacement table of the model as SentencePiece does.

    If a letter and its marks have at most five bytes, `tokenizers` replaces all of them by the
    table's entry for their shortest prefix, and loses the rest. So the steps before the table
    compose characters as the table would, and then separate remaining marks from their letters.
    """
    if normalize(_DROPPED):
        return [normalizers.Precompiled(table)]  # without the separator, marks must stay
    steps: list[normalizers.Normalizer] = []
    if normalize("e\u0301") == "\u00e9":
        kana = [chr(first) + mark for first in range(0xFF66, 0xFF9E) for mark in "\uff9e\uff9f"]
        made = ((pair, normalize(pair)) for pair in kana)
        steps += [normalizers.Replace(*each) for each in made if len(each[1]) == 1]
        steps += [normalizers.Replace(Regex(_uncomposed()), _DROPPED), normalizers.NFC()]
    return [
        *steps,
        # No separator at the start of a text, where the table would not delete it.
        normalizers.Replace(Regex("(?!\\A)(?=[\\p{M}\\x{200c}\\x{200d}])"), _DROPPED),
        normalizers.Precompiled(table),
    ]


@cache
def _uncomposed() -> str:
    """Return a pattern for positions between two marks where NFC would differ from the table.

    NFC reorders marks and may compose a letter with its second mark; the table composes only
    neighbours. A separator prevents the difference. The pattern leaves out marks where both agree:
    a cedilla or dot below, then an accent; a horn, then a dot below; an accent, then an accent.
    """
    marks = {c: n for c in map(chr, range(0x110000)) if (n := unicodedata.combining(c))}
    parts = (unicodedata.normalize("NFD", char)[1:] for char in map(chr, range(0x110000)))
    composing = set("".join(parts)) & marks.keys()
    low = {c for c in composing if 202 <= marks[c] < 230}
    high = {c for c in composing if marks[c] >= 230}
    horn, dot = "\u031b", "\u0323"
    pairs = [
        (marks.keys() - low - high, marks.keys()),
        (low | high, marks.keys() - high - {dot}),
        (low - {horn} | high, {dot}),
        ({c for c in high if marks[c] > 230}, high),
    ]
    return "|".join(f"(?<={_any_of(first)})(?={_any_of(second)})" for first, second in pairs)


def _any_of(chars: Iterable[str]) -> str:
    """Return a character class for a regular expression, written as ranges."""
    ranges: list[list[int]] = []
    for code in sorted(map(ord, chars)):
        if ranges and code == ranges[-1][1] + 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "[" + "".join(f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in ranges) + "]"


def _splitter(model: Any) -> pre_tokenizers.PreTokenizer:
    """Return a pre-tokenizer that splits text inside the names of control and byte pieces.

    Each name is split after its first character, so that the unigram model of `tokenizers` cannot
    match it. If another piece could cross a split, a UserError is raised. Otherwise, the best
    segmentation of a text consists of the best segmentations of its parts.
    """
    names = [piece.piece for piece in model.pieces if piece.type not in (_NORMAL, _BYTE)]
    rests = [f"{_escaped(name[0])}(?={_escaped(name[1:])})" for name in names if len(name) > 1]
    if any(piece.type == _BYTE for piece in model.pieces):
        names.append("<0x")
        rests.append("<(?=0x[0-9A-F]{2}>)")
    cut = {name[:2] for name in names}
    over = [p.piece for p in model.pieces if p.type == _NORMAL and any(c in p.piece for c in cut)]
    if over:
        raise _refusal(
            f"its piece {over[0]!r:.80} contains the first two characters of the name of a special "
            "or byte piece"
        )
    return pre_tokenizers.Split(Regex("|".join(rests)), "merged_with_previous")


def _escaped(text: str) -> str:
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _bpe(model: Any) -> models.BPE:
    ids = {piece.piece: n for n, piece in enumerate(model.pieces)}
    scores = {p.piece: p.score for p in model.pieces if p.type == _NORMAL}
    merges: list[tuple[float, int, tuple[str, str]]] = []
    for piece, score in scores.items():
        for at in range(1, len(piece)):
            first, second = piece[:at], piece[at:]
            if first in scores and second in scores:
                merges.append((-score, ids[piece], (first, second)))
    lost = {char for piece in scores for char in piece} - scores.keys()
    if lost:
        raise _refusal(f"it has pieces with {min(lost)!r}, but no piece of only that character")
    unknown = next(piece.piece for piece in model.pieces if piece.type == _UNKNOWN)
    ordered = [pair for _, _, pair in sorted(merges, key=lambda found: found[:2])]
    fallback = {"fuse_unk": True, "byte_fallback": model.trainer_spec.byte_fallback}
    return models.BPE(vocab=ids, merges=ordered, unk_token=unknown, **fallback)
