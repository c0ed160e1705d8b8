"""Layout of checkpoints on disk or in a bucket. Only this file imports Orbax and TensorStore.

Orbax writes the arrays of all processes. A checkpoint appears only when complete: by a rename or,
in a bucket, by a last file (`commit_success.txt`). To verify, TensorStore reads arrays on the host.
"""

import contextlib
import errno
import gc
import itertools
import json
import logging
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tensorstore
from etils import epath
from orbax.checkpoint import v1 as ocp

from bert_jax.files.staging import REASONS
from bert_jax.files.untrusted.json_file import parse_json
from bert_jax.files.urls import file_system, is_url

PARAMS, REST, RECORD = "params", "rest", "record"
_COMMITTED = "commit_success.txt"
_OUT_OF_REACH = (  # status codes of TensorStore, which the text of a ValueError contains
    "UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|ABORTED|RESOURCE_EXHAUSTED"
)
_ARRAY, _DICT_KEY = {"value_type": "jax.Array", "skip_deserialize": False}, 2
"""Metadata that Orbax writes for an array, and type number of a key of a dict."""
_UNFINISHED = ("*.orbax-checkpoint-tmp*", "*.deleted")
_SAVE_FAULTS = {
    **{code: why for code, why in REASONS.items() if code not in (errno.ENOENT, errno.EEXIST)},
    errno.ENOENT: "the directory is gone",
}

AnyPath: TypeAlias = epath.Path | Path
"""A path on a local disk or in a bucket (`gs://`)."""


def as_path(directory: AnyPath | str) -> epath.Path:
    """Return an absolute path, locally or in a bucket."""
    path = epath.Path(directory)
    if not is_url(path):
        return epath.Path(Path(directory).absolute())
    file_system(str(path))  # turns off cached listings before epath makes (and keeps) its own
    return path


