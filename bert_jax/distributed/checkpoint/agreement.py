"""Decisions that all processes of a run make together.

Each process sees a shared directory through its own caches, so two processes may see different
files. Therefore process 0 reads the directory, and all processes use what it found. Every function
is collective: all processes must call it, in the same order, from the main thread.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from bert_jax.errors import exit_code


class ElsewhereError(RuntimeError):
    """An error of process 0, raised in the other processes, which wait for process 0's result."""

    def __init__(self, message: str, code: int):
        """Make an error with process 0's exit code, as a launcher may read any process's code."""
        super().__init__(message)
        self.exit_code = code


def all_agree(ok: bool) -> bool:
    """Tell whether `ok` is true in all processes."""
    if jax.process_count() == 1:
        return ok
    return bool(multihost_utils.process_allgather(jax.numpy.asarray(int(ok))).min())


def by_first(act: Callable[[], Any]) -> Any:
    """Call `act` in process 0. All processes return the result (JSON values) or raise the error."""
    if jax.process_count() == 1:
        return act()
    answer, error = None, None
    if jax.process_index() == 0:
        try:
            answer = act()
        except Exception as raised:
            error = raised
    code = 0 if error is None else exit_code(error) or 1
    content = np.frombuffer(json.dumps([answer, f"{error}", code]).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    padded = np.resize(content, length)  # all processes need an array of the same size
    answer, message, code = json.loads(bytes(multihost_utils.broadcast_one_to_all(padded)))
    if error is not None:
        raise error
    if code:
        raise ElsewhereError(f"process 0: {message}", code)
    return answer
