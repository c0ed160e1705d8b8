"""The token store: a tokenized corpus as memory-mapped arrays.

On disk a store is a directory with one flat little-endian file per array, so that a batch is one
gather, and `corpus.json` beside them:

    corpus.json  tokenizer/
    tokens.bin  sentence_offsets.bin  document_offsets.bin  unigram_counts.bin
"""

import contextlib
import functools
import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np

from bert_jax.data.staging import StagedDirectory, disk_full, sync_directory, write_synced
from bert_jax.errors import UserError

FORMAT = "bert_jax token store"
VERSION = 1
_OFFSET_DTYPE = np.dtype("<i8")


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the five special tokens."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


@dataclass(frozen=True)
class TokenStore:
    """A tokenized corpus: sentences in documents, over one flat array of token ids.

    Sentence s is `tokens[sentence_offsets[s]:sentence_offsets[s + 1]]`, document d is the
    sentences `document_offsets[d]` to `document_offsets[d + 1]`. No special tokens are stored, no
    sentence and no document is empty.
    """

    tokens: np.ndarray
    """(num_tokens,) uint16, or uint32 where the vocabulary is above 65,536; a memory map."""
    sentence_offsets: np.ndarray
    """(num_sentences + 1,) int64 token positions."""
    document_offsets: np.ndarray
    """(num_documents + 1,) int64 sentence positions."""
    unigram_counts: np.ndarray
    """(vocab_size,) int64: how often each id occurs."""
    vocab_size: int
    special_ids: SpecialIds
    tokenizer_fingerprint: str
    fingerprint: str
    """sha256 of what determines the content; equal stores have equal fingerprints."""
    path: Path | None = None
    meta: dict = field(default_factory=dict)
    """The rest of `corpus.json`."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the store."""
        return len(self.tokens)

    @property
    def num_sentences(self) -> int:
        """Sentences in the store."""
        return len(self.sentence_offsets) - 1

    @property
    def num_documents(self) -> int:
        """Documents in the store."""
        return len(self.document_offsets) - 1

    @property
    def unknown_rate(self) -> float:
        """Share of the tokens that are [UNK]: text that the tokenizer cannot spell."""
        return float(self.unigram_counts[self.special_ids.unk] / self.num_tokens)

    @functools.cached_property
    def unigram_entropy(self) -> float:
        """Entropy in nats of the distribution of the tokens that are not special.

        The loss of a model that knows how frequent each token is and nothing else: the line that
        a masked-LM loss has to fall below.
        """
        counts = np.asarray(self.unigram_counts, dtype=np.float64).copy()
        counts[list(asdict(self.special_ids).values())] = 0.0
        counts = counts[counts > 0]
        if not counts.size:
            return 0.0
        rates = counts / counts.sum()
        return float(-(rates * np.log(rates)).sum())


@runtime_checkable
class StoreTokenizer(Protocol):
    """What a store needs of a tokenizer; `bert_jax.data.tokenizer.Tokenizer` has it."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def special_ids(self) -> SpecialIds:
        """Ids of the special tokens."""

    @property
    def fingerprint(self) -> str:
        """sha256 over everything that determines the ids."""

    def save(self, directory: Path) -> None:
        """Writes the tokenizer's files into a new directory."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The stored integer type: uint16 up to 65,536 ids, uint32 above."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def check_ids(tokens: np.ndarray, tokenizer: StoreTokenizer) -> None:
    """Makes sure that ids can be stored: jax reads past the end of a table without a word.

    Args:
        tokens: (n,) integers.
        tokenizer: the one that made them.

    Raises:
        UserError: an id outside the vocabulary, or a special one other than [UNK].
    """
    if not tokens.size:
        return
    low, high, size = int(tokens.min()), int(tokens.max()), tokenizer.vocab_size
    if low < 0 or high >= size:
        raise UserError(
            f"the tokenizer gave the id {low if low < 0 else high}, but its vocabulary has {size} "
            "entries (ids from 0). Its files do not belong together; save or train it again."
        )
    special = tokenizer.special_ids
    for forbidden in (special.pad, special.cls, special.sep, special.mask):
        if low <= forbidden <= high and (tokens == forbidden).any():
            raise UserError(
                f"the tokenizer gave the special id {forbidden} for plain text; it must read the "
                "names of special tokens in a text as ordinary words."
            )


def is_store(path: str | Path) -> bool:
    """True when `path` is a directory that holds a complete token store."""
    return (Path(path) / "corpus.json").is_file() and (Path(path) / "tokens.bin").is_file()


