"""Reports of a fine-tuning run: printed lines, columns of metrics, and statistics."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from scipy.special import bdtrik, stdtrit

from bert_jax.artefacts.exchange.export import refusal_lines
from bert_jax.artefacts.formats.huggingface_files import TaskOutputs
from bert_jax.artefacts.saved.model import Adapter, Origin, SavedModel
from bert_jax.artefacts.saved.runs import NO_MODEL, STATISTICS
from bert_jax.data.phases import scaling
from bert_jax.distributed.checkpoint.agreement import by_first
from bert_jax.files.remote import WorkDir
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.model.embedding import POOLINGS, EmbeddingConfig
from bert_jax.model.task_heads import TaskHeadConfig, has_transform
from bert_jax.objectives.objective import trains_all
from bert_jax.tasks.task import CONSTANT
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.report import REPORT_LINES, writing
from bert_jax.training.finetune.saves import remove_resume
from bert_jax.training.finetune.setup import Setup
from bert_jax.training.progress import Moment
from bert_jax.training.run.goodput import Clock
from bert_jax.training.run.telemetry import duration
from bert_jax.training.run_plan import Result, Saves, Scores
from bert_jax.training.steps.trials import state_sizes
from bert_jax.training.sweep.report import summary_lines, write_summary
from bert_jax.training.sweep.statistics import LEVEL, Outcome, quantile, summarise

_CORRELATIONS = ("matthews", "pearson", "spearman")
_MAX_STATISTICS_BYTES = 1 << 28


class NoModelError(RuntimeError):
    """Error at the end of a sweep: no run of the first initialisation has a finite score."""

    exit_code = 8


class NothingLearnedError(RuntimeError):
    """Error at the end of a complete sweep: no run scored better than a constant prediction."""

    exit_code = 8


@dataclass(eq=False)
class FinetuneVoice:
    """Reporter of a fine-tuning run: its printed lines, columns of metrics and statistics."""

    summary: Callable[[], list[str]]
    """Function that describes data, batches and trials. It is called without arguments."""
    setup: Setup
    goal: float
    """Score that a trial must exceed."""
    work: WorkDir
    saves: Saves

    def about(self, step: int, restored: bool) -> tuple[list[str], str]:
        """Return lines that describe the run, and the message of the event `start`."""
        head = f"fine-tuning {', '.join(self.setup.inits)} in {self.work.name}"
        if step:
            head += f", continued at step {step:,} of {self.setup.schedule.total_steps:,}"
        baseline = [] if restored else _baseline(self.setup)  # a restart fits no baseline
        return [head, *self.summary(), *baseline], head

    def columns(self, wave: int, step: int) -> dict[str, Any]:
        """Return the index of the wave, and the epoch that the wave has reached."""
        schedule = self.setup.schedule
        return {"epoch": (step - wave * schedule.num_steps) / schedule.epoch, "wave": wave}

    def scored(self, at: Moment, scores: Sequence[Scores | None]) -> list[str]:
        """Describe the scores of the trials that are still running."""
        schedule, metric = self.setup.schedule, self.setup.task.metric
        step = at.step - at.wave * schedule.num_steps
        found = [each.values.get(metric) for each in scores if each is not None]
        return [f"epoch {step / schedule.epoch:.2f}  step {step:,}  {metric} {score_range(found)}"]

    def closing(self, result: Result, clock: Clock, signal: str) -> tuple[str, Iterable[str]]:
        """Write the statistics, and describe how the run ended."""
        del clock
        return duration(result.seconds), self._closing(result, signal)

    def _closing(self, result: Result, signal: str) -> Iterator[str]:
        setup, outcomes = self.setup, result.outcomes
        if not result.finished:
            yield f"stopped by {signal}, saved; the same command continues the run"
            return
        test, constant = [each.constant_score for each in setup.test], setup.dev[0].constant_score
        summary = summarise(outcomes, setup.task.metric, constant, self.goal, *test)
        summary = dataclasses.replace(summary, baseline=setup.dev[0].baseline)
        percent, title = in_percent(setup), Path(self.work.name).name

        def write() -> None:
            with writing("the statistics", self.work):
                write_summary(summary, self.work.local, title=title, percent=percent)
                self.work.sync(required=True)  # a run without statistics needs resume/

        by_first(write)
        yield from ["", *summary_lines(summary, percent=percent)]
        self.saves.close()
        remove_resume(self.work)
        check_model(setup, outcomes)
        yield (
            f"{duration(result.seconds)}, {len(outcomes)} runs; the best of {setup.inits[0]} is "
            f"in {self.work.checkpoints}, a report in {self.work.name}/{REPORT_LINES}"
        )


def check_model(setup: Setup, outcomes: Sequence[Outcome]) -> None:
    """Raise a NoModelError if no trial of the first initialisation had a finite score."""
    if all(o.best is None for o in outcomes if o.member.init != setup.config.sweep.baseline):
        raise NoModelError(f"{setup.inits[0]}: {NO_MODEL}")


def unlearned(
    bests: Sequence[float | None], metric: str, constant_score: float, baseline: str = CONSTANT
) -> str:
    """Return a message if no run scored better than `baseline`, else an empty string."""
    best = max((best for best in bests if best is not None), default=math.inf)
    if not best <= constant_score:
        return ""
    return (
        f"no run learned anything: the best {metric} on dev is {best:.4g}, and {baseline} has "
        f"{constant_score:.4g}. Try other rates (sweep.learning_rates=1e-5,3e-5,1e-4), more steps "
        "(training.num_epochs), or a larger pretrained model (init)"
    )


def score_range(scores: Sequence[float | None]) -> str:
    """Describe the scores of one or more runs: one value, or the median and the range."""
    known = [value for value in scores if value is not None and math.isfinite(value)]
    median = quantile(scores, 0.5)
    text = "not a number" if median is None else f"{median:.4g}"
    if len(scores) > 1 and known:
        text = f"median {text}, from {min(known):.4g} to {max(known):.4g}"
        if len(known) < len(scores):
            text += f"; {len(scores) - len(known)} of {len(scores)} not a number"
    return text


def goal_score(metric: str, constant_score: float, num_examples: int, num_labels: int = 0) -> float:
    """Compute the goal of a run: the score that a trial must exceed to count as having learned.

    A model that guesses without reading the text exceeds the goal in at most about 5% of cases.

    The expected score of guesses is at most `constant_score`. (In macro F1, guesses that draw
    labels as often as they occur may reach 1 / `num_labels`.) The goal is the 95% quantile of the
    accuracy on `num_examples` examples if each guess is right with this probability: exact for
    accuracy, perhaps too high for F1, which varies no more. For correlations, Student's t gives it.

    `metric` is a fraction or a correlation. If `constant_score` is NaN, the goal is minus infinity.
    `num_labels` is the number of labels of a single-label task.
    """
    if not math.isfinite(constant_score):
        return -math.inf
    if metric in _CORRELATIONS:
        t = stdtrit(max(num_examples - 2, 1), LEVEL)
        return max(constant_score, float(t / math.sqrt(max(num_examples - 2, 1) + t * t)))
    expected = constant_score
    if metric == "macro_f1" and num_labels:
        expected = max(expected, 1 / num_labels)
    if not 0 < expected < 1:
        return expected
    return math.ceil(bdtrik(LEVEL, num_examples, expected)) / num_examples


def in_percent(setup: Setup) -> bool:
    """Return true if the task's scores are percentages, as in SQuAD."""
    return setup.objective.kind == "span"


