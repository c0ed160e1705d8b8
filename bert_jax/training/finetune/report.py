"""End of training: test scores of all trials, and a report on the saved model."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bert_jax.artefacts.saved.runs import REPORT
from bert_jax.distributed.checkpoint import SaveFailedError
from bert_jax.distributed.checkpoint.agreement import by_first
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir
from bert_jax.files.staging import replace_file, staged_file
from bert_jax.tasks.reports.lines import report_lines
from bert_jax.tasks.reports.pictures import report_figure
from bert_jax.tasks.task import Split
from bert_jax.training.finetune.evaluate import Judged
from bert_jax.training.finetune.setup import Setup
from bert_jax.training.progress import Moment, best_trial

REPORT_LINES = "report.md"
_PICTURES = {
    "confusion": "confusion.png", "points": "scatter.png", "calibration": "calibration.png"
}  # fmt: skip
"""Files of pictures by the part of a report that each shows."""


def conclude(
    setup: Setup,
    wave: Moment,
    work: WorkDir,
    answers: Callable[[Split], list[Judged]],
) -> list[dict[str, float]]:
    """Score the test data with the best parameters of each trial of a wave.

    Where this wave has the first initialisation's best trial, whose model is saved, a report on the
    trial's dev and test data is written.

    Args:
        setup: The run.
        wave: Moment at the end of the wave's training.
        work: Work directory.
        answers: Function from a split to the answers of the best parameters of all trials.

    Returns:
        Scores on the test data of each trial; empty for a lost trial, and without test data.

    Raises:
        SaveFailedError: The report cannot be written.
    """
    scores: list[dict[str, float]] = [{} for _ in wave.progress]
    saved = _saved_trial(setup, wave)
    kept: dict[str, Judged] = {}
    for split in setup.splits[1:]:
        if split not in setup.test and saved is None:
            continue
        judged = answers(split)
        if saved is not None:
            kept[split.name] = judged[saved]
        for mine, each, theirs in zip(scores, wave.progress, judged, strict=False):
            if split in setup.test and each.best is not None:
                mine |= split.score(theirs.outputs, each.outcome().best_scores)
    if saved is None:
        return scores
    best = wave.progress[saved].outcome()

    def write() -> None:
        reports = {
            split.name: {
                **split.report(
                    kept[split.name].outputs, best.best_scores if split in setup.test else None
                ),
                "chose": split not in setup.test
                and (len(best.scores) > 1 or len(setup.members) > 1),
            }
            for split in setup.splits[1:]
        }
        record = {"metric": setup.task.metric, "member": asdict(best.member)}
        try:
            write_reports(work.local, reports, record, title=Path(work.name).name)
        except (OSError, UserError) as error:
            raise SaveFailedError(
                f"the report cannot be written to {work.local} ({error}). Fix that and rerun the "
                "command: the run continues from its last save"
            ) from error

    by_first(write)
    return scores


def _saved_trial(setup: Setup, wave: Moment) -> int | None:
    """Return the wave's trial whose model is saved so far; None for a model of an earlier wave."""
    own = setup.inits[0]
    before = [o.best for o in wave.outcomes if o.member.init == own and o.best is not None]
    found = best_trial(wave.progress, own)
    if found is None or (before and max(before) >= found[0]):
        return None
    return found[1]


def write_reports(
    directory: Path,
    reports: Mapping[str, Mapping[str, Any]],
    record: Mapping[str, Any],
    *,
    title: str = "",
) -> list[Path]:
    """Write report.md, pictures (each of the last split that has it), and finally report.json.

    Args:
        directory: Made where it is missing; files of the same name in it are replaced.
        reports: Reports by the name of their split, in their order.
        record: Other entries of the JSON.
        title: Heading.

    Returns:
        The files.

    Raises:
        UserError: The directory cannot be written.
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
            with staged_file(files[-1]) as file:
                figure.savefig(file, format="png")
    files.append(directory / REPORT)
    replace_file(files[-1], content.encode())
    return files
