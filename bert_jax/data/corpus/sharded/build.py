"""The build of a corpus: each task makes one shard, wherever it runs."""

import contextlib
import functools
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bert_jax.data.corpus.cleaning.clean import CleaningReport, Drops
from bert_jax.data.corpus.cleaning.duplicates import find_duplicates, scan
from bert_jax.data.corpus.datasheet import Provenance, Tally, account, write_datasheet
from bert_jax.data.corpus.passes import Pass, Recipe, Written, better_thresholds, store_meta
from bert_jax.data.corpus.sharded.engine import Engine, LocalEngine, Task
from bert_jax.data.corpus.sharded.workspace import Workspace
from bert_jax.data.corpus.workers import progress_bar
from bert_jax.data.store import COUNTS, ShardEntry, open_shard, read_manifest
from bert_jax.data.store_writer import write_manifest
from bert_jax.errors import UserError
from bert_jax.files.staging import replace_file
from bert_jax.tokenization.tokenizer import Tokenizer

_FORMAT = 2
"""Number of the way in which tasks make shards; a mark of another is done again."""


def _stay(task: Task) -> None:
    """Move no bar: another process has it."""
    del task


@dataclass(frozen=True)
class Job:
    """Settings that all tasks of a build have in common."""

    recipe: Recipe
    workspace: Workspace
    thresholds: Mapping[str, int]
    samples: int = 0
    drops: Path | None = None
    """Directory of the decisions of a scan, a file for each task."""
    num_workers: int = 1
    """Processes of one task."""
    advance: Callable[[Task], None] = _stay
    """Function that is called after each block of a task that is run in this process."""

    def load_drops(self, task: Task) -> Drops | None:
        """Return the decisions about a task's documents."""
        return None if self.drops is None else Drops.load(self.drops / f"{task.name}.npz")

    def key(self, task: Task) -> str:
        """Return a digest of all that the task's shard depends on."""
        drops = None
        if self.drops is not None:
            drops = hashlib.sha256((self.drops / f"{task.name}.npz").read_bytes()).hexdigest()
        thresholds = sorted(self.thresholds.items())
        return _digest([self.recipe.identity(), thresholds, self.samples, drops, task.identity()])


@dataclass
class Built:
    """Result of the tasks of a build."""

    written: dict[str, Written]
    """Counts by corpus."""
    report: CleaningReport
    sources: list[dict[str, Any]]
    tallies: dict[str, Tally]
    """Languages, licences and coverage, by corpus."""


def make_shard(job: Job, task: Task) -> dict[str, Any]:
    """Write the shard of a task, of each corpus and part, and return the task's mark."""
    with job.workspace.scratch() as root:

        def place(corpus: str, part: str) -> Path:
            return root / corpus / part / "shards" / task.name

        with Pass(
            job.recipe,
            place,
            thresholds=job.thresholds,
            drops=job.load_drops(task),
            samples=job.samples,
        ) as made:
            made.run(task.sources, job.num_workers, lambda: job.advance(task))
            shards = made.finish()
            mark = {
                "key": job.key(task),
                "shards": [[*each, entry._asdict()] for each, entry in shards.items()],
                "corpora": {name: asdict(each) for name, each in made.written().items()},
                "report": {
                    "documents": dict(made.report.documents),
                    "lines": dict(made.report.lines),
                    "samples": made.report.samples,
                },
                "sources": made.sources,
                "tallies": {name: each.as_json() for name, each in made.tallies.items()},
            }
    job.workspace.write_mark(task.name, mark)
    return mark


def build_shards(
    recipe: Recipe,
    tasks: Sequence[Task],
    workspace: Workspace,
    engine: Engine,
    *,
    drops: Path | None = None,
    samples: int = 0,
    progress: bool = True,
    provenance: Provenance | None = None,
) -> Built:
    """Run the tasks that are not complete, and write the manifests of all corpora.

    The result does not depend on the engine, nor on what earlier builds left in the workspace.

    Raises:
        UserError: bad input, a full disk, no text at all.
    """
    thresholds: dict[str, int] = {}
    while True:
        job = Job(recipe, workspace, thresholds, samples, drops)
        marks = _run(job, tasks, engine, progress)
        built = _merged(marks, samples, recipe.tokenizer)
        better = better_thresholds(recipe, thresholds, built.written)
        if not better:
            break
        thresholds |= better
    if not any(each.train + each.heldout for each in built.written.values()):
        raise UserError("the sources hold no text that gives a token: the corpus is empty.")
    stores: dict[tuple[str, str], list[ShardEntry]] = {}
    for mark in marks:
        for corpus, part, entry in mark["shards"]:
            stores.setdefault((corpus, part), []).append(ShardEntry.read(entry))
    paths = {store: "/".join(filter(None, store)) for store in stores}
    workspace.keep_only(
        f"{paths[store]}/shards/{entry.name}" for store in stores for entry in stores[store]
    )
    with workspace.scratch() as root:
        for (corpus, part), entries in stores.items():
            path = paths[corpus, part]
            text_bytes = built.written[corpus].text_bytes
            accounted = account(built.tallies[corpus], built.sources, provenance or Provenance())
            meta = store_meta(recipe, part, text_bytes, built.report, accounted)
            files = (f"{path}/shards/{entry.name}/{COUNTS}.bin" for entry in entries)
            counts = map(workspace.read, files)
            write_manifest(root / path, entries, recipe.tokenizer, counts, **meta)
            if workspace.local is not None:
                store = read_manifest(root / path)
                for number in range(len(entries)):
                    open_shard(store, number, check=False)  # says what is missing
        for corpus in built.written:
            write_datasheet(root / corpus)
    workspace.remove_marks()
    return built


