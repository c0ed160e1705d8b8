"""Tokenizers from a `tokenizer.json`: byte-level BPE (RoBERTa), or BPE or Unigram with "▁" (XLM-R).

The five special tokens keep their names in the model's files, such as `<mask>`; code takes their
ids from `special_ids`. Text that spells one of these names is ordinary text, as in all tokenizers.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers, processors

from bert_jax.errors import UserError
from bert_jax.tokenization import tokenizer as base
from bert_jax.tokenization.special_ids import SpecialIds
from bert_jax.tokenization.tokenizer_json import Pipeline
from bert_jax.tokenization.tokenizer_parts import MAP_NAME

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # as in wordpiece.py

_SPACES = ("Ġ", "Ċ", "ĉ", "č")  # byte-level forms of space, line feed, tab, carriage return
_PROBES = ("", " a  b\n", "Ünïcode ﬁ 漢字 \U0001f642 e\u0301", "<s> [MASK] <0x41>")
"""Texts that a new tokenizer encodes, so that a faulty pipeline raises an error early."""


class FastTokenizer(base.Tokenizer):
    """Tokenizer that runs a checked pipeline of the `tokenizers` library.

    Offsets exclude spaces: a token of only spaces has an empty span. If the bytes of a character
    are several tokens, each of them has the span of the character.
    """

    kind = "fast"

    def __init__(self, pipeline: Pipeline, *, where: str = "tokenizer.json") -> None:
        """Build the tokenizer; raise a UserError, naming `where`, if the library cannot run it."""
        super().__init__(pipeline.vocab, pipeline.specials)
        self.pipeline = pipeline
        self._where = where
        self.special_ids = SpecialIds(*(self._ids[token] for token in pipeline.roles))
        named = (*pipeline.roles, *(token.content for token in self.added if token.special))
        self._named = {self._ids[token]: token for token in named}
        plain = [self._ids[token.content] for token in self.added]
        first = _SPACES if pipeline.kind == "byte_level_bpe" else (base.SPACE,)
        self.continues_word = np.array([not token.startswith(first) for token in self.vocab])
        self.continues_word[[*self._named, *plain]] = False
        self.word_prefix = "" if pipeline.adds_space else " "
        self.num_between = pipeline.num_between
        described = vars(pipeline) | {"specials": [*map(base.added_fields, pipeline.specials)]}
        del described["trim_offsets"]  # does not determine ids
        if self.num_between == 1:  # keeps the fingerprints of older versions
            del described["num_between"]
        if not pipeline.ignore_merges:
            del described["ignore_merges"]
        text = json.dumps(["fast", 1, described], sort_keys=True)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        self.mask_strips_space = pipeline.roles[4] in pipeline.eats_space
        byte_level = pipeline.kind == "byte_level_bpe"
        self._bare = self._ids.get("Ġ" if byte_level else base.SPACE, -1)
        self._decoder = decoders.ByteLevel() if byte_level else piece_decoder()
        self.spellings = {
            token.content: _spelling(token, byte_level) for token in self.added if not token.special
        }
        """Spelling of each added word in vocabulary characters (see `_spelling`)."""
        definition = self._definition()
        self._fast = self._run(tokenizers.Tokenizer.from_str, json.dumps(definition))
        self._spaced: tokenizers.Tokenizer | None = None
        """Tokenizer that puts a space before a text, for `encode_words`; None if not needed."""
        if self.word_prefix and [part["type"] for part in pipeline.pre_tokenizer] == ["ByteLevel"]:
            definition["pre_tokenizer"] = pipeline.marker | {"add_prefix_space": True}
            self._spaced = tokenizers.Tokenizer.from_str(json.dumps(definition))
        for text in _PROBES:
            self.encode(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return FastTokenizer, (self.pipeline,)

    def _run(self, function: Any, *arguments: Any, **options: Any) -> Any:
        """Call the library; turn its exceptions and Rust panics into UserErrors."""
        try:
            return function(*arguments, **options)
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise UserError(f"{self._where} cannot be run: {error!s:.200}") from error
            raise

    def _definition(self, *, renamed: bool = True) -> dict[str, Any]:
        """Make a `tokenizer.json` that treats the five special tokens in a text as ordinary text.

        With `renamed`, special tokens that the model could find in text get names that no text has.
        """
        pipeline = self.pipeline
        model: dict[str, Any] = {"byte_fallback": pipeline.byte_fallback}
        # A space never reaches the model, so names that contain a space match nothing.
        hidden: Sequence[str] = pipeline.roles if renamed else ()
        if pipeline.kind != "unigram" and pipeline.unk_in_model:
            hidden = [token for token in hidden if token != pipeline.roles[1]]
        pieces = self._pieces()
        if pipeline.kind == "unigram" or pipeline.ignore_merges:
            pieces = tuple(f" {id}" if t in hidden else t for id, t in enumerate(pieces))
        if pipeline.kind == "unigram":
            unk = self.special_ids.unk if pipeline.unk_in_model else None
            pairs = list(zip(pieces, pipeline.scores, strict=False))
            model |= {"type": "Unigram", "unk_id": unk, "vocab": pairs}
        else:
            unk_token = pipeline.roles[1] if pipeline.unk_in_model else None
            model |= {"type": "BPE", "unk_token": unk_token, "fuse_unk": pipeline.fuse_unk}
            model |= {"dropout": None, "continuing_subword_prefix": None}
            model |= {"end_of_word_suffix": None, "vocab": {t: n for n, t in enumerate(pieces)}}
            model["merges"] = [list(pair) for pair in pipeline.merges]
            model["ignore_merges"] = pipeline.ignore_merges
        return {
            "version": "1.0", "truncation": None, "padding": None,
            "added_tokens": self._added_entries(),
            "normalizer": _sequence("normalizers", pipeline.normalizer),
            "pre_tokenizer": _sequence("pretokenizers", pipeline.pre_tokenizer),
            "model": model,
        }  # fmt: skip

    def encode(self, text: str) -> base.Encoding:
        """Return the ids and character offsets of a text's tokens."""
        found = self._run(
            self._fast.encode, base.replace_surrogates(text), add_special_tokens=False
        )
        ids = np.array(found.ids, np.int32)
        spans = np.array(found.offsets, np.int32).reshape(-1, 2)
        # Remove white space from the ends of spans; a token of only a space gets an empty span.
        positions = np.arange(len(text) + 1, dtype=np.int32)
        solid = np.array([not char.isspace() for char in text], bool)
        following = np.where(np.append(solid, True), positions, len(text))
        following = np.minimum.accumulate(following[::-1])[::-1]
        preceding = np.maximum.accumulate(np.where(np.append(True, solid), positions, 0))
        # Where normalisation inserts or moves characters, the spans of the library may step back.
        starts, ends = np.maximum.accumulate(spans, axis=0).T if len(spans) else spans.T
        starts = np.minimum(following[starts], ends)
        ends = np.where(ids == self._bare, starts, np.maximum(preceding[ends], starts))
        return base.Encoding(ids, np.stack([starts, ends], axis=1).astype(np.int32))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, (n,) int32."""
        texts = [base.replace_surrogates(text) for text in texts]
        found = self._run(self._fast.encode_batch_fast, texts, add_special_tokens=False)
        return [np.array(each.ids, np.int32) for each in found]

    def encode_words(self, words: Sequence[str]) -> list[np.ndarray]:
        """Encode each word as if a space preceded it, like `add_prefix_space` in Transformers.

        With GPT-2's pre-tokenizer, a word that begins with an added token gets no space.
        """
        if self._spaced is None:
            return super().encode_words(words)
        words = [base.replace_surrogates(word) for word in words]
        found = self._run(self._spaced.encode_batch_fast, words, add_special_tokens=False)
        return [np.array(each.ids, np.int32) for each in found]

    def _spell(self, tokens: list[str]) -> str:
        tokens = [self.spellings.get(token, token) for token in tokens]
        return self._run(self._decoder.decode, tokens).strip(" ")

    def normalised(self, word: str) -> str:
        """Normalise a word as text is normalised; an added token must have this form.

        If a normalizer replaces spaces, added tokens match raw text, and the word stays unchanged.
        """
        normalizer = self._fast.normalizer
        if normalizer is None or self._marks_spaces_early:
            return word
        return str(self._run(normalizer.normalize_str, word))

    def with_words(self, words: Iterable[str]) -> "FastTokenizer":
        """Return a tokenizer in which each of these words is one token; new ids follow the old.

        The words must be as `normalised` returns them. A word matches, with the space before it,
        unless a letter, digit or underscore adjoins it. Raise a UserError beyond `MAX_TOKENS`.
        """
        tokens = [
            AddedToken(word, single_word=True, lstrip=True, normalized=not self._marks_spaces_early)
            for word in words
        ]
        pipeline = self.pipeline
        if self.vocab_size + len(tokens) > base.MAX_TOKENS:
            raise UserError(
                f"the vocabulary of {self.vocab_size:,} tokens and {len(tokens):,} new tokens "
                f"exceed the limit of {base.MAX_TOKENS:,}; add fewer words"
            )
        longer = replace(
            pipeline,
            vocab=(*pipeline.vocab, *(token.content for token in tokens)),
            scores=(*pipeline.scores, *(0.0 for _ in tokens if pipeline.scores)),
            specials=(*pipeline.specials, *tokens),
        )
        return FastTokenizer(longer, where="the tokenizer with the new tokens")

    @property
    def _marks_spaces_early(self) -> bool:
        """Whether a normalizer replaces spaces by another character."""
        return bool(self.pipeline.marker["type"] == "Replace")

    def _files(self) -> dict[str, bytes]:
        """Return files for `AutoTokenizer`, which finds special tokens in text by their names."""
        pipeline, ids = self.pipeline, self._ids
        definition = self._definition(renamed=False)
        eats = pipeline.eats_space
        roles = [AddedToken(each, lstrip=each in eats, special=True) for each in pipeline.roles]
        definition["added_tokens"] = self._added_entries(roles)
        cls, sep = pipeline.roles[2], pipeline.roles[3]
        definition["decoder"] = json.loads(self._decoder.__getstate__())
        template = processors.TemplateProcessing(
            single=[cls, "$A", sep],
            pair=[cls, "$A", *[sep] * self.num_between, "$B:1", f"{sep}:1"],
            special_tokens=[(cls, ids[cls]), (sep, ids[sep])],
        )
        definition["post_processor"] = json.loads(template.__getstate__())
        if pipeline.trim_offsets:
            prefix = pipeline.marker["add_prefix_space"]
            trim = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True}
            both = [{**trim, "use_regex": True}, definition["post_processor"]]
            definition["post_processor"] = {"type": "Sequence", "processors": both}
        names = dict(zip(base.ROLES, pipeline.roles, strict=True))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **names,
        }
        if self.mask_strips_space:
            config["mask_token"] = {"__type": "AddedToken", **base.added_fields(roles[4])}
        # The JSON that the library writes is not used: the last digit of a score may differ.
        files = {"tokenizer.json": definition, base.CONFIG_NAME: config, MAP_NAME: names}
        return {
            name: (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()
            for name, content in files.items()
        }


def _spelling(token: AddedToken, byte_level: bool) -> str:
    """Return an added token in vocabulary characters, with a leading space if `lstrip` is set."""
    if not byte_level:
        return base.SPACE * token.lstrip + token.content
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    (piece,) = bytes_of.pre_tokenize_str(" " * token.lstrip + token.content)
    return str(piece[0])


def _sequence(members: str, parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return {"type": "Sequence", members: list(parts)}


def piece_decoder() -> decoders.Decoder:
    """Make the decoder for pieces that have "▁" for spaces and tokens for bytes."""
    steps = [decoders.Replace(base.SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
