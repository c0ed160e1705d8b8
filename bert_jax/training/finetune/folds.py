"""Cross-validation: one run for each fold, and scores over all examples, each held out once.

Directories fold-1 to fold-K of the work directory contain ordinary runs. The work directory itself
has the predictions of all folds and a report on them. Each fold is scored once, after its last
step, so that the held-out examples never select a checkpoint.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.artefacts.saved.reading import read_finetuned
from bert_jax.distributed.checkpoint.agreement import by_first
from bert_jax.errors import UserError
from bert_jax.files.staging import replace_file
from bert_jax.files.urls import scheme
from bert_jax.tasks.opening import fold_parts, open_task
from bert_jax.tasks.reports.classes import NOISE
from bert_jax.tasks.reports.lines import report_lines
from bert_jax.tasks.task import Task
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.evaluate import split_outputs
from bert_jax.training.finetune.report import write_reports
from bert_jax.training.finetune.train import finetune
from bert_jax.training.run.goodput import Clock
from bert_jax.training.run_plan import Profiler, Result

RESULT = "folds.json"
_SPLIT = "out of fold"


def check_folds(config: FinetuneConfig, workdir: Path | str) -> None:
    """Raise a UserError if a sweep or the directory does not go with the value of `task.folds`."""
    begun = (Path(workdir) / "config.json").exists()
    if not config.task.folds or config.task.fold:
        if not begun and (Path(workdir) / "fold-1").exists():
            raise UserError(f"--workdir {workdir} contains folds of a run; give another directory")
        return
    if config.num_trials > 1:
        raise UserError(
            f"task.folds is {config.task.folds}, which trains one run per fold; leave sweep out, "
            "or run the folds once for each setting"
        )
    if scheme(workdir) is not None:
        raise UserError(f"--workdir is {workdir}; with task.folds, give a local directory")
    if begun:
        raise UserError(
            f"--workdir {workdir} contains a run without task.folds; give another directory"
        )


def finetune_folds(
    config: FinetuneConfig, workdir: Path | str, *, clock: Clock | None = None,
    echo: Callable[[str], None] | None = None, track: Sequence[str] = (),
    profiler: Profiler | None = None,
) -> Result:  # fmt: skip
    """Train the folds one after another, or continue them; then score all predictions together.

    Without `task.folds`, or with `task.fold`, `finetune` does the work; its arguments are the same.
    Return the result of the last fold; after all folds, its `eval_metrics` and `unlearned` are for
    all folds. Raise a UserError as `check_folds` and, for a fold, `train.finetune` do.
    """
    check_folds(config, workdir)
    if not config.task.folds or config.task.fold:
        return finetune(config, workdir, clock=clock, echo=echo, track=track, profiler=profiler)
    if profiler:
        raise UserError("--profile: trace one of the folds, with --config.task.fold=1")
    say = echo or print
    home, count = Path(workdir), config.task.folds
    places = [home / f"fold-{number}" for number in range(1, count + 1)]
    for number, place in enumerate(places, 1):
        say(f"fold {number} of {count}")
        one = dataclasses.replace(config, task=dataclasses.replace(config.task, fold=number))
        clock = clock if number == 1 else None
        result = finetune(one, place, clock=clock, echo=echo, track=track)
        if result.stopped_by:  # perhaps after the last step of this fold
            if result.finished:  # otherwise the run has said so
                say(f"{result.stopped_by}: stopped after fold {number}; the same command continues")
            return dataclasses.replace(result, workdir=workdir, finished=False, unlearned="")
    saved = read_finetuned(places[-1])  # may have more positions than the model named by `init`
    whole = open_task(config.task, saved.tokenizer, saved.config.num_positions)
    report = _pooled(home, places, whole)
    for line in report_lines(_SPLIT, report, mistakes=False):
        say(line)
    scores = {f"eval/{name}": value for name, value in report["scores"].items()}
    score, constant, told = report["scores"][whole.metric], report.get("constant"), ""
    if score is not None and constant is not None and score <= constant:
        told = f"{whole.metric} of all folds is {score:.4f}, not above a constant's {constant:.4f}"
    return dataclasses.replace(result, workdir=workdir, eval_metrics=scores, unlearned=told)


def _pooled(home: Path, places: Sequence[Path], whole: Task) -> dict[str, Any]:
    """Predict each example with the model that has not seen it; return a report on all examples.

    Write predictions, the report and, last, the scores of the folds into `home`.
    """
    split = whole.train_split()
    parts = fold_parts(split, len(places))
    # A split for scoring also has the examples that training leaves out.
    split, _ = split.select(range(len(parts)))
    found: list[Any] = [None] * len(split.rows)
    folds = []
    for number, place in enumerate(places, 1):
        held, rows = split.select(np.flatnonzero(parts == number).tolist())
        outputs = split_outputs(read_finetuned(place), held)
        for row, values in zip(rows.tolist(), outputs, strict=True):
            found[row] = values
        folds.append({"fold": number, "examples": len(held.texts()), **held.score(outputs)})
    pooled = np.stack(found) if found[0].ndim == 1 or split.rows.group > 1 else found
    report: dict[str, Any] = dict(split.report(pooled))
    scores = split.score(pooled)
    is_learned = scores[whole.metric] > split.constant_score
    if noise := split.label_noise(pooled, scores) if is_learned else []:
        report["label_noise"] = len(noise) - 1

    def write() -> None:
        split.write_predictions(pooled, home, scores)
        if noise:
            replace_file(home / NOISE, "\n".join([*noise, ""]).encode())
        record = {"metric": whole.metric, "folds": folds}
        write_reports(home, {_SPLIT: report}, record, title=home.absolute().name)
        content = {**record, "scores": report["scores"], "intervals": report["intervals"]}
        replace_file(home / RESULT, (json.dumps(content, indent=1) + "\n").encode())

    by_first(write)
    return report
