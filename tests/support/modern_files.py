"""Small tokenizers in the form of ModernBERT's, EuroBERT's (Llama 3's) and mmBERT's (Gemma's)."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from bert_jax.artefacts.exchange.proof import PROOF_TEXTS

KINDS = ("modernbert", "eurobert", "mmbert")
CODE = (
    "def f(x):\n    if x:\n        return {\n            'a': [1, 2],  # two\n        }\n\n\n",
    "\tfor (int i = 0;  i < n;   ++i) {\n\t\tsum += a[i];\n\t}\r\n",
    "x  y   z" + " " * 24 + "w" + " " * 25 + "v" + " " * 60,
    "   \n \n\n  a\n\n\n\nb  ",
    'class A:\n\n    """Doc."""\n    x = 1000000  # I\'ve, we\'LL\n',
)
TEXTS = (*PROOF_TEXTS, *CODE)
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ROLES = {
    "modernbert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "eurobert": ("<|end|>", "<|end|>", "<|begin|>", "<|end|>", "<|mask|>"),
    "mmbert": ("<pad>", "<unk>", "<bos>", "<eos>", "<mask>"),
}
"""Padding, unknown, beginning, separator, mask."""


def _plain(content: str, *, normalized: bool) -> AddedToken:
    return AddedToken(content, normalized=normalized, special=False)


def _template(made: Tokenizer, single: str, pair: str) -> processors.PostProcessor:
    names = {name.removesuffix(":1") for name in pair.split() if not name.startswith("$")}
    ids = [(name, made.token_to_id(name)) for name in sorted(names)]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def _train(made: Tokenizer, size: int, special: list[str], alphabet: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)


@cache
def _definition(kind: str) -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if kind == "modernbert":
        made = Tokenizer(models.BPE())
        made.normalizer = normalizers.NFC()
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        _train(made, 500, ["|||IP_ADDRESS|||", "<|padding|>"], alphabet)
        made.add_tokens([_plain(" " * n, normalized=True) for n in range(24, 1, -1)])
        made.add_tokens([_plain("|||EMAIL_ADDRESS|||", normalized=True)])
        _, *others, _ = names = ROLES[kind]
        made.add_special_tokens([*others, names[0], AddedToken(names[4], lstrip=True)])
        made.add_tokens([_plain(f"[unused{n}]", normalized=True) for n in range(3)])
        made.post_processor = _template(made, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    elif kind == "eurobert":
        made = Tokenizer(models.BPE(ignore_merges=True))
        made.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(LLAMA), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])  # fmt: skip
        _train(made, 500, [], alphabet)
        made.add_special_tokens(["<|begin|>", "<|end|>", "<|mask|>", "<|reserved_0|>"])
        made.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            _template(made, "<|begin|> $A", "<|begin|> $A <|begin|>:1 $B:1"),
        ])  # fmt: skip
    else:
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        made.normalizer = normalizers.Replace(" ", "▁")
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<2mass>"]
        rest = [f"<0x{byte:02X}>" for byte in range(256)]
        _train(made, 1000, [*names, *rest], [])
        runs = ["\n\n", "\n\n\n", "▁▁", "▁▁▁", "\t\t"]
        made.add_tokens([_plain(run, normalized=False) for run in runs])
        made.post_processor = _template(made, "<bos> $A <eos>", "<bos> $A <eos> $B:1 <eos>:1")
    text: str = made.to_str()
    return text


def definition(kind: str) -> dict[str, Any]:
    """Content of a `tokenizer.json`, of one of `KINDS`."""
    whole: dict[str, Any] = json.loads(_definition(kind))
    vocab, added = whole["model"]["vocab"], whole["added_tokens"]
    if kind == "modernbert":
        added[0] |= {"special": False, "normalized": True}
    elif kind == "eurobert":  # a word that no merges make
        vocab["Ġfroze"] = vocab.pop("".join(whole["model"]["merges"].pop()))
    else:
        whole["added_tokens"] = [entry for entry in added if not entry["content"].startswith("<0x")]
    return whole


def write_modern(directory: Path, kind: str, **changes: Any) -> Path:
    """Write the files of one of `KINDS`, with some parts changed; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    whole = definition(kind) | changes
    (directory / "tokenizer.json").write_text(json.dumps(whole))
    pad, unk, cls, sep, mask = ROLES[kind]
    if kind == "modernbert":
        names = {"cls_token": cls, "sep_token": sep, "unk_token": unk}
    else:
        names = {"bos_token": cls, "eos_token": sep}
    names |= {"pad_token": pad, "mask_token": mask}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | names))
    return directory
