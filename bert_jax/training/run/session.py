"""The session of a run: the resources of a process while it works on a work directory."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from bert_jax.distributed.checkpoint.agreement import by_first
from bert_jax.files.remote import WorkDir
from bert_jax.model.attention import attend
from bert_jax.model.layers import compute_dtype
from bert_jax.objectives.objective import Objective
from bert_jax.training.run.events import Events
from bert_jax.training.run.goodput import Clock, Goodput
from bert_jax.training.run.telemetry import Telemetry, peak_flops
from bert_jax.training.run.watchdog import Watchdog


class Session:
    """Events, watchdog, clock, goodput and telemetry of one start of a run."""

    out: Telemetry
    """Outputs, inside `telling`."""

    def __init__(
        self,
        work: WorkDir,
        *,
        stall_seconds: float,
        clock: Clock | None = None,
        echo: Callable[[str], None] | None = None,
        event_rows: bool = True,
    ):
        """Open nothing yet; the watchdog has no limit where `stall_seconds` is 0.

        With `event_rows` some events are rows of the metrics, too.
        """
        self.work, self.clock, self._event_rows = work, clock or Clock(), event_rows
        self._echo, self._index = echo, jax.process_index()
        self.events = Events(work.local / "events.jsonl", self._index)
        stacks = work.local / f"stacks.{self._index}.txt"
        self._watchdog = Watchdog(stall_seconds, stacks, events=self.events)
        self.alive = self._watchdog.alive
        self.step = 0
        """Updates made whose metrics were read."""

    @contextlib.contextmanager
    def open(self, prepare: Callable[[], None]) -> Iterator[contextlib.ExitStack]:
        """Watch over the run; record the error that ends it; leave the work directory uploaded.

        Args:
            prepare: Function that makes the files of the work directory.

        Yields:
            Stack of what is closed when the run ends.
        """
        with self._watchdog:
            prepare()
            by_first(lambda: self.work.sync(required=True))
            with contextlib.ExitStack() as closing:
                closing.callback(self.work.sync)
                attend.log.addFilter(self._note_attention)
                closing.callback(attend.log.removeFilter, self._note_attention)
                try:
                    yield closing
                except BaseException as error:
                    self.events.write(
                        "error", f"{type(error).__name__}: {error}", step=self.step,
                        code=getattr(error, "exit_code", None),
                    )  # fmt: skip
                    raise

    @contextlib.contextmanager
    def telling(
        self,
        step: int,
        objective: Objective,
        *,
        num_steps: int,
        num_devices: int,
        lines: Sequence[str],
        event: str,
    ) -> Iterator[Telemetry]:
        """Open the outputs after a restore, and describe the run.

        Args:
            step: Updates made.
            objective: Objective of the run.
            num_steps: Length of the run.
            num_devices: Devices that the run uses.
            lines: Description of the run for people.
            event: Message of the event `start`.
        """
        self.step = step
        self.alive("the restore")
        dtype = compute_dtype(objective.model).name
        peak = peak_flops(jax.devices()[0].device_kind, dtype)
        path = self.work.local / "goodput.json" if self._index == 0 else None
        self._goodput = Goodput(path, self.clock, step)
        with Telemetry(
            self.work.local,
            num_steps=num_steps,
            restored_step=step,
            peak=peak and peak * num_devices,
            metrics=objective.metrics,
            goodput=self._goodput,
            echo=self._echo,
        ) as self.out:
            for line in lines:
                self.out.say(line)
            self.event("start", event, num_steps=num_steps)
            yield self.out

    def report(self, kind: str, step: int, message: str) -> None:
        """Write an event about a checkpoint (see `checkpoint.manager.Report`)."""
        self.events.write(kind, message, step=step)
        if self._event_rows and hasattr(self, "out"):  # not yet while the run is restored
            self.out.write(self.step, {f"event/{kind}": step})

    def _note_attention(self, record: logging.LogRecord) -> bool:
        """Write an event with the cost of the chosen attention; the warning is printed, too."""
        self.event("attention", record.getMessage())
        return True

    def event(self, kind: str, message: str, **values: Any) -> None:
        """Write an event of the whole run, once for all processes."""
        if self._index == 0:
            self.events.write(kind, message, step=self.step, **values)

    def warn(
        self, kind: str, message: str, number: int, error: Exception | None, **values: Any
    ) -> None:
        """Write an event, then print its message, or raise the error that stops the run.

        Args:
            kind: Kind of the event.
            message: Text for people.
            number: Number of the batch or step.
            error: Reason why the run stops; None: the run goes on.
            **values: Values of the event.
        """
        if self._event_rows:
            self.out.write(self.step, {f"event/{kind}": number})
        self.event(kind, message, **values)
        if error:
            raise error
        self.out.say(message if kind == "recovered" else f"Warning: {message}")

    def end(self) -> None:
        """Bring goodput and outputs up to date after the last step."""
        self._goodput.record(self.step)
        self.sync()

    def sync(self) -> None:
        """Flush metrics and upload files, before the checkpoint is written."""
        self.out.sync()
        self.work.sync()

    @contextlib.contextmanager
    def saving(self, what: str) -> Iterator[None]:
        """Flush all output so far, then book the time of a save."""
        with self.clock.spend("save"):
            self.sync()
            yield
        self.alive(what)
