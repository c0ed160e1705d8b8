"""Decisions that several processes share.

Each process sees a shared directory through caches of its own, and two may see different files.
So process 0 looks, and all processes follow. Every function is collective: all processes call the
function, in the same order, from the main thread.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from bert_jax.errors import exit_code


class ElsewhereError(RuntimeError):
    """An error of process 0, in the processes that wait for it."""

    def __init__(self, message: str, code: int):
        """Take the exit code of process 0: a launcher goes by any of them."""
        super().__init__(message)
        self.exit_code = code


def barrier(name: str) -> None:
    """Return when all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def all_agree(ok: bool) -> bool:
    """Whether `ok` holds in all processes."""
    return worst(0 if ok else 1) == 0


def worst(code: int) -> int:
    """Return the highest number of all processes."""
    if jax.process_count() == 1:
        return code
    return int(multihost_utils.process_allgather(jax.numpy.asarray(code)).max())


def by_first(act: Callable[[], Any]) -> Any:
    """Call `act` in process 0 alone and give its answer to all processes.

    Args:
        act: Returns what JSON can hold.

    Raises:
        ElsewhereError: In the other processes, when `act` raised in process 0.
    """
    if jax.process_count() == 1:
        return act()
    answer, error = None, None
    if jax.process_index() == 0:
        try:
            answer = act()
        except Exception as raised:
            error = raised
    code = 0 if error is None else exit_code(error) or 1
    answer, message, code = _from_first([answer, f"{error}", code])
    if error is not None:
        raise error
    if code:
        raise ElsewhereError(f"process 0: {message}", code)
    return answer


def _from_first(value: Any) -> Any:
    content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    padded = np.resize(content, length)  # of other processes, the size alone counts
    return json.loads(bytes(multihost_utils.broadcast_one_to_all(padded)))
