"""Checkpoints: asynchronous, verified by a digest per array. The only file that imports orbax.

A checkpoint is the directory `checkpoints/<step>`, where step is the next batch to train on: the
data cursor and the number of updates made are the same integer. It holds two groups of arrays,
`params` (the nested dict, all that inference needs) and `rest` (optimizer state and counters, by
path), and a JSON `record`: the configuration, the loop's running means, and shape, dtype and digest
of every array, under a CRC of its own.
"""

import contextlib
import gc
import json
import logging
import re
import shutil
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from bert_jax.errors import UserError
from bert_jax.training.config import PretrainConfig, build
from bert_jax.training.digest import leaf_digests

State = TypeVar("State")

FORMAT = 1
_PARAMS = "params/"
_log = logging.getLogger("bert_jax")


def _context() -> ocp.Context:
    """Orbax's settings: the record is one JSON file, which the default would take for a tree."""
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="record")
    context = ocp.Context()
    context.checkpointables.registry = registry
    return context


class DamagedCheckpointError(RuntimeError):
    """No checkpoint of the directory is intact, though there are some."""

    exit_code = 5


@dataclass(frozen=True)
class Restored:
    """What was read from a checkpoint."""

    step: int
    """The next step: the batch to read and the number of updates made."""
    state: Any
    extra: dict[str, Any]
    """What the loop had put aside: JSON values."""


@dataclass(frozen=True)
class LoadedParams:
    """A pretrained model as inference wants it."""

    params: dict[str, Any]
    config: PretrainConfig
    tokenizer: Path
    """Directory for `load_tokenizer`."""
    step: int


class Checkpoints:
    """The checkpoints of one run, for its training loop.

    Every method is collective: all processes call it, in the same order, from the main thread.
    """

    def __init__(self, directory: Path, *, keep: int):
        """Opens `directory`, and removes what interrupted saves left in it.

        Args:
            directory: Made if missing.
            keep: How many of the newest checkpoints stay; older ones are deleted after a save.
        """
        self._directory = directory.absolute()
        # Orbax offers to do this, but in a thread that nothing waits for.
        if jax.process_index() == 0 and self._directory.is_dir():
            for leftover in self._directory.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(leftover)
        _barrier("leftovers of interrupted saves are removed")
        self._orbax = ocp.training.Checkpointer(
            self._directory,
            context=_context(),
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
        )
        self._pending: Any = None
        self._saved: int | None = None
        self._saving = 0

    def save(self, step: int, state: Any, *, config: dict[str, Any], extra: dict[str, Any]) -> None:
        """Starts a save; returns when the arrays are copied, so that the caller may donate them.

        Args:
            step: The next step to train. A step that this object has just saved is not saved again.
            state: A pytree with a `params` field that is a nested dict.
            config: The run's configuration, as `config.to_dict` gives it.
            extra: JSON values to hand back on restore.

        Raises:
            Exception: Whatever made the save before this one fail.
        """
        if step == self._saved:
            return
        self.wait()
        leaves = _named_leaves(state)
        record = {
            "format": FORMAT,
            "step": step,
            "config": config,
            "extra": extra,
            "arrays": {
                name: [list(leaf.shape), str(leaf.dtype), digest]
                for (name, leaf), digest in zip(
                    leaves.items(), leaf_digests(leaves).values(), strict=True
                )
            },
        }
        groups = {**_grouped(leaves), "record": {**record, "crc32": _crc(record)}}
        self._saving = step
        with self._naming_a_full_disk():
            self._pending = self._orbax.save_checkpointables_async(step, groups, force=True)
        self._saved = step

    def wait(self) -> None:
        """Returns when the last save is on disk.

        Raises:
            Exception: Whatever made it fail.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                with self._naming_a_full_disk():
                    pending.result()
            except BaseException:
                self._saved = None
                raise

    @contextlib.contextmanager
    def _naming_a_full_disk(self) -> Iterator[None]:
        """Orbax raises several types for it; the reason is in their text."""
        try:
            yield
        except Exception as error:
            if not re.search("No space left|Disk quota exceeded", _chain(error)):
                raise
            for leftover in self._directory.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(leftover, ignore_errors=True)
            kept = saved_steps(self._directory)
            raise UserError(
                f"the checkpoint of step {self._saving} cannot be written to {self._directory}: "
                f"the disk is full. {f'That of step {kept[-1]} is there' if kept else 'None is'}"
                f"{'; free' if kept else ' there; free'} some space and give the command again: "
                f"the run continues {'from it' if kept else 'from its beginning'}"
            ) from error

    def restore(self, abstract: Any) -> Restored | None:
        """The newest intact checkpoint, or None when there is none at all.

        Damaged checkpoints that are newer are named in a warning and moved to `damaged/` beside the
        directory, where nothing reads them.

        Args:
            abstract: The state with a `jax.ShapeDtypeStruct` per array that carries the sharding
                the array shall have; it need not be the one that was saved.

        Raises:
            DamagedCheckpointError: There are checkpoints and none is intact; nothing is moved.
            UserError: An intact checkpoint holds arrays of other names, shapes or dtypes.
        """
        damaged: list[tuple[int, str]] = []
        for step in reversed(saved_steps(self._directory)):
            record, leaves, fault = _read(self._directory / str(step), _named_leaves(abstract))
            if not fault:
                self._set_aside(damaged, step)
                self._saved = step
                return Restored(step, _filled(abstract, leaves), record["extra"])
            damaged.append((step, fault))
        if damaged:
            raise DamagedCheckpointError(_none_intact(self._directory, damaged))
        return None

    def close(self) -> None:
        """Waits for the last save and releases Orbax's threads."""
        try:
            self.wait()
        finally:
            with self._naming_a_full_disk():  # raises again what a save did
                self._orbax.close()

    def _set_aside(self, damaged: list[tuple[int, str]], used: int) -> None:
        if not damaged:
            return
        aside = self._directory.parent / "damaged"
        if jax.process_index() == 0:
            _log.warning("%s Moved to %s.", _skipped(damaged, used), aside)
            aside.mkdir(exist_ok=True)
            for step, _ in damaged:
                taken = len(list(aside.glob(f"{step}.*")))
                (self._directory / str(step)).rename(aside / f"{step}.{taken}")
        _barrier("damaged checkpoints are set aside")
        self._orbax.reload()


