"""Build of a corpus of text pairs, with a report on the pairs.

Each pair becomes a document of two sentences, the source and the target.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert_jax.data.corpus.build import DEFAULT_LENGTH, rate_line
from bert_jax.data.corpus.datasheet import Provenance, Tally, account, write_datasheet
from bert_jax.data.corpus.encode import EncodedPairs, PairBlock, encode_pairs, start_worker
from bert_jax.data.corpus.pairs import PairSource
from bert_jax.data.corpus.passes import BLOCK_BYTES, check_rate
from bert_jax.data.corpus.sharded.workspace import is_corpora
from bert_jax.data.corpus.workers import grouped, map_ordered, worker_count
from bert_jax.data.pair_packing import plan_translations
from bert_jax.data.store import TokenStore, entropy, is_store, open_store
from bert_jax.data.store_writer import ShardWriter, write_manifest
from bert_jax.errors import UserError
from bert_jax.files.staging import StagedDirectory
from bert_jax.hashing import hash_u64
from bert_jax.tasks.examples import Origin
from bert_jax.terminal import progress_bar
from bert_jax.tokenization.tokenizer import Tokenizer

_SHOWN = 3  # number of places named for each kind of finding
_MOST_CHANGED = 0.05
_MANY_EQUAL = 0.01


@dataclass
class Cases:
    """Number of pairs with some property, and the origins of the first few such pairs."""

    count: int = 0
    first: list[Origin] = field(default_factory=list)

    def add(self, name: str, numbers: np.ndarray) -> None:
        """Add pairs of the source `name`; `numbers` (n,) are the pairs' line or row numbers."""
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


class BuiltPairs(NamedTuple):
    """Result of `build_pairs`."""

    path: Path
    train: TokenStore
    heldout: TokenStore | None
    text_bytes: int
    seconds: float
    duplicates: Cases
    """Pairs that repeat earlier pairs; repeats in separate held-out files are not counted."""
    findings: Sequence[str]
    """Notable properties of the pairs, one per line."""
    warnings: Sequence[str]

    def summary(self) -> str:
        """Return a readable summary."""
        lines = [
            rate_line(self.path, "pairs", self.text_bytes, self.seconds),
            *_sizes("train", self.train),
            *(_sizes("heldout", self.heldout) if self.heldout else ["  heldout: none"]),
        ]
        shard, warning = self.train.shards[0], None
        try:
            plan = plan_translations(shard, DEFAULT_LENGTH, DEFAULT_LENGTH)
        except UserError as error:
            warning = f"Warning: {error}"
        else:
            clause, warning = plan.losses(shard)
            lines.append(
                f"  as rows of {plan.length} source and {plan.target_length} target tokens: "
                f"{len(plan):,} rows; {clause}"
            )
        return "\n".join(filter(None, [*lines, *self.findings, warning, *self.warnings]))


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


_SAMPLE = 1000  # number of targets that are encoded and decoded as a check
_NO_HASHES = np.zeros((0, 2), np.uint64)
_RECENT = 1 << 20  # number of new hashes that `_Seen` collects before merging them with the others


