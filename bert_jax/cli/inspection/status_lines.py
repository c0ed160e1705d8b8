"""Text that `bert-jax status` prints for people."""

import datetime
import textwrap
from typing import Any

from bert_jax.cli.inspection.status import FinetuneStatus, PretrainStatus, RunStatus
from bert_jax.training.run.loss_curve import terminal_curve
from bert_jax.training.run.telemetry import duration, readout

_MOST_STEPS = 8
_INDENT = 12
_REASONS = {
    "productive": "steps (goodput)",
    "startup": "start-up",
    "input": "waiting for input",
    "lost": "steps that were lost",
}


def pretrain_lines(status: PretrainStatus, *, width: int = 80, plain: bool = True) -> list[str]:
    """Describe a pretraining run: one subject per line, and the loss curve.

    If `plain` is true, the curve is ASCII without colours, for a file or a pipe.
    """
    phases = ", then ".join(
        f"{phase.num_steps:,} of {phase.batch_size:,} rows of {phase.length} tokens"
        for phase in status.phases
    )
    tokens = "not there now" if status.corpus_tokens is None else f"{status.corpus_tokens:,} tokens"
    count = len(status.phases)
    phase = f", phase {status.phase + 1} of {count}" if count > 1 else ""
    subjects = [
        (
            "model",
            f"{status.num_params:,} parameters: {status.num_layers} layers, {status.hidden_dim} "
            f"wide, vocabulary {status.vocab_size:,}",
        ),
        *([("origin", status.origin)] if status.origin else []),
        ("corpus", f"{status.corpus or 'in memory'} ({tokens})"),
        ("steps", phases),
        ("reached", _reached(status, phase)),
    ]
    for label, row, name in (
        ("training", status.train, "train"), ("held-out", status.evaluation, "eval"),
    ):  # fmt: skip
        if text := readout(status.metrics, row, name, status.unigram_entropy):
            subjects.append((label, f"{text} (step {row['step']:,})"))
    if status.corpora:
        texts = [f"{each.label}: {each.describe()}" for each in status.corpora]
        subjects.append(("mixture", "; ".join(texts)))
    subjects.append(("checkpoints", _checkpoints(status)))
    if status.branches:
        texts = [f"step {step:,}: {', '.join(names)}" for step, names in status.branches.items()]
        subjects.append(("branches", f"from {'; from '.join(texts)}"))
    if status.damaged:
        subjects.append(("damaged", f"put aside in damaged/: {', '.join(status.damaged)}"))
    curve = terminal_curve(
        status.curve, status.heldout_curve, status.unigram_entropy, width=width, plain=plain
    )
    if curve:
        metric = status.metrics[0]
        unit = metric.unit.partition(" ")[0]
        legend = f"{metric.title}, {unit} by step: {'*' if plain else 'line'} training"
        legend += ", o held-out" if status.heldout_curve else ""
        legend += f", - {metric.baseline}" if status.unigram_entropy is not None else ""
        curve = ["", legend, *curve]
    return _lines(status, subjects, curve, width)


def finetune_lines(status: FinetuneStatus, *, width: int = 80) -> list[str]:
    """Describe a fine-tuning run: one subject per line, and a finished run's statistics."""
    subjects = [
        ("task", f"{status.task}, starting from {status.init}"),
        ("runs", f"{status.runs:,} of {status.num_epochs:g} epochs"),
        ("reached", _reached(status)),
        ("model", f"the best model is {'saved' if status.model_saved else 'not yet saved'}"),
    ]
    row = status.evaluation
    if row and not status.statistics:
        values = "  ".join(
            f"{name} {_value(value)}" for name, value in row.items() if "/" in name
            and not name.startswith("perf/")
        )  # fmt: skip
        where = f"step {row['step']:,}, epoch {row.get('epoch', 0):.2f} of wave "
        subjects.append(("newest", f"{where}{row.get('wave', 0)}: {values}"))
    statistics = ["", status.statistics.rstrip()] if status.statistics else []
    return _lines(status, subjects, statistics, width)


