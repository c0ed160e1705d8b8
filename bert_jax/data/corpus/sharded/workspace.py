"""Workspace of a build: the shards that tasks write, and the marks of complete tasks.

If the output directory OUT is local, the workspace is OUT.unfinished, which is renamed to OUT at
the end. If OUT is in a bucket, the workspace is OUT itself, which becomes a corpus when its last
files, the manifests, are written.
"""

import contextlib
import functools
import json
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from typing_extensions import override

from bert_jax.data.corpus.intake import QUARANTINE
from bert_jax.data.store import is_store
from bert_jax.errors import UserError
from bert_jax.files.claims import BucketClaims
from bert_jax.files.lease import Lease, Times
from bert_jax.files.staging import StagedDirectory, disk_full, replace_file
from bert_jax.files.untrusted.json_file import parse_json
from bert_jax.files.urls import failures_named, file_system, is_url, upload

_TIMES = Times(patience=30.0)
"""Times of the lease on a bucket. Patience is short, since a stopped build has nothing to save."""
MARKS = "tasks"
"""Name of the directory of marks. A mark is a JSON file that marks a task as complete."""


class Workspace:
    """A picklable directory, local or on a shared disk, that all processes of a build access."""

    def __init__(self, path: Path) -> None:
        self.local: Path | None = path
        """Directory of the workspace; None in a bucket."""
        self.path = path

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a local directory. If the `with` block succeeds, its files join the workspace."""
        if not self.path.is_dir():
            raise UserError(
                f"{self.path} does not exist on the node {socket.gethostname()}. All nodes of a "
                "cluster need access to it: give an --out in gs:// or on a shared disk."
            )
        yield self.path

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is no such file."""
        path = self.path / name
        return path.read_bytes() if path.is_file() else None

    def marks(self) -> set[str]:
        """Return the names of the complete tasks."""
        return {path.stem for path in (self.path / MARKS).glob("*.json")}

    def read_mark(self, name: str) -> dict[str, Any]:
        """Return the mark of a complete task; an empty dict if it cannot be read."""
        try:
            found = parse_json(self.read(f"{MARKS}/{name}.json") or b"", where=name)
        except UserError:
            return {}  # the task will be repeated
        return found if isinstance(found, dict) else {}

    def write_mark(self, name: str, mark: dict[str, Any]) -> None:
        """Mark a task as complete; its files must have been written."""
        with self.scratch() as root:
            replace_file(root / MARKS / f"{name}.json", json.dumps(mark).encode())

    def keep_only(self, shards: Iterable[str]) -> None:
        """Remove all shards except `shards`, such as shards that earlier builds left behind."""
        stays = {self.path / each for each in (*shards, MARKS)}
        parents = {parent for each in stays for parent in each.parents}
        for directory in filter(Path.is_dir, parents - set(self.path.parents)):
            for path in directory.iterdir():
                if path.is_dir() and path not in stays and path not in parents:
                    shutil.rmtree(path)

    def remove_marks(self) -> None:
        """Remove all marks, once the corpus is complete."""
        shutil.rmtree(self.path / MARKS, ignore_errors=True)


class BucketWorkspace(Workspace):
    """A directory of a bucket; shards are written on a node's disk and uploaded."""

    def __init__(self, url: str) -> None:
        self.local, self.url = None, url.rstrip("/")

    @override
    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="bert_jax-") as name:
            yield Path(name)
            upload(Path(name), self.url)

    @override
    def read(self, name: str) -> bytes | None:
        try:
            return self._files().cat_file(self._key(name))
        except FileNotFoundError:
            return None

    @override
    def marks(self) -> set[str]:
        return {Path(key).stem for key in self._find(MARKS)}

    @override
    def keep_only(self, shards: Iterable[str]) -> None:
        kept = tuple(f"{self._key(each)}/" for each in shards)
        for key in self._find():
            name = key.removeprefix(f"{self._key()}/")
            if re.search(r"(^|/)shards/", name) and not key.startswith(kept):
                self._files().rm_file(key)

    @override
    def remove_marks(self) -> None:
        for key in self._find(MARKS):
            self._files().rm_file(key)

    def manifests(self) -> list[str]:
        """Return the keys of the manifests that exist."""
        return [key for key in self._find() if re.search(r"/(train|heldout)/corpus\.json$", key)]

    def lease(self) -> Lease:
        """Return a lease on the directory. The caller acquires the lease with `take`."""
        claims = BucketClaims(self._files(), self.url)
        say = functools.partial(print, file=sys.stderr, flush=True)
        return Lease(claims, self.url, _TIMES, say=say, writer="build", place="directory")

    def _find(self, name: str = "") -> list[str]:
        """Return the keys below a directory; [] if it does not exist."""
        files, key = self._files(), self._key(name)
        return list(files.find(key)) if files.exists(key) else []

    def _files(self) -> Any:
        return file_system(self.url)

    def _key(self, name: str = "") -> str:
        return f"{self.url.partition('://')[2]}/{name}".rstrip("/")


def is_corpora(path: Path) -> bool:
    """Return true if `path` is a corpus, or a directory of corpora as `--by-column` makes it."""
    if is_store(path / "train"):
        return True
    found = [each for each in path.glob("*") if each.name != QUARANTINE]
    return bool(found) and all(is_store(each / "train") for each in found)


@contextlib.contextmanager
def open_workspace(out: str | Path, *, overwrite: bool, resume: bool) -> Iterator[Workspace]:
    """Yield the workspace of a build, which becomes the corpus `out` if the `with` block succeeds.

    If the block fails and `resume` is set, complete tasks are kept for the next build.

    Raises:
        UserError: `out` may not be replaced, or cannot be written, or another build uses it.
    """
    if not is_url(out):
        with StagedDirectory(out, is_corpora, overwrite=overwrite, resume=resume) as staged:
            space = Workspace(staged.path)
            try:
                yield space
            except BaseException:
                # Without the mark of a shard or a scan, the next build has nothing to continue.
                if not any(staged.path.rglob(f"{MARKS}/*.json")):
                    shutil.rmtree(staged.path, ignore_errors=True)
                raise
            try:
                staged.commit()
            except OSError as error:
                raise disk_full(Path(out), error) from error
        return
    bucket = BucketWorkspace(str(out))
    lease = bucket.lease()
    try:
        with failures_named(f"cannot write {out}", str(out)):
            while not lease.take():
                time.sleep(_TIMES.poll)
            there = bucket.manifests()
            if there and not overwrite:
                raise UserError(
                    f"{out} already exists and is complete. Name another place, or ask for it to "
                    "be overwritten (--overwrite)."
                )
            for key in there:  # without manifests the old corpus no longer counts
                file_system(bucket.url).rm_file(key)
        yield bucket
    finally:
        lease.release()
