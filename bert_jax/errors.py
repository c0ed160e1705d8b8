"""The exception for errors that users can correct, and functions that report errors."""

import contextlib
import difflib
import errno
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice


class UserError(ValueError):
    """Error in the input, which the user can correct.

    The message names the file, line or field, the value found, and what would be right. The command
    line prints the message without a traceback and exits with status 2.
    """


class BadRecord(UserError):
    """Error in one record (line, row or page) of a file; other records can still be read."""

    count = 1
    """Number of records that are lost."""
    unread = 0
    """Number of bytes of the stored file that are lost, if the number of records is not known."""

    def __init__(self, message: str, reason: str = "malformed", data: bytes | str = b"") -> None:
        """Make an error from a message, a word for the reason, and the record itself."""
        super().__init__(message)
        self.reason, self.data = reason, data

    def text(self) -> str:
        """Return the record as text, with escapes for bytes that are not UTF-8."""
        data = self.data
        return data if isinstance(data, str) else data.decode(errors="backslashreplace")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to `name`, or None if none is similar.

    At most 1,000 names are compared; names longer than 64 characters are never similar.
    """
    some = [each for each in islice(known, 1000) if max(len(name), len(each)) <= 64]
    return next(iter(difflib.get_close_matches(name, some, 1, cutoff=0.5)), None)


def suggestion(name: str, known: Iterable[str], question: str = " Did you mean {!r}?") -> str:
    """Return `question` with the known name nearest to `name`, or "" if none is similar."""
    near = nearest(name, known)
    return "" if near is None else question.format(near)


@contextlib.contextmanager
def needs_package(message: str) -> Iterator[None]:
    """Raise a UserError with this message if an import in the `with` block fails."""
    try:
        yield
    except ImportError as error:
        raise UserError(message) from error


def first_few(items: Sequence[str], most: int = 5) -> str:
    """Join the first `most` items with "; " and state how many more there are."""
    more = f"; and {len(items) - most:,} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more


# Errors of the disk (full, broken, no permission). They are not bugs, so no traceback is printed.
_NOT_OURS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR,
             errno.EISDIR, errno.ENAMETOOLONG, errno.EIO}  # fmt: skip


def exit_code(error: BaseException) -> int | None:
    """Return the exit code of the command line for this error, or None if the error is a bug."""
    if isinstance(error, UserError) or (isinstance(error, OSError) and error.errno in _NOT_OURS):
        return 2
    if type(error) is ConnectionError:  # a bucket; subclasses, such as BrokenPipeError, are bugs
        return 6
    if isinstance(error, KeyboardInterrupt):
        return 130
    return getattr(error, "exit_code", None) if isinstance(error, RuntimeError) else None


def signal_code(signal: str, code: int = 0) -> int:
    """Return the exit code of a run that `signal` ended early: 130 for SIGINT, otherwise `code`."""
    return 130 if signal == "SIGINT" else code


def report_error(error: BaseException, verb: str) -> int | None:
    """Print what went wrong and return the exit code; for a bug, only return None."""
    if isinstance(error, SystemExit):  # raised by the handler of SIGTERM
        return error.code if isinstance(error.code, int) else 1
    code, text = exit_code(error), f"{error}"
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted"
    elif isinstance(error, OSError) and code == 2:
        text += ". Fix the cause or name another directory, then rerun; complete files are kept"
    if code is not None:
        print(f"bert-jax {verb}: {text}", file=sys.stderr)
    return code
