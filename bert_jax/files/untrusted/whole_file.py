"""Readers of complete files, which limit the size and require that text is UTF-8."""

import os
import re
import stat
from pathlib import Path

import numpy as np

from bert_jax.errors import UserError

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Characters that are forbidden in names: control characters, line separators, lone surrogates."""


def read_bytes(path: Path, *, max_bytes: int) -> bytes:
    """Read a file. Raise a UserError if it is empty, too large or not a regular file."""
    try:
        # Without O_NONBLOCK, opening a pipe that nobody writes to would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"{path} is not a regular file but a pipe or device")
            # read(n) always allocates n bytes, so n depends on the size of the file.
            raw = file.read(min(status.st_size, max_bytes) + 1)
            if status.st_size < len(raw) <= max_bytes:  # longer than the reported size
                raw += file.read(max_bytes + 1 - len(raw))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from error
    if len(raw) > max_bytes:
        raise UserError(f"{path} is larger than {max_bytes:,} bytes, the limit for such a file")
    if not raw:
        raise UserError(f"{path} is empty")
    return raw


def map_bytes(path: Path, what: str) -> np.ndarray:
    """Map a file into memory as bytes (n,). `what` ends the UserError for a missing file."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; {what}")
    try:
        empty = path.stat().st_size == 0  # an empty file cannot be mapped
        return np.zeros(0, np.uint8) if empty else np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def read_text(path: Path, *, max_bytes: int) -> str:
    """Read a UTF-8 file of at most `max_bytes`. Errors: see `read_bytes` and `decode_text`."""
    return decode_text(read_bytes(path, max_bytes=max_bytes), where=f"{path}")


def decode_text(raw: bytes, *, where: str) -> str:
    """Decode UTF-8 without its byte order mark; raise a UserError for a NUL or another encoding."""
    if (nul := raw.find(b"\0")) >= 0:
        line = raw.count(b"\n", 0, nul) + 1
        raise UserError(f"{where}, line {line}: a NUL byte (offset {nul}); this is not a text file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The error's positions count from after the byte order mark, if there is one.
        raw = raw.removeprefix(b"\xef\xbb\xbf")
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        raise UserError(
            f"{where}, line {line}, byte {column}: 0x{raw[error.start]:02x} is not UTF-8; save the "
            "file as UTF-8"
        ) from error
