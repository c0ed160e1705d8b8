"""Access to files by name: local path, gs:// or s3://BUCKET/FILE, hf://datasets/...@COMMIT/FILE."""

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.errors import UserError

_PACKAGES = {
    "gs": ("gcsfs", "gcs"), "gcs": ("gcsfs", "gcs"), "s3": ("obstore", "s3"),
    "hf": ("huggingface_hub", "hub"),
}  # fmt: skip
"""Package that each URL scheme needs, and the extra of bert_jax that installs the package."""
BUCKETS = ("gs", "s3")  # schemes of buckets that hold corpora
_VERSIONS = ("generation", "blob_id", "e_tag", "etag", "ETag", "mtime", "last_modified")
_REMEDIES = {
    "gs": (
        "gcloud storage buckets create gs://",
        "Run `gcloud auth application-default login`, or "
        "give this machine's service account the role roles/storage.objectAdmin on the bucket",
    ),
    "s3": (
        "aws s3 mb s3://",
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_ENDPOINT_URL "
        "for another store than Amazon's), or give this machine a role that may use the bucket",
    ),
}
"""For each kind of bucket: the command that makes a bucket, and what to do about denied access."""


class FileState(NamedTuple):
    """Size and version of a file. Equal states mean that the content has not changed."""

    size: int
    version: str
    """Modification time in nanoseconds. For a URL: the store's version, such as a generation."""


def scheme(path: str | Path) -> str | None:
    """Return a URL's scheme, such as "gs" (also for gs:/x, as in a `Path`); None for a path."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/", str(path))
    return match[1] if match else None


def is_url(name: str | os.PathLike[str]) -> bool:
    """Tell whether a name is a URL, such as gs://BUCKET/FILE."""
    return "://" in str(name)


def file_system(url: str) -> Any:
    """Return the fsspec file system of a URL. Raise a UserError for an unsupported scheme."""
    kind = scheme(url) or ""
    package, extra = _PACKAGES.get(kind, ("", ""))
    if not package:
        raise UserError(
            f"{url}: {kind}:// is not supported; give a local file, gs://BUCKET/FILE, "
            "s3://BUCKET/FILE or hf:OWNER/NAME"
        )
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{url} needs {package}, which is not installed: pip install 'bert_jax[{extra}]'"
        )
    if kind == "s3":
        from obstore.fsspec import FsspecStore

        return FsspecStore("s3")
    import fsspec

    for protocol in ("gs", "gcs"):  # a cached listing would miss what other processes write
        fsspec.config.conf.setdefault(protocol, {})["use_listings_cache"] = False
    return fsspec.filesystem(kind)


def file_state(name: str) -> FileState:
    """Return a file's size and version. Raise a UserError if the file cannot be reached."""
    with _read_failures(name):
        if not is_url(name):
            status = os.stat(name)
            return FileState(status.st_size, str(status.st_mtime_ns))
        info = file_system(name).info(name)
        if info["type"] == "directory":
            raise FileNotFoundError(name)
        return _state(info)


def _state(info: Mapping[str, Any]) -> FileState:
    version = next((info[key] for key in _VERSIONS if info.get(key)), "")
    return FileState(int(info["size"]), str(version))


@contextlib.contextmanager
def open_binary(name: str) -> Iterator[Any]:
    """Open a local or remote file; raise a UserError if opening or a read in the block fails."""
    opens = file_system(name).open if is_url(name) else open
    with _read_failures(name), opens(name, "rb") as file:
        yield file


def match_urls(pattern: str) -> dict[str, FileState]:
    """Return the remote files that match a URL or a pattern (`*`, `?`, `**`), sorted by name."""
    files = file_system(pattern)
    prefix = pattern[: pattern.index("://") + 3]
    with _read_failures(pattern):
        if not re.search(r"[*?\[]", pattern):
            with contextlib.suppress(FileNotFoundError):  # `isfile` would hide other errors
                info = files.info(pattern)
                return {pattern: _state(info)} if info["type"] == "file" else {}
            return {}
        found = files.glob(pattern.removeprefix(prefix), detail=True)
    there = sorted(name for name, info in found.items() if info["type"] == "file")
    return {prefix + name: _state(found[name]) for name in there if not name.endswith("/")}


def list_states(urls: Sequence[str]) -> dict[str, FileState]:
    """Return the states of remote files, in the order of `urls`. Each directory is listed once."""
    found = dict[str, FileState]()
    for folder in dict.fromkeys(url.rpartition("/")[0] for url in urls):
        with _read_failures(folder):
            entries = file_system(folder).ls(folder, detail=True)
        found |= {f"{scheme(folder)}://{each['name']}": _state(each) for each in entries}
    return {url: found[url] for url in urls}


def upload(directory: Path, url: str) -> None:
    """Copy the files of a local directory to a URL. Each file appears only when it is complete.

    Manifests (`corpus.json`) are copied last, so that a manifest never describes a missing file.
    Raise a UserError if the files cannot be written.
    """
    files = file_system(url)
    with failures_named(f"cannot write {url}", url):
        found = [path for path in directory.rglob("*") if path.is_file()]
        for path in sorted(found, key=lambda each: (each.name == "corpus.json", each)):
            files.put_file(str(path), f"{url}/{path.relative_to(directory).as_posix()}")


@contextlib.contextmanager
def _read_failures(name: str) -> Iterator[None]:
    with failures_named(f"cannot read {name}", name):
        try:
            yield
        except FileNotFoundError as error:
            raise UserError(f"cannot read {name}: No such file or directory.") from error


@contextlib.contextmanager
def failures_named(what: str, name: str) -> Iterator[None]:
    """Turn I/O errors in the `with` block into UserErrors whose messages begin with `what`."""
    is_bucket = scheme(name) in ("gcs", *BUCKETS)
    try:
        with bucket_failures(what, name) if is_bucket else contextlib.nullcontext():
            yield
    except ConnectionError as error:
        raise UserError(f"{error}. Rerun the command") from error
    except OSError as error:
        reason = error.strerror or (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{what}: {reason}.") from error


@contextlib.contextmanager
def bucket_failures(what: str, url: str) -> Iterator[None]:
    """Turn errors of a store or the network into errors that say what to do.

    A missing bucket or permission becomes a UserError. Other errors become ConnectionErrors.
    """
    failures: tuple[type[Exception], ...]
    if scheme(url) == "s3":
        from obstore.exceptions import BaseError

        failures = (OSError, BaseError)
    else:
        import aiohttp
        import google.auth.exceptions
        from gcsfs.retry import HttpError

        failures = (OSError, HttpError, aiohttp.ClientError, google.auth.exceptions.GoogleAuthError)
    try:
        yield
    except failures as error:
        text = (str(error).strip().splitlines() or [""])[0][:200]
        bucket = url.partition("://")[2].partition("/")[0]
        create, access = _REMEDIES["s3" if scheme(url) == "s3" else "gs"]
        if isinstance(error, FileNotFoundError) or "NoSuchBucket" in str(error):
            raise UserError(
                f"{what}: there is no bucket {bucket}, or these credentials cannot see it. "
                f"Create it with `{create}{bucket}`"
            ) from error
        denied = getattr(error, "code", None) in (401, 403) or text.startswith("Forbidden")
        denied |= type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")
        if denied or type(error).__module__.startswith("google.auth"):
            raise UserError(
                f"{what}: access denied or no credentials ({type(error).__name__}: {text}). "
                + access
            ) from error
        raise ConnectionError(f"{what}: {type(error).__name__}: {text}") from error
