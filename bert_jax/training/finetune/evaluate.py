"""Evaluation of the trials of a sweep, and of the best model on other data."""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
from bert_jax.objectives.objective import Forward
from bert_jax.tasks.examples import listed
from bert_jax.tasks.reports.intervals import Grounds, Intervals, intervals
from bert_jax.tasks.rows import Rows, choose_buckets, eval_batches
from bert_jax.tasks.task import Outputs, Split, null
from bert_jax.terminal import progress_bar
from bert_jax.training.finetune.data import other_split, read_scored, splits_of, task_of
from bert_jax.training.finetune.start import saved_objective
from bert_jax.training.steps.optim import OptimizerConfig
from bert_jax.training.steps.state import StepConfig
from bert_jax.training.steps.step import make_eval_step
from bert_jax.training.steps.trials import place_params, place_rows
from bert_jax.training.sweep.statistics import student_interval

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
    """Score minus another model's score, by split and name: the mean, the difference of each pair
    of runs (`by_seed`), the paired 95% interval and its units, `over` (see `differences`)."""

    def as_json(self) -> dict[str, Any]:
        """Return all fields as JSON values. Scores that are not finite are None."""
        scores = {name: null(value) for name, value in self.scores.items()}
        more = {"differences": self.differences} if self.differences else {}
        return {**scores, "splits": self.reports, **more}


def evaluate_finetuned(
    workdir: Path | str,
    data: str | None = None,
    reports: Sequence[Path] = (),
    versus: Sequence[Path | str] = (),
    columns: Mapping[str, str] | None = None,
    other_seeds: Sequence[Path | str] = (),
) -> Evaluation:
    """Score the best model of a run, or a model in Hugging Face's format.

    Raise a UserError if there is no such model; the data cannot be read, have changed or lack
    labels; a report is about other data; or runs differ in labels or examples, or cannot be paired.

    Args:
        workdir: Work directory of `bert-jax finetune`, or a directory with a model that has a head.
        data: Labelled file, split of GLUE, or the run's `dev` or `test`; None means dev and test.
        reports: Files that `bert-jax contamination` wrote about the data. If there are none, the
            reports on the corpora of the run's lineage are used.
        versus: Directories of the runs of another model, whose scores on the same examples are
            subtracted: one for `workdir` and one for each of `other_seeds`, in this order.
        columns: Fields of the task to change, such as the names of the text and label columns.
        other_seeds: Directories of further runs of the model, which differ in their seed.
    """
    check_runs([workdir, *other_seeds], versus)
    model = read_scored(workdir, columns)
    texts = merged([read_report(path) for path in reports] or reports_on_ancestors(workdir))
    splits = splits_of(workdir, model, data)
    own = data is None or not Path(data).is_file()  # a file may have the name of a split
    dev = (task_of(model).config.dev_sources or {"dev": ""}) if own else {}

    def scored(place: Path | str) -> dict[str, Scored]:
        """Score another run on the same examples."""
        other, found = read_scored(place, columns), {}
        for name, split in _same_splits(place, other, data, model, splits).items():
            outputs, chosen = split_outputs(other, split), _chosen(other, split, dev)
            found[name] = Scored(split.score(outputs, chosen), split.grounds(outputs, chosen))
        return found

    more, theirs = ([scored(place) for place in side] for side in (other_seeds, versus))
    found = Evaluation({}, {}, {})
    for number, split in enumerate(splits):
        parts = divide(split, texts, needed=bool(reports))
        outputs = split_outputs(model, split)
        # Thresholds are tuned on dev only.
        mine = _chosen(model, split, dev)
        report = dict(split.report(outputs, mine))
        known = model.origin.reports.get(split.name, {}) if own else {}
        if "chose" in known:
            report["chose"] = known["chose"]
        elif not own and split.name.removesuffix("_matched") == "dev":  # a file of this name
            report["chose"] = False
        scores = {
            name: math.nan if value is None else value for name, value in report["scores"].items()
        }
        apart = scores_apart(split, outputs, scores, parts)
        found.scores.update(named(split, number, scores | apart))
        found.reports[split.name] = report
        if versus:
            first = Scored(scores, split.grounds(outputs, mine))
            ours, others = ([run[split.name] for run in side] for side in (more, theirs))
            over = report.get("units", split.unit_names)[0] if len(versus) == 1 else "seeds"
            found.differences[split.name] = differences([first, *ours], others, over)
    return found


