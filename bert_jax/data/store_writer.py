"""Writers of token stores. `bert_jax.data.store` describes the layout and reads the stores."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bert_jax.data.shard import OFFSET_DTYPE, StoreTokenizer, damaged, token_dtype
from bert_jax.data.store import ARRAYS, COUNTS, FORMAT, VERSION, ShardEntry, content_fingerprint
from bert_jax.errors import UserError
from bert_jax.files.checks import DIGESTS, crc_of, digests_of, json_crc
from bert_jax.files.staging import StagedDirectory, disk_full, replace_file


def check_ids(tokens: np.ndarray, tokenizer: StoreTokenizer) -> None:
    """Raise a UserError if an id of `tokens` (n,) is special, except [UNK], or out of range.

    Without this check, jax would silently read other ids.
    """
    if not tokens.size:
        return
    low, high, size = int(tokens.min()), int(tokens.max()), tokenizer.vocab_size
    if low < 0 or high >= size:
        raise UserError(
            f"the tokenizer gave the id {low if low < 0 else high}, but its vocabulary has the ids "
            f"0 to {size - 1}. The tokenizer's files do not match; save or train it again."
        )
    special = tokenizer.special_ids
    for forbidden in (special.pad, special.cls, special.sep, special.mask):
        if low <= forbidden <= high and (tokens == forbidden).any():
            raise UserError(
                f"the tokenizer gave the special id {forbidden} for plain text; it must treat the "
                "names of special tokens in a text as ordinary words."
            )


class ShardWriter(contextlib.AbstractContextManager["ShardWriter"]):
    """Writer of a shard, block by block, with constant memory; a context manager.

    The shard is built in `path.tmp-<process>`. `finish` renames it, replacing an older shard;
    without `finish`, it is removed. Raise a UserError if `path` holds anything else, or is
    read-only.
    """

    def __init__(self, path: str | Path, tokenizer: StoreTokenizer) -> None:
        self._tokenizer = tokenizer
        self._dtype = token_dtype(tokenizer.vocab_size)
        self.unigram_counts = np.zeros(tokenizer.vocab_size, OFFSET_DTYPE)
        """(vocab_size,): number of times that each id has occurred so far."""
        self.num_tokens = self.num_sentences = self.num_documents = 0
        self._staged = StagedDirectory(path, _is_shard, overwrite=True)
        self.path = self._staged.target
        self._files: dict[str, BinaryIO] = {}
        self._digests: dict[str, Any] = {}
        try:
            for name in ARRAYS:
                self._files[name] = open(self._staged.path / f"{name}.bin", "wb")  # noqa: SIM115
                self._digests[name] = hashlib.sha256()
            for name in ("sentence_offsets", "document_offsets"):
                self._write(name, np.zeros(1, OFFSET_DTYPE))
        except BaseException:
            self.close()
            raise

    def append(
        self, tokens: np.ndarray, sentence_lengths: np.ndarray, document_lengths: np.ndarray
    ) -> None:
        """Add documents.

        `tokens` (n,) has the ids of all sentences, one after the other. `sentence_lengths` (s,) has
        the number of tokens in each sentence, and sums to n. `document_lengths` (d,) has the number
        of sentences in each document, and sums to s. Raise a ValueError if a length is below 1, or
        lengths do not add up. Raise a UserError if an id cannot be stored (see `check_ids`), or the
        disk is full.
        """
        tokens = np.asarray(tokens)
        sentence_lengths = np.asarray(sentence_lengths, OFFSET_DTYPE)
        document_lengths = np.asarray(document_lengths, OFFSET_DTYPE)
        if not len(document_lengths):
            if len(tokens) or len(sentence_lengths):
                raise ValueError("there are tokens or sentences, but no documents")
            return
        if sentence_lengths.min() < 1 or document_lengths.min() < 1:
            raise ValueError("a sentence has no tokens, or a document has no sentences")
        if sentence_lengths.sum() != len(tokens) or document_lengths.sum() != len(sentence_lengths):
            raise ValueError(
                f"lengths do not add up: {len(tokens)} tokens, but sentence lengths add up to "
                f"{sentence_lengths.sum()}; {len(sentence_lengths)} sentences, but document "
                f"lengths add up to {document_lengths.sum()}"
            )
        check_ids(tokens, self._tokenizer)
        stored = np.ascontiguousarray(tokens, self._dtype)
        # Count before writing, so that a refused block changes nothing.
        self.unigram_counts += np.bincount(stored, minlength=len(self.unigram_counts))
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

    def finish(self) -> ShardEntry:
        """Complete the shard, rename it to `path`, and return its entry for the manifest.

        Raise a UserError if there are no documents, or the disk is full.
        """
        if not self.num_documents:
            raise UserError(f"no documents to write to {self.path}: the corpus is empty.")
        try:
            for file in self._files.values():
                file.close()
            (self._staged.path / f"{COUNTS}.bin").write_bytes(self.unigram_counts.tobytes())
            crcs = digests_of(self._staged.path)
            self._staged.commit()
        except OSError as error:
            raise disk_full(self.path, error) from error
        return ShardEntry(
            self.path.name, self.num_tokens, self.num_sentences, self.num_documents,
            {name: digest.hexdigest() for name, digest in self._digests.items()},
            {name.removesuffix(".bin"): crc for name, crc in crcs.items()},
        )  # fmt: skip

    def close(self) -> None:
        """Remove the shard unless `finish` has completed. May be called twice."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # `append` has reported a full disk
                file.close()
        if self._staged is not None:
            self._staged.close()
            self._staged = None  # type: ignore[assignment]

    def __exit__(self, *exception: object) -> None:
        self.close()


