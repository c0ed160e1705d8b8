"""The exception that means "the user can correct this", and what is said of errors at the end."""

import difflib
import errno
import sys
from collections.abc import Iterable
from itertools import islice


class UserError(ValueError):
    """Input that its author can correct.

    The message names the file, line or field, the value met, and what would be right. The command
    line prints it as one paragraph and exits with status 2; any other exception is a bug and keeps
    its traceback.
    """


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Find the known name that `name` most likely misspells.

    Comparing takes at most some milliseconds: of the names the first 1,000 take part, and none of
    more than 64 characters.
    """
    some = [each for each in islice(known, 1000) if max(len(name), len(each)) <= 64]
    return next(iter(difflib.get_close_matches(name, some, 1, cutoff=0.5)), None)


# Failures of the disk or of the rights on it, wherever they strike: no bug, so no traceback.
_NOT_OURS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR,
             errno.ENAMETOOLONG, errno.EIO}  # fmt: skip


def explained(error: BaseException, verb: str) -> int | None:
    """Says what went wrong and gives the exit code; None for a bug, which keeps its traceback."""
    code, text = None, f"{error}"
    if isinstance(error, SystemExit):  # _terminate
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, UserError):
        code = 2
    elif isinstance(error, KeyboardInterrupt):
        code, text = 130, "interrupted"
    elif isinstance(error, OSError) and error.errno in _NOT_OURS:
        hint = "Mend that or name another place, and give the command again; what is complete stays"
        code, text = 2, f"{error}. {hint}"
    elif isinstance(error, RuntimeError):
        code = getattr(error, "exit_code", None)
    if code is not None:
        print(f"bert-jax {verb}: {text}", file=sys.stderr)
    return code
