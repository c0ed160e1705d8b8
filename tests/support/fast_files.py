"""Small files of byte-level BPE and of XLM-R's pieces, the same every time."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps.",
    "Pack my box with five dozen liquor jugs; the jugs are heavy.",
    "Äpfel und 漢字 don't you're it's",
] * 5
SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
WORDS = ["the", "The", "dog", "fox", "lazy", "jugs", "heavy", "over", "sleeps", "s", "."]


def _merges(words: list[str]) -> list[tuple[str, str]]:
    """Pairs that build each word from its left."""
    pairs = {(word[:n], word[n]): None for word in words for n in range(1, len(word))}
    return list(pairs)


@cache
def _definition(kind: str) -> str:
    letters = sorted({char for word in WORDS for char in word})
    if kind == "bpe":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        merges = _merges([*(f"Ġ{word}" for word in WORDS), *WORDS])
        tokens = [*SPECIALS, *alphabet, *(a + b for a, b in merges)]
        vocab = {token: id for id, token in enumerate(dict.fromkeys(tokens))}
        made = Tokenizer(models.BPE(vocab, merges))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "pieces":
        merges = _merges([*(f"▁{word}" for word in WORDS), *WORDS])
        tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
        tokens += [a + b for a, b in merges]
        vocab = {token: id for id, token in enumerate(dict.fromkeys(tokens))}
        made = Tokenizer(
            models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
        )
        made.normalizer = normalizers.Replace(" ", "▁")
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        pieces = [(token, 0.0) for token in SPECIALS]
        pieces += [(f"▁{word}", -3 - n / 8) for n, word in enumerate(WORDS)]
        pieces += [(char, -6 - n / 8) for n, char in enumerate(["▁", *letters, "é", "漢"])]
        made = Tokenizer(models.Unigram(pieces, unk_id=3, byte_fallback=False))
        made.normalizer = normalizers.Sequence([normalizers.NFKC()])
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        )
    made.add_special_tokens(SPECIALS)
    ends = [(token, SPECIALS.index(token)) for token in ("</s>", "<s>")]
    if kind == "bpe":
        made.post_processor = processors.RobertaProcessing(*ends)
    elif kind == "unigram":
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=ends
        )
    text: str = made.to_str()
    return text


def definition(kind: str) -> dict[str, Any]:
    """The content of a `tokenizer.json`: `bpe`, `unigram` or `pieces` (BPE with "▁" and bytes)."""
    whole: dict[str, Any] = json.loads(_definition(kind))
    for token in whole["added_tokens"]:
        token["lstrip"] = token["content"] == "<mask>"
    return whole


def write_fast(directory: Path, kind: str, **changes: Any) -> Path:
    """Writes `tokenizer.json` of a kind, with some of its parts changed; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(definition(kind) | copy.deepcopy(changes)))
    return path
