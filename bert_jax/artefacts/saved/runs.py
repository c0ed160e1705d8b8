"""Work directories of runs: the kind of a run, its checkpoints by name, and its starts."""

import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bert_jax.artefacts.formats.huggingface_files import MAX_CONFIG_BYTES
from bert_jax.artefacts.formats.peft import CONFIG as ADAPTER
from bert_jax.artefacts.formats.sentence_transformers import is_sentence_model
from bert_jax.distributed.checkpoint.reading import Restored, load_newest, restore_step
from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.distributed.checkpoint.verify import verified_steps
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir, open_workdir
from bert_jax.files.staging import StagedDirectory, disk_full
from bert_jax.files.untrusted.json_file import read_json, read_json_object
from bert_jax.files.urls import scheme

_log = logging.getLogger("bert_jax")

Kind = Literal["pretrain", "finetune"]
"""Kind of a run, named after its verb; config.json has the field `kind` only for fine-tuning."""

RUN_FORMAT = 2
"""Format number in config.json; it rises when older runs can no longer be read."""
_MAX_REPORT_BYTES = 1 << 26
_PATIENCE = 5.0  # seconds for threads to end after an error

STATISTICS = "statistics.json"
"""File that a fine-tuning run writes when all its trials have ended; it marks a finished run."""
TRAIN_TEXTS = "train_texts.u64"
"""File with the hashes of a fine-tuning run's training texts, see `tasks.overlap`."""
REPORT = "report.json"
"""File with the report on the model that a fine-tuning run has saved."""

REASONS = ("startup", "compile", "restore", "save", "evaluation", "input", "lost")
"""Reasons for time in which a run does not train (badput), in the order of their display."""
PRODUCTIVE = "productive"

NO_MODEL = (
    "no run gave a finite score, so there is no model to save: all have diverged. Lower "
    "optimizer.learning_rate or sweep.learning_rates, or check the data, and choose another work "
    "directory"
)
_NO_CHECKPOINT = (
    "holds no checkpoint; give the work directory of a `bert-jax pretrain` run that has saved at "
    "least once"
)


class FinetunedState(NamedTuple):
    """Content of a fine-tuning checkpoint: the best model."""

    params: Any
    """Parameters, in the structure of `init_task_params`."""


def is_finetuning(workdir: Path) -> bool:
    """Return true if a directory holds a fine-tuning run; raise UserError for another format."""
    path = workdir / "config.json"
    if not path.is_file():
        return False
    record = read_json_object(path, max_bytes=MAX_CONFIG_BYTES)
    _check_format(path, record)
    return record.get("kind") == "finetune"


def is_run(place: Path | str) -> bool:
    """Return true if a directory or URL is to be read as a run, not as a foreign model."""
    if scheme(place) is not None:
        return True
    config = Path(place) / "config.json"
    if not config.is_file():
        return not is_sentence_model(Path(place)) and not (Path(place) / ADAPTER).is_file()
    return "bert_jax" in read_json_object(config, max_bytes=MAX_CONFIG_BYTES)


def read_record(workdir: Path, kind: Kind) -> dict[str, Any]:
    """Read a run's `config.json`: `bert_jax` (the version), `config`, and entries of its kind.

    Raise a UserError if the file is missing, is not a run's record, or has another kind or format.
    """
    path = workdir / "config.json"
    remedy = f"give the work directory of a `bert-jax {kind}` run"
    if (workdir / "fold-1").is_dir():
        remedy = f"for one fold of this cross-validation, give {workdir / 'fold-1'}"
    if not path.is_file():
        raise UserError(f"{workdir} has no config.json, so it is not a run; {remedy}")
    try:
        record = read_json_object(path, max_bytes=MAX_CONFIG_BYTES)
        if not isinstance(record.get("config"), dict):
            raise UserError("it has no field `config`")
    except UserError as error:
        raise UserError(f"{path} is not the configuration of a run: {error}; {remedy}") from error
    _check_format(path, record)
    found = record.get("kind") or "pretrain"
    if found != kind:
        names = {"pretrain": "pretraining", "finetune": "fine-tuning"}
        other = f"a {names.get(found, found)} run, not a {names[kind]} run"
        raise UserError(f"{workdir} holds {other}; {remedy}")
    return record


