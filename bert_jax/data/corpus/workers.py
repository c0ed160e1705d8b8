"""Worker processes that end when their parent does, never block it, and report their failures."""

import contextlib
import itertools
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from bert_jax.errors import UserError

T = TypeVar("T")
R = TypeVar("R")

_MAX_WORKERS = 1024
_LEAVE_SECONDS = 5.0
"""Time that workers have to remove unfinished files before they are killed."""


def worker_count(asked: int | None) -> int:
    """Return `asked` or, if None, the number of usable cores; raise a UserError if out of range."""
    if asked is not None and not 1 <= asked <= _MAX_WORKERS:
        raise UserError(f"num_workers is {asked}; it must be 1 to {_MAX_WORKERS}.")
    known = hasattr(os, "sched_getaffinity")
    return asked or (len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1)


def grouped(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Divide items, in order, into lists; a list ends once its items' sizes sum to `limit`."""
    group: list[T] = []
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= limit:
            yield group
            group, total = [], 0
    if group:
        yield group


def _work(
    connection: Connection, function: Callable[[Any], Any],
    initializer: Callable[..., None] | None, arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    # Ctrl-C reaches the whole process group; the parent decides what happens.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    parent = multiprocessing.parent_process()
    if parent is not None:
        # A parent that was killed cannot stop this worker, so a thread watches the parent.
        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()
    if initializer is not None:
        initializer(*arguments)
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            item = connection.recv()
            try:
                connection.send((function(item), None))
            except Exception as error:
                error.add_note("".join(traceback.format_exception(error)))
                connection.send((None, error))


def _leave(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt `finally`
    sys.exit(128 + number)


class Guard:
    """A process that runs calls with limits of time and memory, and ends if a call exceeds one."""

    def __init__(self, seconds: float, most_bytes: int) -> None:
        """Limit the memory that calls need and, for each call, its time on a processor.

        As a second limit, a call ends after ten times as many seconds of wall-clock time.
        """
        self._seconds, self._most_bytes = seconds, most_bytes
        self._process: SpawnProcess | None = None

    def call(self, function: Callable[[T], R], item: T) -> R:
        """Return `function(item)`; raise a ChildProcessError if it fails or exceeds a limit."""
        is_new = self._process is None
        if is_new:
            context = multiprocessing.get_context("spawn")
            self._connection, its = context.Pipe()
            process = context.Process(target=_work, args=(its, _timed, None, ()))
            process.start()
            self._process = process
            its.close()
        try:
            if is_new:  # the process starts, and imports the function, outside of the limits
                self._connection.send((0.0, _limit, (self._most_bytes, function)))
                self._connection.recv()
            self._connection.send((self._seconds, function, item))
            if not self._connection.poll(10 * self._seconds):
                raise TimeoutError
            result, error = self._connection.recv()
        except (EOFError, OSError) as ended:
            error = ended
        if error is None:
            return result
        self.close()
        limits = f"{self._seconds:g} s or {self._most_bytes:,} bytes of memory"
        raise ChildProcessError(f"its parser fails, or takes over {limits}") from error

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = None


def _limit(given: tuple[int, object]) -> None:
    """Limit the memory of this process to what its imports have reserved, and so many bytes."""
    if (sizes := Path("/proc/self/statm")).exists():  # macOS cannot limit memory
        limit = int(sizes.read_text().split()[0]) * resource.getpagesize() + given[0]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _timed(given: tuple[float, Callable[[T], R], T]) -> R:
    seconds, function, item = given
    # A process inherits which signals are ignored or blocked.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
    result = function(item)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return result


def map_ordered(
    function: Callable[[T], R], items: Iterable[T], num_workers: int, *,
    initializer: Callable[..., None] | None = None, arguments: tuple[Any, ...] = (),
) -> Generator[R, None, None]:  # fmt: skip
    """Apply a function in worker processes, and yield the results in the order of the items.

    Each process gets the function once, and first calls `initializer(*arguments)`. With one worker
    or one item, everything runs in this process. Items are read as results are consumed, at most
    three per worker in advance. After an error of `function` or of reading `items`, all workers are
    ended, and the error is raised. Raise a UserError if a worker was killed.

    Processes are spawned, since forking a process that runs threads (as jax does) can hang. For
    each worker, a thread waits for results on a connection, which closes if the worker dies.
    """
    items = iter(items)
    first = list(itertools.islice(items, 2))
    items = itertools.chain(first, items)
    if num_workers == 1 or len(first) < 2:
        if initializer is not None:
            initializer(*arguments)
        yield from map(function, items)
        return
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    idle: SimpleQueue[Connection] = SimpleQueue()
    flying: deque[Future[R]] = deque()
    death: Future[None] = Future()
    threads = ThreadPoolExecutor(num_workers)

    def ask(item: T) -> Any:
        connection = idle.get()
        try:
            connection.send(item)
            result, error = connection.recv()
        except (EOFError, OSError):
            death.set_result(None)
            raise
        finally:
            idle.put(connection)
        if error is not None:
            raise error
        return result

    def oldest() -> R:
        either: list[Future[Any]] = [flying[0], death]
        wait(either, return_when=FIRST_COMPLETED)
        if death.done():
            raise UserError(
                "a worker process died: most likely the system killed it for lack of memory. Use "
                f"fewer workers (there were {num_workers}) or a machine with more memory."
            )
        return flying.popleft().result()

    try:
        for item in items:
            if len(processes) < num_workers:
                mine, its = context.Pipe()
                given = (its, function, initializer, arguments)
                process = context.Process(target=_work, args=given)
                process.start()
                processes.append(process)
                its.close()  # a second holder would keep the connection open when the worker dies
                idle.put(mine)
            flying.append(threads.submit(ask, item))
            # Yield finished results to free memory; at the limit, wait for the oldest.
            while flying and (flying[0].done() or len(flying) >= 3 * num_workers):
                yield oldest()
        while flying:
            yield oldest()
    finally:
        for process in processes:
            process.terminate()
        end = time.monotonic() + _LEAVE_SECONDS
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()
        threads.shutdown(cancel_futures=True)
