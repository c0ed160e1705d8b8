"""Build of a corpus from raw text: two token stores, `train` and `heldout`.

Sources are divided into tasks, and each task makes one shard (see `sharded`). The process of a task
reads documents, its workers split blocks of about a megabyte into sentences and tokenize them, and
the process appends the results in order. The number of workers does not change the corpus.
"""

import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bert_jax.data.corpus.cleaning.clean import SAMPLES
from bert_jax.data.corpus.datasheet import FIELDS, Provenance
from bert_jax.data.corpus.documents import ReadOptions, Source
from bert_jax.data.corpus.intake import DUPLICATES, DropReport
from bert_jax.data.corpus.overlap.ngrams import hash_text
from bert_jax.data.corpus.passes import PARTS, Recipe, Written
from bert_jax.data.corpus.sentences import get_splitter
from bert_jax.data.corpus.sharded.build import build_shards, find_drops
from bert_jax.data.corpus.sharded.engine import SHARD_BYTES, Engine, Task, plan_tasks
from bert_jax.data.corpus.sharded.workspace import Workspace, open_workspace
from bert_jax.data.corpus.sources import resolve_sources
from bert_jax.data.corpus.workers import grouped
from bert_jax.data.pairs import plan_pairs
from bert_jax.data.store import TokenStore, is_store, open_store
from bert_jax.errors import UserError
from bert_jax.files.staging import StagedDirectory
from bert_jax.files.urls import is_url
from bert_jax.terminal import progress_bar
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.tokenization.training import CountedWords, count_words
from bert_jax.tokenization.wordpiece import WordPieceOptions

DEFAULT_LENGTH = 128
"""Default number of tokens in a row (a training example) in the first phase of pretraining."""


@dataclass(frozen=True)
class BuiltCorpus:
    """Result of a build."""

    path: str | Path
    """Directory, or URL in a bucket."""
    train: TokenStore | None
    """Training store; None in a bucket, or if no document is left to train on."""
    heldout: TokenStore | None
    """Held-out store; None in a bucket, for rate 0, or with fewer than four distinct documents."""
    written: Written
    seconds: float
    bad: DropReport = field(default_factory=DropReport)
    """Bad records, which were left out."""

    @classmethod
    def open(cls, out: str | Path, name: str, written: Written, *given: Any) -> "BuiltCorpus":
        """Open the stores of the corpus in `out`, or of the corpus `name` if `out` has several."""
        if is_url(out):
            return cls("/".join(filter(None, [str(out), name])), None, None, written, *given)
        path = Path(out) / name
        train, heldout = (open_store(path / p) if getattr(written, p) else None for p in PARTS)
        return cls(path, train, heldout, written, *given)

    def summary(self) -> str:
        """Return a readable summary: counts, speed, and the text that sentence pairs leave out."""
        lines = [rate_line(self.path, "text", self.written.text_bytes, self.seconds)]
        lines += [f"  left out: {self.bad.bad_records()}"] * bool(self.bad.documents)
        if self.train is None:
            counts = f"{self.written.train:,} documents to train on, {self.written.heldout:,} held"
            return "\n".join([*lines, f"  {counts} out"])
        for name, store in (("train", self.train), ("heldout", self.heldout)):
            if store is None:
                lines.append(f"  {name}: none")
                continue
            shards = f" in {len(store.counts):,} shards" if len(store.counts) > 1 else ""
            lines.append(
                f"  {name}: {store.num_documents:,} documents, {store.num_sentences:,} sentences, "
                f"{store.num_tokens:,} tokens{shards}, {store.unknown_rate:.2%} of the tokens [UNK]"
            )
        first = self.train.shards[0]
        try:
            plan = plan_pairs(first, DEFAULT_LENGTH)
        except UserError as error:
            return "\n".join([*lines, f"Warning: {error}"])
        clause, warning = plan.losses(first)
        where = " of the first shard" if len(self.train.counts) > 1 else ""
        lines.append(
            f"  as sentence pairs{where}: {len(plan):,} rows of {plan.length} tokens; {clause}"
        )
        return "\n".join([*lines, warning] if warning else lines)


