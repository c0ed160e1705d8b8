"""Evaluation of the trials of a sweep, and of the best model on other data."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.artefacts.saved.lineage import reports_on_ancestors
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.reading import read_finetuned
from bert_jax.data.corpus.overlap.evaluation import text_key
from bert_jax.data.corpus.overlap.search import merged, read_report, share_of
from bert_jax.distributed.parallel.in_flight import in_flight
from bert_jax.distributed.parallel.sharding import MeshConfig, make_trial_mesh
from bert_jax.errors import UserError
from bert_jax.files.urls import scheme
from bert_jax.objectives.objective import Forward, Objective
from bert_jax.objectives.task import TaskObjective
from bert_jax.tasks.examples import listed
from bert_jax.tasks.reports.intervals import Intervals, intervals
from bert_jax.tasks.rows import Rows, choose_buckets, eval_batches
from bert_jax.tasks.task import Outputs, Split
from bert_jax.terminal import progress_bar
from bert_jax.training.finetune.data import other_split, read_scored, splits_of, task_of
from bert_jax.training.finetune.start import saved_objective
from bert_jax.training.progress import null
from bert_jax.training.steps.optim import OptimizerConfig
from bert_jax.training.steps.state import StepConfig
from bert_jax.training.steps.step import make_eval_step
from bert_jax.training.steps.trials import place_params, place_rows

_BATCH_SIZE = 64


@dataclass(frozen=True)
class Judged:
    """Outputs and loss of one trial on all rows of a split."""

    outputs: Outputs
    """Logits in the form that `Split.score` takes."""
    loss: float | None
    """Mean loss over the labels; None if the rows have no labels or the loss is not finite."""

    @property
    def finite(self) -> bool:
        """Whether all logits are finite."""
        return all(bool(np.isfinite(row).all()) for row in self.outputs)


def score_rows(
    eval_step: Callable[[Any, Any], Forward],
    mesh: Mesh,
    params: Any,
    rows: Rows,
    *,
    buckets: tuple[int, ...],
    batch_size: int,
    pad_id: int,
    done: Callable[[int], object] = lambda rows: None,
) -> list[Judged]:
    """Compute the outputs of all trials for every row, and the losses.

    Axis 0 of `params` runs over trials. `buckets` are the lengths to which rows are padded. After
    each batch, `done` is called with the number of rows in the batch.
    """
    found: list[list[Any]] = []
    sums: dict[str, np.ndarray] = {}

    def dispatch(item: tuple[np.ndarray, Any]) -> Forward:
        return eval_step(params, place_rows(item[1], mesh))

    for (index, _), forward in in_flight(dispatch, eval_batches(rows, buckets, batch_size, pad_id)):
        for name, value in forward.sums.items():
            sums[name] = sums.get(name, 0) + np.asarray(value, np.float64)
        # Keep the first rows. The rows after them only fill the batch.
        values = forward.outputs[:, : len(index)]
        if not found:
            found.extend([None] * len(rows) for _ in values)
        for outputs, mine in zip(found, values, strict=True):
            for row, value in zip(index, mine, strict=True):
                outputs[row] = value
        done(len(index))
    per_row = bool(found) and found[0][0].ndim == 1
    losses = sums["loss"] / np.where(sums["count"] > 0, sums["count"], 1.0)
    return [
        Judged(
            np.stack(outputs) if per_row else outputs,
            float(loss) if count and np.isfinite(loss) else None,
        )
        for outputs, loss, count in zip(found, losses, sums["count"], strict=True)
    ]


def named(split: Split, number: int, scores: Mapping[str, float]) -> dict[str, float]:
    """Prefix the names of scores with the split's name, unless `number` is 0 (the first split)."""
    prefix = f"{split.name}/" if number else ""
    return {f"{prefix}{name}": value for name, value in scores.items()}


@dataclass(frozen=True)
class Evaluation:
    """Scores and reports of a fine-tuned model, and the differences from another model's scores."""

    scores: dict[str, float]
    """Scores by name. For splits after the first, names begin with the name of the split. If there
    is a report on contamination, clean and seen examples also have scores (see `divide`)."""
    reports: dict[str, Mapping[str, Any]]
    """Results of `Split.report`, by name of the split."""
    differences: dict[str, dict[str, Any]]
    """Score minus another model's score, by split and name, with paired 95% intervals."""

    def as_json(self) -> dict[str, Any]:
        """Return all fields as JSON values. Scores that are not finite are None."""
        scores = {name: null(value) for name, value in self.scores.items()}
        more = {"differences": self.differences} if self.differences else {}
        return {**scores, "splits": self.reports, **more}


