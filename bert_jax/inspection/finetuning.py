"""Status of a fine-tuning run, from the files in its work directory."""

from typing import Any

from bert_jax.checkpoint import saved_steps
from bert_jax.config.mapping import build
from bert_jax.files.remote import WorkDir
from bert_jax.finetune.config import FinetuneConfig
from bert_jax.run.events import read_events
from bert_jax.run.telemetry import read_metrics
from bert_jax.saved.runs import STATISTICS, read_finetune_record

_ENDS = {"finished": "finished", "stopped": "stopped", "error": "failed", "stalled": "failed"}
_NO_ERRORS = ("start", "finished", "stopped")
_SHOWN = 5


def finetune_status(place: WorkDir) -> dict[str, Any]:
    """Return the status as JSON values; nothing changes.

    Raises:
        UserError: No fine-tuning run there.
    """
    workdir = place.local
    record = read_finetune_record(workdir)
    config = build(FinetuneConfig, record["config"], where=str(workdir / "config.json"))
    events = read_events(workdir / "events.jsonl")
    turns = [_ENDS.get(event["kind"], "running") for event in events
             if event["kind"] in ("start", *_ENDS)]  # fmt: skip
    finished, text = (workdir / STATISTICS).exists(), workdir / "statistics.txt"
    sweep = config.sweep
    task = config.task
    return {
        "workdir": place.name,
        "version": record.get("bert_jax", ""),
        "task": f"glue {task.glue.name}" if task.kind == "glue" else task.kind,
        "init": config.init,
        "runs": sweep.seeds * len(config.learning_rates) * (2 if sweep.baseline else 1),
        "num_epochs": config.training.num_epochs,
        "state": "finished" if finished else turns[-1] if turns else "new",
        "heard": events[-1]["time"] if events else None,
        "evaluation": (read_metrics(workdir / "metrics.jsonl") or [{}])[-1],
        "model_saved": bool(saved_steps(place.checkpoints)),
        "statistics": text.read_text(encoding="utf-8") if finished and text.exists() else "",
        "errors": [event for event in events if event["kind"] not in _NO_ERRORS][-_SHOWN:],
    }


def status_lines(status: dict[str, Any]) -> list[str]:
    """For people."""
    lines = [
        f"{status['workdir']}: fine-tuning of {status['init']} for {status['task']}, "
        f"{status['runs']} runs of {status['num_epochs']:g} epochs",
        f"{'running, or killed' if status['state'] == 'running' else status['state']}; last event "
        f"{status['heard'] or 'none'}",
    ]
    row = status["evaluation"]
    if row and not status["statistics"]:
        values = "  ".join(
            f"{name} {_shown(value)}" for name, value in row.items()
            if name not in ("step", "epoch", "wave")
        )  # fmt: skip
        lines.append(
            f"step {row['step']:,}, epoch {row.get('epoch', 0):.2f} of wave {row.get('wave', 0)}: "
            f"{values}"
        )
    lines.append(f"the best model {'is' if status['model_saved'] else 'is not yet'} saved")
    if status["statistics"]:
        lines += ["", status["statistics"].rstrip()]
    if status["errors"]:
        lines += ["", "what went wrong last:"]
        lines += [f"  {event['time']}  {event['message'][:300]}" for event in status["errors"]]
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "[" + " ".join(map(_shown, value)) + "]"
    return "not a number" if value is None else f"{value:.4g}"
