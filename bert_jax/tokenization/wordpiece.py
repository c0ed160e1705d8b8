"""WordPiece, the tokenizer of BERT, run by the library `tokenizers` of Hugging Face.

The algorithm (Devlin et al. 2018; google-research/bert `tokenization.py`): delete control
characters, separate CJK characters by spaces, optionally lower-case and strip accents, split at
whitespace and punctuation, then cut each word greedily into the longest pieces of the vocabulary.

For some rare characters, listed in `docs/decisions.md`, `tokenizers` differs from the original. The
differences are kept: an exported model must get the same ids in `transformers`, which has them too.
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bert_jax.errors import UserError
from bert_jax.tokenization import tokenizer as base
from bert_jax.tokenization.special_ids import SpecialIds

# One thread unless the environment says otherwise: the corpus builder runs one process per core,
# and a pool of threads started before a fork would deadlock in the child.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

CONTINUATION = "##"

JOINERS = re.compile("[\x0b\x0c\x1c-\x1f\x85]")
"""Control characters that BERT deletes, but at which Python's `str.split` splits."""
_CACHED_WORDS = 1 << 18  # words in the cache; a full cache takes about 50 MB
_CACHED_WORD_LENGTH = 32


@dataclass(frozen=True)
class WordPieceOptions:
    """Options that, with the vocabulary, determine ids."""

    lowercase: bool = True
    strip_accents: bool | None = None
    """Whether accents are removed; None means the value of `lowercase`, as in the original."""
    split_cjk: bool = True
    """Whether each CJK ideograph is a separate word."""
    max_word_chars: int = 100
    """Longest word, in characters; longer words become [UNK]. `transformers` always uses 100."""

    @property
    def strips_accents(self) -> bool:
        """Whether accents are removed: `strip_accents` or, if that is None, `lowercase`."""
        return self.lowercase if self.strip_accents is None else self.strip_accents

    def normalizer(self) -> normalizers.Normalizer:
        """Make BERT's normaliser with these options."""
        return normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=self.split_cjk,
            strip_accents=self.strips_accents,
            lowercase=self.lowercase,
        )


