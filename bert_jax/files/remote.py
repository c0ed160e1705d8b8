"""The work directory of a run, which is a local directory or a directory in a bucket.

Checkpoints are written directly to the bucket. Other files (such as metrics.jsonl) are appended to,
which a bucket does not support: they are in a local mirror, and `WorkDir.sync` uploads changes.
"""

import atexit
import contextlib
import datetime
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import jax
from etils import epath

from bert_jax.errors import UserError
from bert_jax.files.claims import CLAIM, BucketClaims, Claims, LocalClaims
from bert_jax.files.urls import FileState, bucket_failures, file_state, file_system, scheme

_CHECKPOINTS, _DAMAGED, _RESUME = "checkpoints", "damaged", "resume"
"""Directories of checkpoints, which are read and written in the bucket and not mirrored."""
_LARGEST = 1 << 30
_log = logging.getLogger("bert_jax")


@dataclass(frozen=True)
class WorkDir:
    """Paths of the parts of a work directory, and access to its lease files."""

    local: Path
    """Directory of config.json, metrics.jsonl, tokenizer/ and other small files."""
    checkpoints: epath.Path
    """Directory of the checkpoints."""
    damaged: epath.Path
    """Directory to which damaged checkpoints are moved."""
    resume: epath.Path
    """Directory that holds the checkpoints of all runs of a sweep until the sweep ends."""
    name: str
    """Path or URL of the work directory, for messages."""
    mirror: "_Mirror | None" = None
    """Mirror, in `local`, of the small files in a bucket. None if the work directory is local."""
    confirm: Callable[[], None] | None = None
    """Function that ends the process if the run has lost its lease. `sync` calls it."""

    def claims(self) -> Claims:
        """Return the claims (lease files) in the work directory."""
        if self.mirror is None:
            return LocalClaims(self.local)
        return BucketClaims(self.mirror.files, self.name)

    @contextlib.contextmanager
    def failures_named(self, what: str) -> Iterator[None]:
        """Turn I/O errors in the `with` block into errors that begin with `what` and the directory.

        A local error becomes a UserError. `bucket_failures` describes the errors of a bucket.
        """
        if self.mirror is not None:
            with bucket_failures(f"{what} {self.name}", self.name):
                yield
            return
        try:
            yield
        except OSError as error:
            raise UserError(f"{what} {self.name}: {error}") from error

    def sync(self, *, required: bool = False) -> None:
        """Upload the small files of a bucket's mirror that changed since the last call.

        Process 0 confirms its lease, then uploads. If this is done before each save, a run that is
        restarted from a save finds all metrics up to the save. A failed upload is logged and
        retried at the next call, unless `required`. If `required`, a missing bucket or permission
        raises a UserError, and any other failure a ConnectionError.
        """
        if jax.process_index() != 0:
            return
        if self.confirm is not None:
            self.confirm()
        if self.mirror is None:
            return
        try:
            with bucket_failures(f"cannot upload to {self.name}", self.name):
                self.mirror.upload()
        except (UserError, ConnectionError) as reason:
            if required:
                raise
            _log.error("%s. The run continues and tries again at the next save", reason)


def open_workdir(path: str | Path) -> WorkDir:
    """Open a work directory: a local path, which need not exist, or gs://BUCKET/DIRECTORY.

    Raise a UserError if the scheme is not gs, no directory follows the bucket, gcsfs is not
    installed, the bucket does not exist, or the user has no permission to access it. Raise a
    ConnectionError if the bucket is out of reach; another try may succeed.
    """
    kind, name, mirror = scheme(path), str(path), None
    if kind is None:
        local = Path(path)
        # TensorStore cannot read paths that contain "..".
        root = epath.Path(local.resolve() if ".." in local.parts else local.absolute())
    else:
        bucket, _, directory = name.partition(":")[2].strip("/").partition("/")
        if kind == "s3":
            raise UserError(
                f"the work directory {path}: Orbax, which writes checkpoints, has no s3://. Give a "
                "local directory, which `aws s3 sync` can copy, or gs://BUCKET/DIRECTORY; "
                "data.corpus may be in s3://"
            )
        if kind != "gs":
            raise UserError(
                f"the work directory {path}: {kind}:// is not supported. Give a local directory or "
                "gs://BUCKET/DIRECTORY"
            )
        if not directory:
            raise UserError(
                f"the work directory {path} names no directory in a bucket; give "
                "gs://BUCKET/DIRECTORY"
            )
        name = f"gs://{bucket}/{directory}"
        mirror = _Mirror(name)
        with bucket_failures(f"cannot open {name}", name):
            mirror.download(bucket)
        local, root = mirror.local, epath.Path(name)
    return WorkDir(local, root / _CHECKPOINTS, root / _DAMAGED, root / _RESUME, name, mirror)


class _Mirror:
    """A local copy of the files under a URL, except the checkpoints."""

    def __init__(self, url: str):
        self._url, self.files = url, file_system(url)
        self._uploaded: dict[str, FileState] = {}
        self._failed = False
        self.renewals: list[float] = []
        """Times at which the leases that `download` found were renewed, in seconds since 1970."""
        self.local = Path(tempfile.mkdtemp(prefix="bert_jax-"))
        atexit.register(self._remove)

    def download(self, bucket: str) -> None:
        """Download every file that is not in a directory of checkpoints."""
        self.files.info(bucket)  # fails for a missing bucket; a listing would just be empty
        root = self._url.removeprefix("gs://")
        try:
            entries = self.files.ls(root, detail=True)
        except FileNotFoundError:  # a new run
            return
        objects: dict[str, Any] = {}
        for entry in entries:
            if entry["type"] != "directory":
                objects[entry["name"]] = entry
            elif PurePosixPath(entry["name"]).name not in (_CHECKPOINTS, _DAMAGED, _RESUME):
                objects |= self.files.find(entry["name"], detail=True)
        for key, entry in objects.items():
            name, written = key.removeprefix(f"{root}/"), entry.get("mtime")
            time = written.timestamp() if isinstance(written, datetime.datetime) else None
            if CLAIM.fullmatch(name):  # a lease
                self.renewals += [] if time is None else [time]
                continue
            if name.endswith("/") or key == root:  # a directory's marker, which web consoles write
                continue
            if not set(PurePosixPath(name).parts).isdisjoint(("..", "/")):
                raise UserError(
                    f"{self._url} holds an object with the name {name!r}, which leads out of the "
                    "directory; remove it"
                )
            if entry["size"] > _LARGEST:
                raise UserError(
                    f"{self._url}/{name} has {entry['size']:,} bytes; the limit for a file that is "
                    f"not a checkpoint is {_LARGEST:,}. Move it to another directory"
                )
            target = self.local / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self.files.cat_file(key))
            if time is not None:
                os.utime(target, (time, time))
            self._uploaded[name] = file_state(str(target))

    def upload(self) -> None:
        """Upload each changed file. No object is deleted, even if its local file is gone."""
        self._failed = True
        for path in sorted(self.local.rglob("*")):
            name = path.relative_to(self.local).as_posix()
            if not path.is_file() or re.search(r"\.tmp\b", name):
                continue
            # Take the state before the read: lines appended meanwhile are uploaded next time.
            state = file_state(str(path))
            if self._uploaded.get(name) == state:
                continue
            self.files.pipe_file(f"{self._url}/{name}", path.read_bytes())
            self._uploaded[name] = state
        self._failed = False

    def _remove(self) -> None:
        if self._failed:
            _log.error("Files that could not be uploaded to %s are in %s", self._url, self.local)
        else:
            shutil.rmtree(self.local, ignore_errors=True)
