"""A corpus of pairs, and what people should know of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert_jax.data.corpus.build import DEFAULT_LENGTH, rate_line
from bert_jax.data.pair_packing import plan_translations
from bert_jax.data.store import TokenStore
from bert_jax.errors import UserError
from bert_jax.tasks.examples import Origin
from bert_jax.tokenization.tokenizer import Tokenizer

_SHOWN = 3  # places named of each kind of finding
_LEAST_ROUND_TRIPS = 0.95
_MANY_EQUAL = 0.01


@dataclass
class Cases:
    """Number of pairs with a peculiarity, and the first of them."""

    count: int = 0
    first: list[Origin] = field(default_factory=list)

    def add(self, name: str, numbers: np.ndarray) -> None:
        """Add pairs of a source, (n,) lines."""
        self.count += numbers.size
        room = _SHOWN - len(self.first)
        self.first += [Origin(name, number) for number in numbers[:room].tolist()]

    def __add__(self, other: "Cases") -> "Cases":
        return Cases(self.count + other.count, (self.first + other.first)[:_SHOWN])

    def __str__(self) -> str:
        places = []
        for (name, unit), origins in groupby(self.first, lambda each: (each.path, each.unit)):
            numbers = [str(origin.line) for origin in origins]
            places.append(f"{name}, {unit}{'s' * (len(numbers) > 1)} {', '.join(numbers)}")
        more = ", ..." if self.count > len(self.first) else ""
        return f"{self.count:,} ({'; '.join(places)}{more})"


class RoundTrip(NamedTuple):
    """Targets that came back from their tokens: no translation can be better."""

    num_texts: int
    num_exact: int
    example: tuple[str, str] = ("", "")
    """First text that came back otherwise, and as what."""

    @classmethod
    def measure(cls, tokenizer: Tokenizer, texts: Sequence[str]) -> "RoundTrip":
        """Encode and decode texts."""
        decoded = [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)]
        changed = [each for each in zip(texts, decoded, strict=True) if each[0] != each[1]]
        return cls(len(texts), len(texts) - len(changed), *changed[:1])

    @property
    def share(self) -> float:
        """Share of the texts that came back."""
        return self.num_exact / max(self.num_texts, 1)


class BuiltPairs(NamedTuple):
    """Result of `build_pairs`, and peculiarities of the pairs."""

    path: Path
    train: TokenStore
    heldout: TokenStore | None
    """None where nothing was held out."""
    text_bytes: int
    """UTF-8 bytes of text that were tokenized."""
    seconds: float
    empty: Cases
    """Pairs without tokens on a side; in no store."""
    duplicates: Cases
    """Pairs that occurred before, held-out files excluded."""
    dropped_duplicates: bool
    """Whether these are in no store."""
    equal: Cases
    """Pairs whose target is their source."""
    overlaps: tuple[tuple[int, str], ...]
    """Of sources, and of targets: held-out texts that are training texts too, and the first."""
    round_trip: RoundTrip
    is_swapped: bool
    """Whether the held-out sources look like training targets, and the other way round."""

    def summary(self) -> str:
        """Return counts, lengths, findings and warnings, for people."""
        lines = [
            rate_line(self.path, "pairs", self.text_bytes, self.seconds),
            *_sizes("train", self.train),
            *(_sizes("heldout", self.heldout) if self.heldout else ["  heldout: none"]),
        ]
        warnings, shard = [], self.train.shards[0]
        try:
            plan = plan_translations(shard, DEFAULT_LENGTH, DEFAULT_LENGTH)
        except UserError as error:
            warnings.append(f"Warning: {error}")
        else:
            clause, warning = plan.losses(shard)
            lines.append(
                f"  as rows of {plan.length} source and {plan.target_length} target tokens: "
                f"{len(plan):,} rows; {clause}"
            )
            warnings += [warning] if warning else []
        if self.empty.count:
            lines.append(f"  left out, empty on a side: {self.empty}")
        if self.duplicates.count:
            dropping = "kept; --drop-duplicates exact drops them"
            kept = "left out" if self.dropped_duplicates else dropping
            lines.append(f"  pairs that occur before: {self.duplicates}, {kept}")
        if self.equal.count:
            lines.append(f"  pairs of two equal sides: {self.equal}")
        lines.append(
            f"  targets that come back exactly from their tokens: {self.round_trip.share:.1%} of "
            f"{self.round_trip.num_texts:,}"
        )
        return "\n".join([*lines, *warnings, *self._warnings()])

    def _warnings(self) -> list[str]:
        warnings = []
        for (count, example), side in zip(self.overlaps, ("sources", "targets"), strict=True):
            if count and self.heldout:
                warnings.append(
                    f"Warning: {count:,} of {self.heldout.num_documents:,} held-out {side} are in "
                    f"the training pairs too, for example {example!r}"
                )
        if self.is_swapped:
            warnings.append(
                "Warning: the held-out sources look like training targets and the held-out targets "
                "like training sources; are the files of --heldout-pairs swapped?"
            )
        num_pairs = self.train.num_documents + (self.heldout.num_documents if self.heldout else 0)
        if self.equal.count > _MANY_EQUAL * num_pairs:
            warnings.append(
                f"Warning: {self.equal.count / num_pairs:.1%} of the pairs have two equal sides; "
                "is one file given twice, or a part of the text not translated?"
            )
        if self.round_trip.share < _LEAST_ROUND_TRIPS:
            text, decoded = self.round_trip.example
            warnings.append(
                f"Warning: {1 - self.round_trip.share:.1%} of the targets do not come back from "
                f"their tokens, for example {text!r} comes back as {decoded!r}: the best "
                "translation is still wrong there. What helps: a tokenizer that keeps case and "
                "spaces (bert-jax tokenizer --kind unigram)"
            )
        return warnings


def look_swapped(train: np.ndarray, heldout: np.ndarray) -> bool:
    """Say whether the sides of two parts, (2, vocab_size) counts of ids, match better crosswise."""
    train, heldout = (
        counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1.0)
        for counts in (train, heldout)
    )
    cosines = train @ heldout.T
    return bool(np.trace(cosines) < np.trace(cosines[::-1]))


def _sizes(name: str, store: TokenStore) -> list[str]:
    lines = [
        f"  {name}: {store.num_documents:,} pairs, {store.unknown_rate:.2%} of the tokens [UNK]"
    ]
    sizes = np.concatenate([np.diff(shard.sentence_offsets) for shard in store.shards])
    for side, lengths in zip(("source", "target"), sizes.reshape(-1, 2).T, strict=True):
        middle, most = np.percentile(lengths, [50, 99], method="higher").astype(int)
        lines.append(
            f"    {side}: {lengths.sum():,} tokens; a text has {middle} (p50), {most} (p99), "
            f"{lengths.max()} at most"
        )
    return lines
