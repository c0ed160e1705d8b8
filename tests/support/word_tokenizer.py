"""A tokenizer of a few lines: one id for each word, by a hash."""

import hashlib
import os
import re
import signal
import zlib
from pathlib import Path

import numpy as np

from bert_jax.tokenization.special_ids import SpecialIds
from bert_jax.tokenization.tokenizer import Encoding, Tokenizer


class WordTokenizer(Tokenizer):
    kind = "wordpiece"
    special_ids = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)

    def __init__(self, vocab_size: int = 1000):
        super().__init__(map(str, range(vocab_size)))
        self.fingerprint = hashlib.sha256(str(vocab_size).encode()).hexdigest()
        self.continues_word = np.zeros(vocab_size, bool)

    def _id(self, word: str) -> int:
        return 5 + zlib.crc32(word.encode()) % (self.vocab_size - 5)

    def encode(self, text: str):
        found = [match for match in re.finditer(r"\S+", text) if match[0] != "-"]
        ids = np.array([self._id(match[0]) for match in found], np.int32)
        return Encoding(ids, np.array([m.span() for m in found], np.int32).reshape(-1, 2))

    def encode_batch(self, texts):
        # A word of one dash gives no token, as control characters do in real ones.
        return [
            np.array([self._id(word) for word in text.split() if word != "-"], np.int32)
            for text in texts
        ]

    def _spell(self, tokens):
        return " ".join(tokens)

    def _files(self):
        raise NotImplementedError

    def save(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "size.txt").write_text(str(self.vocab_size))


class OutOfRange(WordTokenizer):
    def encode_batch(self, texts):
        return [np.full(3, self.vocab_size + 65536, np.int32) for _ in texts]


class Failing(WordTokenizer):
    def encode_batch(self, texts):
        raise ZeroDivisionError("in a worker")


class Dying(WordTokenizer):
    """Kills the process that it runs in, as the system does when memory is short."""

    def __init__(self, parent: int):
        super().__init__()
        self.parent = parent

    def encode_batch(self, texts):
        assert os.getpid() != self.parent
        os.kill(os.getpid(), signal.SIGKILL)