def saved_steps(directory: Path) -> list[int]:
    """Steps of the checkpoints in a directory, ascending; damaged ones included."""
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit() and p.is_dir())


def load_params(workdir: Path) -> LoadedParams:
    """Parameters of the newest intact checkpoint of a run, on one device. Changes nothing on disk.

    Raises:
        UserError: `workdir` holds no checkpoint.
        DamagedCheckpointError: It holds some and none is intact.
    """
    directory = (workdir / "checkpoints").absolute()
    damaged: list[tuple[int, str]] = []
    for step in reversed(saved_steps(directory)):
        record, leaves, fault = _read(directory / str(step), None)
        if not fault:
            if damaged:
                _log.warning("%s", _skipped(damaged, step))
            return LoadedParams(
                params=_nested(leaves),
                config=build(PretrainConfig, record["config"], where=f"checkpoint {step}"),
                tokenizer=workdir / "tokenizer",
                step=step,
            )
        damaged.append((step, fault))
    if damaged:
        raise DamagedCheckpointError(_none_intact(directory, damaged))
    raise UserError(
        f"{workdir} holds no checkpoint; give the work directory of a `bert-jax pretrain` run that "
        "has saved at least once"
    )


def _read(
    path: Path, wanted: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, jax.Array], str]:
    """Reads and verifies one checkpoint: (record, arrays by name, what is wrong or "").

    With `wanted` None, reads the parameters alone onto one device.
    """
    loaded, fault = _load(path, {"record": None})
    record = loaded.get("record") or {}
    if not fault and record.get("crc32") != _crc({k: v for k, v in record.items() if k != "crc32"}):
        fault = "its record does not match its CRC"
    if not _all_agree(not fault):
        return {}, {}, fault or "another process could not read its record"
    if record["format"] != FORMAT:
        raise UserError(
            f"{path} has checkpoint format {record['format']}; this version reads {FORMAT}. "
            "Continue the run with the version of bert_jax that began it"
        )
    arrays = record["arrays"]
    if wanted is None:
        device = SingleDeviceSharding(jax.local_devices()[0])
        wanted = {
            name: jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=device)
            for name, (shape, dtype, _) in arrays.items()
            if name.startswith(_PARAMS)
        }
    else:
        _check_same(path, arrays, wanted)
    loaded, fault = _load(path, _grouped(wanted))
    if not _all_agree(not fault):
        return record, {}, fault or "another process could not read its arrays"
    leaves = _flat(loaded)
    digests = leaf_digests(leaves)
    wrong = [name for name, digest in digests.items() if digest != arrays[name][2]]
    if wrong:
        fault = f"{len(wrong)} of {len(digests)} arrays differ from their digest: "
        fault += ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        return record, {}, fault  # an older checkpoint is read next: there is room for one only
    return record, leaves, ""


