"""Worker processes that never outlive, block or surprise their parent."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from bert_jax.errors import UserError

T = TypeVar("T")
R = TypeVar("R")

_MAX_WORKERS = 1024


def num_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_count(asked: int | None) -> int:
    """Return the number of processes, all cores by default.

    Raises:
        UserError: fewer than one, or too many.
    """
    if asked is not None and not 1 <= asked <= _MAX_WORKERS:
        raise UserError(f"num_workers is {asked}; it must be 1 to {_MAX_WORKERS}.")
    return asked or num_cores()


def grouped(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Divide items, in their order, into the shortest lists of at least `limit` in size."""
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


def _start(initializer: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    # Ctrl-C reaches the whole process group; the parent decides what happens.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        # A parent that is killed cannot say so; its workers would wait for work for ever.
        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()
    if initializer is not None:
        initializer(*arguments)


def map_ordered(
    function: Callable[[T], R],
    items: Iterable[T],
    num_workers: int,
    *,
    initializer: Callable[..., None] | None = None,
    arguments: tuple[Any, ...] = (),
) -> Generator[R, None, None]:
    """Map over processes: results in the order of the items, with few items in flight.

    Processes are spawned, since forking a process that runs threads (jax does) can hang. With one
    worker everything runs in this process.

    Items are read as results are taken, at most three for each worker ahead. Each process runs
    `initializer` first.

    Raises:
        UserError: a worker was killed.
        Exception: what `function` or reading `items` raised; the workers are gone by then.
    """
    if num_workers == 1:
        if initializer is not None:
            initializer(*arguments)
        yield from map(function, items)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, _start, (initializer, arguments))
    flying: deque[Future[R]] = deque()
    try:
        for item in items:
            flying.append(pool.submit(function, item))
            # Results that are there free memory; beyond the limit, wait for the oldest.
            while flying and (flying[0].done() or len(flying) >= 3 * num_workers):
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process died: most likely the system killed it for lack of memory. Use fewer "
            f"workers (there were {num_workers}) or a machine with more memory."
        ) from error
    finally:
        with contextlib.suppress(BrokenProcessPool):
            pool.shutdown(wait=True, cancel_futures=True)
