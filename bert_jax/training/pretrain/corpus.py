"""The token stores of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.data.mixture import Mixture, weights_of
from bert_jax.data.pairings import DataConfig
from bert_jax.data.pipeline import ExampleStream
from bert_jax.data.store import TokenStore, open_store
from bert_jax.errors import UserError
from bert_jax.files.urls import scheme
from bert_jax.training.pretrain.bucket_corpus import BucketCorpus, check_cache
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.run.corpora import amounts, corpus_labels

_REMEDY = (
    "Give the directory that `bert-jax corpus` made (pretrain: --config.data.corpus; evaluate and "
    "replay: --corpus, where it has moved)"
)


class Corpus(NamedTuple):
    """Token stores of a run."""

    train: TokenStore
    heldout: TokenStore | None
    """Held-out text; None: no evaluation."""


def open_corpus(path: str, data: DataConfig | None = None) -> Corpus:
    """Open the stores of `data.corpus`: a directory with `train` and `heldout`, or one store.

    Args:
        path: Local directory, or gs://BUCKET/DIRECTORY, whose shards are read through a cache.
        data: Settings of the cache, for shards checked in the background; None: the defaults,
            for reading without windows.

    Raises:
        UserError: No such directory, no store in it, two stores of different tokenizers, or a
            window that does not fit the cache.
        BucketAwayError: The bucket is out of reach.
    """
    if not path:
        raise UserError(
            "data.corpus is not set; give the directory that `bert-jax corpus` made, such as "
            "--config.data.corpus=work/corpus"
        )
    background, missing = data is not None, "holds no complete token store"
    if scheme(path) == "gs":
        bucket = BucketCorpus(path, data or DataConfig())

        def opened(part: str) -> TokenStore | None:
            return bucket.open(part, windowed=background and part != "heldout")

    elif scheme(path):
        raise UserError(
            f"the corpus {path}: {scheme(path)}:// is not supported. Give a local directory or "
            "gs://BUCKET/DIRECTORY"
        )
    else:
        directory = Path(path)
        missing = missing if directory.exists() else "does not exist"

        def opened(part: str) -> TokenStore | None:
            place = directory / part
            has_store = (place / "corpus.json").exists()
            return open_store(place, background=background) if has_store else None

    train = opened("train")
    if train is None:
        store = opened("")
        if store is None:
            raise UserError(f"the corpus {path} {missing}. {_REMEDY}")
        return Corpus(store, None)
    heldout = opened("heldout")
    if heldout is not None and heldout.tokenizer_fingerprint != train.tokenizer_fingerprint:
        raise UserError(
            f"{path}: the stores train and heldout were made with different tokenizers "
            f"({train.tokenizer_fingerprint[:12]} and {heldout.tokenizer_fingerprint[:12]}); build "
            "the corpus again"
        )
    return Corpus(train, heldout)


def phase_stores(
    config: PretrainConfig, run: TokenStore, only: int | None = None
) -> dict[int, TokenStore | Mixture]:
    """Open the training text of the phases that have their own, by the number of the phase.

    `run` is the text of the run's corpus; `only` the number of the only phase to open.

    Raises:
        UserError: A corpus is missing, has another tokenizer than the run's, or is named twice in a
            mixture; or the windows of a mixture of buckets do not fit the cache together.
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
                f"{where}: {name} was made with the tokenizer "
                f"{store.tokenizer_fingerprint[:12]}, and the run's corpus with "
                f"{run.tokenizer_fingerprint[:12]}; build the corpora with one tokenizer "
                "(`bert-jax corpus --tokenizer`)"
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
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise UserError(f"{where} names {twice} twice; expected each corpus once")
            mixed = tuple(opened_at(name, f"{where}[{n}]") for n, name in enumerate(names))
            far = {name: opened[name] for name in names if scheme(name)}
            check_cache(where, far, config.data)
            weights = weights_of(
                mixed, [part.weight for part in parts], config.temperature_of(number) or 0.0
            )
            stores[number] = Mixture(names, mixed, weights)
    return stores


def recorded_corpus(record: Mapping[str, Any], phase: int) -> Any:
    """Return the fingerprint of the training text of a phase, from a run's record."""
    return record.get("phase_corpora", {}).get(str(phase), record.get("corpus"))


class MixedCorpora:
    """Corpora of all phases of a run; none where no phase mixes several."""

    def __init__(self, config: PretrainConfig):
        """Name the corpora; open nothing."""
        phases = range(len(config.training.phases))
        names: list[str] = []
        if any(config.mixture_of(number) for number in phases):
            for number in phases:
                parts = config.mixture_of(number)
                own = config.training.phases[number].corpus or config.data.corpus
                names += [part.corpus for part in parts] or [own]
        self.names: Sequence[str] = tuple(dict.fromkeys(names))
        """Directories, in the order of the phases."""
        self.labels = dict(zip(self.names, corpus_labels(self.names), strict=True))
        """Names in metrics, by directory."""
        self._data = config.data

    def named(
        self, texts: Mapping[int, TokenStore | Mixture], config: PretrainConfig
    ) -> dict[int, TokenStore | Mixture]:
        """Return the text of the phases, with a phase's own corpus under its name."""
        own = {n: phase.corpus for n, phase in enumerate(config.training.phases) if phase.corpus}
        return {
            number: Mixture((own[number],), (text,), (1.0,))
            if self.names and isinstance(text, TokenStore)
            else text
            for number, text in texts.items()
        }

    def seen(self, stream: ExampleStream, step: int) -> dict[str, Any]:
        """Return the values of a row of metrics for the text that the first steps have read."""
        found = stream.progress(step)
        tokens = [each.tokens for each in found]
        row = {"data/rows": sum(each.rows for each in found), "data/tokens": sum(tokens)}
        if not self.names:
            return row
        labels = [self.labels[each.name or self._data.corpus] for each in found]
        return row | amounts(labels, tokens, [each.epochs for each in found])

    def heldout(self) -> dict[str, TokenStore]:
        """Open the held-out text of each corpus that has some, by label."""
        return {
            label: store
            for name, label in self.labels.items()
            if (store := open_corpus(name, self._data).heldout) is not None
        }