def build_pairs(
    sources: Sequence[PairSource], tokenizer: Tokenizer, out: str | Path, *,
    heldout: Sequence[PairSource] = (), heldout_rate: float = 0.01, drop_duplicates: bool = False,
    num_workers: int | None = None, overwrite: bool = False, progress: bool = True,
    provenance: Provenance | None = None,
) -> BuiltPairs:  # fmt: skip
    """Build a corpus of pairs: the directory `out` with the token stores `train` and `heldout`.

    The held-out pairs come from `heldout`. If `heldout` is empty, a hash of the source text decides
    which pairs are held out (the fraction `heldout_rate`), so that equal sources share a store.
    With `drop_duplicates`, only the first of equal pairs in `sources` is kept. A pair whose source
    or target has no tokens is left out. For the other arguments, see `build.build_corpora`. Raise a
    UserError, and leave no unfinished files, if the input is bad (see `pairs`) or has no pair,
    `out` exists or is in a bucket, the disk is full, or a worker was killed.
    """
    check_rate(heldout_rate)
    workers, begin = worker_count(num_workers), time.perf_counter()
    with contextlib.ExitStack() as stack:
        staged = stack.enter_context(StagedDirectory(out, is_corpora, overwrite=overwrite))
        train = _Part(staged.path / "train", tokenizer, drop_duplicates)
        stack.enter_context(train.writer)
        held = _Part(staged.path / "heldout", tokenizer, drop_duplicates and not heldout)
        stack.enter_context(held.writer)
        sample: list[str] = []
        text_bytes = 0
        size = sum(source.size for source in (*sources, *heldout))
        with progress_bar(of="corpus", unit="B", total=size, shown=progress) as bar:
            for block in _encoded(heldout, tokenizer, workers, sample, bar):
                held.append(block, np.ones(block.numbers.size, bool))
                text_bytes += block.text_bytes
            threshold = 0 if heldout else int(heldout_rate * 2**64)
            for block in _encoded(sources, tokenizer, workers, sample, bar):
                is_held = block.hashes[:, 0] < np.uint64(threshold)
                train.append(block, ~is_held)
                held.append(block, is_held)
                text_bytes += block.text_bytes
        for part, read in ((held, heldout), (train, sources)):
            if read and not part.writer.num_documents:
                why = "no pair has text on both sides."
                if held.writer.num_documents and not heldout:
                    why = f"all pairs are held out; lower heldout_rate, which is {heldout_rate:g}."
                raise UserError(f"{', '.join(source.name for source in read)}: {why}")
        tally = Tally(tokenizer.target)
        for text in sample:
            tally.measure(text)
        duplicates = train.duplicates if heldout else train.duplicates + held.duplicates
        cleaning = {"cleaning": {"duplicates": True}, "dropped": {"duplicate": duplicates.count}}
        for part, read in ((train, sources), (held, heldout or sources)):
            if not part.writer.num_documents:  # an empty held-out store is left out
                shutil.rmtree(part.path)
            else:
                records = [record for source in read for record in source.records()]
                accounted = account(tally, records, provenance or Provenance())
                accounted.update(cleaning if part.drops else {})
                part.finish(accounted, text_bytes, 0.0 if heldout else heldout_rate)
        write_datasheet(staged.path)
        staged.commit()
    out = Path(out)
    heldout_store = open_store(out / "heldout") if is_store(out / "heldout") else None
    findings, warnings = _findings(train, held, heldout_store, duplicates, sample)
    return BuiltPairs(
        out, open_store(out / "train"), heldout_store, text_bytes, time.perf_counter() - begin,
        duplicates, findings, warnings,
    )  # fmt: skip


class _Seen:
    """Set of 64-bit hashes, 8 bytes each."""

    def __init__(self) -> None:
        self._sorted = np.zeros(0, np.uint64)
        self._recent = np.zeros(0, np.uint64)

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """Add hashes, (n,) uint64; return which of them are new, (n,) bool."""
        first = np.zeros(hashes.size, bool)
        first[np.unique(hashes, return_index=True)[1]] = True
        for known in (self._sorted, self._recent):
            at = np.minimum(np.searchsorted(known, hashes), known.size - 1)
            if known.size:
                first &= known[at] != hashes
        self._recent = np.union1d(self._recent, hashes[first])
        if self._recent.size > _RECENT:
            self._sorted = np.union1d(self._sorted, self._recent)
            self._recent = self._recent[:0]
        return first


class _Part:
    """A token store that is being written, and properties of the pairs written so far."""

    def __init__(self, path: Path, tokenizer: Tokenizer, drops: bool) -> None:
        self.path, self.writer = path, ShardWriter(path / "shards" / "00000", tokenizer)
        self.empty, self.duplicates, self.equal = Cases(), Cases(), Cases()
        self.counts = np.zeros((2, tokenizer.vocab_size), np.int64)
        """(2, vocab_size): number of times that each id occurs in sources and in targets."""
        self.hashes: list[np.ndarray] = []
        self.tokenizer, self.drops, self._seen = tokenizer, drops, _Seen()

    def append(self, block: EncodedPairs, chosen: np.ndarray) -> None:
        """Write `chosen` pairs, (n,) bool, without empty sides and, if `drops`, without repeats."""
        filled = (block.lengths > 0).all(axis=1)
        self.empty.add(block.name, block.numbers[chosen & ~filled])
        chosen = chosen & filled
        first = np.ones(chosen.size, bool)
        source, target = block.hashes[chosen].T
        first[chosen] = self._seen.add(hash_u64(0, source) ^ target)
        self.duplicates.add(block.name, block.numbers[chosen & ~first])
        if self.drops:
            chosen &= first
        self.equal.add(block.name, block.numbers[chosen & (np.ptp(block.hashes, axis=1) == 0)])
        kept = block.tokens[np.repeat(chosen, block.lengths.sum(axis=1))]
        lengths = block.lengths[chosen]
        side = np.repeat(np.arange(lengths.size) % 2, lengths.ravel())
        for number, counts in enumerate(self.counts):
            counts += np.bincount(kept[side == number], minlength=counts.size)
        self.writer.append(kept, lengths.ravel(), np.full(len(lengths), 2))
        self.hashes.append(block.hashes[chosen])

    def finish(self, accounted: Mapping[str, Any], text_bytes: int, heldout_rate: float) -> None:
        targets = self.counts[1].copy()
        targets[self.tokenizer.special_ids.sep] += self.writer.num_documents  # ends each target
        write_manifest(
            self.path, [self.writer.finish()], self.tokenizer, part=self.path.name, pairs=True,
            target_entropy=entropy(targets), heldout_rate=heldout_rate, text_bytes=text_bytes,
            **accounted,
        )  # fmt: skip


