"""Verification of checkpoints (`bert-jax verify`): files by CRC, and arrays by digest.

The arrays are read one by one on the host. Devices are not used, and no process waits for another.
"""

import contextlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from etils import epath

from bert_jax.distributed.checkpoint import storage
from bert_jax.distributed.checkpoint.digest import block_digest, text
from bert_jax.distributed.checkpoint.record import RecordFaultError, group_of, read_record
from bert_jax.distributed.checkpoint.storage import AnyPath, as_path, damage, saved_steps
from bert_jax.files.checks import json_crc
from bert_jax.files.urls import is_url
from bert_jax.terminal import progress_bar

_MARK = "verified.json"
_BLOCK = 8 << 20


@dataclass(frozen=True)
class Verdict:
    """Result of the verification of a checkpoint."""

    step: int
    fault: str
    """Description of the fault with the name of the file or array, or "" if there is no fault."""
    num_bytes: int = 0
    num_arrays: int = 0

    @property
    def intact(self) -> bool:
        """Whether the checkpoint has no faults."""
        return not self.fault


class VerificationStoppedError(Exception):
    """Signal that a verification was stopped on request before everything was read."""


def is_verified(checkpoint: AnyPath) -> bool:
    """Tell whether a checkpoint has `verified.json`: it was once read back and was intact."""
    return (as_path(checkpoint) / _MARK).exists()


def verified_steps(directory: AnyPath) -> list[int]:
    """Return the steps of the checkpoints with `verified.json`, in ascending order."""
    return [step for step in saved_steps(directory) if is_verified(as_path(directory) / str(step))]


def verify_checkpoint(
    checkpoint: AnyPath, *, mark: bool = False, stopped: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> Verdict:  # fmt: skip
    """Read every file and every array of a checkpoint, and compare them with their digests.

    If `mark` is set, an intact checkpoint gets `verified.json`, with which `file_fault` can later
    find changed files. `progress` is called with the number of bytes of each block. Raise a
    VerificationStoppedError if `stopped()`, which is called before each block, returned true. Raise
    a UserError if the checkpoint has another format.
    """
    checkpoint = as_path(checkpoint)
    step = int(checkpoint.name)
    if fault := file_fault(checkpoint):
        return Verdict(step, fault)
    try:
        record = read_record(checkpoint)
    except RecordFaultError as error:
        return Verdict(step, str(error))
    num_bytes = 0
    for name, (_, _, digest) in record.arrays.items():
        total = 0
        try:
            for block, start, shape in storage.host_blocks(checkpoint, *group_of(name)):
                if stopped():
                    raise VerificationStoppedError
                total += block_digest(block, start, shape)
                num_bytes += block.nbytes
                progress(block.nbytes)
        except VerificationStoppedError:
            raise
        except Exception as error:  # for a damaged file, TensorStore may raise any type of error
            return Verdict(step, f"array {name} cannot be read: {damage(error, checkpoint)}")
        if text(total) != digest:
            return Verdict(step, f"array {name} differs from its digest")
    if fault := _listing_fault(checkpoint, {group_of(name) for name in record.arrays}):
        return Verdict(step, fault)
    if mark and not is_verified(checkpoint):
        _write_mark(checkpoint)
    return Verdict(step, "", num_bytes, len(record.arrays))


def find_fault(checkpoint: AnyPath) -> str:
    """Return the fault of a checkpoint or "". If it has `verified.json`, check only the files."""
    is_known = is_verified(checkpoint)
    return file_fault(checkpoint) if is_known else verify_checkpoint(checkpoint).fault


def audit(directory: AnyPath, steps: Iterable[int], *, progress: bool = False) -> list[Verdict]:
    """Verify the checkpoints of the given steps in a directory."""
    verdicts = []
    for step in steps:
        path = as_path(directory) / str(step)
        num_bytes = None
        with contextlib.suppress(RecordFaultError):
            num_bytes = read_record(path).num_bytes
        with progress_bar(of=f"step {step:,}", unit="B", total=num_bytes, shown=progress) as bar:
            verdicts.append(verify_checkpoint(path, progress=bar.update))
    return verdicts


def audit_report(verdicts: list[Verdict]) -> list[str]:
    """Format a line for each checkpoint and, if there are several, a summary."""
    width = max(len(f"{verdict.step:,}") for verdict in verdicts)
    lines = []
    for verdict in verdicts:
        found = f"intact    {verdict.num_arrays} arrays, {verdict.num_bytes / 1e6:,.1f} MB"
        if not verdict.intact:
            found = f"DAMAGED   {verdict.fault}"
        lines.append(f"step {verdict.step:>{width},}  {found}")
    intact = [verdict.step for verdict in verdicts if verdict.intact]
    if len(verdicts) == 1:
        return lines
    newest = f"the newest intact one is step {intact[-1]:,}" if intact else "none is intact"
    return [*lines, f"{len(intact)} of {len(verdicts)} checkpoints are intact; {newest}"]


def file_fault(
    checkpoint: AnyPath, part: tuple[int, int] = (0, 1), groups: tuple[str, ...] = ()
) -> str:
    """Describe how the first faulty file differs from `verified.json`.

    Return "" if no file differs or `verified.json` is missing. `part` is (i, n): every n-th file is
    checked, beginning with file i. `groups` are the directories to check, by default all.
    """
    checkpoint = as_path(checkpoint)
    if not is_verified(checkpoint):
        return ""
    try:
        content = storage.read_object(checkpoint / _MARK)
        files: dict[str, list[Any]] = content["files"]
        if content["crc32"] != json_crc(files):
            return f"{_MARK} does not match its CRC"
        names = [name for name in sorted(files) if not groups or name.split("/")[0] in groups]
        for name in names[part[0] :: part[1]]:
            size, crc = files[name]
            path = checkpoint / name
            if not path.exists():
                return f"file {name} is missing"
            found = path.stat().length
            if found != size:
                return f"file {name} has {found:,} bytes instead of {size:,}"
            if _file_crc(path) != crc:
                return f"file {name} differs from its CRC"
    except Exception as error:  # a damaged file or a bucket may raise any type of error
        return f"{_MARK} or a file cannot be read: {damage(error, checkpoint)}"
    return ""


def _listing_fault(checkpoint: epath.Path, recorded: set[tuple[str, str]]) -> str:
    """Describe a fault in Orbax's lists of the arrays, or return "" if there is none."""
    try:
        listed = storage.listed_arrays(checkpoint)
    except Exception as error:  # damaged lists may raise any type of error
        return f"the list of its arrays cannot be read: {damage(error, checkpoint)}"
    wrong = ", ".join("/".join(array) for array in sorted(listed ^ recorded)[:3])
    return wrong and f"the list of its arrays differs from its record: {wrong}"


def _write_mark(checkpoint: epath.Path) -> None:
    def files_below(directory: epath.Path) -> Iterator[epath.Path]:
        for path in sorted(directory.iterdir()):
            yield from files_below(path) if path.is_dir() else [path]

    files = {
        str(path.relative_to(checkpoint)): [path.stat().length, _file_crc(path)]
        for path in files_below(checkpoint)
    }
    content = json.dumps({"files": files, "crc32": json_crc(files)})
    if is_url(checkpoint):  # a bucket shows only complete files
        (checkpoint / _MARK).write_text(content)
    else:
        temporary = checkpoint.with_name(f"{checkpoint.name}.{_MARK}.deleted")
        temporary.write_text(content)
        temporary.rename(checkpoint / _MARK)


def _file_crc(path: epath.Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc
