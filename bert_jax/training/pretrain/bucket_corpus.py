"""A corpus read in place from a bucket: whole shards, through a cache on disk."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from bert_jax.data.pairings import DataConfig
from bert_jax.data.shard import OFFSET_DTYPE, token_dtype
from bert_jax.data.store import ARRAYS, ShardEntry, TokenStore, open_store, read_manifest
from bert_jax.errors import UserError
from bert_jax.files.bucket import BucketFiles, FileCache
from bert_jax.files.staging import replace_file

_GOOD_WINDOW = 8


class BucketCorpus:
    """The stores of a corpus below a URL."""

    def __init__(self, url: str, data: DataConfig) -> None:
        """Read nothing yet.

        Raises:
            UserError: gcsfs is not installed.
        """
        self.files = BucketFiles(url, data.read_timeout)
        self._data = data
        default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        self._root = Path(data.cache_dir or default / "bert_jax" / "corpora")
        self._cache = FileCache(self._root, data.cache_gb * 1e9)

    def open(self, part: str, *, windowed: bool) -> TokenStore | None:
        """Open the store in a directory of the corpus; None where there is no store.

        `part` is "train", "heldout", or "" for the directory itself. If `windowed`, the store is
        read in windows of shards, as training does.

        Raises:
            UserError: A damaged store, or one whose window does not fit the cache.
            BucketAwayError: The bucket is out of reach.
        """
        prefix = f"{part}/" if part else ""
        try:
            header = self.files.read(f"{prefix}corpus.json")
        except FileNotFoundError:
            return None
        directory = self._directory(header, prefix)
        for name in self.files.names(f"{prefix}tokenizer"):
            self.files.fetch_small(f"{prefix}tokenizer/{name}", directory / "tokenizer" / name)
        self.files.fetch_small(f"{prefix}unigram_counts.bin", directory / "unigram_counts.bin")
        store = read_manifest(directory)
        sizes = [_sizes(store, shard) for shard in store.counts]
        if windowed:
            self._check_window([sum(each.values()) for each in sizes])
        shards = {shard.name: shard for shard in store.counts}

        def fetch(name: str) -> None:
            for array, size in _sizes(store, shards[name]).items():
                file = f"shards/{name}/{array}.bin"
                digest = shards[name].sha256[array]
                self._cache.fetch(self.files, prefix + file, directory / file, size, digest)

        return open_store(
            directory, background=True, fetch=fetch, num_open=2 * self._data.window + 1
        )

    def _directory(self, header: bytes, prefix: str) -> Path:
        """Return the store's directory in the cache, named by its fingerprint."""
        try:
            fingerprint = json.loads(header)["fingerprint"]
            if not re.fullmatch("[0-9a-f]{64}", fingerprint):
                raise ValueError(fingerprint)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.files.url}/{prefix}corpus.json does not describe a bert_jax token store."
            ) from error
        directory: Path = self._root / fingerprint
        replace_file(directory / "corpus.json", header)
        return directory

    def _check_window(self, sizes: list[int]) -> None:
        """Refuse a window that does not fit the cache together with the next window."""
        largest, limit, window = max(sizes), self._data.cache_gb * 1e9, self._data.window
        fitting = int(limit // (2 * largest))
        if len(sizes) == 1:
            if sizes[0] > limit:
                raise UserError(
                    f"data.cache_gb is {self._data.cache_gb:g}, but {self.files.url} is one shard "
                    f"of {sizes[0] / 1e9:.2f} GB. Set data.cache_gb to at least "
                    f"{sizes[0] / 1e9:.2f}, or build the corpus in shards"
                )
        elif not window or window > fitting:
            need = 1.05 * 2 * largest * (window or 1) / 1e9
            better = f"{window or 1} and data.cache_gb to {need:.2g} or more"
            if good := min(_GOOD_WINDOW, fitting, len(sizes)):
                better = f"{good}"
            raise UserError(
                f"data.window is {window}{'' if window else ' (the whole corpus)'}, but the corpus "
                f"{self.files.url} is read from a bucket through data.cache_gb "
                f"{self._data.cache_gb:g}, which must hold two windows of shards of up to "
                f"{largest / 1e9:.2g} GB. Set data.window to {better}"
            )


def check_cache(where: str, stores: Mapping[str, TokenStore], data: DataConfig) -> None:
    """Refuse a mixture whose windows do not fit the cache together.

    `where` names the mixture; `stores` has its corpora in buckets by their URLs.
    """
    needed = 0
    for store in stores.values():
        sizes = sorted(sum(_sizes(store, shard).values()) for shard in store.counts)
        needed += sum(sizes[-2 * data.window :])
    if len(stores) > 1 and needed > data.cache_gb * 1e9:
        raise UserError(
            f"{where}: two windows of data.window {data.window} of each of {', '.join(stores)} are "
            f"{needed / 1e9:.2g} GB, and data.cache_gb is {data.cache_gb:g}, so that the corpora "
            f"would drive each other out. Set data.cache_gb to {1.05 * needed / 1e9:.2g} or more, "
            "or data.window to a lower number"
        )


def _sizes(store: TokenStore, shard: ShardEntry) -> dict[str, int]:
    """Return the bytes of each array of a shard."""
    sizes = (
        shard.num_tokens * token_dtype(store.vocab_size).itemsize,
        (shard.num_sentences + 1) * OFFSET_DTYPE.itemsize,
        (shard.num_documents + 1) * OFFSET_DTYPE.itemsize,
    )
    return dict(zip(ARRAYS, sizes, strict=True))