def rate_line(path: str | Path, what: str, text_bytes: int, seconds: float) -> str:
    """Describe the amount of text that a build read, and its speed."""
    size = text_bytes / 1e6
    rate = size / max(seconds, 1e-9)
    return f"{path}: {size:.1f} MB of {what} in {seconds:.1f} s ({rate:.1f} MB/s)"


def is_corpus(path: Path) -> bool:
    """Return true if `path` holds a corpus, as `build_corpus` makes it."""
    return is_store(path / "train")


def build_corpus(
    sources: Sequence[str | Source], tokenizer: Tokenizer, out: str | Path, *,
    heldout_rate: float = 0.01, splitter: str = "fast", num_workers: int | None = None,
    **options: Any,
) -> BuiltCorpus:  # fmt: skip
    """Build one corpus in local processes; see `build_corpora` for `options` and the errors.

    `tokenizer`, `heldout_rate` and `splitter` are fields of `Recipe`. `num_workers` is the number
    of processes, by default one per core.
    """
    recipe = Recipe(tokenizer, heldout_rate, splitter)
    (built,) = build_corpora(sources, recipe, out, engine=Engine(num_workers), **options)
    return built


def build_corpora(
    sources: Sequence[str | Source], recipe: Recipe, out: str | Path, *,
    engine: Engine | None = None, shard_bytes: int = SHARD_BYTES,
    options: ReadOptions | None = None, overwrite: bool = False, progress: bool = True,
    keep_dropped: Path | None = None, scratch: str | Path | None = None,
    provenance: Provenance | None = None,
) -> list[BuiltCorpus]:  # fmt: skip
    """Build a corpus from sources, or one corpus for each value of the field `recipe.by_field`.

    A hash of the text decides whether a document is held out. Equal documents are therefore always
    in the same store, and documents stay in their stores when a corpus grows. If there are four or
    more distinct documents, at least two are held out: if necessary, the two with lowest hashes.

    The result does not depend on the engine or its number of processes. Small sources become a
    single shard, which is made on this machine. Larger sources become one shard for each task (see
    `plan_tasks`). If a build of several shards ends early, its complete tasks are kept beside
    `out`, and a later build with the same arguments runs only the remaining tasks.

    Raise a UserError if the input is bad (see `sources`) or has no text, `out` exists or is used by
    another build, the disk is full, or a worker was killed.

    Args:
        sources: see `resolve_sources`; `options` says how they are read.
        out: directory, or gs://BUCKET/DIRECTORY, for the stores `train` and `heldout`. With
            `recipe.by_field`, `out` gets one directory per value, each with both stores.
        engine: engine that runs the tasks; by default, in local processes.
        shard_bytes: number of bytes of input files per shard.
        overwrite: whether to replace an existing corpus: on a disk, once the new one is complete;
            in a bucket, the old corpus is lost when the build begins.
        keep_dropped: new directory for samples of the documents that cleaning dropped.
        scratch: directory or gs://BUCKET/DIRECTORY for the files of the search for duplicates,
            which all processes must be able to reach; by default, inside the unfinished corpus.
    """
    begin = time.perf_counter()
    engine = engine or Engine()
    get_splitter(recipe.splitter)  # raises an error early if the splitter is missing
    options = options or ReadOptions()
    wanted = (*options.keep, recipe.by_field, *itertools.chain(*FIELDS.values()))
    options = replace(options, keep=tuple(dict.fromkeys(filter(None, wanted))))
    tasks = plan_tasks(resolve_sources(sources, options), shard_bytes)
    with contextlib.ExitStack() as stack:
        dropped = None
        if keep_dropped is not None:
            dropped = stack.enter_context(StagedDirectory(keep_dropped, lambda path: False))
        space = stack.enter_context(open_workspace(out, overwrite=overwrite, resume=len(tasks) > 1))
        if len(tasks) == 1:
            engine = Engine(engine.num_workers)
        drops = None
        if recipe.cleaning.needs_scan:
            name = hash_text(Workspace(out).place)
            drops = Workspace(f"{scratch or space.place}/{DUPLICATES}-{name:016x}")
            find_drops(recipe, tasks, drops, engine, progress=progress)
        built = build_shards(
            recipe, tasks, space, engine, drops=drops, samples=SAMPLES if dropped else 0,
            progress=progress, options=options, provenance=provenance,
        )  # fmt: skip
        if drops is not None:
            drops.remove()
        if dropped is not None:
            built.report.write_samples(dropped.path)
            dropped.commit()
    seconds = time.perf_counter() - begin
    return [
        BuiltCorpus.open(out, name, written, seconds, built.bad)
        for name, written in built.written.items()
    ]


