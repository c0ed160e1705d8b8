"""Claims: small files with which a process marks a directory as its own (see `lease`).

If several processes create a claim at once, exactly one succeeds: local disks, NFS and buckets all
guarantee this. Each renewal gives the claim a new version, which shows that the owner is alive.
"""

import contextlib
import errno
import os
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from typing_extensions import override

from bert_jax.errors import UserError

CLAIM = re.compile(r"lease-([1-9]\d{0,8})\.json")  # file name; later claims have higher numbers
_MAX_BYTES = 4096
_OTHER = {"e_tag": '"0"'}  # condition that no object in S3 meets, because tags are longer


@runtime_checkable
class Claims(Protocol):
    """The claims in one directory."""

    def numbers(self) -> list[int]:
        """List the numbers of all claims, in ascending order."""

    def create(self, number: int, content: bytes) -> bool:
        """Create a claim. Return False if the number is taken."""

    def read(self, number: int) -> tuple[bytes, Hashable] | None:
        """Read the content and version of a claim. Return None if the claim does not exist."""

    def renew(self, number: int, content: bytes) -> bool:
        """Renew this process's claim. Return False if the claim is gone or taken over."""

    def remove(self, number: int) -> None:
        """Remove a claim if it exists."""


class LocalClaims(Claims):
    """Claims in a local directory or on NFS; `create` makes a missing directory.

    A version is the modification time set by the file server. Versions are only compared for
    equality, so clocks need not agree. Every read opens the file: NFS clients then ask the server.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._made: list[Path] = []

    @override
    def numbers(self) -> list[int]:
        try:
            return _numbers(os.listdir(self._directory))
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise UserError(
                f"{self._directory} is a file or lies below a file; the work directory must be a "
                "directory"
            ) from None

    @override
    def create(self, number: int, content: bytes) -> bool:
        places = (self._directory, *self._directory.parents)
        missing = [path for path in places if not path.exists()]
        self._directory.mkdir(parents=True, exist_ok=True)
        self._made = missing or self._made
        try:
            file = os.open(self._path(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(file, content)
            os.fsync(file)
        except OSError:
            self.remove(number)
            raise
        finally:
            os.close(file)
        return True

    @override
    def read(self, number: int) -> tuple[bytes, Hashable] | None:
        try:
            with open(self._path(number), "rb") as file:
                return file.read(_MAX_BYTES), os.fstat(file.fileno()).st_mtime_ns
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return None
            raise

    @override
    def renew(self, number: int, content: bytes) -> bool:
        found = self.read(number)
        if found is not None and found[0] == content:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._path(number))  # needs no space, so it works on a full disk
                return True
        os.stat(self._directory)  # raises if not mounted; the claim is then not known to be lost
        return False

    @override
    def remove(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # `rmdir` fails if a run has written files
            for path in self._made:
                path.rmdir()
        self._made = []

    def _path(self, number: int) -> Path:
        return self._directory / f"lease-{number}.json"


class BucketClaims(Claims):
    """Claims as objects of Cloud Storage. The version of a claim is the generation of the object.

    Every write names the generation that it replaces, so only one of concurrent writes succeeds.
    `files`, a gcsfs file system, must not cache listings.
    """

    def __init__(self, files: Any, url: str):
        self._files = files
        self._bucket, _, self._root = url.partition("://")[2].partition("/")
        self._generation = ""

    @override
    def numbers(self) -> list[int]:
        try:
            found = self._files.ls(f"{self._bucket}/{self._root}", detail=False)
        except FileNotFoundError:
            return []
        return _numbers(name.rpartition("/")[2] for name in found)

    @override
    def create(self, number: int, content: bytes) -> bool:
        return self._write(number, content, "0")

    @override
    def read(self, number: int) -> tuple[bytes, Hashable] | None:
        path = f"{self._bucket}/{self._key(number)}"
        try:
            generation = str(self._files.info(path)["generation"])
            return self._files.cat_file(path)[:_MAX_BYTES], generation
        except FileNotFoundError:
            return None

    @override
    def renew(self, number: int, content: bytes) -> bool:
        return bool(self._generation) and self._write(number, content, self._generation)

    @override
    def remove(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.call("DELETE", "b/{}/o/{}", self._bucket, self._key(number))

    def _write(self, number: int, content: bytes, generation: str) -> bool:
        url = self._files.base.replace("/storage/v1/", "/upload/storage/v1/b/{}/o")
        try:
            written = self._files.call(
                "POST", url, self._bucket, uploadType="media", name=self._key(number),
                ifGenerationMatch=generation, data=content, json_out=True,
            )  # fmt: skip
        except FileExistsError:  # our own earlier request may have succeeded without a reply
            found = self.read(number)
            if found is None or found[0] != content:
                return False
            written = {"generation": found[1]}
        self._generation = str(written["generation"])
        return True

    def _key(self, number: int) -> str:
        return f"{self._root}/lease-{number}.json"


class S3Claims(Claims):
    """Claims in S3 or a similar store with conditional writes; a version is the time of writing."""

    def __init__(self, url: str):
        import obstore

        self._s3: Any = obstore
        self._url, self._store = url, obstore.store.from_url(url)
        self._etag: str | None = None

    @override
    def numbers(self) -> list[int]:
        found = self._s3.list_with_delimiter(self._store)["objects"]
        return _numbers(each["path"].rpartition("/")[2] for each in found)

    @override
    def create(self, number: int, content: bytes) -> bool:
        fault = ""
        try:
            if not self._write(number, content, "create"):
                return False
            if self._write(number, content, "create") or self._write(number, content, _OTHER):
                fault = "ignores"
        except (NotImplementedError, self._s3.exceptions.BaseError) as error:
            if isinstance(error, NotImplementedError):  # obstore's own
                fault = "is used with AWS_CONDITIONAL_PUT=disabled, without"
            elif "status code: 501" in str(error):
                fault = "answers 501 (Not Implemented) to"
            else:
                raise
        if fault:
            self.remove(number)
            endpoint = os.environ.get("AWS_ENDPOINT_URL", "this store")
            raise UserError(
                f"{self._url}: {endpoint} {fault} the conditions If-None-Match and If-Match of "
                "writes, so two processes could write to one directory. Take a store that has "
                "conditional writes, or a local directory"
            )
        return True

    @override
    def read(self, number: int) -> tuple[bytes, Hashable] | None:
        try:
            found = self._s3.get(self._store, f"lease-{number}.json")
            return bytes(found.bytes())[:_MAX_BYTES], found.meta["last_modified"]
        except FileNotFoundError:
            return None

    @override
    def renew(self, number: int, content: bytes) -> bool:
        return self._write(number, content, {"e_tag": self._etag})

    @override
    def remove(self, number: int) -> None:
        self._s3.delete(self._store, f"lease-{number}.json")

    def _write(self, number: int, content: bytes, mode: Any) -> bool:
        errors = self._s3.exceptions
        try:
            put = self._s3.put(self._store, f"lease-{number}.json", content, mode=mode)
        except (errors.AlreadyExistsError, errors.PreconditionError, FileNotFoundError):
            return False
        self._etag = put["e_tag"]
        return True


def bucket_claims(files: Any, url: str) -> Claims:
    """Return the claims in a directory of a bucket, given its fsspec file system."""
    return S3Claims(url) if url.startswith("s3://") else BucketClaims(files, url)


def _numbers(names: Any) -> list[int]:
    return sorted(int(match[1]) for name in names if (match := CLAIM.fullmatch(name)))