def _findings(
    train: _Part, held: _Part, heldout: TokenStore | None, duplicates: Cases, sample: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return notable properties and warnings. `sample` has targets to test the tokenizer on."""
    findings, warnings = [], []
    empty, equal = train.empty + held.empty, train.equal + held.equal
    if empty.count:
        findings.append(f"  left out, since a side is empty: {empty}")
    if duplicates.count:
        kept = "left out" if train.drops else "kept; --drop-duplicates exact drops them"
        findings.append(f"  repeats of earlier pairs: {duplicates}, {kept}")
    if equal.count:
        findings.append(f"  pairs with two equal sides: {equal}")
    decoded = map(train.tokenizer.decode, train.tokenizer.target.encode_batch(sample))
    changed = [each for each in zip(sample, decoded, strict=True) if each[0] != each[1]]
    share = len(changed) / max(len(sample), 1)
    said = f"{1 - share:.1%} of {len(sample):,}"
    findings.append(f"  targets that come back exactly from their tokens: {said}")
    for side, name in enumerate(("sources", "targets")):
        count, example = _overlap(train, held, side, heldout)
        if count and heldout:
            warnings.append(
                f"Warning: {count:,} of {heldout.num_documents:,} held-out {name} are in the "
                f"training pairs too, for example {example!r}"
            )
    ours, theirs = (
        part.counts / np.maximum(np.linalg.norm(part.counts, axis=1, keepdims=True), 1.0)
        for part in (train, held)
    )
    cosines = ours @ theirs.T  # (2, 2): training sides by held-out sides
    given = heldout and not heldout.meta["heldout_rate"]
    if given and np.trace(cosines) < np.trace(cosines[::-1]):
        warnings.append(
            "Warning: the held-out sources look like training targets and the held-out targets "
            "like training sources; are the files of --heldout-pairs swapped?"
        )
    num_pairs = train.writer.num_documents + held.writer.num_documents
    if equal.count > _MANY_EQUAL * num_pairs:
        warnings.append(
            f"Warning: {equal.count / num_pairs:.1%} of the pairs have two equal sides; "
            "is one file given twice, or a part of the text not translated?"
        )
    if share > _MOST_CHANGED:
        text, again = changed[0]
        warnings.append(
            f"Warning: {share:.1%} of the targets do not come back from "
            f"their tokens, for example {text!r} comes back as {again!r}; even a "
            "perfect model gets these targets wrong. Use a tokenizer that keeps case and spaces "
            "(bert-jax tokenizer --kind bytelevel)."
        )
    return findings, warnings


def _overlap(train: _Part, held: _Part, side: int, store: TokenStore | None) -> tuple[int, str]:
    """Count the held-out sources (`side` 0) or targets (1) in `train`; also return the first."""
    texts, others = (np.concatenate([*part.hashes, _NO_HASHES])[:, side] for part in (held, train))
    known = np.flatnonzero(np.isin(texts, others))
    if store is None or not known.size:
        return 0, ""
    (shard,) = store.shards
    begin, end = shard.sentence_offsets[2 * known[0] + side :][:2]
    return known.size, train.tokenizer.decode(shard.tokens[begin:end])


def _encoded(
    sources: Sequence[PairSource], tokenizer: Tokenizer, num_workers: int, sample: list[str],
    bar: Any,
) -> Iterator[EncodedPairs]:  # fmt: skip
    """Yield the encoded blocks of sources in order, and add the first targets to `sample`."""
    encoded = map_ordered(
        encode_pairs, _blocks(sources, sample), num_workers,
        initializer=start_worker, arguments=(tokenizer, "lines"),
    )  # fmt: skip
    before = bar.n
    with contextlib.closing(encoded):
        for block in encoded:
            yield block
            bar.update(before + sum(source.bytes_read for source in sources) - bar.n)


def _blocks(sources: Sequence[PairSource], sample: list[str]) -> Iterator[PairBlock]:
    for source in sources:
        for group in grouped(
            source.pairs(), lambda pair: len(pair.source) + len(pair.target), BLOCK_BYTES
        ):
            sample += [pair.target for pair in group if pair.target][: _SAMPLE - len(sample)]
            texts = [text for pair in group for text in (pair.source, pair.target)]
            yield PairBlock(source.name, [pair.number for pair in group], texts)