def evaluate_finetuned(
    workdir: Path | str,
    data: str | None = None,
    reports: Sequence[Path] = (),
    versus: Path | str | None = None,
    columns: Mapping[str, str] | None = None,
) -> Evaluation:
    """Score the best model of a run, or a model in Hugging Face's format.

    Args:
        workdir: Work directory of `bert-jax finetune`, or a directory with a model that has a head.
        data: Labelled file, split of GLUE, or the run's `dev` or `test`; None means dev and test.
        reports: Files that `bert-jax contamination` wrote about the data. If there are none, the
            reports on the corpora of the run's lineage are used.
        versus: Directory of another model, whose scores on the same examples are subtracted.
        columns: Fields of the task to change, such as the names of the text and label columns.

    Raises:
        UserError: There is no such model; the data cannot be read, have changed or lack labels; a
            report is about other data; or the other model has other labels or examples.
    """
    model = read_scored(workdir, columns)
    texts = merged([read_report(path) for path in reports] or reports_on_ancestors(workdir))
    splits = splits_of(workdir, model, data)
    other = None if versus is None else read_scored(versus, columns)
    theirs = {} if other is None else _same_splits(versus or "", other, data, model, splits)
    dev = task_of(model).config.dev_sources or {"dev": ""}
    found = Evaluation({}, {}, {})
    for number, split in enumerate(splits):
        parts = divide(split, texts, needed=bool(reports))
        outputs = split_outputs(model, split)
        # Only dev chooses thresholds. A file cannot be mistaken for dev: its name has a suffix.
        mine, others = (
            None if each is None or split.name in dev else each.origin.metrics or None
            for each in (model, other)
        )
        report = split.report(outputs, mine)
        scores = {
            name: math.nan if value is None else value for name, value in report["scores"].items()
        }
        apart = scores_apart(split, outputs, scores, parts)
        found.scores.update(named(split, number, scores | apart))
        found.reports[split.name] = report
        if other is not None:
            again = theirs[split.name]
            answers = split_outputs(other, again)
            ours, grounds = split.grounds(outputs, mine), again.grounds(answers, others)
            paired = Intervals({}, {})
            if ours is not None and grounds is not None:
                paired = intervals(ours, grounds)
            values = again.report(answers, others)["scores"]
            found.differences[split.name] = {
                name: {
                    "difference": value - values[name],
                    "interval": paired.found.get(name),
                    "no_interval": paired.missing.get(name),
                }
                for name, value in report["scores"].items()
                if value is not None and values.get(name) is not None
            }
    return found


def _same_splits(
    versus: Path | str, other: SavedModel, data: str | None, model: SavedModel,
    splits: Sequence[Split],
) -> dict[str, Split]:  # fmt: skip
    """Return another model's splits by name; raise a UserError if labels or examples differ."""
    mine, theirs = (task_of(each).spec.labels for each in (model, other))
    if mine != theirs:
        raise UserError(
            f"{versus} has other labels ({listed(theirs, 5)}) than the model it is compared with "
            f"({listed(mine, 5)}); compare models of one task"
        )
    found = {split.name: split for split in splits_of(versus, other, data)}
    for split in splits:
        if split.name not in found or found[split.name].fingerprint != split.fingerprint:
            raise UserError(
                f"{versus} was trained with other {split.name} data; to compare both models on "
                "the same data, name a file with --data FILE"
            )
    return found


def predict_finetuned(workdir: Path | str, data: str, out: Path) -> list[Path]:
    """Write the predictions of the best model of a run, and return the paths of the files.

    `data` is a file with the columns of the training data, or a split of GLUE. Labels are ignored.

    Raises:
        UserError: There is no such run, the data cannot be read, or `out` cannot be written.
    """
    if scheme(out) is not None:
        raise UserError(f"--out is {out}; give a local directory for the predictions")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; give a directory")
    model = read_finetuned(workdir)
    split = other_split(workdir, model, data, labelled=False)
    return split.write_predictions(split_outputs(model, split), out, model.origin.metrics)


def split_outputs(model: SavedModel, split: Split) -> Outputs:
    """Compute the logits of a split on all devices, in the form that `Split.score` takes."""
    objective: Objective
    if model.embedding is not None:
        task = task_of(model).config
        objective = saved_objective(model.embedding, model.config, task, split.rows)
    else:
        assert model.outputs is not None  # from `read_finetuned`
        objective = TaskObjective(model.config, model.outputs.head, model.outputs.objective)
    config = StepConfig(objective, OptimizerConfig(), num_steps=1)
    mesh = make_trial_mesh(MeshConfig(), 1)
    one = jax.tree.map(lambda leaf: np.asarray(leaf)[None], model.params)
    params = place_params(config, mesh, one)
    lengths = split.rows.lengths
    buckets = choose_buckets(lengths, 8, limit=model.config.num_positions)
    with progress_bar(of="evaluation", unit="rows", total=len(lengths)) as bar:
        (scored,) = score_rows(
            make_eval_step(config, mesh, seed=0), mesh, params, split.rows, buckets=buckets,
            batch_size=_BATCH_SIZE, pad_id=model.tokenizer.special_ids.pad, done=bar.update,
        )  # fmt: skip
    return scored.outputs


def divide(
    split: Split, texts: Mapping[str, tuple[int, int]], *, needed: bool
) -> dict[str, list[int]]:
    """Group the indices of a split's examples by contamination: clean, seen or unjudged.

    `texts` maps the key of a text to two counts: all its n-grams, and how many of them the run's
    corpora contain. If `texts` contains no example of the split, the result is empty.

    Raises:
        UserError: `needed` is true, but `texts` contains no example.
    """
    keys = [tuple(map(text_key, each)) for each in split.texts()]
    if not any(all(key in texts for key in each) for each in keys):
        if needed:
            raise UserError(
                f"{split.name}: none of its {len(keys):,} examples is in the report given by "
                "--contamination, so the report is on other texts; give the report on this file"
            )
        return {}
    shares = np.array([share_of(texts, each) for each in keys])
    parts = {"clean": shares == 0, "seen": shares > 0, "unjudged": np.isnan(shares)}
    return {name: np.flatnonzero(chosen).tolist() for name, chosen in parts.items()}


def scores_apart(
    split: Split, outputs: Outputs, scores: Mapping[str, float], parts: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    """Return the scores of clean and of seen examples, named clean/NAME and seen/NAME.

    `scores` of all examples include the null threshold of SQuAD. `parts` comes from `divide`.
    """
    found: dict[str, float] = {}
    for name, examples in parts.items():
        found[f"{name}/examples"] = float(len(examples))
        if examples and name != "unjudged":
            part, rows = split.select(examples)
            some = part.score([outputs[row] for row in rows], scores)
            found |= {f"{name}/{metric}": value for metric, value in some.items()}
    return found
