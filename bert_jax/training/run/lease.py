"""One run at a time in a work directory."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from bert_jax.distributed.checkpoint.agreement import by_first
from bert_jax.files.lease import Lease, Times
from bert_jax.files.remote import WorkDir, open_workdir


@contextlib.contextmanager
def hold_workdir(
    path: Path | str, *, echo: Callable[[str], None] | None = None, times: Times | None = None
) -> Iterator[WorkDir]:
    """Open a work directory that no other run writes to meanwhile.

    Collective: process 0 holds the lease for all processes.

    Args:
        path: The work directory, made if missing.
        echo: Function that gets lines for people in process 0; None: standard output.
        times: Times of the lease.

    Raises:
        UserError: Another run holds the directory, or the directory cannot be written.
    """
    work, times = open_workdir(path), times or Times()
    lease = Lease(work.claims(), work.name, times, say=echo or functools.partial(print, flush=True))

    def take() -> bool:
        with work.failures_named("cannot write to the work directory"):
            return lease.take()

    # A collective that lasted as long as the wait would time out in the other processes.
    while not by_first(take):
        time.sleep(times.poll)
    try:
        if work.mirror is not None:  # another run may have written since the download
            work = open_workdir(path)
        yield dataclasses.replace(work, confirm=lease.confirm)
    finally:
        if jax.process_index() == 0:
            lease.release()
