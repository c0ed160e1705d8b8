"""Build of a corpus, with one shard per task, and an estimate of its cost."""

import contextlib
import functools
import hashlib
import json
import resource
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_jax.data.corpus.cleaning.clean import Drops
from bert_jax.data.corpus.datasheet import Provenance, Tally, account, write_datasheet
from bert_jax.data.corpus.documents import Head, ReadOptions, Source
from bert_jax.data.corpus.intake import BAD_SAMPLES, MARKS, QUARANTINE, DropReport
from bert_jax.data.corpus.passes import Pass, Recipe, Written, better_thresholds
from bert_jax.data.corpus.sharded.duplicates import find_duplicates, read_drops, scan
from bert_jax.data.corpus.sharded.engine import SHARD_BYTES, Engine, Task, plan_tasks
from bert_jax.data.corpus.sharded.shuffle import RANGE_BYTES
from bert_jax.data.corpus.sharded.workspace import Workspace
from bert_jax.data.store import ARRAYS, COUNTS, ShardEntry, open_shard, read_manifest
from bert_jax.data.store_writer import write_manifest
from bert_jax.errors import UserError
from bert_jax.terminal import progress_bar

_FORMAT = 8
"""Version of the code that makes shards. Tasks that another version completed are run again."""


@dataclass(frozen=True)
class Job:
    """Settings that all tasks of a build share."""

    recipe: Recipe
    workspace: Workspace
    thresholds: Mapping[str, int]
    samples: int = 0
    drops: Workspace | None = None
    """Workspace in which the search for duplicates decided what to drop; None without a search."""

    def key(self, task: Task, corpora: Collection[str]) -> str:
        """Return a digest of everything that the task's shards of `corpora` depend on."""
        drops = self.drops and hashlib.sha256(read_drops(self.drops, task.number)).hexdigest()
        thresholds = sorted(each for each in self.thresholds.items() if each[0] in corpora)
        return _digest([self.recipe.identity(), thresholds, self.samples, drops, task.identity()])


@dataclass
class Built:
    """Result of the tasks of a build."""

    written: dict[str, Written]
    """Counts by corpus."""
    report: DropReport
    sources: list[dict[str, Any]]
    tallies: dict[str, Tally]
    """Languages, licences and tokenizer coverage, by corpus."""
    bad: DropReport
    """Counts and samples of bad records."""


def make_shard(
    job: Job, task: Task, num_workers: int = 1, advance: Callable[[Task], None] = lambda task: None
) -> dict[str, Any]:
    """Write a task's shards, one per corpus and part. Return the content of the task's mark file.

    The work uses `num_workers` processes. `advance` is called after each block of documents.
    """
    drops = Drops.load(read_drops(job.drops, task.number)) if job.drops else None
    with job.workspace.scratch() as root:

        def place(corpus: str, part: str) -> Path:
            return root / corpus / part / "shards" / task.name

        made = Pass(job.recipe, place, thresholds=job.thresholds, drops=drops, samples=job.samples)
        with made:
            made.run(task.sources, num_workers, lambda: advance(task))
            shards = made.finish()
            mark = {
                "key": job.key(task, made.written()),
                "shards": [[*each, entry._asdict()] for each, entry in shards.items()],
                "corpora": {name: vars(each) for name, each in made.written().items()},
                "report": vars(made.report),
                "bad": vars(made.bad),
                "on_bad": task.on_bad if made.bad.documents else None,
                "sources": made.sources,
                "tallies": {name: each.as_json() for name, each in made.tallies.items()},
            }
    job.workspace.write_mark(task.name, mark)
    return mark