def goal_of(setup: Setup) -> float:
    """Return the score that each trial of a run must exceed (see `goal_score`)."""
    task, dev, scale = setup.task, setup.dev[0], 100.0 if in_percent(setup) else 1.0
    labels = task.num_outputs if task.objective == "single_label" else 0
    return scale * goal_score(task.metric, dev.constant_score / scale, dev.num_scored, labels)


def summary(config: FinetuneConfig, setup: Setup, mesh: Mesh, goal: float) -> list[str]:
    """Describe a run's data, batches and trials, one line for each subject."""
    notes = [text for split in setup.splits for text in split.warnings]
    lines = [f"Warning: {text}" for text in (*notes, *setup.overlaps())]
    shapes = ", ".join(f"{n} x {length}" for length, n in setup.batches.batches_of.items())
    sizes = ", ".join(f"{split.name} {len(split.rows):,}" for split in setup.splits[1:])
    task = config.task
    fitted = task.fitted(setup.objective.model.num_positions)
    if fitted.length < task.length:
        lines.append(
            f"length   {fitted.length} tokens a row: the model has no more positions; "
            f"task.max_length is {task.length} by default"
        )
    warmup = config.optimizer.warmup_steps or 0
    lines += scaling("optimizer.warmup_steps", warmup, setup.schedule.num_steps)
    lines += [
        f"data     {len(setup.train.rows):,} rows to train on; {sizes}",
        f"batches  {setup.schedule.epoch:,} of {config.training.batch_size} rows an "
        f"epoch, by length: {shapes}",
        f"runs     {setup.schedule.num_trials} of {setup.schedule.num_steps:,} steps, "
        f"{len(setup.schedule.waves[0])} at once, devices as "
        + " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
    ]
    if head := _head(setup):
        title = "vectors" if setup.task.objective == "embedding" else "head"
        lines.append(f"{title:8} {head}")
    if teacher := config.distil.teacher:
        lines.append(f"teacher  {teacher}: each simultaneous run has a copy, saves have none")
    if not trains_all(setup.step.objective):
        state = state_sizes(setup.step)
        params, moments, saved = (
            f"{count / 2**20:,.1f} MiB"
            for count in (state.param_bytes, state.optimizer_bytes, state.saved_bytes)
        )
        lines.append(
            f"trained  {state.trained:,} of {state.params:,} parameters "
            f"({state.trained / state.params:.2%}); a run holds {params} of parameters and "
            f"{moments} of the optimizer's state, and saves {saved}"
        )
    lines += refusal_lines({"model": planned_model(setup)})
    constant = setup.dev[0].constant_score
    if math.isfinite(constant):
        lines.append(
            f"goal     {setup.task.metric} above {goal:.4g} at the end of training "
            f"({setup.dev[0].baseline} has {constant:.4g}; {LEVEL:.0%} bound for "
            f"{setup.dev[0].num_scored:,} examples)"
        )
    return lines


