"""Restoring the newest intact checkpoint of a directory onto devices.

These functions are collective: all processes call them, in the same order, from the main thread.
Process 0 lists checkpoints, reads records and decides what is damaged. All processes check files.
"""

import dataclasses
import logging
import time
from dataclasses import dataclass
from typing import Any

import jax
from etils import epath
from jax.sharding import SingleDeviceSharding

from bert_jax.distributed.checkpoint import storage
from bert_jax.distributed.checkpoint.agreement import all_agree, by_first
from bert_jax.distributed.checkpoint.digest import leaf_digests
from bert_jax.distributed.checkpoint.record import (
    Record,
    RecordFaultError,
    grouped,
    is_param,
    named_leaves,
    nested_params,
    read_record,
    ungrouped,
)
from bert_jax.distributed.checkpoint.storage import AnyPath, as_path, read_arrays, saved_steps
from bert_jax.distributed.checkpoint.verify import Verdict, file_fault, verify_checkpoint
from bert_jax.errors import UserError

_log = logging.getLogger("bert_jax")

_CACHED_SECONDS = 90.0
"""Longest wait until the file system shows a new directory. NFS and gcsfuse may need 60 s."""


class DamagedCheckpointError(RuntimeError):
    """Error if the requested checkpoint, or every checkpoint of a directory, is damaged."""

    exit_code = 5


class OutOfSightError(RuntimeError):
    """Error if another process cannot read a checkpoint that process 0 finds intact."""

    exit_code = 6  # another try may succeed


@dataclass(frozen=True)
class Restored:
    """Content of a restored checkpoint."""

    step: int
    """Next step to train, which is also the index of the next batch."""
    state: Any
    """The full state or, from `load_newest` without `abstract`, a nested dict of parameters."""
    record: Record
    damaged: tuple[Verdict, ...] = ()
    """Newer checkpoints that were skipped because they are damaged."""

    def warning(self) -> str:
        """Return a sentence that names the skipped checkpoints, or "" if there are none."""
        if not self.damaged:
            return ""
        what = "; ".join(f"{bad.step} ({bad.fault})" for bad in self.damaged)
        noun = "checkpoint" if len(self.damaged) == 1 else "checkpoints"
        return f"Skipped damaged {noun} {what}. Using the checkpoint of step {self.step}."


def load_newest(directory: AnyPath, abstract: Any = None) -> Restored | None:
    """Restore the newest intact checkpoint, or return None if there are no checkpoints.

    `abstract` is the state with a `jax.ShapeDtypeStruct`, which sets the sharding, for each array.
    If `abstract` is None, only the parameters are restored, onto one device. No files are changed.
    Raise a DamagedCheckpointError if there are checkpoints, but none is intact. Raise a UserError
    if a checkpoint has another format, or arrays of other names, shapes or dtypes. Raise an
    OutOfSightError if process 0 finds a checkpoint intact, but another process cannot read it.
    """
    directory = as_path(directory)
    damaged: list[Verdict] = []
    for step in reversed(by_first(lambda: saved_steps(directory))):
        found = _read(directory / str(step), abstract)
        if isinstance(found, Restored):
            return dataclasses.replace(found, damaged=tuple(damaged))
        damaged.append(Verdict(step, found))
    if damaged:
        what = "; ".join(f"{bad.step}: {bad.fault}" for bad in damaged)
        raise DamagedCheckpointError(
            f"no checkpoint in {directory} is intact ({what}). Restore the directory from a copy, "
            "or move it to another place to start the run from its beginning"
        )
    return None


def restore_step(directory: AnyPath, step: int, abstract: Any) -> Restored:
    """Restore a step's checkpoint. Raise a DamagedCheckpointError if it is damaged or missing."""
    path = as_path(directory) / str(step)
    found = _read(path, abstract)
    if isinstance(found, str):
        raise DamagedCheckpointError(f"the checkpoint {path} is damaged: {found}")
    return found


def _read(path: epath.Path, abstract: Any) -> Restored | str:
    """Read and check a checkpoint. Return its content or, if it is damaged, its fault."""

    def record_or_fault() -> tuple[dict[str, Any], str]:
        try:
            return read_record(path).__dict__, ""
        except RecordFaultError as error:
            return {}, str(error)

    wanted = None if abstract is None else named_leaves(abstract)
    groups = () if wanted is not None else (storage.PARAMS, storage.RECORD)
    _await_sight(path)
    fault = file_fault(path, (jax.process_index(), jax.process_count()), groups)
    content, unread = by_first(record_or_fault)
    if fault := _common_fault(path, fault or unread):
        return fault
    record = Record(**content)
    if wanted is None:
        device = SingleDeviceSharding(jax.local_devices()[0])
        wanted = {
            name: jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=device)
            for name, (shape, dtype, _) in record.arrays.items()
            if is_param(name)
        }
    else:
        check_same(path, record.arrays, wanted)
    loaded, fault = read_arrays(path, grouped(wanted))
    if fault := _common_fault(path, fault):
        return fault
    leaves = ungrouped(loaded)
    digests = leaf_digests(leaves)
    wrong = [name for name, digest in digests.items() if digest != record.arrays[name][2]]
    if wrong:  # drop the arrays, since memory may not hold two checkpoints
        some = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        return f"{len(wrong)} of {len(digests)} arrays differ from their digest: {some}"
    if abstract is None:
        return Restored(int(path.name), nested_params(leaves), record)
    state = jax.tree.unflatten(jax.tree.structure(abstract), [leaves[name] for name in wanted])
    return Restored(int(path.name), state, record)


def _await_sight(path: epath.Path) -> None:
    """Wait until this process's file system shows the checkpoint that process 0 has listed."""
    deadline = time.monotonic() + _CACHED_SECONDS
    while jax.process_index() != 0 and not path.exists() and time.monotonic() < deadline:
        time.sleep(1)


def _common_fault(path: epath.Path, fault: str) -> str:
    """Return one fault in all processes; `fault` is the fault that this process found, or "".

    The result is "" if no process found a fault, otherwise the fault that process 0 found. If only
    other processes found a fault, process 0 reads the complete checkpoint. If process 0 still finds
    no fault, raise an OutOfSightError, since an intact checkpoint must not be skipped.
    """
    if all_agree(not fault):
        return ""
    if fault and jax.process_index() != 0:
        _log.error("%s: %s", path, fault)
    common: str = by_first(lambda: fault or verify_checkpoint(path).fault)
    if not common:
        raise OutOfSightError(
            f"{path} is intact when process 0 reads it, but another process cannot read it ("
            f"{fault or 'its log has the reason'}). Mount the same directory on all hosts. If they "
            "do, a file system's cache may be outdated: rerun the command after a minute"
        )
    return common


def check_same(path: epath.Path, arrays: dict[str, list[Any]], wanted: dict[str, Any]) -> None:
    """Raise a UserError for the first array whose name, shape or dtype differs from `wanted`."""
    saved = {name: f"{dtype} {tuple(shape)}" for name, (shape, dtype, _) in arrays.items()}
    needed = {name: f"{array.dtype} {tuple(array.shape)}" for name, array in wanted.items()}
    for name in sorted({*saved, *needed}):
        has, wants = (each.get(name, "missing") for each in (saved, needed))
        if has != wants:
            raise UserError(
                f"{path}: array {name} is {has} in the checkpoint but {wants} in this run; both "
                "must have the same model and optimizer"
            )
