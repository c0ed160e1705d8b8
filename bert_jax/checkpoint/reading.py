"""The newest intact checkpoint of a directory, onto devices.

Functions here are collective: with several processes all call them, in the same order, from the
main thread.
"""

import logging
from dataclasses import dataclass
from typing import Any

import jax
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding

from bert_jax.checkpoint import storage
from bert_jax.checkpoint.digest import leaf_digests
from bert_jax.checkpoint.record import (
    Record,
    RecordFaultError,
    filled,
    grouped,
    is_param,
    named_leaves,
    nested_params,
    read_record,
    ungrouped,
)
from bert_jax.checkpoint.storage import AnyPath, as_path, read_arrays, saved_steps
from bert_jax.checkpoint.verify import file_fault
from bert_jax.errors import UserError

_log = logging.getLogger("bert_jax")


class DamagedCheckpointError(RuntimeError):
    """No checkpoint of the directory is intact, though there are some."""

    exit_code = 5


@dataclass(frozen=True)
class Damaged:
    """A checkpoint that was passed over."""

    step: int
    fault: str


@dataclass(frozen=True)
class Restored:
    """What was read from a checkpoint."""

    step: int
    """The next step: the batch to read and the number of updates made."""
    state: Any
    """The whole state, or the nested dict of parameters from `load_newest`."""
    record: Record
    damaged: tuple[Damaged, ...] = ()
    """Newer checkpoints that were passed over."""

    def warning(self) -> str:
        """What was passed over, as a sentence; "" where nothing was."""
        if not self.damaged:
            return ""
        what = "; ".join(f"{bad.step} ({bad.fault})" for bad in self.damaged)
        noun = "checkpoint" if len(self.damaged) == 1 else "checkpoints"
        return f"Skipped damaged {noun} {what}. Using the checkpoint of step {self.step}."


def restore_newest(directory: AnyPath, abstract: Any) -> Restored | None:
    """The newest intact checkpoint, or None when there is none at all. Changes nothing on disk.

    Args:
        directory: Of checkpoints.
        abstract: The state with a `jax.ShapeDtypeStruct` per array that carries the sharding the
            array shall have; it need not be the one that was saved.

    Raises:
        DamagedCheckpointError: There are checkpoints and none is intact.
        UserError: An intact checkpoint holds arrays of other names, shapes or dtypes.
    """
    return _newest(as_path(directory), abstract)


def load_newest(directory: AnyPath) -> Restored | None:
    """As `restore_newest`, of the parameters alone, onto one device."""
    return _newest(as_path(directory), None)


def _newest(directory: epath.Path, abstract: Any) -> Restored | None:
    damaged: list[Damaged] = []
    wanted = None if abstract is None else named_leaves(abstract)
    for step in reversed(saved_steps(directory)):
        record, leaves, fault = _read(directory / str(step), wanted)
        if not fault:
            assert record is not None
            state = nested_params(leaves) if abstract is None else filled(abstract, leaves)
            return Restored(step, state, record, tuple(damaged))
        damaged.append(Damaged(step, fault))
    if damaged:
        what = "; ".join(f"{bad.step}: {bad.fault}" for bad in damaged)
        raise DamagedCheckpointError(
            f"no checkpoint in {directory} is intact ({what}). Restore the directory from a copy, "
            "or move it away to start the run from its beginning"
        )
    return None


def _read(
    path: epath.Path, wanted: dict[str, Any] | None
) -> tuple[Record | None, dict[str, jax.Array], str]:
    """Reads and checks one checkpoint: (record, arrays by name, what is wrong or "")."""
    record = None
    groups = () if wanted is not None else (storage.PARAMS, storage.RECORD)
    fault = file_fault(path, (jax.process_index(), jax.process_count()), groups)
    if not fault:
        try:
            record = read_record(path)
        except RecordFaultError as error:
            fault = str(error)
    if fault and jax.process_index() != 0:  # process 0 speaks for all, but knows no name
        _log.error("%s: %s", path, fault)
    if not all_agree(not fault) or record is None:
        return None, {}, fault or "another process found a file of it damaged, and says which"
    if wanted is None:
        device = SingleDeviceSharding(jax.local_devices()[0])
        wanted = {
            name: jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=device)
            for name, (shape, dtype, _) in record.arrays.items()
            if is_param(name)
        }
    else:
        _check_same(path, record.arrays, wanted)
    loaded, fault = read_arrays(path, grouped(wanted))
    if not all_agree(not fault):
        return record, {}, fault or "another process could not read its arrays"
    leaves = ungrouped(loaded)
    digests = leaf_digests(leaves)
    wrong = [name for name, digest in digests.items() if digest != record.arrays[name][2]]
    if wrong:
        fault = f"{len(wrong)} of {len(digests)} arrays differ from their digest: "
        fault += ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        return record, {}, fault  # an older checkpoint is read next: there is room for one only
    return record, leaves, ""


def _check_same(path: epath.Path, arrays: dict[str, list[Any]], wanted: dict[str, Any]) -> None:
    for name in sorted({*arrays, *wanted}):
        has = "no such array"
        if name in arrays:
            has = f"{arrays[name][1]} {tuple(arrays[name][0])}"
        wants = "no such array"
        if name in wanted:
            wants = f"{wanted[name].dtype} {tuple(wanted[name].shape)}"
        if has != wants:
            raise UserError(
                f"{path}: array {name} is {has} in the checkpoint and {wants} in this run; they "
                "must be of the same model and optimizer"
            )


def barrier(name: str) -> None:
    """Returns when all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def all_agree(ok: bool) -> bool:
    """Whether it is so in all processes."""
    return worst(0 if ok else 1) == 0


def worst(code: int) -> int:
    """The highest number of all processes."""
    if jax.process_count() == 1:
        return code
    return int(multihost_utils.process_allgather(jax.numpy.asarray(code)).max())