def _lines(
    status: RunStatus, subjects: list[tuple[str, str]], body: list[str], width: int
) -> list[str]:
    """Return a paragraph per subject, the body, the use of time, and the last errors."""
    made_by = f", by bert_jax {status.version}" if status.version else ""
    lines = []
    for name, text in [("run", f"{status.workdir}{made_by}: {_state(status)}"), *subjects]:
        lines += textwrap.wrap(
            _printable(text), max(40, width), initial_indent=f"{name:{_INDENT}}",
            subsequent_indent=" " * _INDENT, break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return [*lines, *body, *_time(status), *_errors(status, width)]


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + " ".join(map(_value, value)) + "]"
    return "not a number" if value is None else f"{value:.4g}"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _state(status: RunStatus) -> str:
    ago = "" if status.silent_seconds is None else f"{duration(status.silent_seconds)} ago"
    return {
        "new": "no step has been logged yet",
        "running": f"running (last sign of life {ago})",
        "silent": f"seems to be running, but the last sign of life was {ago}. The run may be "
        "compiling, evaluating, saving or restoring, or it was killed",
        "killed": f"NOT running: the last sign of life was {ago}, and no end was recorded. The run "
        "was killed, or its machine is gone. The same command continues the run",
        "failed": f"failed: it ended with an error {ago}",
        "stopped": f"stopped by a signal {ago}, and saved; the same command continues the run",
        "finished": f"finished {ago}".rstrip(),
    }[status.state]


def _reached(status: RunStatus, phase: str = "") -> str:
    parts = [f"step {status.step:,}"]
    if status.num_steps:
        parts[0] += f" of {status.num_steps:,} ({status.step / status.num_steps:.1%}){phase}"
    if (rate := status.steps_per_second) is not None and (left := status.seconds_left):
        parts.append(f"{rate:.3g} steps/s, {duration(left)} left at that rate")
    return "; ".join(parts)


def _checkpoints(status: PretrainStatus) -> str:
    others = [step for step in status.checkpoints if step not in status.verified]
    if not status.checkpoints:
        return "none yet"
    if not status.verified:
        return f"none has been read back; written: {_steps(others)}"
    text = f"step {status.verified[-1]:,} is the newest that was read back"
    if status.verified[:-1]:
        text += f"; before it {_steps(status.verified[:-1])}"
    return text + (f"; not read back: {_steps(others)}" if others else "")


def _steps(steps: list[int]) -> str:
    newest = [f"{step:,}" for step in reversed(steps[-_MOST_STEPS:])]
    more = len(steps) - len(newest)
    return ", ".join(newest) + (f" and {more} older" if more else "")


def _time(status: RunStatus) -> list[str]:
    if not (whole := sum(status.seconds.values())):
        return []
    noun = "start" if status.num_starts == 1 else "starts"
    title = f"time of {status.num_starts} {noun}: {duration(whole)}"
    if status.num_starts > 1:
        title += f", and {duration(status.down_seconds)} between them"
    if status.num_killed:
        title += f"; {status.num_killed} ended without a record"
    rows = [
        f"  {_REASONS.get(name, name):24} {duration(seconds):>14} {100 * seconds / whole:6.1f}%"
        for name, seconds in status.seconds.items()
    ]
    return ["", title, *rows]


def _errors(status: RunStatus, width: int) -> list[str]:
    if not status.errors:
        return []
    lines = ["", "last errors"]
    for event in status.errors:
        try:
            when = f"{datetime.datetime.fromisoformat(event['time']):%Y-%m-%d %H:%M:%S}"
        except ValueError:
            when = event["time"][:32]
        lines += textwrap.wrap(
            _printable(f"{when}  {event['kind']}{_where(event)}: {event['message']}"),
            max(40, width), initial_indent="  ", subsequent_indent="    ", max_lines=4,
            placeholder=" ...",
        )  # fmt: skip
    return lines


def _where(event: dict[str, Any]) -> str:
    parts = []
    if isinstance(event.get("step"), int):
        parts.append(f"step {event['step']:,}")
    if event.get("process"):
        parts.append(f"process {event['process']}")
    return f" ({', '.join(parts)})" if parts else ""
