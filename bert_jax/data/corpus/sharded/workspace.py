"""Workspace of a build: the shards that tasks write, and the marks of complete tasks.

If the output directory OUT is local, the workspace is OUT.unfinished, which is renamed to OUT at
the end. If OUT is in a bucket, the workspace is OUT itself, which becomes a corpus when its last
files, the manifests, are written.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import fsspec

from bert_jax.data.corpus.datasheet import DATASHEET
from bert_jax.data.corpus.intake import MARKS, QUARANTINE
from bert_jax.data.store import ARRAYS, COUNTS, is_store
from bert_jax.errors import UserError
from bert_jax.files.claims import bucket_claims
from bert_jax.files.lease import Lease, Times
from bert_jax.files.staging import StagedDirectory, disk_full, replace_file
from bert_jax.files.untrusted.json_file import parse_json
from bert_jax.files.urls import failures_named, file_system, is_url, upload

_OWN = re.compile(
    rf"{MARKS}/\d{{5,}}\.json|{QUARANTINE}/[\w-]+\.jsonl|([\w-]+/)?(train|heldout)/(corpus\.json|"
    rf"tokenizer/[\w.]+|shards/\d{{5,}}/({'|'.join((*ARRAYS, COUNTS))})\.bin)"
)
"""Names of files that a build may remove. A directory in a bucket may also hold a user's files."""
_TIMES = Times(patience=30.0)
"""Times of the lease on a bucket. Patience is short, since a stopped build has nothing to save."""


class Part(NamedTuple):
    """A part of a file of a workspace, from byte `begin` up to byte `end`."""

    name: str
    begin: int
    end: int


class Workspace:
    """A picklable directory that all processes of a build access: on a shared disk, or a URL."""

    def __init__(self, place: str | Path) -> None:
        self.place = str(place).rstrip("/") if is_url(place) else os.path.abspath(place)
        self.local = None if is_url(self.place) else Path(self.place)
        """Directory of the workspace; None in a bucket."""

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a local directory. If the `with` block succeeds, its files join the workspace."""
        if self.local is None:
            with tempfile.TemporaryDirectory(prefix="bert_jax-") as name:
                yield Path(name)
                upload(Path(name), self.place)
            return
        if not self.local.is_dir():
            raise UserError(
                f"{self.local} does not exist on the node {socket.gethostname()}. All nodes of a "
                "cluster need access to it: give an --out in a bucket or on a shared disk."
            )
        yield self.local

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is no such file."""
        with self._failures("read"), contextlib.suppress(FileNotFoundError):
            return self._files().cat_file(self._key(name))
        return None

    def read_parts(self, parts: Sequence[Part]) -> list[bytes]:
        """Return the bytes of parts of files."""
        names, begins, ends = map(list, zip(*parts, strict=True))
        with self._failures("read"):
            keys = list(map(self._key, names))
            return self._files().cat_ranges(keys, begins, ends, on_error="raise")

    @contextlib.contextmanager
    def local_copy(self, name: str) -> Iterator[Path]:
        """Yield a local path with the content of a file."""
        if self.local is not None:
            yield self.local / name
            return
        with tempfile.NamedTemporaryFile(prefix="bert_jax-") as file:
            with self._failures("read"):
                self._files().get_file(self._key(name), file.name)
            yield Path(file.name)

    def marks(self) -> dict[str, Any]:
        """Return the marks of complete tasks by name. A task whose mark is damaged is left out."""
        found = dict[str, Any]()
        for name in self._find(MARKS):
            data = self.read(name) or b""
            with contextlib.suppress(UserError):
                mark = parse_json(data, where=name)
                found |= {Path(name).stem: mark} if isinstance(mark, dict) else {}
        return found

    def write_mark(self, name: str, mark: dict[str, Any]) -> None:
        """Mark a task as complete; its files must have been written."""
        with self.scratch() as root:
            data = json.dumps(mark, ensure_ascii=False).encode(errors="replace")
            replace_file(root / MARKS / f"{name}.json", data)

    def keep_only(self, shards: Sequence[str]) -> None:
        """Remove what earlier builds left behind: shards except `shards`, and bad records."""
        if self.local is None:
            kept = tuple(f"{each}/" for each in (*shards, MARKS))
            self._remove(name for name in self._find() if not name.startswith(kept))
            return
        stays = {self.local / each for each in (*shards, MARKS)}
        parents = {parent for each in stays for parent in each.parents}
        for directory in filter(Path.is_dir, parents - set(self.local.parents)):
            for path in directory.iterdir():
                if path.is_dir() and path not in stays and path not in parents:
                    shutil.rmtree(path)

    def remove(self, name: str = "") -> None:
        """Remove the workspace or one of its directories; in a bucket, only a build's files."""
        if name and self.local is None:
            self._remove(self._find(name))
        elif self._files().exists(self._key(name)):
            self._files().rm(self._key(name), recursive=True)

    def lease(self) -> Lease:
        """Return a lease on the directory of a bucket. The lease is not taken yet."""
        claims = bucket_claims(self._files(), self.place)
        say = functools.partial(print, file=sys.stderr, flush=True)
        return Lease(claims, self.place, _TIMES, say=say, writer="build", place="directory")

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files; a bucket's client removes several at once."""
        with self._failures("remove files of"):
            if keys := [*map(self._key, names)]:
                self._files().rm(keys)

    def _find(self, name: str = "") -> list[str]:
        """Return the names of a build's files in a directory; [] if it does not exist."""
        files, key, start = self._files(), self._key(name), len(self._key()) + 1
        with self._failures("list"):
            names = (each[start:] for each in files.find(key)) if files.exists(key) else ()
        return list(filter(_OWN.fullmatch, names))

    def _failures(self, verb: str) -> AbstractContextManager[None]:
        return failures_named(f"cannot {verb} {self.place}", self.place)

    def _files(self) -> Any:
        return fsspec.filesystem("file") if self.local else file_system(self.place)

    def _key(self, name: str = "") -> str:
        return f"{self.place.rpartition('://')[2]}/{name}".rstrip("/")


def is_corpora(path: Path) -> bool:
    """Return true if `path` has one corpus, or those of `--by-column`, and nothing else."""
    own = QUARANTINE, DATASHEET
    found = [p for p in path.glob("*") if p.name not in own and not is_store(p)]
    return all(is_store(p / "train") for p in found) and (bool(found) or is_store(path / "train"))


@contextlib.contextmanager
def open_workspace(out: str | Path, *, overwrite: bool, resume: bool) -> Iterator[Workspace]:
    """Yield the workspace of a build, which becomes the corpus `out` if the `with` block succeeds.

    If the block fails and `resume` is set, complete tasks are kept for the next build. A local
    build also resumes if an earlier build left `OUT.unfinished`. Raise a UserError if `out` may not
    be replaced, or cannot be written, or another build uses it.
    """
    if not is_url(out):
        # Otherwise the unfinished directory of an earlier build would never be removed.
        resume = resume or Path(f"{os.path.realpath(out)}.unfinished").is_dir()
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
    bucket = Workspace(out)
    lease = bucket.lease()
    try:
        with failures_named(f"cannot write {out}", str(out)):
            while not lease.take():
                time.sleep(_TIMES.poll)
            there = [name for name in bucket._find() if name.endswith("/corpus.json")]
            if there and not overwrite:
                how = "Name another place, or ask for it to be overwritten (--overwrite)."
                raise UserError(f"{out} already exists and is complete. {how}")
            bucket._remove(there)  # without manifests the old corpus no longer counts
        yield bucket
    finally:
        lease.release()