class WordPieceTokenizer(base.Tokenizer):
    """Tokenizer with a WordPiece vocabulary and options."""

    kind = "wordpiece"

    def __init__(
        self,
        vocab: Sequence[str],
        options: WordPieceOptions | None = None,
        added: Sequence[tokenizers.AddedToken] = (),
        *,
        where: str = "vocabulary, entry {}",
    ) -> None:
        """Check the vocabulary, in the order of its ids, and build the tokenizer.

        `where` names an entry in error messages; its `{}` becomes the entry's position, from 1.
        Raise a UserError if an entry is empty, repeated, too long or not one line of text, a
        special token is missing, or there are too many entries.
        """
        options = options or WordPieceOptions()
        _check_vocab(vocab, where)
        super().__init__(vocab, added)
        ids = self._ids
        self.options = options
        self.special_ids = SpecialIds(*(ids[t] for t in base.SPECIAL_TOKENS))
        self.continues_word = np.array(
            [t.startswith(CONTINUATION) and len(t) > len(CONTINUATION) for t in self.vocab]
        )
        self.continues_word[[ids[token.content] for token in self.added]] = False
        entries = self._added_entries()
        determines: dict[str, Any] = {
            "kind": "wordpiece", "version": 1, "vocab": self.vocab,
            "options": asdict(options) | {"strip_accents": options.strips_accents},
            **({"added": entries} if entries else {}),
        }  # fmt: skip
        text = json.dumps(determines, sort_keys=True)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        self._fast = tokenizers.Tokenizer(
            models.WordPiece(
                {token: id for id, token in enumerate(self._pieces())},
                unk_token="[UNK]",
                max_input_chars_per_word=options.max_word_chars,
                continuing_subword_prefix=CONTINUATION,
            )
        )
        self._fast.normalizer = options.normalizer()
        self._fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        # The special tokens are left out: the library would match them in text.
        self._fast.add_tokens(list(self.added))
        self._decoder = decoders.WordPiece(prefix=CONTINUATION)
        self._cache: dict[str, bytes] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return WordPieceTokenizer, (self.vocab, self.options, self.added)

    def encode(self, text: str) -> base.Encoding:
        """Return ids and character offsets; an [UNK] has the span of its complete word."""
        found = self._fast.encode(base.replace_surrogates(text), add_special_tokens=False)
        offsets = np.array(found.offsets, np.int32).reshape(-1, 2)
        return base.Encoding(np.array(found.ids, np.int32), offsets)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, (n,) int32, read-only.

        No step of the algorithm looks across whitespace, so each word is encoded once and cached.
        """
        if self.added:  # added tokens may contain whitespace
            return [np.frombuffer(ids, np.int32) for ids in self._encode_words(list(texts))]
        cache = self._cache
        words = [
            (JOINERS.sub("", text) if JOINERS.search(text) else text).split() for text in texts
        ]
        parts = [list(map(cache.get, each)) for each in words]
        missing = {
            word
            for each, found in zip(words, parts, strict=True)
            if None in found
            for word, ids in zip(each, found, strict=True)
            if ids is None
        }
        if missing:
            fresh = dict(zip(missing, self._encode_words(list(missing)), strict=True))
            if len(cache) + len(fresh) > _CACHED_WORDS:
                cache = self._cache = {}  # this slows one batch; frequent words soon return
            # In scripts without spaces, a "word" is a full sentence, which hardly ever repeats.
            cache.update(
                (word, ids)
                for word, ids in fresh.items()
                if len(word) <= _CACHED_WORD_LENGTH and len(cache) < _CACHED_WORDS
            )
            for each, found in zip(words, parts, strict=True):
                if None in found:
                    found[:] = [
                        fresh[word] if ids is None else ids
                        for word, ids in zip(each, found, strict=True)
                    ]
        return [np.frombuffer(b"".join(found), np.int32) for found in parts]  # type: ignore[arg-type]

    def _encode_words(self, words: list[str]) -> list[bytes]:
        words = [base.replace_surrogates(word) for word in words]
        found = self._fast.encode_batch_fast(words, add_special_tokens=False)
        return [np.array(each.ids, np.int32).tobytes() for each in found]

    def _spell(self, tokens: list[str]) -> str:
        """Join pieces, without spaces before English punctuation."""
        return self._decoder.decode(tokens)

    def _files(self) -> dict[str, bytes]:
        """Return files for `AutoTokenizer`, which finds special tokens in text by their names."""
        whole = tokenizers.Tokenizer.from_str(self._fast.to_str())
        whole.decoder = self._decoder
        whole.add_special_tokens(list(base.SPECIAL_TOKENS))
        whole.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", self.special_ids.cls), ("[SEP]", self.special_ids.sep)],
        )
        config = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": self.options.lowercase,
            "strip_accents": self.options.strips_accents,
            "tokenize_chinese_chars": self.options.split_cjk,
            "max_input_chars_per_word": self.options.max_word_chars,
            **dict(zip(base.ROLES, base.SPECIAL_TOKENS, strict=True)),
        }
        if self.added:
            entries = {str(entry.pop("id")): entry for entry in self._added_entries()}
            config["added_tokens_decoder"] = entries
        files = {
            "tokenizer.json": whole.to_str(pretty=True),
            "vocab.txt": "".join(token + "\n" for token in self.vocab),
            base.CONFIG_NAME: json.dumps(config, indent=1) + "\n",
        }
        return {name: text.encode() for name, text in files.items()}


def _check_vocab(vocab: Sequence[str], where: str) -> None:
    """Raise a UserError if a vocabulary is invalid; `where` is as in `WordPieceTokenizer`."""
    if len(vocab) > base.MAX_TOKENS:
        raise UserError(
            f"{where.format(base.MAX_TOKENS + 1)}: more than {base.MAX_TOKENS:,} tokens"
        )
    ids: dict[str, int] = {}
    for id, token in enumerate(vocab):
        fault, shown = "", f"{token[:80]!r}"
        if not token:
            fault = " is empty; each entry is one token"
        elif len(token) > base.MAX_TOKEN_CHARS:
            size = f"a token of {len(token):,} characters ({token[:40]!r}...)"
            fault = f": {size}; the limit is {base.MAX_TOKEN_CHARS:,}"
        elif "\n" in token or "\r" in token or "\0" in token:
            fault = f": {shown} has a line break or a NUL; vocab.txt has one token per line"
        elif ids.setdefault(token, id) != id:
            there = where.format(ids[token] + 1)
            fault = f": {shown} occurs already ({there}); each token must occur once"
        elif base.replace_surrogates(token) != token:
            fault = f": {shown} is not valid Unicode text"
        if fault:
            raise UserError(where.format(id + 1) + fault)
    if missing := [token for token in base.SPECIAL_TOKENS if token not in ids]:
        source = where.partition(",")[0]
        raise UserError(
            f"{source} has {len(vocab):,} tokens, but lacks {', '.join(missing)}; all of "
            f"{', '.join(base.SPECIAL_TOKENS)} are needed"
        )
