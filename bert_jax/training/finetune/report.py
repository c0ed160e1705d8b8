"""Scores of the trials on dev and test data, and a report on the saved model."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from bert_jax.artefacts.saved.runs import REPORT
from bert_jax.distributed.checkpoint.agreement import by_first
from bert_jax.distributed.checkpoint.manager import SaveFailedError
from bert_jax.errors import UserError
from bert_jax.files.pictures import write_picture
from bert_jax.files.remote import WorkDir
from bert_jax.files.staging import replace_file
from bert_jax.tasks.reports.lines import report_figure, report_lines
from bert_jax.tasks.rows import choose_buckets
from bert_jax.tasks.task import Split
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.evaluate import Judged, named, score_rows
from bert_jax.training.finetune.setup import Setup
from bert_jax.training.finetune.start import scoring
from bert_jax.training.progress import Moment, best_trial
from bert_jax.training.run_plan import Scores
from bert_jax.training.steps import trials
from bert_jax.training.steps.state import made_once
from bert_jax.training.steps.step import make_eval_step

REPORT_LINES = "report.md"
_PICTURES = {
    "confusion": "confusion.png", "points": "scatter.png", "calibration": "calibration.png"
}  # fmt: skip
"""Names of picture files, by the part of a report that the picture shows."""


@contextlib.contextmanager
def writing(what: str, work: WorkDir) -> Iterator[None]:
    """Turn an error in writing to a work directory into a `SaveFailedError` that names `what`."""
    try:
        yield
    except (OSError, UserError) as error:
        raise SaveFailedError(
            f"{what} cannot be written to {work.name} ({error}). Fix the cause and rerun the "
            "command: the run continues from its last save"
        ) from error


class TaskScorer:
    """Scorer of the dev splits and, at the end, of the test splits."""

    def __init__(self, config: FinetuneConfig, setup: Setup, mesh: Mesh, work: WorkDir):
        self._setup, self._mesh, self._work = setup, mesh, work
        self._batch_size = config.training.eval_batch_size
        splits, limit = setup.splits[1:], setup.objective.model.num_positions
        settings = [replace(setup.step, objective=scoring(setup.objective, s.rows)) for s in splits]
        steps = made_once(settings, lambda each: make_eval_step(each, mesh, seed=0))
        self._steps = dict(zip([split.name for split in splits], steps, strict=True))
        self._buckets = {
            split.name: choose_buckets(split.rows.lengths, config.training.max_buckets, limit=limit)
            for split in splits
        }

    def after(self, step: int) -> bool:
        """Return true if trials are evaluated after step `step`, counted over all waves."""
        schedule = self._setup.schedule
        return schedule.evaluates_after((step - 1) % schedule.num_steps + 1)

    def score(self, params: Any, at: Moment, alive: Callable[[str], None]) -> list[Scores | None]:
        """Score each trial on the dev splits; return None for a trial that has stopped."""
        answers = [self._answers(params, split, alive) for split in self._setup.dev]
        found: list[Scores | None] = []
        for trial, each in enumerate(at.progress):
            values: dict[str, float] = {}
            mine = [judged[trial] for judged in answers]
            if not each.stopped:
                for number, (split, judged) in enumerate(zip(self._setup.dev, mine, strict=True)):
                    if judged.finite:
                        values |= named(split, number, split.score(judged.outputs))
                    alive("scoring")
            scores = Scores(values, mine[0].loss, all(judged.finite for judged in mine))
            found.append(None if each.stopped else scores)
        return found

    def conclude(self, at: Moment, alive: Callable[[str], None]) -> list[dict[str, float]]:
        """Score the test data with the best parameters of each trial in a wave.

        A trial without a finite dev score gets no test scores. If this wave trained the saved model
        (the first initialisation's best so far), also write the model's report on dev and test.
        Raise a SaveFailedError if the report cannot be written.
        """
        setup = self._setup
        params = trials.filled(setup.step, self._mesh, at.state.params, at.best)
        scores: list[dict[str, float]] = [{} for _ in at.progress]
        saved = _saved_trial(setup, at)
        kept: dict[str, Judged] = {}
        for split in setup.splits[1:]:
            if split not in setup.test and saved is None:
                continue
            judged = self._answers(params, split, alive)
            if saved is not None:
                kept[split.name] = judged[saved]
            for mine, each, theirs in zip(scores, at.progress, judged, strict=False):
                if split in setup.test and each.best is not None:
                    mine |= split.score(theirs.outputs, each.outcome().best_scores)
        if saved is None:
            return scores
        best = at.progress[saved].outcome()

        def write() -> None:
            reports = {
                split.name: {
                    **split.report(
                        kept[split.name].outputs, best.best_scores if split in setup.test else None
                    ),
                    "chose": split == setup.dev[0]
                    and (len(best.scores) > 1 or setup.schedule.num_trials > 1),
                }
                for split in setup.splits[1:]
            }
            record = {"metric": setup.task.metric, "member": asdict(best.member)}
            with writing("the report", self._work):
                write_reports(self._work.local, reports, record, title=Path(self._work.name).name)

        by_first(write)
        return scores

    def _answers(self, params: Any, split: Split, alive: Callable[[str], None]) -> list[Judged]:
        return score_rows(
            self._steps[split.name], self._mesh, self._setup.objective.own(params), split.rows,
            buckets=self._buckets[split.name],
            batch_size=min(self._batch_size, len(split.rows)),
            pad_id=self._setup.initial.tokenizer.special_ids.pad,
            done=lambda _: alive("a batch of an evaluation"),
        )  # fmt: skip


def _saved_trial(setup: Setup, wave: Moment) -> int | None:
    """Return the index in `wave` of the trial that made the saved model; None for other waves."""
    own = setup.inits[0]
    before = [o.best for o in wave.outcomes if o.member.init == own and o.best is not None]
    found = best_trial(wave.progress, own)
    return None if found is None or (before and max(before) >= found[0]) else found[1]


def write_reports(
    directory: Path,
    reports: Mapping[str, Mapping[str, Any]],
    record: Mapping[str, Any],
    *,
    title: str = "",
) -> list[Path]:
    """Write report.md, report.json and pictures, and return their paths.

    `reports` maps split names to reports. `record` adds entries to report.json. A picture shows the
    last split for which it can be drawn. `directory` is made if needed, and old files are replaced.
    Raise a UserError if the directory cannot be written.
    """
    blocks = ["\n".join(report_lines(name, report)) for name, report in reports.items()]
    text = "\n\n".join([f"# Report on {title}", *blocks]) + "\n"
    content = json.dumps({**record, "splits": reports}, indent=1, allow_nan=False) + "\n"
    files = [directory / REPORT_LINES]
    replace_file(files[0], text.encode())
    for kind, picture in _PICTURES.items():
        shown = [name for name, report in reports.items() if report.get(kind)]
        if shown:
            files.append(directory / picture)
            figure = report_figure(kind, reports[shown[-1]], title=f"{title}, {shown[-1]}")
            write_picture(figure, files[-1])
    files.append(directory / REPORT)
    replace_file(files[-1], content.encode())
    return files
