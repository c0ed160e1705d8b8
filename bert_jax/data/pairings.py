"""Ways to make rows from a token store (`PAIRINGS`), and the section `data`, which chooses one.

A pairing checks stores, plans rows, and describes batch arrays and the text that no row has.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from typing_extensions import override

from bert_jax.config import bounds
from bert_jax.data import packing, pair_packing, pairs
from bert_jax.data.pair_packing import MIN_TARGET_LENGTH
from bert_jax.data.phases import MixtureConfig
from bert_jax.data.shard import Shard
from bert_jax.data.store import TokenStore
from bert_jax.errors import UserError

MAX_LENGTH = 65535


@dataclass(frozen=True)
class DataConfig(bounds.Bounded, section="data"):
    """Corpora of the run, and settings for making and reading examples."""

    RENAMED: ClassVar = {"objective": "pairing"}

    corpus: str = ""
    """Directory made by `bert-jax corpus`, with the stores `train` and `heldout`."""
    mixture: tuple[MixtureConfig, ...] = ()
    """Corpora to mix, with weights, instead of the training text of `corpus`. The tokenizer and the
    held-out text of `corpus` are still used."""
    mixture_temperature: bounds.Fraction = 0.0
    """Exponent t: the share of a corpus is proportional to weight x tokens^t. 0 uses only the
    weights, 1 mixes by size, and XLM-R uses 0.3."""
    pairing: Literal["nsp", "sop", "none", "translation"] = "nsp"
    """Content of a row. nsp: next-sentence pairs. sop: sentence-order pairs. none: consecutive
    text. translation: sources and targets from a corpus of pairs."""
    target_length: Annotated[
        int, bounds.AtLeast(MIN_TARGET_LENGTH), bounds.AtMost(MAX_LENGTH), bounds.Or(0)
    ] = 0
    """Target tokens per row, for translation. 0 means the length of the phase."""
    short_rate: bounds.Fraction = 0.1
    """Share of sentence pairs that get a random, shorter target length (BERT: 0.1)."""
    window: bounds.Natural = 0
    """Number of shards whose rows are shuffled together (a window); 0 means all. A host keeps the
    plans of the current and the next window and, if the corpus is in a bucket, their files."""
    cache_gb: bounds.NonNegative = 20.0
    """Gigabytes of local disk for shards of corpora in buckets. Two windows must fit."""
    cache_dir: str = ""
    """Directory of cached shards, shared by a host's processes; by default in ~/.cache/bert_jax."""
    read_timeout: bounds.NonNegative = 600.0
    """Seconds for which a bucket may be out of reach before the run ends with exit code 6."""
    num_passes: bounds.Count = 1
    """Number of passes over the corpus per epoch, each with new rows (BERT's dupe_factor: 10)."""
    num_threads: bounds.Natural = 2
    """Number of threads that build batches in advance. With 0, a batch is built when needed."""
    prefetch_batches: bounds.Count = 8
    """Number of batches that are built in advance."""

    def __post_init__(self) -> None:
        """Raise a UserError for values that are wrong whatever the corpus."""
        super().__post_init__()
        if self.target_length and self.pairing != "translation":
            raise UserError(
                f"data.target_length is {self.target_length}, but data.pairing {self.pairing!r} "
                "makes rows without targets; leave it out, or set data.pairing to 'translation'"
            )