class Scored(NamedTuple):
    """Scores of a run on a split, and the data for their intervals."""

    scores: Mapping[str, float]
    grounds: Grounds | None


def _chosen(model: SavedModel, split: Split, dev: Container[str]) -> Mapping[str, float] | None:
    """Return the label thresholds that were tuned on dev; None if the split is in `dev` itself."""
    return None if split.name in dev else model.origin.metrics or None


def check_runs(runs: Sequence[Path | str], versus: Sequence[Path | str]) -> None:
    """Raise a UserError unless each run has a run of the other model, and no run occurs twice."""
    if (versus or len(runs) > 1) and len(runs) != len(versus):
        raise UserError(
            f"--versus is given {len(versus)} times; give it {len(runs)} times, once for MODEL and "
            "once for each --other-seed, since runs are paired in the order given"
        )
    for side in (runs, versus):
        if len({Path(place) for place in side}) < len(side):
            named = ", ".join(map(str, side))
            raise UserError(f"{named}: a run is given twice; name a run of another seed each time")


def differences(
    ours: Sequence[Scored], theirs: Sequence[Scored], over: str
) -> dict[str, dict[str, Any]]:
    """Return the mean difference of each score that all runs have, with its paired interval.

    With one run of each model, the interval is over the units of the split, which `over` names.
    With several, the interval is Student's t over the differences of the pairs of runs.
    """
    paired = Intervals({}, {})
    (_, mine), (_, other) = ours[0], theirs[0]
    if len(ours) == 1 and mine is not None and other is not None:
        paired = intervals(mine, other)
    found = {}
    for name in ours[0].scores:
        both = zip(ours, theirs, strict=True)
        each = np.array([a.get(name, np.nan) - b.get(name, np.nan) for (a, _), (b, _) in both])
        if not np.isfinite(each).all():
            continue
        if len(each) > 1 and np.ptp(each) < 1e-9:
            paired.missing[name] = "all pairs differ by the same amount"
        elif len(each) > 1:
            paired.found[name] = student_interval(each)
        found[name] = {
            "difference": float(each.mean()), "by_seed": each.tolist(), "over": over,
            "interval": paired.found.get(name), "no_interval": paired.missing.get(name),
        }  # fmt: skip
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
    Raise a UserError if there is no such run, the data cannot be read, or `out` cannot be written.
    """
    if scheme(out) is not None:
        raise UserError(f"--out is {out}; give a local directory for the predictions")
    if (out.exists() and not out.is_dir()) or (out / "folds.json").exists():
        raise UserError(f"--out {out} is a file or a cross-validation; give another directory")
    model = read_finetuned(workdir)
    split = other_split(workdir, model, data, labelled=False)
    return split.write_predictions(split_outputs(model, split), out, model.origin.metrics)


def split_outputs(model: SavedModel, split: Split) -> Outputs:
    """Compute the logits of a split on all devices, in the form that `Split.score` takes."""
    params, head = model.params, model.head
    if head is not None and model.config.pooler:
        params = model.complete_params()  # a file may lack the pooler if the head does not read it
    objective = saved_objective(model, task_of(model), split.rows)
    config = StepConfig(objective, OptimizerConfig(), num_steps=1)
    mesh = make_trial_mesh(MeshConfig(), 1)
    params = place_params(config, mesh, jax.tree.map(lambda leaf: np.asarray(leaf)[None], params))
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
    """Group the indices of a split's examples: clean, seen (contaminated), or unjudged (unknown).

    `texts` maps the key of a text to two counts: its n-grams, and its n-grams in the run's corpora
    (0 for a clean text). Texts that `texts` lacks do not count, such as choices joined to their
    beginning. If the split has none of `texts`, return {} or, if `needed`, raise a UserError.
    """
    if split.is_collection and needed:
        raise UserError(
            f"{split.name}: each text is ranked among all others, so that scores of a part are not "
            "comparable; leave out --contamination"
        )
    keys = [[key for key in map(text_key, each) if key in texts] for each in split.texts()]
    if split.is_collection or not any(keys):
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

    `scores` are the scores of all examples, with SQuAD's null threshold. `parts` is from `divide`.
    """
    found: dict[str, float] = {}
    for name, examples in parts.items():
        found[f"{name}/examples"] = float(len(examples))
        if examples and name != "unjudged":
            part, rows = split.select(examples)
            some = part.score([outputs[row] for row in rows], scores)
            found |= {f"{name}/{metric}": value for metric, value in some.items()}
    return found