def find_drops(
    recipe: Recipe, tasks: Sequence[Task], directory: Path, engine: Engine, *, progress: bool
) -> Path:
    """Read all tasks once, and decide which duplicates to drop.

    Args:
        recipe: settings.
        tasks: tasks of the build.
        directory: directory that all processes reach; scans that are complete there are kept.
        engine: engine that reads the tasks.
        progress: whether a bar is shown on a terminal.

    Returns:
        Directory with a file for each task, which `Drops.load` reads.

    Raises:
        UserError: bad input, or a full disk.
    """
    scans, drops = directory / "scans", directory / "drops"
    job = _ScanJob(recipe, scans)
    todo = [task for task in tasks if not job.is_done(task)]
    _completed(engine, _scan_task, job, todo, "reading for duplicates", progress)
    shutil.rmtree(drops, ignore_errors=True)
    drops.mkdir(parents=True)
    find_duplicates([scans / task.name for task in tasks], recipe.cleaning, drops, map_=engine.map)
    return drops


@dataclass(frozen=True)
class _ScanJob:
    recipe: Recipe
    directory: Path
    num_workers: int = 1
    advance: Callable[[Task], None] = _stay

    def key(self, task: Task) -> str:
        return _digest([self.recipe.cleaning.record(), task.identity()])

    def is_done(self, task: Task) -> bool:
        mark = self.directory / task.name / "key"
        return mark.is_file() and mark.read_text() == self.key(task)


def _scan_task(job: _ScanJob, task: Task) -> None:
    directory = job.directory / task.name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    texts = (document.text for source in task.sources for document in source.documents())
    scan(texts, job.recipe.cleaning, directory, num_workers=job.num_workers)
    replace_file(directory / "key", job.key(task).encode())


def _run(job: Job, tasks: Sequence[Task], engine: Engine, progress: bool) -> list[dict[str, Any]]:
    """Return the marks of all tasks, in their order; those that are complete are not run."""
    complete = job.workspace.marks()
    marks: dict[str, dict[str, Any]] = {}
    for task in tasks:
        if task.name in complete:
            mark = job.workspace.read_mark(task.name)
            if mark.get("key") == job.key(task):
                marks[task.name] = mark
    todo = [task for task in tasks if task.name not in marks]
    made = _completed(engine, make_shard, job, todo, "corpus", progress)
    marks |= {task.name: mark for task, mark in zip(todo, made, strict=True)}
    return [marks[task.name] for task in tasks]


def _completed(
    engine: Engine,
    function: Callable[[Any, Task], Any],
    job: Any,
    todo: Sequence[Task],
    description: str,
    progress: bool,
) -> list[Any]:
    """Run tasks and return their results, with a bar on a terminal.

    Few tasks are run one by one; each takes all processes of this machine.
    """
    found: list[Any] = []
    bar = progress_bar(sum(task.size for task in todo), description, progress)

    def advance(task: Task) -> None:
        done = sum(each.size for each in todo[: len(found)])
        bar.update(done + sum(source.bytes_read for source in task.sources) - bar.n)

    with bar, contextlib.ExitStack() as stack:
        results: Iterator[Any]
        if isinstance(engine, LocalEngine) and len(todo) < max(2, engine.num_workers):
            job = replace(job, num_workers=engine.num_workers, advance=advance)
            results = map(functools.partial(function, job), todo)
        else:
            results = engine.map(functools.partial(function, job), todo)
        if isinstance(results, Generator):
            stack.enter_context(contextlib.closing(results))
        for _, result in zip(todo, results, strict=True):
            found.append(result)
            bar.update(sum(each.size for each in todo[: len(found)]) - bar.n)
    return found


def _merged(marks: Sequence[Mapping[str, Any]], samples: int, tokenizer: Tokenizer) -> Built:
    built = Built({}, CleaningReport(samples), [], {})
    for mark in marks:
        for corpus, counts in mark["tallies"].items():
            built.tallies.setdefault(corpus, Tally(tokenizer)).add(counts)
        for corpus, counts in mark["corpora"].items():
            built.written.setdefault(corpus, Written()).add(Written(**counts))
        built.sources += mark["sources"]
        found = mark["report"]
        one = CleaningReport(
            samples, Counter(found["documents"]), Counter(found["lines"]), found["samples"]
        )
        built.report.merge([one])
    return built


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps([_FORMAT, value], sort_keys=True).encode()).hexdigest()