class StoreWriter:
    """Writes a token store, block by block, in memory that does not grow with the corpus.

    A context manager. The store is built in `path.tmp-<process>` beside `path` and renamed by
    `finish`; leaving the block without it, by an error or not, removes what was written.

    Args:
        path: the store's directory.
        tokenizer: gives vocabulary size, special ids and fingerprint, and is saved in the store.
        overwrite: replace a complete store at `path` when the new one is complete.
        meta: further entries of `corpus.json`, such as the sources; `finish` takes more.

    Raises:
        UserError: `path` exists and may not be replaced, or cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: StoreTokenizer,
        *,
        overwrite: bool = False,
        meta: dict[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._meta = dict(meta or {})
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._unigram_counts = np.zeros(tokenizer.vocab_size, np.int64)
        self.num_tokens = 0
        self.num_sentences = 0
        self.num_documents = 0
        self._staged = StagedDirectory(path, is_store, overwrite=overwrite)
        self.path = self._staged.target
        self._files: dict[str, BinaryIO] = {}
        self._digests: dict[str, Any] = {}
        try:
            for name in ("tokens", "sentence_offsets", "document_offsets"):
                self._files[name] = open(self._staged.path / f"{name}.bin", "wb")  # noqa: SIM115
                self._digests[name] = hashlib.sha256()
            zero = np.zeros(1, _OFFSET_DTYPE)
            self._write("sentence_offsets", zero)
            self._write("document_offsets", zero)
        except BaseException:
            self.close()
            raise

    def append(
        self, tokens: np.ndarray, sentence_lengths: np.ndarray, document_lengths: np.ndarray
    ) -> None:
        """Adds documents.

        Args:
            tokens: (n,) integers, the token ids of all sentences, one after the other.
            sentence_lengths: (s,) integers, tokens in each sentence; each at least 1, sum n.
            document_lengths: (d,) integers, sentences in each document; each at least 1, sum s.

        Raises:
            ValueError: the lengths do not add up, or one is below 1.
            UserError: an id is outside the vocabulary or is a special token other than [UNK], or
                the disk is full.
        """
        tokens = np.asarray(tokens)
        sentence_lengths = np.asarray(sentence_lengths, _OFFSET_DTYPE)
        document_lengths = np.asarray(document_lengths, _OFFSET_DTYPE)
        if not len(document_lengths):
            if len(tokens) or len(sentence_lengths):
                raise ValueError("sentences outside any document")
            return
        if sentence_lengths.min() < 1 or document_lengths.min() < 1:
            raise ValueError("a sentence without tokens or a document without sentences")
        if sentence_lengths.sum() != len(tokens) or document_lengths.sum() != len(sentence_lengths):
            raise ValueError(
                f"lengths do not add up: {len(tokens)} tokens, sentences hold "
                f"{sentence_lengths.sum()}; {len(sentence_lengths)} sentences, documents hold "
                f"{document_lengths.sum()}"
            )
        check_ids(tokens, self._tokenizer)
        stored = np.ascontiguousarray(tokens, self._dtype)
        # Before anything is written: a refused block leaves no trace in the counts.
        self._unigram_counts += np.bincount(stored, minlength=len(self._unigram_counts))
        self._write("tokens", stored)
        self._write("sentence_offsets", self.num_tokens + np.cumsum(sentence_lengths))
        self._write("document_offsets", self.num_sentences + np.cumsum(document_lengths))
        self.num_tokens += len(stored)
        self.num_sentences += len(sentence_lengths)
        self.num_documents += len(document_lengths)

    def _write(self, name: str, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).data.cast("B")
        self._digests[name].update(data)
        try:
            self._files[name].write(data)
        except OSError as error:
            raise disk_full(self.path, error) from error

    def finish(self, **meta: Any) -> TokenStore:
        """Completes the store, makes it appear at `path` and opens it.

        Args:
            **meta: further entries of `corpus.json`.

        Raises:
            UserError: there are no documents, or the disk is full.
        """
        if not self.num_documents:
            raise UserError(f"no documents to write to {self.path}: the corpus is empty.")
        try:
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
                file.close()
            counts = self._unigram_counts.astype(_OFFSET_DTYPE)
            write_synced(self._staged.path / "unigram_counts.bin", counts.tobytes())
            self._tokenizer.save(self._staged.path / "tokenizer")
            sync_directory(self._staged.path / "tokenizer")
            header = {
                **self._meta,
                **meta,
                "format": FORMAT,
                "version": VERSION,
                "num_tokens": self.num_tokens,
                "num_sentences": self.num_sentences,
                "num_documents": self.num_documents,
                "token_dtype": self._dtype.name,
                "vocab_size": self._tokenizer.vocab_size,
                "special_ids": asdict(self._tokenizer.special_ids),
                "tokenizer_fingerprint": self._tokenizer.fingerprint,
                "fingerprint": _fingerprint(
                    self._tokenizer.fingerprint,
                    {name: digest.hexdigest() for name, digest in self._digests.items()},
                ),
            }
            text = json.dumps(header, indent=2, ensure_ascii=False) + "\n"
            write_synced(self._staged.path / "corpus.json", text.encode())
            self._staged.commit()
        except OSError as error:
            raise disk_full(self.path, error) from error
        return open_store(self.path)

    def close(self) -> None:
        """Removes what was written unless `finish` has completed; may be called twice."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk was reported by `append`
                file.close()
        if self._staged is not None:
            self._staged.close()
            self._staged = None  # type: ignore[assignment]

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _fingerprint(tokenizer_fingerprint: str, digests: dict[str, str]) -> str:
    parts = [f"{FORMAT} {VERSION}", tokenizer_fingerprint]
    parts += [f"{name} {digests[name]}" for name in sorted(digests)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def open_store(
    path: str | Path, tokenizer: StoreTokenizer | None = None, *, verify: bool = False
) -> TokenStore:
    """Opens a store without reading it: arrays are memory maps.

    Args:
        path: the store's directory.
        tokenizer: refuse a store that another tokenizer built.
        verify: read everything and compare with the fingerprint (about 1 GB/s).

    Raises:
        UserError: nothing there, not complete, damaged, of another version, or of another
            tokenizer.
    """
    path = Path(path)
    header = _read_header(path)
    try:
        numbers = [header[f"num_{name}"] for name in ("tokens", "sentences", "documents")]
        vocab_size = header["vocab_size"]
        if not all(type(n) is int and n > 0 for n in (*numbers, vocab_size)):
            raise ValueError(f"counts {numbers}, vocab_size {vocab_size}")
        special_ids = SpecialIds(**header["special_ids"])
        if not all(type(i) is int and 0 <= i < vocab_size for i in asdict(special_ids).values()):
            raise ValueError(f"{special_ids} outside a vocabulary of {vocab_size}")
        fingerprints = (header["tokenizer_fingerprint"], header["fingerprint"])
        dtype = token_dtype(vocab_size)
        if header["token_dtype"] != dtype.name:
            raise ValueError(f"token_dtype {header['token_dtype']!r} with vocab_size {vocab_size}")
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"corpus.json: {type(error).__name__}: {error}") from error
    if tokenizer is not None and tokenizer.fingerprint != fingerprints[0]:
        raise UserError(
            f"the token store {path} was built with another tokenizer: the store has "
            f"{fingerprints[0]}, the given tokenizer {tokenizer.fingerprint}. Use the tokenizer in "
            f"{path / 'tokenizer'}, or build the corpus again with the one you want."
        )
    num_tokens, num_sentences, num_documents = numbers
    tokens = _map(path, "tokens", dtype, num_tokens)
    sentences = _map(path, "sentence_offsets", _OFFSET_DTYPE, num_sentences + 1)
    documents = _map(path, "document_offsets", _OFFSET_DTYPE, num_documents + 1)
    counts = np.array(_map(path, "unigram_counts", _OFFSET_DTYPE, vocab_size))
    for name, array, end in (
        ("sentence", sentences, num_tokens),
        ("document", documents, num_sentences),
    ):
        if array[0] != 0 or array[-1] != end:
            raise _damaged(
                path, f"{name}_offsets.bin runs from {array[0]} to {array[-1]}, not 0 to {end}"
            )
    if counts.min() < 0 or counts.sum() != num_tokens:
        raise _damaged(path, f"unigram_counts.bin adds up to {counts.sum()}, not {num_tokens}")
    if verify:
        arrays = {"tokens": tokens, "sentence_offsets": sentences, "document_offsets": documents}
        digests = {name: hashlib.sha256(a.data).hexdigest() for name, a in arrays.items()}
        if _fingerprint(fingerprints[0], digests) != fingerprints[1]:
            raise _damaged(path, "its content does not have the fingerprint in corpus.json")
    known = {"vocab_size", "special_ids", "tokenizer_fingerprint", "fingerprint"}
    return TokenStore(
        tokens=tokens,
        sentence_offsets=sentences,
        document_offsets=documents,
        unigram_counts=counts,
        vocab_size=vocab_size,
        special_ids=special_ids,
        tokenizer_fingerprint=fingerprints[0],
        fingerprint=fingerprints[1],
        path=path,
        meta={key: value for key, value in header.items() if key not in known},
    )