def _check_format(path: Path, record: Mapping[str, Any]) -> None:
    """Raise UserError if another version of bert_jax wrote a run's record in another format."""
    if "bert_jax" in record and (found := record.get("format", 1)) != RUN_FORMAT:
        raise UserError(
            f"{path} records a run in format {found} (version {record['bert_jax']}); this version "
            f"reads format {RUN_FORMAT}. Train the model again, or export it with the version that "
            "trained it and use the export instead"
        )


def split_name(name: str) -> tuple[str, int | None]:
    """Split WORKDIR@STEP into work directory and step; without @STEP, the step is None."""
    workdir, sign, step = name.rpartition("@")
    if not sign or "/" in step:
        return name, None
    if not workdir or not (step.isascii() and step.isdigit()):
        raise UserError(
            f"{name!r} names no checkpoint; expected WORKDIR@STEP, where STEP is a saved step, or "
            "only WORKDIR. If the name of WORKDIR has an @, give the step too"
        )
    return workdir, int(step)


def named_steps(work: WorkDir, step: int | None, last: int | None = 1) -> list[int]:
    """Return the named step or, if none is named, the `last` newest verified steps, ascending.

    If `last` is None, all saved steps are returned, verified or not. Raise a UserError if `step` is
    not saved, or fewer than `last` steps are verified.
    """
    saved = saved_steps(work.checkpoints)
    if not saved:
        raise UserError(f"{work.name} {_NO_CHECKPOINT}")
    there = ", ".join(f"{each}" for each in saved)
    if step is not None:
        if step not in saved:
            raise UserError(f"{work.name} has no checkpoint of step {step}; saved steps: {there}")
        return [step]
    if last is None:
        return saved
    verified = verified_steps(work.checkpoints)
    if len(verified) < last:
        raise UserError(
            f"{work.name} has {len(verified)} verified checkpoints, but {last} are needed; saved "
            f"steps: {there}. To use one of them, name it as {work.name}@STEP"
        )
    return verified[-last:]


def pretrained_checkpoint(workdir: Path | str, step: int | None = None) -> Restored:
    """Read a checkpoint of a pretraining run, the newest intact one by default; change nothing.

    Raise a UserError if `workdir` holds no checkpoint, none of `step`, or a fine-tuning run. Raise
    a DamagedCheckpointError if no checkpoint is intact, or the checkpoint of `step` is damaged.
    """
    work = open_workdir(workdir)
    if step is None:
        restored = load_newest(work.checkpoints)
    else:
        (step,) = named_steps(work, step)
        restored = restore_step(work.checkpoints, step, None)
    if restored is None:
        raise UserError(f"{workdir} {_NO_CHECKPOINT}")
    if "task" in restored.record.config:
        raise UserError(
            f"{workdir} holds a fine-tuning run, whose model has no head for masked words; give "
            "the work directory of a `bert-jax pretrain` run"
        )
    return _warned(restored)


def finetuned_checkpoint(workdir: Path | str) -> Restored:
    """Read the best model of a fine-tuning run; change nothing on disk.

    Raise a UserError if `workdir` holds no fine-tuning run, or the run has saved no model. Raise a
    DamagedCheckpointError if no checkpoint is intact.
    """
    place = open_workdir(workdir)
    read_record(place.local, "finetune")
    restored = load_newest(place.checkpoints)
    if restored is None and (place.local / STATISTICS).exists():
        raise UserError(f"{workdir} has no model: {NO_MODEL}")
    if restored is None:
        raise UserError(
            f"{workdir} holds no checkpoint yet: the run has not reached its first save. Repeat "
            "the `bert-jax finetune` command to continue the run"
        )
    return _warned(restored)