@runtime_checkable
class ExamplePlan(Protocol):
    """Plan of the rows of a shard."""

    def __len__(self) -> int: ...

    def batch(self, shard: Shard, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Build the rows with indices `rows`, (B,) int64: all arrays except `row_index`."""

    def losses(self, shard: Shard) -> tuple[str, str | None]:
        """Describe the text that is in no row. If there is much, also return a warning."""


class Column(NamedTuple):
    """Shape and dtype of an array of a batch, for code that runs before there is data."""

    shape: tuple[int, ...]
    """Shape of a row."""
    dtype: np.dtype


class Pairing(ABC):
    """A way to make rows from a token store."""

    min_length: int
    has_labels: bool = False
    """Whether rows are sentence pairs with a label to learn."""
    empty_share: float = 0.0
    """Share of a row that a document leaves empty (measured), to estimate numbers of rows."""

    def check(self, store: TokenStore) -> None:
        """Raise a UserError if this pairing cannot use the store."""
        if store.is_pairs:
            raise UserError(
                f"the corpus {store.path or 'in memory'} holds pairs of sources and targets; only "
                "data.pairing 'translation' reads it. For a language model, build a corpus from "
                "the same files with `bert-jax corpus --input`"
            )

    @abstractmethod
    def plan(self, shard: Shard, config: DataConfig, length: int, seed: int) -> ExamplePlan:
        """Plan rows of `length` tokens from a shard, as a pure function of the arguments."""

    def segment_dtype(self, config: DataConfig, length: int) -> np.dtype:
        """Return the smallest integer type for the segment ids."""
        return np.dtype(np.uint8)

    def columns(self, config: DataConfig, length: int, tokens: np.dtype) -> dict[str, Column]:
        """Describe the arrays of a batch except `row_index`. `tokens` is the dtype of the store."""
        return {
            "tokens": Column((length,), tokens),
            "type_ids": Column((length,), np.dtype(np.uint8)),
            "segment_ids": Column((length,), self.segment_dtype(config, length)),
            "pair_labels": Column((), np.dtype(np.int32)),
        }


@dataclass(frozen=True)
class SentencePairs(Pairing):
    """Rows of sentence pairs with a label."""

    name: Literal["nsp", "sop"]
    empty_share: float
    min_length = pairs.MIN_LENGTH
    has_labels = True

    @override
    def check(self, store: TokenStore) -> None:
        super().check(store)
        if self.name == "nsp":
            for shard in store.counts:
                pairs.check_documents(store.path and store.shard_path(shard), shard.num_documents)

    @override
    def plan(self, shard: Shard, config: DataConfig, length: int, seed: int) -> ExamplePlan:
        return pairs.plan_pairs(
            shard, length, pairing=self.name, short_rate=config.short_rate, seed=seed,
            num_passes=config.num_passes,
        )  # fmt: skip


class PackedText(Pairing):
    """Rows of consecutive text."""

    min_length = packing.MIN_LENGTH

    @override
    def plan(self, shard: Shard, config: DataConfig, length: int, seed: int) -> ExamplePlan:
        return packing.plan_packing(shard, length, seed=seed, num_passes=config.num_passes)

    @override
    def segment_dtype(self, config: DataConfig, length: int) -> np.dtype:
        return packing.segment_dtype(length)


class Translations(Pairing):
    """Packed rows of source and target texts."""

    min_length = pair_packing.MIN_LENGTH

    @override
    def check(self, store: TokenStore) -> None:
        pair_packing.check_pairs(store.shards[0])  # planning checks the other shards

    @override
    def plan(self, shard: Shard, config: DataConfig, length: int, seed: int) -> ExamplePlan:
        return pair_packing.plan_translations(
            shard, length, config.target_length or length, seed=seed, num_passes=config.num_passes
        )

    @override
    def segment_dtype(self, config: DataConfig, length: int) -> np.dtype:
        return pair_packing.pair_segment_dtype(length, config.target_length or length)

    @override
    def columns(self, config: DataConfig, length: int, tokens: np.dtype) -> dict[str, Column]:
        columns, target_length = super().columns(config, length, tokens), config.target_length
        del columns["pair_labels"]
        columns["target_tokens"] = Column((target_length or length,), tokens)
        segments = columns["segment_ids"].dtype
        return columns | {"target_segment_ids": Column((target_length or length,), segments)}


PAIRINGS: dict[str, Pairing] = {
    "nsp": SentencePairs("nsp", 0.75),
    "sop": SentencePairs("sop", 0.5),
    "none": PackedText(),
    "translation": Translations(),
}
"""Pairings by name. A new pairing needs an entry here and a name in `DataConfig.pairing`."""