def build_shards(
    recipe: Recipe, tasks: Sequence[Task], workspace: Workspace, engine: Engine, *,
    drops: Workspace | None = None, samples: int = 0, options: ReadOptions | None = None,
    progress: bool = True, provenance: Provenance | None = None,
) -> Built:  # fmt: skip
    """Run the tasks that are not complete, and write the manifests of all corpora.

    The result depends neither on the engine nor on what earlier builds left in the workspace. Raise
    a UserError if the input is bad, the disk is full, or the texts contain no tokens.
    """
    options = options or ReadOptions()
    thresholds: dict[str, int] = {}
    while True:
        job = Job(recipe, workspace, thresholds, samples, drops)
        work = functools.partial(make_shard, job)
        marks = _run(work, workspace, job.key, tasks, engine, "corpus", progress)
        built = Built({}, DropReport(samples), [], {}, DropReport(BAD_SAMPLES))
        for mark in marks:
            for corpus, counts in mark["tallies"].items():
                built.tallies.setdefault(corpus, Tally(recipe.tokenizer)).add(counts)
            for corpus, counts in mark["corpora"].items():
                built.written.setdefault(corpus, Written()).add(Written(**counts))
            built.sources += mark["sources"]
            built.report.merge(mark["report"])
            built.bad.merge(mark["bad"])
        built.bad.check(options.most_bad, sum(task.size for task in tasks))
        if not (better := better_thresholds(recipe, thresholds, built.written)):
            break
        thresholds |= better
    if not any(each.train + each.heldout for each in built.written.values()):
        dropped = ", ".join(f"{n:,} {why}" for why, n in built.report.documents.most_common())
        which = f"are dropped ({dropped}) or" if dropped else "in the sources"
        raise UserError(f"the texts {which} contain no tokens, so the corpus is empty.")
    stores: dict[tuple[str, str], list[ShardEntry]] = {}
    for mark in marks:
        for corpus, part, entry in mark["shards"]:
            stores.setdefault((corpus, part), []).append(ShardEntry.read(entry))
    paths = {store: "/".join(filter(None, store)) for store in stores}
    workspace.keep_only(
        [f"{paths[store]}/shards/{entry.name}" for store in stores for entry in stores[store]]
    )
    about: dict[str, Any] = {"by_field": recipe.by_field} if recipe.by_field else {}
    about |= {} if recipe.cleaning.is_empty else {
        "cleaning": recipe.cleaning.record(), **built.report.record()
    }  # fmt: skip
    with workspace.scratch() as root:
        for (corpus, part), entries in stores.items():
            path = paths[corpus, part]
            files = (f"{path}/shards/{entry.name}/{COUNTS}.bin" for entry in entries)
            write_manifest(
                root / path, entries, recipe.tokenizer, map(workspace.read, files),
                part=part, heldout_rate=recipe.heldout_rate, splitter=recipe.splitter,
                text_bytes=built.written[corpus].text_bytes,
                bad_records={
                    "on_bad": options.on_bad, "most": options.most_bad, "unread": built.bad.unread,
                    "records": built.bad.records, "bad": built.bad.documents,
                },
                **account(built.tallies[corpus], built.sources, provenance or Provenance()),
                **about,
            )  # fmt: skip
            if workspace.local is not None:
                store = read_manifest(root / path)
                for number in range(len(entries)):
                    open_shard(store, number, check=False)  # raises if a file is missing
        built.bad.write_samples(root / QUARANTINE)
        for corpus in {corpus for corpus, _ in stores}:  # filters may drop a whole corpus
            write_datasheet(root / corpus)
    workspace.remove(MARKS)
    return built


def find_drops(
    recipe: Recipe, tasks: Sequence[Task], space: Workspace, engine: Engine, *, progress: bool
) -> None:
    """Read the sources of all tasks once, and decide which duplicates to drop.

    All workers must have access to `space`, which gets the decisions (see `find_duplicates`).
    Complete scans in it are reused. Raise a UserError if the input is bad, or the disk is full.
    """
    if space.local is not None:
        space.local.mkdir(parents=True, exist_ok=True)
    work = functools.partial(_scan_task, recipe, space)
    key = lambda task, corpora: _scan_key(recipe, task)  # noqa: E731, a scan knows no corpora
    marks = _run(work, space, key, tasks, engine, "reading for duplicates", progress)
    find_duplicates([mark["scan"] for mark in marks], recipe.cleaning, space, engine.map)