def saved_steps(directory: AnyPath) -> list[int]:
    """Return the steps of the complete checkpoints, even damaged ones, in ascending order."""
    directory = as_path(directory)
    try:  # `is_dir` would be false for a bucket that cannot be reached, too
        steps = [p for p in directory.iterdir() if p.name.isdigit() and p.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        damage(error, directory)  # raises a ConnectionError for a bucket
        raise
    commits = is_url(directory)
    return sorted(int(p.name) for p in steps if not commits or (p / _COMMITTED).exists())


def newest_step(directory: AnyPath) -> int | None:
    """Return the newest step for a message; None if there is none, or steps cannot be listed."""
    with contextlib.suppress(OSError):  # the message reports another error
        return max(saved_steps(directory), default=None)
    return None


def remove_unfinished(directory: AnyPath) -> None:
    """Remove the files that interrupted saves and deletions left."""
    directory = as_path(directory)
    if not directory.is_dir():
        return
    for leftover in itertools.chain.from_iterable(map(directory.glob, _UNFINISHED)):
        if leftover.is_dir():
            leftover.rmtree()
        else:
            leftover.unlink()
    if is_url(directory):
        complete = saved_steps(directory)
        for path in directory.iterdir():
            if path.name.isdigit() and int(path.name) not in complete:
                path.rmtree()


def delete(checkpoint: AnyPath) -> None:
    """Delete a checkpoint. The remains of an interrupted deletion do not count as a checkpoint."""
    checkpoint = as_path(checkpoint)
    if is_url(checkpoint):
        (checkpoint / _COMMITTED).unlink(missing_ok=True)
        checkpoint.rmtree()
    else:
        condemned = checkpoint.with_name(f"{checkpoint.name}.deleted")
        checkpoint.rename(condemned)
        condemned.rmtree()


def set_aside(checkpoint: AnyPath, target: AnyPath) -> epath.Path:
    """Move a checkpoint into the directory `target`; return its new path."""
    checkpoint, target = as_path(checkpoint), as_path(target)
    target.mkdir(parents=True, exist_ok=True)
    taken = len(list(target.glob(f"{checkpoint.name}.*")))
    aside = target / f"{checkpoint.name}.{taken}"
    if is_url(checkpoint):
        import fsspec

        (checkpoint / _COMMITTED).unlink(missing_ok=True)  # a half-moved checkpoint must not count
        fsspec.filesystem("gs").copy(f"{checkpoint}/", f"{aside}/", recursive=True)
        checkpoint.rmtree()
    else:
        checkpoint.rename(aside)
    return aside


def write_async(
    checkpoint: AnyPath, arrays: dict[str, dict[str, Any]], record: dict[str, Any]
) -> Any:
    """Start a save, and return when the arrays are copied. From then on they may be donated.

    This is collective. The directory `checkpoint` must not exist; it appears when everything is
    written. The returned future's `result()` waits until then, or raises a failed save's error.
    `arrays` has the groups "params" (nested) and "rest" (other arrays, flat). `record` is JSON.
    """
    with _context():
        # Copy the record, since Orbax writes it later and the caller may change its values.
        return ocp.save_checkpointables_async(
            as_path(checkpoint), {**arrays, RECORD: json.loads(json.dumps(record))}
        )


def write_tree(directory: AnyPath, tree: dict[str, Any]) -> None:
    """Write a nested dict of arrays in Orbax's default format, which other programs can read."""
    ocp.save(as_path(directory), tree)


def read_tree(directory: AnyPath) -> dict[str, Any]:
    """Read into host memory a tree that `write_tree` wrote."""
    return ocp.load(as_path(directory))


def read_arrays(checkpoint: AnyPath, wanted: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Read groups of arrays onto devices. Return the arrays and a fault ("" if there is none).

    Collective. `wanted` has the groups of `write_async`, with a `jax.ShapeDtypeStruct` per array.
    """
    loaded: dict[str, Any] = {}
    fault = ""
    # After a read error, Orbax leaves coroutines and tasks that were never awaited. They are
    # collected here without their many warnings. The caller reports the error itself.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            for group, abstract in wanted.items():
                with _context():
                    loaded |= ocp.load_checkpointables(as_path(checkpoint), {group: abstract})
        except Exception as error:  # for a damaged file, Orbax may raise any type of error
            fault = damage(error, checkpoint)
        if fault:
            asyncio_log = logging.getLogger("asyncio")
            level, asyncio_log.level = asyncio_log.level, logging.CRITICAL
            gc.collect()
            asyncio_log.level = level
    return loaded, fault


def listed_arrays(checkpoint: AnyPath) -> set[tuple[str, str]]:
    """Return (group, name) of each array that Orbax's metadata files list. Not collective."""
    checkpoint = as_path(checkpoint)
    listed = set()
    for group in read_object(checkpoint / "_CHECKPOINT_METADATA")["item_handlers"]:
        if group != RECORD:
            content = read_object(checkpoint / group / "_METADATA")
            if not (content["use_ocdbt"] is content["use_zarr3"] is True):
                raise ValueError(f"the arrays in {group}/_METADATA are not OCDBT and Zarr 3")
            for leaf in content["tree_metadata"].values():
                keys = leaf["key_metadata"]
                kinds = {key["key_type"] for key in keys}
                if leaf["value_metadata"] != _ARRAY or kinds != {_DICT_KEY}:
                    raise ValueError(f"{group}/_METADATA lists other values than arrays in dicts")
                listed.add((group, "/".join(key["key"] for key in keys)))
    return listed


def host_blocks(
    checkpoint: AnyPath, group: str, name: str
) -> Iterator[tuple[np.ndarray, tuple[int, ...], tuple[int, ...]]]:
    """Yield the blocks of an array: (block, index of its first element, shape of the array).

    This is not collective. A block is in host memory and has the size of one device's part. `name`
    is the name in the group ("params" or "rest"): the keys of nested dicts, joined by "/".
    """
    place = f"{as_path(checkpoint) / group}/"
    base = {"driver": "file", "path": place}
    if place.startswith("gs://"):
        bucket, _, path = place.removeprefix("gs://").partition("/")
        base = {"driver": "gcs", "bucket": bucket, "path": path}
    inner = name.replace("/", ".") if group == PARAMS else name  # Orbax joins nested keys by a dot
    store = {"driver": "ocdbt", "base": base, "path": inner + "/"}
    array = tensorstore.open({"driver": "zarr3", "kvstore": store}, open=True).result()
    shape = tuple(array.shape)
    chunk = array.chunk_layout.read_chunk.shape or shape
    steps = [max(1, step or size) for step, size in zip(chunk, shape, strict=True)]
    for start in itertools.product(*map(range, [0] * len(shape), shape, steps)):
        part = tuple(
            slice(first, min(first + step, size))
            for first, step, size in zip(start, steps, shape, strict=True)
        )
        yield np.asarray(array[part].read().result()), start, shape


def damage(error: Exception, path: AnyPath) -> str:
    """Describe a read error as a phrase.

    If a bucket is out of reach or denies access, raise a ConnectionError: its files may be intact.
    """
    if is_url(path) and (
        type(error).__module__.split(".")[0] in ("gcsfs", "google", "aiohttp", "requests")
        or (isinstance(error, OSError) and not isinstance(error, FileNotFoundError))
        or re.search(_OUT_OF_REACH, str(error))
    ):
        raise ConnectionError(f"{path} cannot be read now: {one_line(error)}") from error
    return one_line(error)


def save_fault(error: BaseException) -> str:
    """Describe in a phrase why a save failed, from the error and its causes."""
    chain: list[BaseException] = []
    known: BaseException | None = error
    while known is not None and not any(known is seen for seen in chain):  # causes may be cyclic
        chain.append(known)
        known = known.__cause__ or known.__context__
    messages = "\n".join(map(str, chain))
    found = (reason for code, reason in _SAVE_FAULTS.items() if os.strerror(code) in messages)
    return next(found, one_line(error))


def one_line(error: BaseException) -> str:
    """Return an error as a phrase: its type and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def read_object(path: epath.Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raise an OSError or a ValueError if the file has none."""
    content = parse_json(path.read_bytes(), where=str(path), allow_nan=True)
    if not isinstance(content, dict):
        raise ValueError("the file does not contain a JSON object")
    return content


def _context() -> ocp.Context:
    registry = ocp.handlers.local_registry()
    # Store the record as one JSON file. By default, Orbax would store it as a tree of arrays.
    registry.add(ocp.handlers.JsonHandler, checkpointable_name=RECORD)
    context = ocp.Context()
    context.checkpointables.registry = registry
    # Compression would save 12% of weights and moments, for more than half of a save's CPU time.
    context.array.saving.use_compression = False
    # Devices with copies of an array each save a part of it. A program must be compiled for each
    # shape and device to cut the parts, so small arrays are not cut.
    context.array.saving.min_slice_bytes_for_replica_parallel = 1 << 16
    # Only random keys need this metadata. Verification would miss damage that breaks restores.
    context.array.saving.array_metadata_store = None
    # Otherwise, if a directory cannot be created, threads of Orbax would wait 20 minutes for it.
    context.asynchronous.create_directories_asynchronously = False
    return context
