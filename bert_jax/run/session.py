"""The session of a run: everything that a process holds while it works on a work directory."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from bert_jax.checkpoint.agreement import by_first
from bert_jax.files.remote import WorkDir
from bert_jax.objectives.objective import Metric
from bert_jax.run.events import Events
from bert_jax.run.goodput import Clock, Goodput
from bert_jax.run.telemetry import Telemetry
from bert_jax.run.watchdog import Watchdog


class Session:
    """Events, watchdog, clock, goodput and telemetry of one start of a run."""

    out: Telemetry
    """Outputs, inside `telling`."""

    def __init__(
        self,
        place: WorkDir,
        *,
        stall_seconds: float,
        clock: Clock | None = None,
        echo: Callable[[str], None] | None = None,
    ):
        """Open nothing yet.

        Args:
            place: Work directory of the run.
            stall_seconds: Limit of the watchdog; 0: none.
            clock: Clock of this start; None: a new one.
            echo: Gets each line for people; None: standard output, with a bar on a terminal.
        """
        self.place, self.clock = place, clock or Clock()
        self._echo, self._index = echo, jax.process_index()
        self.events = Events(place.local / "events.jsonl", self._index)
        stacks = place.local / f"stacks.{self._index}.txt"
        self._watchdog = Watchdog(stall_seconds, stacks, events=self.events)
        path = place.local / "goodput.json" if self._index == 0 else None
        self._goodput = Goodput(path, self.clock)
        self.step = 0
        """Updates made whose metrics were read."""

    @contextlib.contextmanager
    def open(self, prepare: Callable[[], None]) -> Iterator[contextlib.ExitStack]:
        """Watch over the run; record what ends it; leave the work directory in its place.

        Args:
            prepare: Makes the files of the work directory.

        Yields:
            Stack for what is closed when the run ends.
        """
        with self._watchdog:
            prepare()
            by_first(lambda: self.place.sync(required=True))
            with contextlib.ExitStack() as closing:
                closing.callback(self.place.sync)
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
        self, step: int, *, num_steps: int, metrics: Sequence[Metric], peak: float | None
    ) -> Iterator[Telemetry]:
        """Open the outputs after a restore.

        Args:
            step: Updates made.
            num_steps: Length of the run.
            metrics: Metrics of the objective.
            peak: FLOP/s of all devices together; None: not known.
        """
        self.step = step
        self.alive("the restore")
        self._goodput.begin(step)
        with Telemetry(
            self.place.local,
            num_steps=num_steps,
            restored_step=step,
            peak=peak,
            clock=self.clock,
            metrics=metrics,
            goodput=self._goodput,
            echo=self._echo,
        ) as self.out:
            yield self.out

    def alive(self, what: str) -> None:
        """Give a sign of life: `what` was completed."""
        self._watchdog.alive(what)

    def report(self, kind: str, step: int, message: str) -> None:
        """Write an event about a checkpoint (see `checkpoint.manager.Report`)."""
        self.events.write(kind, message, step=step)
        if hasattr(self, "out"):  # not yet while the run is restored
            self.out.write(self.step, {f"event/{kind}": step})

    def event(self, kind: str, message: str, **values: Any) -> None:
        """Write an event of the whole run, once for all processes."""
        if self._index == 0:
            self.events.write(kind, message, step=self.step, **values)

    def warn(
        self, kind: str, message: str, number: int, error: Exception | None, **values: Any
    ) -> None:
        """Write an event, and say or raise it.

        Args:
            kind: Kind of the event.
            message: Words for people.
            number: Number of the batch or step.
            error: Reason why the run stops; None: the run goes on.
            **values: Values of the event.
        """
        self.out.write(self.step, {f"event/{kind}": number})
        self.event(kind, message, **values)
        if error:
            raise error
        self.out.say(message if kind == "recovered" else f"Warning: {message}")

    def begin(self, lines: Sequence[str], event: str, num_steps: int) -> None:
        """Say what the run is and how long, and write the event `start`."""
        for line in lines:
            self.out.say(line)
        self.event("start", event, num_steps=num_steps)

    def end(self, step: int) -> None:
        """Bring goodput and outputs up to date after the last step."""
        self._goodput.record(step)
        self.sync()

    def sync(self) -> None:
        """Flush metrics and upload files, before the checkpoint is written."""
        self.out.sync()
        self.place.sync()

    @contextlib.contextmanager
    def saving(self, what: str) -> Iterator[None]:
        """Book the time of a save, which follows everything that was written so far."""
        with self.clock.spend("save"):
            self.sync()
            yield
        self.alive(what)