def read_reports(workdir: Path, member: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the reports on a run's best model, by split; empty if there is no report.

    `member` is the trial of the best model, as the checkpoint records it. Before a run has ended,
    its report may be on an earlier trial; such a report is ignored.
    """
    path = workdir / REPORT
    if not path.is_file():
        return {}
    record = read_json_object(path, max_bytes=_MAX_REPORT_BYTES)
    splits, told = record.get("splits"), record.get("member", {})
    if not (isinstance(splits, dict) and isinstance(told, dict)):
        raise UserError(f"{path} is not a report of a run: it lacks splits or member; delete it")
    # The path to `init` may have another spelling now.
    return splits if {**told, "init": ""} == {**member, "init": ""} else {}


def _warned(restored: Restored) -> Restored:
    if restored.damaged:
        _log.warning("%s", restored.warning())
    return restored


@contextlib.contextmanager
def staged(out: str | Path) -> Iterator[Path]:
    """Yield a new directory beside `out`; rename the directory to `out` if the body succeeds.

    If the body fails for any reason, including Ctrl-C and SIGTERM, the directory is removed. The
    next call for the same `out` removes a directory that a killed process left behind. Raise a
    UserError if `out` exists and is not an empty directory, is in a bucket, or is not writable.
    """
    before = {*threading.enumerate()}
    with StagedDirectory(out, lambda _: False) as directory:
        try:
            yield directory.path
            directory.commit()
        except BaseException as error:
            # Threads of a failed Orbax save keep writing, which would bring the directory back.
            deadline = time.monotonic() + _PATIENCE
            for thread in {*threading.enumerate()} - before:
                if not thread.daemon:
                    thread.join(max(0.0, deadline - time.monotonic()))
            if isinstance(error, OSError):
                raise disk_full(directory.target, error) from error
            raise


@dataclass
class Start:
    """Record of one start of a run, or the sum of the records of several old starts."""

    begin: float
    """Time of the start, in seconds since 1970."""
    last: float
    """Time of the last update of this record, in seconds since 1970."""
    first_step: int
    """Number of steps that the run had completed before the start."""
    last_step: int
    """Number of steps that the run had completed at the time `last`."""
    kept_step: int
    """Newest step of this start that no later start has repeated."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds spent on each reason and on steps (`productive`)."""
    count: int = 1
    """Number of starts in this record."""
    down: float = 0.0
    """Seconds between the starts in this record."""
    flops: int = 0
    """Floating-point operations of all steps, repeated ones included, from the batches' shapes."""
    devices: str = ""
    """Number and kind of the devices."""


def read_starts(path: Path) -> list[Start]:
    """Return the starts in a `goodput.json`, the oldest first; [] if the file is unreadable."""
    try:
        if not path.is_file():
            return []
        return [_start(row) for row in read_json(path, max_bytes=_MAX_REPORT_BYTES)["starts"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("%s cannot be read, so a new record begins: %r", path, error)
        return []


def total_seconds(starts: Sequence[Start]) -> dict[str, float]:
    """Add up the seconds of all starts. The keys are `productive` and the reasons that occurred."""
    names = [PRODUCTIVE, *REASONS, *(name for start in starts for name in start.seconds)]
    totals = {
        name: sum((start.seconds.get(name, 0.0) for start in starts), 0.0)
        for name in dict.fromkeys(names)
    }
    return {name: total for name, total in totals.items() if total or name == PRODUCTIVE}


def spent(path: Path) -> dict[str, Any]:
    """Return the hours, the operations and the devices of a run; {} if a start recorded none."""
    if not (starts := read_starts(path)) or not all(start.devices for start in starts):
        return {}
    flops = sum(start.flops for start in starts)
    return {"hours": total_hours(starts), "flops": flops, "devices": starts[-1].devices}


def total_hours(starts: Sequence[Start]) -> float:
    """Return the hours of all starts of a run."""
    return sum(total_seconds(starts).values()) / 3600


def down_seconds(starts: Sequence[Start]) -> float:
    """Add up the seconds between the starts."""
    gaps = (max(0.0, b.begin - a.last) for a, b in itertools.pairwise(starts))
    return sum(gaps, sum((start.down for start in starts), 0.0))


def _start(row: dict[str, Any]) -> Start:
    start = Start(**row)
    times = [start.begin, start.last, start.down, *start.seconds.values()]
    counts = [start.first_step, start.last_step, start.kept_step, start.count, start.flops]
    if not all(type(count) is int for count in counts):
        raise TypeError(f"{counts} are not whole numbers")
    if not all(type(time) in (int, float) and math.isfinite(time) for time in times):
        raise TypeError(f"{times} are not numbers")
    return start