def iter_texts(
    sources: Sequence[str | Source], *, max_bytes: int | None = None,
    options: ReadOptions | None = None,
) -> Iterator[str]:  # fmt: skip
    """Yield paragraphs of the sources, for training a tokenizer.

    With `max_bytes`, yield a sample of at most about this size, evenly spread over all sources; a
    temporary file holds the sample. Raise a UserError if the sources have too many bad records.
    """
    most = (options or ReadOptions()).most_bad
    texts = _texts(resolve_sources(sources, options), DropReport(), most)
    paragraphs = itertools.chain.from_iterable(text.split("\n") for text in texts)
    if max_bytes is None:
        yield from paragraphs
        return

    # Keep every k-th piece (a few consecutive paragraphs); k doubles if pieces exceed `max_bytes`.
    kept: list[tuple[int, int]] = []
    total, stride = 0, 1
    piece_bytes = max(64, min(1 << 16, max_bytes // 64))
    lines = (f"{paragraph}\n".encode() for paragraph in paragraphs)
    with tempfile.TemporaryFile() as spool:
        for number, piece in enumerate(grouped(lines, len, piece_bytes + 1)):
            if number % stride == 0:
                kept.append((spool.tell(), spool.write(b"".join(piece))))
                total += kept[-1][1]
            while total > max_bytes and len(kept) > 1:
                kept, stride = kept[::2], 2 * stride
                total = sum(size for _, size in kept)
        for begin, size in kept:
            spool.seek(begin)
            yield from spool.read(size).decode().split("\n")[:-1]


def _texts(sources: Sequence[Source], bad: DropReport, most: float = 1.0) -> Iterator[str]:
    """Yield all texts, count bad records in `bad`, and check that their share is at most `most`."""
    for source in sources:
        yield from source.texts()
        bad.merge(vars(source.bad))
    bad.check(most, sum(source.size for source in sources))


_COUNTED_BYTES = 64 << 20
"""Number of input bytes whose words one task counts."""


def counted_texts(
    sources: Sequence[str | Source], options: ReadOptions, form: WordPieceOptions, engine: Engine,
    memory: float,
) -> Iterator[CountedWords]:  # fmt: skip
    """Count the words of all texts, for `train_wordpiece`; yield the counts of each task in order.

    Each task counts one part of the sources within `memory` GiB. The engine does not change the
    result. Raise a UserError if a source cannot be read, or too many records are bad.
    """
    tasks, bad = plan_tasks(resolve_sources(sources, options), _COUNTED_BYTES), DropReport()
    size = sum(task.size for task in tasks)
    found = engine.map(partial(_count_task, form, memory), tasks)
    bar = progress_bar(of="counting words", unit="B", total=size)
    with bar, contextlib.closing(found):
        for task, (words, lost) in zip(tasks, found, strict=True):
            bad.merge(lost)
            bar.update(task.size)
            yield words
    bad.check(options.most_bad, size)


def _count_task(
    form: WordPieceOptions, memory: float, task: Task
) -> tuple[CountedWords, dict[str, Any]]:
    bad = DropReport()
    return count_words(_texts(task.sources, bad), form, memory), vars(bad)
