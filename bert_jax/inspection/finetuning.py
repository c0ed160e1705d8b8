"""Status of a fine-tuning run, from the files in its work directory: `bert-jax status`."""

from dataclasses import dataclass
from typing import Any

from bert_jax.checkpoint import saved_steps
from bert_jax.config.mapping import build
from bert_jax.files.remote import WorkDir
from bert_jax.finetune.config import FinetuneConfig
from bert_jax.inspection.status import RunStatus, run_values
from bert_jax.run.events import read_events
from bert_jax.run.telemetry import read_metrics
from bert_jax.saved.runs import STATISTICS, read_finetune_record


@dataclass(frozen=True)
class FinetuneStatus(RunStatus):
    """A fine-tuning run; steps are those of all waves of runs."""

    task: str
    init: str
    runs: int
    """Number of runs in the sweep."""
    num_epochs: float
    evaluation: dict[str, Any]
    """Newest row of metrics; empty when there is none."""
    model_saved: bool
    statistics: str
    """Statistics of a finished run, as lines."""


def finetune_status(place: WorkDir) -> FinetuneStatus:
    """Read the status of a run. Changes nothing.

    Raises:
        UserError: No fine-tuning run there.
    """
    workdir = place.local
    record = read_finetune_record(workdir)
    config = build(FinetuneConfig, record["config"], where=str(workdir / "config.json"))
    rows = read_metrics(workdir / "metrics.jsonl")
    sweep, task = config.sweep, config.task
    finished, text = (workdir / STATISTICS).exists(), workdir / "statistics.txt"
    values = run_values(
        workdir,
        version=record.get("bert_jax", ""),
        num_steps=_num_steps(read_events(workdir / "events.jsonl")),
        stall_seconds=config.training.stall_seconds,
        saved=saved_steps(place.resume),
        damaged=[],
        row=rows[-1] if rows else {},
    )
    return FinetuneStatus(
        **values | {"workdir": place.name} | ({"state": "finished"} if finished else {}),
        task=f"glue {task.glue.name}" if task.kind == "glue" else task.kind,
        init=config.init,
        runs=sweep.seeds * len(config.learning_rates) * (2 if sweep.baseline else 1),
        num_epochs=config.training.num_epochs,
        evaluation=rows[-1] if rows else {},
        model_saved=bool(saved_steps(place.checkpoints)),
        statistics=text.read_text(encoding="utf-8") if finished and text.exists() else "",
    )


def _num_steps(events: list[dict[str, Any]]) -> int | None:
    """Return the length of the run as its last start has said it; version 0.1.0 said nothing."""
    said = [event.get("num_steps") for event in events if event["kind"] == "start"]
    return said[-1] if said and isinstance(said[-1], int) else None