def _scan_key(recipe: Recipe, task: Task) -> str:
    return _digest([recipe.cleaning.record(), task.identity()])


def _scan_task(
    recipe: Recipe, space: Workspace, task: Task, num_workers: int = 1, advance: object = None
) -> dict[str, Any]:
    del advance  # a scan reads far ahead of its work, so the bytes read do not show progress
    with space.scratch() as root:
        (root / MARKS / f"{task.name}.json").unlink(missing_ok=True)
        texts = (each.text for source in task.sources for each in source.documents(gaps=True))
        found = scan(texts, recipe.cleaning, root, task.number, num_workers=num_workers)
    mark = {"key": _scan_key(recipe, task), "scan": found}
    space.write_mark(task.name, mark)
    return mark


def _run(
    work: Callable[..., dict[str, Any]], space: Workspace, key: Callable[..., str],
    tasks: Sequence[Task], engine: Engine, description: str, progress: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run `work(task, num_workers, advance)` for the incomplete tasks, with a progress bar.

    A task is complete if its mark in `space` contains the key `key(task, corpora)`, with the mark's
    corpora, and, if records were bad, the reaction `task.on_bad`. If a local engine has fewer
    incomplete tasks than processes, the tasks run one by one, each with all processes. Return all
    marks, in task order.
    """

    def is_complete(task: Task, mark: Mapping[str, Any]) -> bool:
        is_current = mark.get("key") == key(task, mark.get("corpora", ()))
        return is_current and mark.get("on_bad") in (None, task.on_bad)

    marks = space.marks()
    todo = [task for task in tasks if not is_complete(task, marks.get(task.name, {}))]
    done = 0
    size = sum(task.size for task in todo)
    bar = progress_bar(of=description, unit="B", total=size, shown=progress)

    def advance(task: Task | None = None) -> None:
        read = sum(source.bytes_read for source in task.sources) if task else 0
        bar.update(sum(each.size for each in todo[:done]) + read - bar.n)

    if engine.is_local and len(todo) < max(2, engine.num_workers):
        results = (work(task, engine.num_workers, advance) for task in todo)
    else:
        results = engine.map(work, todo)
    with bar, contextlib.closing(results):
        for done, mark in enumerate(results, 1):
            marks[todo[done - 1].name] = mark
            advance()
    return [marks[task.name] for task in tasks]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps([_FORMAT, value], sort_keys=True).encode()).hexdigest()


SAMPLE_BYTES = 32 << 20
"""Number of bytes that an estimate reads from the sources."""
_PIECES, _ROWS = 32, 10_000


@dataclass(frozen=True)
class Estimate:
    """Estimated sizes of a corpus that is not built yet, scaled up from a sample."""

    total: int
    """Sum of the sources' sizes in `unit`."""
    sampled: int
    """Amount that was read for the sample, in `unit`."""
    unit: str
    """Unit of the sources' sizes: bytes, examples, or both."""
    documents: int
    tokens: int
    text_bytes: int
    store_bytes: int
    processor_seconds: float
    """Time on one core of this machine, in seconds."""
    process_bytes: int
    """Peak memory of one process, in bytes."""
    shards: int

    def lines(self, num_workers: int) -> list[str]:
        """Return the lines of a readable estimate."""
        hours = self.processor_seconds / 3600
        count = f"{num_workers} process{'es' * (num_workers != 1)}"
        return [
            f"estimate from {self.sampled:,} of {self.total:,} {self.unit} "
            f"({min(self.sampled / self.total, 1):.2%} of the sources); nothing is built",
            f"  documents        {self.documents:,}",
            f"  text             {self.text_bytes / 1e6:,.1f} MB",
            f"  tokens           {self.tokens:,}",
            f"  store            {self.store_bytes / 1e6:,.1f} MB in {self.shards:,} shard(s)",
            f"  processor hours  {hours:,.3g} (with {count} like this one: "
            f"{hours / num_workers:,.3g} hours)",
            f"  memory           {self.process_bytes / 2**30:.2f} GiB a process, "
            f"{self.process_bytes * (num_workers + 1) / 2**30:.2f} GiB with {count} on one "
            "machine",
        ]


def estimate_corpus(
    sources: Sequence[Source], recipe: Recipe, *, shard_bytes: int = SHARD_BYTES,
    sample_bytes: int = SAMPLE_BYTES,
) -> Estimate:  # fmt: skip
    """Estimate the sizes of a corpus and the cost of building it.

    A sample, evenly spread over the sources, is built and scaled up. A file that cannot be divided
    is sampled at its beginning. Raise a UserError if the input is bad, or the sample has no tokens.
    """
    tasks = plan_tasks(sources, shard_bytes)
    # Each source of examples has its own scale: one source's examples are larger than another's.
    sets = [[each] for each in sources if each.unit == "examples"]
    groups = [[each for each in sources if each.unit != "examples"], *sets]
    with tempfile.TemporaryDirectory(prefix="bert_jax-") as name:
        parts = [
            _sampled(group, recipe, sample_bytes, Path(name, f"{number}"))
            for number, group in enumerate(filter(None, groups))
        ]
    sums = {field: sum(part[field] for part in parts) for field in parts[0]}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if recipe.cleaning.needs_scan:
        memory += 10 * RANGE_BYTES
    unit = " and ".join(sorted({each.unit for each in sources}))
    estimate = Estimate(**sums, unit=unit, process_bytes=memory, shards=len(tasks))
    if not estimate.tokens or not estimate.sampled:
        raise UserError("the sample of the sources contains no tokens.")
    return estimate


def _sampled(
    sources: Sequence[Source], recipe: Recipe, sample_bytes: int, directory: Path
) -> dict[str, Any]:
    """Build a sample of sources that share one scale; return fields of `Estimate`, by name."""
    directory.mkdir()
    sample, begin = _sample(sources, sample_bytes), time.process_time()
    if recipe.cleaning.needs_scan:
        texts = (document.text for head in sample for document in head.documents())
        scan(texts, recipe.cleaning, directory, 0)
    with Pass(recipe, lambda corpus, part: directory / f"{corpus}-{part}") as made:
        made.run(sample)
        seconds = time.process_time() - begin
        tokens = sum(entry.num_tokens for entry in made.finish().values())
        documents = sum(source["documents"] for source in made.sources)
    store_bytes = sum(f.stat().st_size for n in ARRAYS for f in directory.glob(f"*/{n}.bin"))
    total, sampled = sum(each.size for each in sources), sum(each.bytes_read for each in sample)
    text_bytes = sum(each.text_bytes for each in made.written().values())
    scale = max(1.0, total / max(1, sampled))
    return {
        "total": total, "sampled": sampled, "documents": int(scale * documents),
        "tokens": int(scale * tokens), "text_bytes": int(scale * text_bytes),
        "store_bytes": int(scale * store_bytes), "processor_seconds": scale * seconds,
    }  # fmt: skip


def _sample(sources: Sequence[Source], sample_bytes: int) -> list[Source]:
    """Return parts of the sources, about `sample_bytes` in all, spread evenly over all sources."""
    total = sum(source.size for source in sources)
    if total <= sample_bytes:
        # A source of examples knows their number only once it is open.
        return [Head(each, _ROWS) if each.unit == "examples" else each for each in sources]
    wanted = [total * (2 * number + 1) // (2 * _PIECES) for number in range(_PIECES)]
    pieces: list[Source] = []
    begin = 0
    for source in sources:
        mine = [at for at in wanted if begin <= at < begin + source.size]
        begin += source.size
        if mine:
            parts = source.divided(max(1, source.size // len(mine)))[: len(mine)]
            limit = sample_bytes * len(mine) // (_PIECES * len(parts))
            pieces += [part.head(max(1, limit)) for part in parts]
    return pieces