def _load(path: Path, groups: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What Orbax reads, and "" or why it cannot."""
    loaded: dict[str, Any] = {}
    fault = ""
    # After a read error Orbax drops coroutines and tasks that nobody awaits; collecting them here
    # keeps pages of their complaints out of the log. The error itself is reported by the caller.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            for group, abstract in groups.items():
                with _context():
                    loaded |= ocp.load_checkpointables(path, {group: abstract})
        except Exception as error:  # whatever a damaged file makes Orbax raise
            lines = str(error).strip().splitlines() or [""]
            fault = f"{type(error).__name__}: {lines[0][:200]}"
        if fault:
            asyncio_log = logging.getLogger("asyncio")
            level, asyncio_log.level = asyncio_log.level, logging.CRITICAL
            gc.collect()
            asyncio_log.level = level
    return loaded, fault


def _check_same(path: Path, arrays: dict[str, list], wanted: dict[str, Any]) -> None:
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


def _named_leaves(tree: Any) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _filled(abstract: Any, leaves: dict[str, Any]) -> Any:
    """`abstract` with its leaves replaced by those of the same name."""
    return jax.tree.unflatten(
        jax.tree.structure(abstract), [leaves[name] for name in _named_leaves(abstract)]
    )


def _grouped(leaves: dict[str, Any]) -> dict[str, Any]:
    """What Orbax is given: nested parameters, and (unless absent) the rest by path."""
    rest = {name: leaf for name, leaf in leaves.items() if not name.startswith(_PARAMS)}
    return {"params": _nested(leaves), **({"rest": rest} if rest else {})}


def _nested(leaves: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        if name.startswith(_PARAMS):
            *parents, last = name.removeprefix(_PARAMS).split("/")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = leaf
    return tree


def _flat(groups: dict[str, Any]) -> dict[str, Any]:
    params = {_PARAMS + name: leaf for name, leaf in _named_leaves(groups["params"]).items()}
    return {**params, **groups.get("rest", {})}


def _chain(error: BaseException | None) -> str:
    """The messages of an error and of what caused it."""
    chain: list[BaseException] = []
    while error is not None and not any(error is known for known in chain):  # it may be a ring
        chain.append(error)
        error = error.__cause__ or error.__context__
    return "\n".join(map(str, chain))


def _crc(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _all_agree(ok: bool) -> bool:
    if jax.process_count() == 1:
        return ok
    return bool(multihost_utils.process_allgather(jax.numpy.asarray(ok)).all())


def _skipped(damaged: list[tuple[int, str]], used: int) -> str:
    what = "; ".join(f"{step} ({fault})" for step, fault in damaged)
    noun = "checkpoint" if len(damaged) == 1 else "checkpoints"
    return f"Skipped damaged {noun} {what}. Using the checkpoint of step {used}."


def _none_intact(directory: Path, damaged: list[tuple[int, str]]) -> str:
    what = "; ".join(f"{step}: {fault}" for step, fault in damaged)
    return (
        f"no checkpoint in {directory} is intact ({what}). Restore the directory from a copy, or "
        "move it away to start the run from its beginning"
    )