def write_manifest(
    directory: Path,
    shards: Sequence[ShardEntry],
    tokenizer: StoreTokenizer,
    counts: Iterable[bytes | None] | None = None,
    **meta: Any,
) -> None:
    """Make a store from complete shards, in this order. `meta` has further manifest entries.

    `corpus.json` is written last, because a directory without it is not a store. `counts` has the
    content of each shard's `unigram_counts.bin` (None if missing); by default, the files are read.
    Raise a UserError if there are no shards, a shard's counts are wrong, or the disk is full.
    """
    if not shards:
        raise UserError(f"no documents to write to {directory}: the corpus is empty.")
    unigram_counts = np.zeros(tokenizer.vocab_size, OFFSET_DTYPE)
    places = [directory / "shards" / shard.name for shard in shards]
    for shard, place, found in zip(shards, places, counts or map(_counts, places), strict=True):
        if found is None or crc_of([found]) != shard.crc32c[COUNTS]:
            raise damaged(place, f"{COUNTS}.bin is missing, or has changed since it was written")
        unigram_counts += np.frombuffer(found, OFFSET_DTYPE)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "corpus.json").unlink(missing_ok=True)  # left by an interrupted build
        (directory / f"{COUNTS}.bin").write_bytes(unigram_counts.tobytes())
        shutil.rmtree(directory / "tokenizer", ignore_errors=True)
        tokenizer.save(directory / "tokenizer")
        header = {
            **meta, "format": FORMAT, "version": VERSION,
            **{name: sum(getattr(s, name) for s in shards) for name in ShardEntry._fields[1:4]},
            "token_dtype": token_dtype(tokenizer.vocab_size).name,
            "vocab_size": tokenizer.vocab_size,
            "special_ids": asdict(tokenizer.special_ids),
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "fingerprint": content_fingerprint(tokenizer.fingerprint, *(e.sha256 for e in shards)),
            "shards": [each._asdict() for each in shards], DIGESTS: digests_of(directory),
        }  # fmt: skip
        # Use the values that a reader will get: file names may have bytes that are not UTF-8.
        header = json.loads(json.dumps(header, ensure_ascii=False).encode(errors="replace"))
        header["crc32"] = json_crc(header)
        text = json.dumps(header, indent=2, ensure_ascii=False) + "\n"
        replace_file(directory / "corpus.json", text.encode())
    except OSError as error:
        raise disk_full(directory, error) from error


def _is_shard(path: Path) -> bool:
    return (path / f"{COUNTS}.bin").is_file()


def _counts(shard: Path) -> bytes | None:
    return (shard / f"{COUNTS}.bin").read_bytes() if _is_shard(shard) else None
