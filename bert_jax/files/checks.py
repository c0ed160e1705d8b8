"""Comparison of files with the digests that were recorded when the files were written."""

import contextlib
import functools
import hashlib
import json
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c

from bert_jax.errors import UserError
from bert_jax.files.untrusted.json_file import read_json_object

DIGESTS = "crc32c"
"""Key in a record whose value maps file paths to CRC-32Cs. Older records use the key sha256."""
RECORD_FILES = {"parity.json": "export", "import.json": "import", "growth.json": "growth"}
"""Kind of a model directory, by the name of the record file in it."""
MAX_RECORD_BYTES = 1 << 24


class Checks:
    """A queue of file checks, which run in a background thread while the files are in use."""

    def __init__(self) -> None:
        self._lock, self._todo = threading.Lock(), deque[Callable[[], None]]()
        self._thread: threading.Thread | None = None
        self._fault: Exception | None = None

    def add(self, check: Callable[[], None]) -> None:
        """Add a check, a function that raises an error if a file is not as recorded."""
        with self._lock:
            self._todo.append(check)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Wait for all checks; raise the first error."""
        while (thread := self._thread) is not None:
            thread.join()
        if self._fault is not None:
            raise self._fault

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._fault is not None or not self._todo:
                    self._thread = None
                    return
                check = self._todo.popleft()
            try:
                check()
            except Exception as error:
                self._fault = error


@contextlib.contextmanager
def checked(directory: Path) -> Iterator[None]:
    """Run `check_recorded` in a thread beside the `with` block; raise its error after the block."""
    checks = Checks()
    checks.add(lambda: check_recorded(directory, DIGESTS, "sha256"))
    yield
    checks.wait()


def check_recorded(directory: Path, *keys: str) -> None:
    """Raise a UserError if a file in `directory` does not match its digest in a record file.

    The first of `keys` that holds a map has the digests. The first of all may hold a string, the
    digest of the weights.
    """
    for name in filter(lambda name: (directory / name).is_file(), RECORD_FILES):
        record = read_json_object(directory / name, max_bytes=MAX_RECORD_BYTES)
        held = [record[key] for key in keys if record.get(key)]
        found = next((each for each in held if isinstance(each, dict)), {})
        if held and isinstance(held[0], str):  # an import records a digest of its weights apart
            found = found | {"model.safetensors": held[0]}
        if other := differing(directory, found):
            raise UserError(
                f"{directory / other} is not the file that {name} describes: it is damaged, "
                "missing or changed. Copy or export the directory again. If the change is "
                f"intended, delete the lines of {other} from {name}"
            )


def differing(directory: Path, digests: Any, *, missing_ok: bool = False) -> str:
    """Return the first path whose file has another digest or is missing, "" if all files agree."""
    for name, digest in digests.items() if isinstance(digests, dict) else ():
        inside = not name.startswith("/") and ".." not in Path(name).parts
        kind = DIGESTS if len(f"{digest}") == 8 else "sha256"
        path = directory / name
        if missing_ok and inside and not os.path.lexists(path):
            continue
        if not (inside and path.is_file() and digest_of(path, kind) == digest):
            return str(name)
    return ""


def digests_of(directory: Path, kind: str = DIGESTS) -> dict[str, str]:
    """Return a map from path to digest of all files in a directory, except `shards` and locks."""
    paths = sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    files = [path for path in paths if path.parts[0] not in ("shards", ".lock")]
    return {path.as_posix(): digest_of(directory / path, kind) for path in files}


def crc_of(pieces: Iterable[bytes]) -> str:
    """Compute the CRC-32C of the concatenated `pieces`, as 8 hex digits."""
    return f"{functools.reduce(google_crc32c.extend, pieces, 0):08x}"


def json_crc(content: dict[str, Any]) -> int:
    """Compute the CRC-32 of a JSON object. `content` must not include the stored CRC itself."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def digest_of(path: Path, kind: str = "sha256") -> str:
    """Compute the digest of a file in hex. `kind` is `DIGESTS` or an algorithm of hashlib."""
    with open(path, "rb") as file:
        if kind == DIGESTS:
            return crc_of(iter(lambda: file.read(1 << 20), b""))
        return hashlib.file_digest(file, kind).hexdigest()