def _read_header(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise UserError(f"no token store at {path}: there is no such directory.")
    if not (path / "corpus.json").is_file():
        for part in ("train", "heldout"):
            if is_store(path / part):
                raise UserError(
                    f"{path} holds several token stores; name one, such as {path / part}."
                )
        raise UserError(
            f"no complete token store at {path}: it has no corpus.json. Build one with "
            "`bert-jax corpus`."
        )
    try:
        header = json.loads((path / "corpus.json").read_bytes())
    except ValueError as error:
        raise _damaged(path, f"corpus.json is not JSON: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise UserError(f"{path / 'corpus.json'} does not describe a bert_jax token store.")
    if header.get("version") != VERSION:
        raise UserError(
            f"the token store {path} has version {header.get('version')!r}; this bert_jax reads "
            f"version {VERSION}. Build the corpus again, or use the bert_jax that made it."
        )
    return header


def _map(path: Path, name: str, dtype: np.dtype, length: int) -> np.ndarray:
    file = path / f"{name}.bin"
    size = file.stat().st_size if file.is_file() else None
    if size != length * dtype.itemsize:
        found = "is missing" if size is None else f"has {size} bytes"
        raise _damaged(path, f"{file.name} {found}, corpus.json asks for {length * dtype.itemsize}")
    return np.memmap(file, dtype=dtype, mode="r", shape=(length,))


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"the token store {path} is damaged: {what}. Build the corpus again.")
