"""Tables in plain text or Markdown, and standard streams that escape control characters."""

import codecs
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from tqdm import tqdm

T = TypeVar("T")

# Control characters: C0 except tab and line feed, delete, and C1. A terminal takes U+009B of C1 for
# the beginning of a control sequence.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BAR = re.compile("\r?[^\x00-\x1f\x7f-\x9f]*|(?:\n|\x1b\\[A)*")
_UNKNOWN = "bert_jax.json"


def table_lines(rows: Sequence[Sequence[str]], between: str = "  ") -> list[str]:
    """Return the lines of a table: the first column is aligned left and all others right."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [between.join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows]


def markdown_table(rows: Sequence[Sequence[str]], *, figures: bool = False) -> str:
    """Return a Markdown table with a header row; `figures` right-aligns columns 2 and higher."""
    ruler = ["---", *["--:" if figures else "---"] * (len(rows[0]) - 1)]
    return "\n".join(f"| {line} |" for line in table_lines([rows[0], ruler, *rows[1:]], " | "))


def plain(value: Any, most: int = 200) -> str:
    """Return a value as one line of up to `most` characters, safe in Markdown code and tables."""
    return "".join(c if c.isprintable() and c not in "`|<>" else " " for c in f"{value}")[:most]


class Intervals:
    """Times at which a progress line is due: at intervals that grow from 5 to 60 seconds."""

    FIRST = 5.0
    """Shortest interval, in seconds."""

    def __init__(self, now: Callable[[], float] | None = None):
        """Start the first interval; `now` replaces `time.monotonic`."""
        self._now = now or time.monotonic
        self._start = self._last = self._now()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._now() - self._start

    def due(self) -> bool:
        """Return true, and begin a new interval, if a line is due; the caller then prints it."""
        now = self._now()
        if now - self._last < min(max(self.elapsed / 10, self.FIRST), 60.0):
            return False
        self._last = now
        return True


class _Lines(Generic[T]):
    """Progress as lines, for standard error that is not a terminal, such as a log file."""

    def __init__(self, items: Iterable[T] | None, **bar: Any):
        self._items, self._bar = items, bar
        self.n, self._intervals = 0, Intervals()

    def __enter__(self) -> "_Lines[T]":
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: all lines have been printed."""

    def __iter__(self) -> Iterator[T]:
        for item in self._items or ():
            yield item
            self.update(1)

    def update(self, count: int = 1) -> None:
        """Count work that is done."""
        self.n += count
        if self._intervals.due():
            text = tqdm.format_meter(self.n, elapsed=self._intervals.elapsed, ncols=0, **self._bar)
            print(text, file=sys.stderr, flush=True)


def progress_bar(
    items: Iterable[T] | None = None,
    *,
    of: str,
    unit: str,
    total: int | None = None,
    shown: bool = True,
) -> Any:
    """Show the progress of long work on standard error: a bar on a terminal, elsewhere lines.

    Args:
        items: Items of the work, which are counted as the result is iterated over. Without items,
            the result is a context manager whose method `update(count)` counts work.
        of: Name of the work.
        unit: Unit of the counts, such as "B" (bytes).
        total: Count of the whole work (default: the length of `items`, if known).
        shown: Whether to show anything.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    bar = {"total": total, "unit": "B" if unit == "B" else f" {unit}", "unit_scale": True}
    if not shown or sys.stderr.isatty():
        return tqdm(items, of, leave=False, dynamic_ncols=True, disable=not shown, **bar)
    return _Lines(items, prefix=of, **bar)


class Escaping:
    r"""A wrapper of the terminal stream `unescaped` that writes control characters as `\u001b`."""

    def __init__(self, stream: Any) -> None:
        self.unescaped = stream

    def write(self, text: str) -> int:
        """Write text; leave the carriage returns and cursor moves of a progress bar unescaped."""
        if not _BAR.fullmatch(text):
            text = _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
        self.unescaped.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)


@contextmanager
def safe_streams() -> Iterator[None]:
    """Escape special characters in the standard streams while the `with` block runs.

    These are the characters that the encoding lacks and, on a terminal, control characters.
    """
    before = sys.stdout, sys.stderr
    for stream in before:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_UNKNOWN)
    sys.stdout, sys.stderr = (Escaping(s) if s and s.isatty() else s for s in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _as_json(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error(_UNKNOWN, _as_json)
