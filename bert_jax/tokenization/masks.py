"""Functions that find and encode masks in texts, and that fill masks with tokens."""

import re

import numpy as np

from bert_jax.tokenization.fast_tokenizer import FastTokenizer
from bert_jax.tokenization.tokenizer import SPACE, Encoding, Id, Tokenizer
from bert_jax.tokenization.wordpiece import CONTINUATION

MASK = "[MASK]"

_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
_BYTE = {chr(byte): byte for byte in _PLAIN} | {
    chr(256 + place): byte for place, byte in enumerate(_OTHERS)
}
"""Map from each character of a byte-level vocabulary to its byte."""


def mask_spans(text: str, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Return the spans [start, end) of masks, written `[MASK]` or as the tokenizer's mask token."""
    spellings = (MASK, tokenizer.id_to_token(tokenizer.special_ids.mask))
    return [found.span() for found in re.finditer("|".join(map(re.escape, spellings)), text)]


def encode_masked(text: str, tokenizer: Tokenizer) -> Encoding:
    """Encode a text in which masks become mask tokens; offsets refer to the given text."""
    ids, offsets, at = [], [], 0
    for start, end in [*mask_spans(text, tokenizer), (len(text), len(text))]:
        piece = text[at:start]
        if tokenizer.mask_strips_space and start < end:
            piece = piece.rstrip()
        found = tokenizer.encode(piece)
        ids.append(found.ids)
        offsets.append(found.offsets + at)
        if start < end:
            ids.append(np.array([tokenizer.special_ids.mask], np.int32))
            offsets.append(np.array([(start, end)], np.int32))
        at = end
    return Encoding(np.concatenate(ids), np.concatenate(offsets).astype(np.int32))


def token_text(id: Id, tokenizer: Tokenizer) -> str:
    """Return the text that a token stands for; a WordPiece token is returned unchanged.

    In other vocabularies, the text of a token that begins a word begins with a space, and bytes
    that are not a complete character are written as `<0xC4>`.
    """
    entry = tokenizer.id_to_token(id)
    if tokenizer.kind == "wordpiece":
        return entry
    if not isinstance(tokenizer, FastTokenizer) or tokenizer.pipeline.kind != "byte_level_bpe":
        return entry.replace(SPACE, " ")
    added = any(token.content == entry for token in tokenizer.added)
    if added or not all(character in _BYTE for character in entry):
        return entry
    text = bytes(_BYTE[character] for character in entry).decode("utf-8", "surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda byte: f"<0x{ord(byte[0]) - 0xDC00:02X}>", text)


def filled(text: str, span: tuple[int, int], id: Id, tokenizer: Tokenizer) -> str:
    """Return a text in which a token replaces the mask at `span`.

    A token that continues a word is joined to the word before, unless a space token separates them.
    """
    before, after = text[: span[0]], text[span[1] :]
    token = token_text(id, tokenizer)
    keeps_blank = False  # the space before a mask is a token in byte-level BPE and for Gemma
    if isinstance(tokenizer, FastTokenizer) and not tokenizer.mask_strips_space:
        keeps_blank = tokenizer.pipeline.marker["type"] in ("ByteLevel", "Replace")
    if token.startswith(" ") or (tokenizer.continues_word[id] and not keeps_blank):
        before = before.rstrip()
    if tokenizer.kind == "wordpiece" and tokenizer.continues_word[id]:
        token = token.removeprefix(CONTINUATION)
    return f"{before}{token if before else token.lstrip()}{after}"
