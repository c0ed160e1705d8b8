"""Token stores of a run, on disk or in a bucket. Shards of a bucket are copied to a disk cache."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from bert_jax.data.mixture import Mixture, weights_of
from bert_jax.data.pairings import DataConfig
from bert_jax.data.phases import PhaseConfig
from bert_jax.data.shard import OFFSET_DTYPE, token_dtype
from bert_jax.data.store import ARRAYS, ShardEntry, TokenStore, is_store, open_store, read_manifest
from bert_jax.errors import UserError
from bert_jax.files.bucket import BucketFiles, FileCache
from bert_jax.files.caches import cache_directory
from bert_jax.files.checks import DIGESTS
from bert_jax.files.staging import replace_file
from bert_jax.files.urls import BUCKETS, scheme

if TYPE_CHECKING:  # these load jax, which processes that search a corpus do not need
    from bert_jax.data.pipeline import ExampleStream
    from bert_jax.training.pretrain.config import PretrainConfig

_GOOD_WINDOW = 8
_PARTS = ("train", "heldout", "")
SHORT_TIMEOUT = 5.0  # seconds: `data.read_timeout` of commands that only look at a corpus
_REMEDY = (
    "Give the directory that `bert-jax corpus` made (pretrain: --config.data.corpus; evaluate and "
    "replay: --corpus, if it has moved)"
)


class Corpus(NamedTuple):
    """Token stores of a run."""

    train: TokenStore
    heldout: TokenStore | None
    """Held-out text. If None, the run is not evaluated on held-out text."""


def open_corpus(path: str, data: DataConfig | None = None) -> Corpus:
    """Open a corpus: a directory with the stores `train` and `heldout`, or a single store.

    Raise a UserError if the path is empty, has an unsupported scheme or contains no store,
    tokenizers differ, or a window exceeds the cache; a BucketAwayError if a bucket is out of reach.

    Args:
        path: Local directory, or gs:// or s3://BUCKET/DIRECTORY, read through a cache.
        data: Settings of a run, which reads text in windows of shards and checks them in the
            background. If None, there are no windows, and the cache has its default settings.
    """
    if not path:
        raise UserError(
            "data.corpus is not set; give the directory that `bert-jax corpus` made, such as "
            "--config.data.corpus=work/corpus"
        )
    if scheme(path) not in (None, *BUCKETS):
        raise UserError(
            f"the corpus {path}: {scheme(path)}:// is not supported. Give a local directory or "
            "gs://BUCKET/DIRECTORY or s3://BUCKET/DIRECTORY"
        )
    opens = store_openers(path, data)
    if "train" not in opens:
        if "" in opens:
            return Corpus(opens[""](), None)
        is_lost = scheme(path) is None and not Path(path).exists()
        missing = "does not exist" if is_lost else "holds no complete token store"
        raise UserError(f"the corpus {path} {missing}. {_REMEDY}")
    train, heldout = opens["train"](), opens["heldout"]() if "heldout" in opens else None
    if heldout is not None and heldout.tokenizer_fingerprint != train.tokenizer_fingerprint:
        raise UserError(
            f"the corpus {path} is damaged: its stores train and heldout have different tokenizers "
            f"({train.tokenizer_fingerprint[:12]} and {heldout.tokenizer_fingerprint[:12]}). Build "
            "the corpus again"
        )
    return Corpus(train, heldout)


def store_openers(path: str, data: DataConfig | None = None) -> dict[str, Callable[[], TokenStore]]:
    """Return, for each part of a corpus, a function that opens the part's store in any process.

    The parts are "train", "heldout", and "" for a store at `path` itself; there may be none. `data`
    is as in `open_corpus`. Raise a BucketAwayError if the bucket is out of reach.
    """
    if scheme(path) in BUCKETS:
        bucket = BucketCorpus(path, data or DataConfig())
        parts = [part for part in _PARTS if "corpus.json" in bucket.files.names(part)]
        background = data is not None
        return {
            part: partial(bucket.open, part, windowed=background and part != "heldout")
            for part in parts
        }
    places = {part: Path(path, part) for part in _PARTS if is_store(Path(path, part))}
    opened = partial(open_store, background=data is not None)
    return {part: partial(opened, place) for part, place in places.items()}


def phase_stores(
    config: "PretrainConfig", run: TokenStore, only: int | None = None
) -> dict[int, TokenStore | Mixture]:
    """Open the training texts that differ from the run's corpus; return them by phase index.

    `run` is the store of the run's corpus. If `only` is given, open only the text of phase `only`.
    Raise a UserError if a corpus is missing, has another tokenizer than the run's corpus, or is
    named twice in a mixture; or the cache is too small for the windows of a mixture.
    """
    opened = {config.data.corpus: run}

    def opened_at(name: str, where: str) -> TokenStore:
        if name not in opened:
            try:
                opened[name] = open_corpus(name, config.data).train
            except UserError as error:
                raise UserError(f"{where}: {error}") from error
        store = opened[name]
        if store.tokenizer_fingerprint != run.tokenizer_fingerprint:
            raise UserError(
                f"{where}: {name} has the tokenizer {store.tokenizer_fingerprint[:12]}, but the "
                f"run's corpus has {run.tokenizer_fingerprint[:12]}. Build both corpora with the "
                "same tokenizer (`bert-jax corpus --tokenizer`)"
            )
        return store

    stores: dict[int, TokenStore | Mixture] = {}
    for number, phase in enumerate(config.training.phases):
        if only not in (None, number):
            continue
        where = f"training.phases[{number}]"
        if phase.corpus:
            stores[number] = opened_at(phase.corpus, f"{where}.corpus")
        elif parts := config.mixture_of(number):
            where = f"{where}.mixture" if phase.mixture else "data.mixture"
            names = tuple(part.corpus for part in parts)
            mixed = tuple(opened_at(name, f"{where}[{n}]") for n, name in enumerate(names))
            texts = [store.fingerprint for store in mixed]
            if twice := [name for n, name in enumerate(names) if texts[n] in texts[:n]]:
                raise UserError(f"{where} names {twice[0]} twice; name each corpus once")
            far = {name: opened[name] for name in names if scheme(name)}
            check_cache(where, far, config.data)
            weights = weights_of(
                mixed, [part.weight for part in parts], config.temperature_of(number) or 0.0
            )
            stores[number] = Mixture(names, mixed, weights)
    return stores


def recorded_corpus(record: Mapping[str, Any], phase: int) -> Any:
    """Return the fingerprint of a phase's training text. `record` is the run's config.json."""
    return record.get("phase_corpora", {}).get(str(phase), record.get("corpus"))


@dataclass(frozen=True)
class MixedCorpora:
    """All corpora of a run that mixes corpora in some phase; empty for any other run."""

    names: tuple[str, ...]
    """Directories of the corpora, in the order of the phases that read them."""
    data: DataConfig

    @cached_property
    def labels(self) -> dict[str, str]:
        """Names of the corpora in metrics, by directory."""
        return dict(zip(self.names, corpus_labels(self.names), strict=True))

    def named(
        self, texts: dict[int, TokenStore | Mixture], phases: Sequence[PhaseConfig],
        store: TokenStore,
    ) -> dict[int, TokenStore | Mixture]:  # fmt: skip
        """Return `texts`; if some phase has a mixture, the text of every phase becomes a mixture.

        `texts` lacks the phases that read `store`, the corpus of the run.
        """
        if not self.names:
            return texts
        found = dict(texts)
        for number, phase in enumerate(phases):
            text = texts.get(number, store)
            if isinstance(text, TokenStore):
                found[number] = Mixture((phase.corpus or self.data.corpus,), (text,), (1.0,))
        return found

    def seen(self, stream: "ExampleStream", step: int) -> dict[str, Any]:
        """Return columns of metrics that tell how much text the first `step` steps have read."""
        found = stream.progress(step)
        row: dict[str, Any] = {
            "data/rows": sum(each.rows for each in found),
            "data/tokens": sum(each.tokens for each in found),
        }
        if not self.names:
            return row
        for each in found:
            name = f"data/{self.labels[each.name]}"
            row |= {f"{name}/tokens": each.tokens, f"{name}/epochs": round(each.epochs, 6)}
        return row

    def heldout(self) -> dict[str, TokenStore]:
        """Open the held-out stores of all corpora that have one; return them by corpus label."""
        return {
            label: store
            for name, label in self.labels.items()
            if (store := open_corpus(name, self.data).heldout) is not None
        }


def corpus_labels(names: Sequence[str]) -> tuple[str, ...]:
    """Shorten paths to their shortest distinct ends: work/de and work/en become de and en."""
    paths = [PurePath(name).parts for name in names]
    most = max((len(parts) for parts in paths), default=1)
    for count in range(1, most + 1):
        labels = tuple("/".join(parts[-count:]) for parts in paths)
        if len(set(labels)) == len(labels):
            return labels
    return tuple(names)


class BucketCorpus:
    """Corpus in a bucket. Its stores are read through a cache on disk."""

    def __init__(self, url: str, data: DataConfig) -> None:
        """Set up the bucket and the cache; read nothing yet.

        Raise a UserError if the package for the bucket is not installed.
        """
        self.files = BucketFiles(url, data.read_timeout)
        self._data = data
        self._root = Path(data.cache_dir or cache_directory("corpora"))
        self._cache = FileCache(self._root, data.cache_gb * 1e9)

    def open(self, part: str, *, windowed: bool) -> TokenStore:
        """Open the store in a directory of the corpus.

        `part` is "train", "heldout", or "" for the directory of the corpus itself. If `windowed`,
        the store is read in windows of shards, as in training. Raise a UserError if the store is
        damaged or its window exceeds the cache, a BucketAwayError if the bucket is out of reach.
        """
        prefix = f"{part}/" if part else ""
        directory, digests = self._directory(self.files.read(f"{prefix}corpus.json"), prefix)
        names = [f"tokenizer/{each}" for each in self.files.names(f"{prefix}tokenizer")]
        for name in ["unigram_counts.bin", *names]:
            self.files.fetch_small(prefix + name, directory / name, digests.get(name))
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

    def _directory(self, header: bytes, prefix: str) -> tuple[Path, dict[str, str]]:
        """Write the `corpus.json` of a store to the cache; return the directory and all digests."""
        try:
            found = json.loads(header)
            fingerprint, digests = found["fingerprint"], found.get(DIGESTS)
            if not re.fullmatch("[0-9a-f]{64}", fingerprint):
                raise ValueError(fingerprint)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.files.url}/{prefix}corpus.json does not describe a bert_jax token store."
            ) from error
        directory: Path = self._root / fingerprint
        replace_file(directory / "corpus.json", header)
        return directory, digests if isinstance(digests, dict) else {}

    def _check_window(self, sizes: list[int]) -> None:
        """Raise a UserError if the cache cannot hold two windows of `data.window` shards."""
        largest, limit, window = max(sizes), self._data.cache_gb * 1e9, self._data.window
        fitting = int(limit // (2 * largest))
        if len(sizes) == 1:
            if sizes[0] > limit:
                raise UserError(
                    f"data.cache_gb is {self._data.cache_gb:g}, but the only shard of "
                    f"{self.files.url} has {sizes[0] / 1e9:.2f} GB. Set data.cache_gb to at least "
                    f"{sizes[0] / 1e9:.2f}, or build the corpus in smaller shards"
                )
        elif not window or window > fitting:
            need = 1.05 * 2 * largest * (window or 1) / 1e9
            better = f"{window or 1} and data.cache_gb to {need:.2g} or more"
            if good := min(_GOOD_WINDOW, fitting, len(sizes)):
                better = f"{good}"
            raise UserError(
                f"data.window is {window}{'' if window else ' (the whole corpus)'}, but the corpus "
                f"{self.files.url} is read through a cache of data.cache_gb "
                f"{self._data.cache_gb:g}, which must hold two windows of shards of up to "
                f"{largest / 1e9:.2g} GB. Set data.window to {better}"
            )


def check_cache(where: str, stores: Mapping[str, TokenStore], data: DataConfig) -> None:
    """Raise a UserError if the cache cannot hold two windows of each corpus of a mixture.

    `where` names the mixture. `stores` contains its corpora in buckets: it maps URLs to stores.
    """
    needed = 0
    for store in stores.values():
        sizes = sorted(sum(_sizes(store, shard).values()) for shard in store.counts)
        needed += sum(sizes[-2 * data.window :])
    if len(stores) > 1 and needed > data.cache_gb * 1e9:
        raise UserError(
            f"{where}: the cache must hold two windows (data.window {data.window}) of each of "
            f"{', '.join(stores)}: {needed / 1e9:.2g} GB. But data.cache_gb is {data.cache_gb:g}, "
            "so the corpora would evict each other. Set data.cache_gb to "
            f"{1.05 * needed / 1e9:.2g} or more, or data.window to a lower number"
        )


def _sizes(store: TokenStore, shard: ShardEntry) -> dict[str, int]:
    sizes = (
        shard.num_tokens * token_dtype(store.vocab_size).itemsize,
        (shard.num_sentences + 1) * OFFSET_DTYPE.itemsize,
        (shard.num_documents + 1) * OFFSET_DTYPE.itemsize,
    )
    return dict(zip(ARRAYS, sizes, strict=True))
