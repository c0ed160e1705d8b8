"""Marian's tokenizer, as in opus-mt: a SentencePiece model for each language, and one map to ids.

`vocab.json` maps the pieces of both models to ids; others are unknown. A text may begin with one
token for the target language (`>>fra<<`). Sources end with `</s>`; decoders begin with `<pad>`.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from bert_jax.files.untrusted.whole_file import read_bytes
from bert_jax.tokenization import tokenizer as base
from bert_jax.tokenization.sentencepiece import load_model, spans_of
from bert_jax.tokenization.special_ids import SpecialIds
from bert_jax.tokenization.tokenizer_parts import MAP_NAME, Reading

_SOURCE, _TARGET, _ = _FILES = base.KIND_FILES["marian"]
_ROLES = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"}
"""Usual names of the special tokens, by field of `tokenizer_config.json`."""


class MarianTokenizer(base.Tokenizer):
    """Tokenizer of sources; `target` is the tokenizer of targets."""

    kind = "marian"
    num_between = 0

    def __init__(
        self, files: Mapping[str, bytes], vocab: Sequence[str], roles: Sequence[str],
        where: str = "Marian's tokenizer", side: str = _SOURCE,
    ) -> None:  # fmt: skip
        """Load the models in `files` (contents by name); `side` is the model that encodes texts.

        `vocab` has the tokens in the order of their ids; `roles` are the padding token, the unknown
        token and the end of a text. Raise a UserError that names `where` if a model is damaged.
        """
        super().__init__(vocab)
        self._given = files, vocab, roles, where
        self._side = side
        self._models = {n: load_model(files[n], f"{where}/{n}") for n in (_SOURCE, _TARGET)}
        pad, unk, end = ids = [self._ids[role] for role in roles]
        self.special_ids = SpecialIds(pad, unk, cls=pad, sep=end, mask=pad)
        self._named = dict(zip(ids, roles, strict=True))
        # No text gets the id of a special token, even if the text spells the token.
        self._of_pieces = {token: id for token, id in self._ids.items() if id not in self._named}
        self.continues_word = np.array([not t.startswith((base.SPACE, ">>")) for t in vocab])
        self.continues_word[ids] = False
        parts = [hashlib.sha256(files[name]).hexdigest() for name in _FILES]
        self.fingerprint = hashlib.sha256(" ".join(["marian", *parts, *roles]).encode()).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return MarianTokenizer, (*self._given, self._side)

    @functools.cached_property
    @override
    def target(self) -> base.Tokenizer:
        return MarianTokenizer(*self._given, side=_TARGET)

    @override
    def encode(self, text: str) -> base.Encoding:
        code, text = _divided(text)
        pieces, _, spans = spans_of(self._models[self._side], text)
        shift = sum(map(len, code))
        spans = np.concatenate(
            [np.array([(0, shift)] * len(code), np.int32).reshape(-1, 2), spans + shift]
        )
        return base.Encoding(self._mapped(code + pieces), spans.astype(np.int32))

    @override
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        parts = [_divided(text) for text in texts]
        found = self._models[self._side].encode(
            [text for _, text in parts], out_type=str, num_threads=1
        )
        return [self._mapped(code + more) for (code, _), more in zip(parts, found, strict=True)]

    def _mapped(self, pieces: list[str]) -> np.ndarray:
        unk = self.special_ids.unk
        return np.array([self._of_pieces.get(piece, unk) for piece in pieces], np.int32)

    def _spell(self, tokens: list[str]) -> str:
        # The model leaves pieces of the other language as they are.
        return self._models[_TARGET].decode_pieces(tokens).replace(base.SPACE, " ").strip()

    def _files(self) -> dict[str, bytes]:
        return dict(self._given[0])


def _divided(text: str) -> tuple[list[str], str]:
    """Return the language code at the beginning of a text, if there is one, and the rest."""
    text = base.replace_surrogates(text)
    end = text.find("<<") + 2 if text.startswith(">>") else 0
    return ([text[:end]], text[end:]) if end > 1 else ([], text)


def read_marian(reading: Reading) -> MarianTokenizer:
    """Read a `vocab.json` and the files in its directory.

    Raise a UserError if a file is missing or damaged, sources and targets have separate maps, there
    are added tokens, or a special token is not in the map.
    """
    config, path = reading.config, reading.path
    for name, only in {"separate_vocabs": False, "sp_model_kwargs": {}}.items():
        reading.one_of(f"{base.CONFIG_NAME}: {name}", config.get(name) or only, (only,))
    vocab = reading.vocab({"vocab": reading.whole})
    roles: list[str] = []
    for field, usual in _ROLES.items():
        token = {**reading.beside(MAP_NAME), **config}.get(field) or usual
        token = token.get("content") if isinstance(token, dict) else token
        if token not in vocab or token in roles:
            reading.wrong(field, token, "expected a token of this file, another one for each role")
        roles.append(token)
    if added := [t.content for t in reading.added(None, list(vocab)) if t.content not in roles]:
        reading.wrong("added token", added[0], "Marian has no added tokens; put it into the map")
    names = [n for n in (*_FILES, base.CONFIG_NAME, MAP_NAME) if path.with_name(n).is_file()]
    limit = base.MAX_FILE_BYTES
    files = {n: read_bytes(path.with_name(n), max_bytes=limit) for n in {*_FILES, *names}}
    return MarianTokenizer(files, vocab, roles, f"{path.parent}")
