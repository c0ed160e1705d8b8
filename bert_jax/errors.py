"""The exception that means "the user can correct this", and the report of errors."""

import contextlib
import difflib
import errno
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice


class UserError(ValueError):
    """Error in the input, which the user can correct.

    The message names the file, line or field, the value found, and what would be right. The command
    line prints the message as one paragraph and exits with status 2. An exception for which
    `exit_code` is None is a bug and keeps its traceback.
    """


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Guess the known name that `name` misspells; try the first 1,000 names up to 64 letters."""
    some = [each for each in islice(known, 1000) if max(len(name), len(each)) <= 64]
    return next(iter(difflib.get_close_matches(name, some, 1, cutoff=0.5)), None)


def suggestion(name: str, known: Iterable[str], question: str = " Did you mean {!r}?") -> str:
    """Return the question for the nearest known name; "" if none is near."""
    near = nearest(name, known)
    return "" if near is None else question.format(near)


@contextlib.contextmanager
def needs_package(message: str) -> Iterator[None]:
    """Raise a UserError with this message if an import in the body fails."""
    try:
        yield
    except ImportError as error:
        raise UserError(message) from error


def first_few(items: Sequence[str], most: int = 5) -> str:
    """Join the first items of a list of faults and count the others."""
    more = f"; and {len(items) - most:,} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more


# Failures of the disk, or missing rights to use it: not bugs, so no traceback is printed.
_NOT_OURS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR,
             errno.ENAMETOOLONG, errno.EIO}  # fmt: skip


def exit_code(error: BaseException) -> int | None:
    """Return the exit code that an error stands for; None for a bug."""
    if isinstance(error, UserError) or (isinstance(error, OSError) and error.errno in _NOT_OURS):
        return 2
    if isinstance(error, KeyboardInterrupt):
        return 130
    return getattr(error, "exit_code", None) if isinstance(error, RuntimeError) else None


def report_error(error: BaseException, verb: str) -> int | None:
    """Print what went wrong and return the exit code; None for a bug, which keeps its traceback."""
    if isinstance(error, SystemExit):  # _terminate
        return error.code if isinstance(error.code, int) else 1
    code, text = exit_code(error), f"{error}"
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted"
    elif isinstance(error, OSError) and code == 2:
        text += ". Fix the cause or name another place, and rerun the command; complete files stay"
    if code is not None:
        print(f"bert-jax {verb}: {text}", file=sys.stderr)
    return code
