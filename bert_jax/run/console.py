"""The console of a run: lines, around a bar on a terminal; only process 0 speaks."""

import sys
from collections.abc import Callable
from typing import Any

import jax
from tqdm import tqdm


class Console:
    """Lines and a bar of steps.

    Args:
        total: Steps of the run.
        begun: Steps that are done.
        echo: Gets each line; None: standard output, and a bar where standard error is a terminal.
    """

    def __init__(self, total: int, begun: int, echo: Callable[[str], None] | None = None):
        self._active = jax.process_index() == 0
        self._echo = echo or self._print
        self._bar: Any = None
        if self._active and echo is None and sys.stderr.isatty():
            self._bar = tqdm(
                total=total, initial=begun, unit="step", dynamic_ncols=True, leave=False
            )

    @property
    def has_bar(self) -> bool:
        """Whether the bar shows how far the run is."""
        return self._bar is not None

    def say(self, text: str) -> None:
        """Print a line."""
        if self._active:
            self._echo(text)

    def tick(self, beside: str) -> None:
        """Advance the bar by a step; `beside` stands beside the bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(beside, refresh=False)
            self._bar.update(1)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _print(self, text: str) -> None:
        try:
            if self._bar is not None:
                tqdm.write(text, file=sys.stdout)
            else:
                print(text, flush=True)
        except BrokenPipeError:
            raise
        except OSError:  # the output goes to a file whose disk is full
            pass