def planned_model(setup: Setup) -> SavedModel:
    """Return the model that a run will save, with logical axes in place of parameter arrays."""
    objective, initial, kind = setup.objective, setup.initial, setup.task.predicts
    head, lora, axes = objective.config, objective.lora, objective.axes()
    long = setup.task.config.long_texts
    return dataclasses.replace(
        initial, config=objective.model, origin=Origin("finetune"), network=None,
        params={name: entry for name, entry in axes.items() if name != "lora"},
        outputs=TaskOutputs(head, kind, long=long) if isinstance(head, TaskHeadConfig) else None,
        embedding=head if isinstance(head, EmbeddingConfig) else None,
        adapter=Adapter(lora, axes["lora"], axes["encoder"]["layers"]) if lora.rank else None,
    )  # fmt: skip


def _baseline(setup: Setup) -> list[str]:
    """Describe the score of the linear TF-IDF baseline, if the task has this baseline."""
    words = setup.dev[0].linear_score(setup.train)
    if words is None:
        return ["baseline not measured: pip install 'bert_jax[baseline]' adds scikit-learn"]
    if not math.isfinite(words):
        return []
    return [f"baseline {setup.task.metric} {words:.4g} (TF-IDF and a linear model, same rows)"]


def _head(setup: Setup) -> str:
    """Describe the pooling of an embedding model, or the input and initial weights of a head."""
    model, head = setup.objective.model, setup.objective.config
    if isinstance(head, EmbeddingConfig):
        return POOLINGS[head.pooling]
    said = []
    if head.kind == "classification" and not model.pooler:
        said.append(f"from {POOLINGS[head.pooling]}")
    if "head" in setup.start.parts[0]:
        said.append("it begins as the head of init, which has the same labels")
    if has_transform(model, head):
        known = "transform" in setup.start.parts[0]
        said.append(f"its transform begins {'with pretrained weights' if known else 'at random'}")
    return "; ".join(said)


def finished_before(work: WorkDir, say: Callable[[str], None]) -> tuple[Outcome, ...]:
    """Print the statistics of a finished run, and return its outcomes."""
    path = work.local / STATISTICS
    rows = by_first(lambda: read_json_object(path, max_bytes=_MAX_STATISTICS_BYTES)["outcomes"])
    if jax.process_index() == 0:
        say(f"{work.name} is finished")
        say((work.local / "statistics.txt").read_text(encoding="utf-8").rstrip())
    return tuple(Outcome.from_json(each) for each in rows)
