"""Writing a token store; `bert_jax.data.store` says how it lies on disk and reads it."""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bert_jax.data.shard import OFFSET_DTYPE, StoreTokenizer, token_dtype
from bert_jax.data.store import (
    ARRAYS,
    FORMAT,
    SHARDED_VERSION,
    VERSION,
    ShardCounts,
    TokenStore,
    content_fingerprint,
    is_store,
    open_shard,
    open_store,
    read_manifest,
)
from bert_jax.errors import UserError
from bert_jax.files.checks import DIGESTS, digests_of, json_crc
from bert_jax.files.staging import StagedDirectory, disk_full, replace_file


def check_ids(tokens: np.ndarray, tokenizer: StoreTokenizer) -> None:
    """Make sure that ids, (n,) integers, can be stored: jax reads past a table without a word.

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


class StoreWriter:
    """A token store that is written block by block, in memory that does not grow with the corpus.

    A context manager. The store is built in `path.tmp-<process>` beside `path` and renamed by
    `finish`; leaving the block without it, by an error or not, removes what was written. The
    tokenizer is saved in the store. `overwrite` replaces a complete store at `path`. A `shard` has
    no tokenizer and names the digests of its arrays; `write_manifest` makes a store of shards.

    Raises:
        UserError: `path` exists and may not be replaced, or cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: StoreTokenizer,
        *,
        overwrite: bool = False,
        shard: bool = False,
    ) -> None:
        self._tokenizer, self._shard = tokenizer, shard
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
            for name in ARRAYS:
                self._files[name] = open(self._staged.path / f"{name}.bin", "wb")  # noqa: SIM115
                self._digests[name] = hashlib.sha256()
            zero = np.zeros(1, OFFSET_DTYPE)
            self._write("sentence_offsets", zero)
            self._write("document_offsets", zero)
        except BaseException:
            self.close()
            raise

    def append(
        self, tokens: np.ndarray, sentence_lengths: np.ndarray, document_lengths: np.ndarray
    ) -> None:
        """Add documents.

        Args:
            tokens: (n,) ids of all sentences, one after the other.
            sentence_lengths: (s,) tokens in each sentence; each at least 1, sum n.
            document_lengths: (d,) sentences in each document; each at least 1, sum s.

        Raises:
            ValueError: the lengths do not add up, or one is below 1.
            UserError: see `check_ids`, or the disk is full.
        """
        tokens = np.asarray(tokens)
        sentence_lengths = np.asarray(sentence_lengths, OFFSET_DTYPE)
        document_lengths = np.asarray(document_lengths, OFFSET_DTYPE)
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
        """Complete the store, make it appear at `path` and open it.

        Further entries of `corpus.json`, such as the sources, are in `meta`.

        Raises:
            UserError: there are no documents, or the disk is full.
        """
        if not self.num_documents:
            raise UserError(f"no documents to write to {self.path}: the corpus is empty.")
        try:
            for file in self._files.values():
                file.close()
            _write_counts(self._staged.path, self._unigram_counts)
            digests = {name: digest.hexdigest() for name, digest in self._digests.items()}
            if self._shard:
                meta["sha256"] = digests
            else:
                self._tokenizer.save(self._staged.path / "tokenizer")
            counts = ShardCounts("", self.num_tokens, self.num_sentences, self.num_documents)
            _write_header(self._staged.path, meta, counts, self._tokenizer, [digests])
            self._staged.commit()
        except OSError as error:
            raise disk_full(self.path, error) from error
        return open_store(self.path)

    def close(self) -> None:
        """Remove what was written unless `finish` has completed; may be called twice."""
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


def write_manifest(
    directory: str | Path, names: Sequence[str], tokenizer: StoreTokenizer, **meta: Any
) -> TokenStore:
    """Make one store of the shards that lie in a directory, and open the store.

    Each shard is what `StoreWriter(directory / "shards" / name, tokenizer, shard=True)` wrote.
    Nothing of a shard is read but its header and its counts of ids. `corpus.json` is written last:
    without it there is no store. Rename the directory only afterwards (`StagedDirectory`).

    Args:
        directory: Directory of the store, with the shards below `shards`.
        names: Names of the shards, in the order that the store has.
        tokenizer: Tokenizer of all shards.
        meta: Further entries of `corpus.json`, such as the sources.

    Raises:
        UserError: No shards, one that is missing, incomplete or of another tokenizer, or the disk
            is full.
    """
    directory = Path(directory)
    if not names:
        raise UserError(f"no documents to write to {directory}: the corpus is empty.")
    unigram_counts = np.zeros(tokenizer.vocab_size, np.int64)
    shards, digests = [], []
    for name in names:
        shard, _ = read_manifest(directory / "shards" / name, tokenizer)
        open_shard(shard, 0, check=False)  # says what is missing
        unigram_counts += shard.unigram_counts
        shards.append(shard.counts[0]._replace(name=name))
        digests.append(shard.meta["sha256"])
    try:
        _write_counts(directory, unigram_counts)
        if not (directory / "tokenizer").exists():
            tokenizer.save(directory / "tokenizer")
        entries = [
            {**shard._asdict(), "sha256": dict(each)}
            for shard, each in zip(shards, digests, strict=True)
        ]
        whole = ShardCounts(
            "", *(sum(numbers) for numbers in zip(*(s[1:] for s in shards), strict=True))
        )
        _write_header(directory, {**meta, "shards": entries}, whole, tokenizer, digests)
    except OSError as error:
        raise disk_full(directory, error) from error
    return open_store(directory)


def _write_counts(directory: Path, counts: np.ndarray) -> None:
    (directory / "unigram_counts.bin").write_bytes(counts.astype(OFFSET_DTYPE).tobytes())


def _write_header(
    directory: Path,
    meta: Mapping[str, Any],
    counts: ShardCounts,
    tokenizer: StoreTokenizer,
    digests: Sequence[Mapping[str, str]],
) -> None:
    header = {
        **meta,
        "format": FORMAT,
        "version": SHARDED_VERSION if "shards" in meta else VERSION,
        "num_tokens": counts.num_tokens,
        "num_sentences": counts.num_sentences,
        "num_documents": counts.num_documents,
        "token_dtype": token_dtype(tokenizer.vocab_size).name,
        "vocab_size": tokenizer.vocab_size,
        "special_ids": asdict(tokenizer.special_ids),
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "fingerprint": content_fingerprint(tokenizer.fingerprint, *digests),
        DIGESTS: digests_of(directory),
    }
    header = json.loads(json.dumps(header))  # as it is read back
    header["crc32"] = json_crc(header)
    text = json.dumps(header, indent=2, ensure_ascii=False) + "\n"
    replace_file(directory / "corpus.json", text.encode())
