"""Checkpoints for a training loop: written asynchronously, verified, and kept by rules.

Steps of a save::

    save(step) -> arrays are copied, and the training loop continues
                  Orbax writes the arrays                  (threads of all processes)
                  the checkpoint is read back, old checkpoints are deleted (a thread of process 0)
    save(step + n) -> first checks whether the previous save succeeded

A failed save is reported, and the loop tries the next save. Several failures in a row end the run.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import jax

from bert_jax.distributed.checkpoint import storage
from bert_jax.distributed.checkpoint.agreement import all_agree, by_first
from bert_jax.distributed.checkpoint.digest import leaf_digests
from bert_jax.distributed.checkpoint.reading import Restored, load_newest
from bert_jax.distributed.checkpoint.record import (
    Record,
    RecordFaultError,
    grouped,
    named_leaves,
    read_record,
)
from bert_jax.distributed.checkpoint.retention import Retention, kept_steps
from bert_jax.distributed.checkpoint.storage import AnyPath, one_line, save_fault, saved_steps
from bert_jax.distributed.checkpoint.verify import (
    Verdict,
    VerificationStoppedError,
    is_verified,
    verified_steps,
    verify_checkpoint,
)
from bert_jax.files.urls import is_url

_log = logging.getLogger("bert_jax")

Report = Callable[[str, int, str], None]
"""Function that is called with (kind, step, message). The kind is "save_failed" or "damaged"."""


class SaveFailedError(RuntimeError):
    """Error that ends the run after several failed saves in a row."""

    exit_code = 3


class Checkpoints:
    """Writer and reader of the checkpoints of a run, for the training loop.

    Methods are collective: all processes must call them, in the same order, from the main thread.
    """

    def __init__(
        self, directory: AnyPath, retention: Retention | None = None, *, max_failed_saves: int = 3,
        report: Report = lambda kind, step, message: None,
    ):  # fmt: skip
        """Open `directory`, and remove files that interrupted saves left in it.

        The first save creates `directory`. Damaged checkpoints move to `damaged` beside it.
        `max_failed_saves` failures in a row end the run. Process 0's main thread calls `report`.
        """
        self._directory = storage.as_path(directory)
        self._aside = self._directory.parent / "damaged"
        self._retention = retention or Retention()
        self._max_failures, self._report = max_failed_saves, report
        self._failures = 0
        self._save: _Save | None = None
        self._reader = _Reader(self)
        self._judged: dict[int, tuple[Any, dict[str, float]]] = {}
        self._made = self._directory.exists()
        by_first(lambda: storage.remove_unfinished(self._directory))

    def restore(self, abstract: Any) -> Restored | None:
        """Restore the newest intact checkpoint. Move newer, damaged checkpoints to `damaged/`."""
        restored = load_newest(self._directory, abstract)
        if restored is None:
            return None

        def set_aside() -> None:
            if restored.damaged:
                _log.warning("%s", restored.warning())
            for bad in restored.damaged:
                moved = storage.set_aside(self._directory / str(bad.step), self._aside)
                self._report("damaged", bad.step, f"{bad.fault}; moved to {moved}")

        by_first(set_aside)
        self._reader.start(restored.step)
        return restored

    def save(
        self, step: int, state: Any, *, config: dict[str, Any], extra: dict[str, Any],
        metrics: dict[str, float] | None = None,
    ) -> None:  # fmt: skip
        """Start a save, and return when the arrays are copied. From then on they may be donated.

        `step` is the next step to train. If it has a checkpoint, nothing is saved. `state` is a
        pytree with a nested dict `params`. The other arguments are fields of `Record`. `Retention`
        uses `metrics`, `extra["lowest_at"]` and `extra["judged_on"]`, and compares `metrics` only
        between checkpoints judged on the same rows. Too many failures raise a SaveFailedError.
        """
        self.wait()
        pending, fault = None, None
        try:
            if by_first(lambda: step in saved_steps(self._directory)):
                return
            by_first(self._make_directory)  # if this failed in Orbax, other processes would wait
            leaves = named_leaves(state)
            digests = leaf_digests(leaves)
            arrays = {n: [list(x.shape), str(x.dtype), digests[n]] for n, x in leaves.items()}
            record = Record(step, config, extra, metrics or {}, arrays).to_json()
            pending = storage.write_async(self._directory / str(step), grouped(leaves), record)
        except Exception as error:  # Orbax raises many types of errors for a full disk
            fault = error
        self._save = _Save(self, step, pending, fault)

    def wait(self) -> bool:
        """Wait until the last save is on disk. Return false if the save or a verification failed.

        Too many failures in a row raise a SaveFailedError.
        """
        save, self._save = self._save, None
        if save:
            save.join()
        error = save.error if save else None
        damaged = self._reader.take_damaged()
        if all_agree(not (error or damaged)):
            self._failures = 0 if save else self._failures
            return True
        self._failures += 1
        if jax.process_index() == 0:
            if damaged:
                self._report("damaged", damaged.step, f"read back, {damaged.fault}; set aside")
            if save and (error or not damaged):
                try:
                    storage.remove_unfinished(self._directory)
                except Exception as trouble:
                    _log.warning("Leftovers in %s stay for now: %s", self._directory, trouble)
                reason = save_fault(error) if error else "another process could not write its part"
                self._report("save_failed", save.step, self._explained(save.step, reason))
        if self._failures >= self._max_failures:
            step = save.step if save else damaged.step if damaged else -1
            reason = save_fault(error) if error else damaged.fault if damaged else "not written"
            raise SaveFailedError(
                f"{self._failures} saves in a row have failed, so the run stops. "
                + self._explained(step, reason)
                + " Fix the cause and rerun: the run continues from its newest checkpoint, if any"
            ) from error
        return False

    def save_last(self, step: int, state: Any, *, read_back: bool, **content: Any) -> None:
        """Save at the end of a run, and retry until a save succeeds, since no later save follows.

        `content` is `config`, `extra` and `metrics`, as in `save`. `read_back` also waits for the
        verification, which may take as long as the save. Too many failures raise a SaveFailedError.
        """
        with contextlib.suppress(SaveFailedError):  # earlier failures must not prevent this save
            self.wait()
        damaged = self._failures = 0
        while damaged < self._max_failures:
            self.save(step, state, **content)
            if not self.wait():
                continue
            if not read_back:
                return
            self._reader.wait()
            if self.wait():
                return
            damaged += 1
        raise SaveFailedError(
            f"{damaged} saves in a row were damaged when they were read back, so the run stops. "
            + self._explained(step, "what was read is not what was written")
            + " Check the disk and rerun: the run continues from its newest checkpoint, if any"
        )

    def close(self) -> None:
        """Wait for a save in progress, and stop a verification after the current block.

        This method is not collective. It raises nothing, so that an error handler may call it.
        """
        self.join()
        self._reader.stop()

    def join(self) -> None:
        """Wait until a save in progress has succeeded or failed. This method is not collective."""
        if self._save is not None:
            self._save.join()

    def _explained(self, step: int, reason: str) -> str:
        kept: list[int] = []
        with contextlib.suppress(Exception):
            kept = saved_steps(self._directory)
        there = f"The newest checkpoint is step {kept[-1]}" if kept else "No checkpoint exists yet"
        where = f"The checkpoint of step {step} could not be written to {self._directory}"
        return f"{where}: {reason}. {there}."

    def _make_directory(self) -> None:
        """Create the directory once. A missing parent is not created: its disk may be unmounted."""
        if not self._made:
            self._directory.mkdir(exist_ok=True)
        self._made = True
        if not is_url(self._directory):  # raise an OSError if nothing can be written
            probe = self._directory / "probe.deleted"
            probe.mkdir(exist_ok=True)
            probe.rmdir()

    def _prune(self) -> None:
        """Delete the checkpoints that `Retention.superfluous` lists and that no branch keeps."""
        saved = saved_steps(self._directory)
        for step in saved if self._retention.keep_best else ():
            if step not in self._judged:
                with contextlib.suppress(RecordFaultError):
                    record = read_record(self._directory / str(step))
                    self._judged[step] = record.extra.get("judged_on"), record.metrics
        verified = verified_steps(self._directory)
        if not verified:
            return
        newest = read_record(self._directory / str(verified[-1])).extra
        on = newest.get("judged_on")
        metrics = {n: found for n, (rows, found) in self._judged.items() if rows in (None, on)}
        lowest_at = newest.get("lowest_at")
        for step in self._retention.superfluous(saved, verified, metrics, lowest_at):
            if step not in kept_steps(self._directory):  # a branch may have just begun
                storage.delete(self._directory / str(step))


class _Save(threading.Thread):
    """Thread of a save. It waits for the write, then starts the reader or logs an error."""

    def __init__(self, owner: Checkpoints, step: int, pending: Any, error: Exception | None):
        super().__init__(name="save", daemon=True)
        self.step, self.error = step, error
        self._owner, self._pending = owner, pending
        self.start()

    def run(self) -> None:
        if self._pending is not None:
            try:
                self._pending.result()
            except Exception as error:
                self.error = error
        if self.error is None:
            self._owner._reader.start(self.step)
        else:  # log now, since the next save may be far away
            _log.error("%s", self._owner._explained(self.step, save_fault(self.error)))


class _Reader:
    """Thread of process 0 that reads checkpoints back, one at a time, and then deletes old ones.

    If several checkpoints are written while one is read, only the newest of them is read next.
    """

    def __init__(self, owner: Checkpoints):
        self._owner = owner
        self._lock = threading.Lock()
        self._next: int | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._damaged: Verdict | None = None

    def start(self, step: int) -> None:
        if jax.process_index() != 0 or self._stopping.is_set():
            return
        with self._lock:
            self._next = step
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="verify", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Wait until no checkpoint is left to read."""
        while thread := self._thread:
            thread.join()

    def stop(self) -> None:
        self._stopping.set()
        self.wait()

    def take_damaged(self) -> Verdict | None:
        with self._lock:
            damaged, self._damaged = self._damaged, None
        return damaged

    def _run(self) -> None:
        while True:
            with self._lock:
                step, self._next = self._next, None
                if step is None or self._stopping.is_set():
                    self._thread = None
                    return
            try:
                self._read(step)
            except VerificationStoppedError:
                pass
            except Exception as error:  # if the directory is gone, the next save reports it
                _log.warning("Cannot verify the checkpoint of step %d: %s", step, one_line(error))

    def _read(self, step: int) -> None:
        path = self._owner._directory / str(step)
        for is_last in (False, True):  # try twice, since a disk may be unavailable for a moment
            if is_verified(path):
                break
            verdict = verify_checkpoint(path, mark=True, stopped=self._stopping.is_set)
            if verdict.intact:
                break
            if not path.exists():
                raise FileNotFoundError(f"{path} no longer exists")
            if is_last:
                storage.set_aside(path, self._owner._aside)
                with self._lock:
                    self._damaged = verdict
                return
        self._owner._prune()
