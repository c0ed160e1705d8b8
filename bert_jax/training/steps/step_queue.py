"""A queue that dispatches each training step before it reads the previous step's metrics."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax

from bert_jax.objectives.objective import Objective
from bert_jax.training.run.session import Session
from bert_jax.training.steps.recheck import GRADIENT_DIGESTS, Recheck


class StepQueue:
    """Queue of compiled steps. `dispatch` returns before the device has computed the step.

    Metrics are read after the dispatch of the next step, before a compilation, or in `flush`. So
    one step is always queued, and the device need not wait for the host, except in a recheck.
    """

    def __init__(
        self,
        session: Session,
        recheck: Recheck,
        read: Callable[[int, int, dict[str, Any], Any], None],
    ):
        """Make a queue. `read` gets each step's number, FLOPs and metrics, and the newest state."""
        self._session, self._recheck, self._read = session, recheck, read
        self._compiled: set[tuple[int, tuple[int, ...]]] = set()
        self._unread: tuple[int, int, Any] | None = None

    def switch(self, step: Callable[..., tuple[Any, Any]], objective: Objective) -> None:
        """Use the step `(state, batch, ...) -> (state, metrics)` from the next dispatch on."""
        self._step, self._objective = step, objective

    def dispatch(self, number: int, state: Any, batch: Any, *settings: Any) -> Any:
        """Dispatch step `number`, read the previous step's metrics, and return the new state."""
        shape = batch["tokens"].shape
        is_new = (id(self._step), shape) not in self._compiled
        if is_new:
            self.flush(state)
            self._compiled.add((id(self._step), shape))
        with self._session.clock.spend("compile") if is_new else contextlib.nullcontext():
            state, metrics = self._recheck.step(number, self._step, state, batch, *settings)
        if is_new:
            self._session.alive("a compilation")
        self.flush(state)
        flops = math.prod(shape[:-1]) * self._objective.flops(batch)
        self._unread = (number, flops, metrics)
        return state

    def flush(self, state: Any) -> None:
        """Wait for metrics that have not been read yet, and pass them to `read`."""
        if self._unread is None:
            return
        (number, flops, metrics), self._unread = self._unread, None
        metrics = jax.device_get({n: m for n, m in metrics.items() if n != GRADIENT_DIGESTS})
        self._session.step = number
        self._session.alive(f"step {number:,}")
        self._read(number, flops, metrics, state)
