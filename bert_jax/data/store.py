"""The token store: a tokenized corpus as memory-mapped arrays.

On disk a store is a directory with one flat little-endian file per array, so that a batch is one
gather, and `corpus.json` beside them:

    corpus.json  tokenizer/
    tokens.bin  sentence_offsets.bin  document_offsets.bin  unigram_counts.bin
"""

import functools
import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from bert_jax.errors import UserError
from bert_jax.untrusted.json_file import read_json

FORMAT = "bert_jax token store"
VERSION = 1
OFFSET_DTYPE = np.dtype("<i8")
MAX_HEADER_BYTES = 256 << 20
"""Largest corpus.json in bytes: an entry for each source, about a million of them."""
MAX_VOCAB = 1 << 22
"""Ids; the counts of all of them are read when a store is opened."""
_CHECK_BLOCK = 1 << 20
_CHECKED_OFFSETS = 1 << 22
"""At each opening; `verify` looks at all of them."""


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
        """Length of `tokens`."""
        return len(self.tokens)

    @property
    def num_sentences(self) -> int:
        """Number of sentences."""
        return len(self.sentence_offsets) - 1

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_offsets) - 1

    def take_spans(
        self, starts: np.ndarray, spans: np.ndarray, used: np.ndarray, length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fill the rows of a batch with stretches of tokens, laid end to end, and padding.

        Stretch i covers the next `spans[i]` positions and reads upwards from `starts[i]`.

        Args:
            starts: (k,) int64 first token of each stretch. Positions for special tokens read
                whatever lies there, the ends of the array included; the caller overwrites them.
            spans: (k,) int64, of sum B * L.
            used: (B, 1) positions of each row that are not padding.

        Returns:
            Tokens (B, L) of the store's dtype, and (B, L) bool, false for padding.

        Raises:
            UserError: an id is outside the vocabulary; jax would read it as another id.
        """
        # Indices stay int64, because numpy would convert narrower ones.
        index = np.repeat(starts - (np.cumsum(spans) - spans), spans)
        index += np.arange(index.size)
        rows = np.empty((used.size, length), self.tokens.dtype)
        # "clip" is what numpy does fastest, and it makes the index of what is overwritten harmless.
        np.take(self.tokens, index, mode="clip", out=rows.reshape(-1))
        highest = int(rows.max(initial=0))
        if highest >= self.vocab_size:
            raise _damaged(
                self.path, f"it has the id {highest}, of {self.vocab_size} in its vocabulary"
            )
        real = np.arange(length, dtype=np.int32) < used.astype(np.int32)
        np.copyto(rows, np.asarray(self.special_ids.pad, rows.dtype), where=~real)
        return rows, real

    @property
    def unknown_rate(self) -> float:
        """Share of the tokens that are [UNK]: text that the tokenizer cannot spell."""
        return float(self.unigram_counts[self.special_ids.unk] / self.num_tokens)

    @property
    def is_pairs(self) -> bool:
        """Whether each document is a pair of two sentences, a source and its target."""
        return self.meta.get("pairs") is True

    @property
    def target_entropy(self) -> float | None:
        """Entropy in nats of the target tokens of pairs, an end token each; None without pairs.

        A model that knows how frequent each target token is, and nothing else, has this loss.
        """
        value = self.meta.get("target_entropy")
        return float(value) if isinstance(value, float) else None

    @functools.cached_property
    def unigram_entropy(self) -> float:
        """Entropy in nats of the distribution of the tokens that are not special.

        A model that knows how frequent each token is, and nothing else, has this masked-LM loss.
        """
        counts = np.asarray(self.unigram_counts, dtype=np.float64).copy()
        counts[list(asdict(self.special_ids).values())] = 0.0
        return entropy(counts)


@runtime_checkable
class StoreTokenizer(Protocol):
    """The part of `bert_jax.tokenization.tokenizer.Tokenizer` that a store needs."""

    vocab_size: int
    special_ids: SpecialIds
    fingerprint: str

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files into a new directory."""


def entropy(counts: np.ndarray) -> float:
    """Return the entropy in nats of the distribution that counts, (vocab_size,), give."""
    counts = counts[counts > 0]
    if not counts.size:
        return 0.0
    rates = counts / counts.sum()
    return float(-(rates * np.log(rates)).sum())


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the stored integer type: uint16 up to 65,536 ids, uint32 above."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def is_store(path: str | Path) -> bool:
    """Return true when `path` is a directory that holds a complete token store."""
    return (Path(path) / "corpus.json").is_file() and (Path(path) / "tokens.bin").is_file()


def content_fingerprint(tokenizer_fingerprint: str, digests: dict[str, str]) -> str:
    """Return the store's fingerprint: of its tokenizer and the sha256 of each array file."""
    parts = [f"{FORMAT} {VERSION}", tokenizer_fingerprint]
    parts += [f"{name} {digests[name]}" for name in sorted(digests)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def open_store(
    path: str | Path, tokenizer: StoreTokenizer | None = None, *, verify: bool = False
) -> TokenStore:
    """Open a store without reading it: arrays are memory maps.

    Args:
        path: the store's directory.
        tokenizer: refuse a store that another tokenizer built.
        verify: read everything and compare with the fingerprint (about 1 GB/s).

    Raises:
        UserError: nothing there, incomplete, damaged, of another version or another tokenizer.
    """
    path = Path(path)
    header = _read_header(path)
    try:
        numbers = [header[f"num_{name}"] for name in ("tokens", "sentences", "documents")]
        vocab_size = header["vocab_size"]
        if not all(type(n) is int and 0 < n < 1 << 48 for n in (*numbers, vocab_size)):
            raise ValueError(f"counts {numbers}, vocab_size {vocab_size}")
        if vocab_size > MAX_VOCAB:
            raise ValueError(f"vocab_size {vocab_size}; the limit is {MAX_VOCAB}")
        special_ids = SpecialIds(**header["special_ids"])
        if not all(type(i) is int and 0 <= i < vocab_size for i in asdict(special_ids).values()):
            raise ValueError(f"{special_ids} outside a vocabulary of {vocab_size}")
        fingerprints = (header["tokenizer_fingerprint"], header["fingerprint"])
        if not all(isinstance(fingerprint, str) for fingerprint in fingerprints):
            raise ValueError(f"fingerprints {fingerprints}")
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
    sentences = _map(path, "sentence_offsets", OFFSET_DTYPE, num_sentences + 1)
    documents = _map(path, "document_offsets", OFFSET_DTYPE, num_documents + 1)
    counts = np.array(_map(path, "unigram_counts", OFFSET_DTYPE, vocab_size))
    offsets = (("sentence", sentences, num_tokens), ("document", documents, num_sentences))
    for name, array, end in offsets:
        if array[0] != 0 or array[-1] != end:
            raise _damaged(
                path, f"{name}_offsets.bin runs from {array[0]} to {array[-1]}, not 0 to {end}"
            )
        _check_rising(path, name, array if verify else array[:_CHECKED_OFFSETS])
    total = sum(counts.tolist())  # of numpy's integers a sum can wrap around
    if counts.min() < 0 or total != num_tokens:
        raise _damaged(path, f"unigram_counts.bin adds up to {total}, not {num_tokens}")
    if verify:
        _check_tokens(path, tokens, vocab_size)
        arrays = {"tokens": tokens, "sentence_offsets": sentences, "document_offsets": documents}
        digests = {name: hashlib.sha256(a.data).hexdigest() for name, a in arrays.items()}
        if content_fingerprint(fingerprints[0], digests) != fingerprints[1]:
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
        header = read_json(path / "corpus.json", max_bytes=MAX_HEADER_BYTES)
    except UserError as error:
        raise _damaged(path, f"{error}") from error
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


def _check_rising(path: Path, name: str, offsets: np.ndarray) -> None:
    """No sentence and no document is empty."""
    for begin in range(0, len(offsets) - 1, _CHECK_BLOCK):
        falls = np.flatnonzero(np.diff(offsets[begin : begin + _CHECK_BLOCK + 1]) <= 0)
        if falls.size:
            at = begin + int(falls[0])
            raise _damaged(
                path, f"{name}_offsets.bin: {offsets[at]} is followed by {offsets[at + 1]} at {at}"
            )


def _check_tokens(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    for begin in range(0, len(tokens), _CHECK_BLOCK):
        block = tokens[begin : begin + _CHECK_BLOCK]
        if block.max() >= vocab_size:
            at = begin + int(np.argmax(block >= vocab_size))
            raise _damaged(
                path, f"tokens.bin has the id {tokens[at]} at {at}, of {vocab_size} in vocab_size"
            )


def _damaged(path: Path | None, what: str) -> UserError:
    return UserError(f"the token store {path} is damaged: {what}. Build the corpus again.")
