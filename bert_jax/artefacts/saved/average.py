"""Averages of the parameters of several checkpoints: `bert-jax average`.

average(["work/decay-a", "work/decay-b"], Path("work/mean"))

The result is a work directory with one checkpoint, which holds only parameters. Everything that
reads a pretrained model can read it. The host reads one array at a time, checks the array's digest
and adds the array in float64, in the order of the sources. Memory therefore holds one model however
many sources there are, and the result is the same on every device, bit for bit.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import realpath
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from etils import epath

import bert_jax
from bert_jax.artefacts.saved.ancestors import RECORD
from bert_jax.artefacts.saved.lineage import ancestor_entry
from bert_jax.artefacts.saved.runs import named_steps, split_name, staged
from bert_jax.artefacts.saved.runs import read_record as read_run
from bert_jax.config.mapping import build
from bert_jax.distributed.checkpoint import storage
from bert_jax.distributed.checkpoint.digest import block_digest, leaf_digests, text
from bert_jax.distributed.checkpoint.reading import DamagedCheckpointError
from bert_jax.distributed.checkpoint.record import (
    Record,
    RecordFaultError,
    group_of,
    grouped,
    is_param,
    read_record,
)
from bert_jax.distributed.checkpoint.verify import verify_checkpoint
from bert_jax.errors import UserError, first_few
from bert_jax.files.remote import open_workdir
from bert_jax.files.staging import write_synced
from bert_jax.model.config import ARCHITECTURE, ModelConfig
from bert_jax.terminal import progress_bar
from bert_jax.tokenization.load import load_tokenizer

Method = Literal["mean", "ema"]
DECAY = 0.9


@dataclass(frozen=True)
class Source:
    """A checkpoint to average."""

    workdir: str
    step: int
    checkpoint: epath.Path
    record: Record
    run: dict[str, Any]
    """Content of the run's config.json."""
    tokenizer: Path

    @property
    def name(self) -> str:
        """Name for messages and for `split_name`."""
        return f"{self.workdir}@{self.step}"

    @property
    def arrays(self) -> dict[str, list[Any]]:
        """Shape, dtype and digest of each parameter, by name."""
        return {name: each for name, each in self.record.arrays.items() if is_param(name)}


def average(
    names: Sequence[str],
    out: Path,
    *,
    method: Method = "mean",
    decay: float | None = None,
    last: int | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Write the average of checkpoints to a new directory, completely or not at all.

    Return the entry `average` of the new config.json: method, decay, and the sources in order of
    addition, each with workdir, step, digest and weight.

    Raise a UserError if an argument is invalid, a checkpoint is missing, there are fewer than two,
    or they are of different models; a DamagedCheckpointError if one differs from its digests.

    Args:
        names: Checkpoints as WORKDIR@STEP, or WORKDIR for its newest verified checkpoint.
        out: Local directory that does not exist yet, or is empty.
        method: `mean` weights all checkpoints equally. `ema` is an exponential moving average: each
            further checkpoint has weight 1 - `decay`, and the average of all before it has `decay`.
        decay: Decay of `ema`, above 0 and below 1; None means 0.9.
        last: Number of newest checkpoints to take from each WORKDIR, oldest first; None means 1.
        progress: Whether to show a progress bar on standard error.
    """
    sources = find_sources(names, last)
    weights = _weights(len(sources), method, decay)
    _check_same(sources)
    entry = {
        "method": method,
        **({"decay": DECAY if decay is None else decay} if method == "ema" else {}),
        "sources": [
            {"workdir": each.workdir, "step": each.step, "digest": each.record.digest, "weight": w}
            for each, w in zip(sources, weights, strict=True)
        ],
    }
    newest = max(sources, key=lambda each: each.step)
    with staged(out) as directory:
        _write(directory, newest, entry, _averaged(sources, weights, progress))
    return entry


def find_sources(names: Sequence[str], last: int | None) -> list[Source]:
    """Return the checkpoints to average, in order of addition; fewer than two raise UserError."""
    if last is not None and last < 1:
        raise UserError(f"--last is {last}; it must be at least 1")
    found: list[Source] = []
    for name in names:
        workdir, step = split_name(name)
        if step is not None and last is not None:
            raise UserError(f"{name} names its step, so --last {last} cannot apply to it")
        work = open_workdir(workdir)
        run = read_run(work.local, "pretrain")
        for each in named_steps(work, step, last or 1):
            path = work.checkpoints / str(each)
            try:
                record = read_record(path)
            except RecordFaultError as error:
                raise _damaged(path, str(error)) from error
            found.append(Source(work.name, each, path, record, run, work.local / "tokenizer"))
            if realpath(path) in [realpath(source.checkpoint) for source in found[:-1]]:
                raise UserError(f"{found[-1].name} is named twice; name it once")
    if len(found) < 2:
        raise UserError(
            f"{found[0].name} is one checkpoint; an average takes two or more (WORKDIR@STEP "
            "WORKDIR@STEP, or --last K)"
        )
    return found


def _weights(count: int, method: Method, decay: float | None) -> list[float]:
    """Return the weight of each source, not yet divided by the sum of all weights."""
    if method == "mean":
        if decay is not None:
            raise UserError(f"--decay is {decay:g}, but --method is mean, which has no decay")
        return [1.0] * count
    rate = DECAY if decay is None else decay
    if not 0 < rate < 1:
        raise UserError(f"--decay is {rate:g}; it must be above 0 and below 1")
    first = rate ** (count - 1)
    return [first, *((1 - rate) * rate ** (count - n) for n in range(2, count + 1))]


def _facts(source: Source) -> dict[str, str]:
    """Return the facts on which all sources must agree: tokenizer, architecture and arrays."""
    model = build(ModelConfig, source.record.config["model"], f"{source.name}: model")
    arrays = sorted(source.arrays.items())
    return {
        "tokenizer": load_tokenizer(source.tokenizer).fingerprint[:12],
        **{f"model.{name}": f"{getattr(model, name)}" for name in ("vocab_size", *ARCHITECTURE)},
        **{f"array {name}": f"{dtype} {tuple(shape)}" for name, (shape, dtype, _) in arrays},
    }


def _check_same(sources: Sequence[Source]) -> None:
    first = _facts(sources[0])
    for other in sources[1:]:
        found = _facts(other)
        wrong = [
            f"{name}: {first.get(name, 'missing')} and {found.get(name, 'missing')}"
            for name in first | found
            if first.get(name) != found.get(name)
        ]
        if wrong:
            raise UserError(
                f"{sources[0].name} and {other.name} are checkpoints of different models; an "
                f"average needs one model: {first_few(wrong, 8)}"
            )


def _averaged(
    sources: Sequence[Source], weights: Sequence[float], progress: bool
) -> dict[str, jax.Array]:
    arrays, device = sources[0].arrays, jax.local_devices()[0]
    sizes = [np.dtype(dtype).itemsize * int(np.prod(shape)) for shape, dtype, _ in arrays.values()]
    size = sum(sizes) * len(sources)
    result: dict[str, jax.Array] = {}
    with progress_bar(of="average", unit="B", total=size, shown=progress) as bar:
        for name, (shape, dtype, _) in arrays.items():
            total = np.zeros(shape, np.float64)
            for source, weight in zip(sources, weights, strict=True):
                total += weight * _read(source, name).astype(np.float64)
                bar.update(np.dtype(dtype).itemsize * total.size)
            total /= sum(weights)
            result[name] = jax.device_put(total.astype(dtype), device)
    return result


def _read(source: Source, name: str) -> np.ndarray:
    shape, dtype, digest = source.record.arrays[name]
    array, total = np.empty(shape, dtype), 0
    try:
        for block, start, whole in storage.host_blocks(source.checkpoint, *group_of(name)):
            place = zip(start, block.shape, strict=True)
            array[tuple(slice(first, first + size) for first, size in place)] = block
            total += block_digest(block, start, whole)
    except Exception as error:  # TensorStore raises many types for a damaged file
        reason = storage.damage(error, source.checkpoint)
        raise _damaged(source.checkpoint, f"array {name} cannot be read: {reason}") from error
    if text(total) != digest:
        raise _damaged(source.checkpoint, f"array {name} differs from its digest")
    return array


def _damaged(checkpoint: epath.Path, fault: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"the checkpoint {checkpoint} is damaged: {fault}")


def _write(
    directory: Path, newest: Source, entry: dict[str, Any], leaves: dict[str, jax.Array]
) -> None:
    digests = leaf_digests(leaves)
    arrays = {n: [list(leaf.shape), str(leaf.dtype), digests[n]] for n, leaf in leaves.items()}
    record = Record(newest.step, newest.record.config, {"average": entry}, {}, arrays)
    (directory / "checkpoints").mkdir()
    checkpoint = directory / "checkpoints" / str(newest.step)
    try:
        storage.write_async(checkpoint, grouped(leaves), record.to_json()).result()
    except Exception as error:  # Orbax has many error types for a full disk
        raise UserError(
            f"cannot write {checkpoint}: {storage.save_fault(error)}. Nothing was left there"
        ) from error
    if fault := verify_checkpoint(checkpoint, mark=True).fault:
        raise UserError(
            f"{checkpoint} was written, but reading it back shows damage ({fault}); write to "
            "another disk"
        )
    load_tokenizer(newest.tokenizer).save(directory / "tokenizer")
    left_out = ("branch", "average", "bert_jax", RECORD)
    run = {name: value for name, value in newest.run.items() if name not in left_out}
    ancestors = [
        ancestor_entry(f"average[{number}]", each["workdir"], each["step"])
        for number, each in enumerate(entry["sources"])
    ]
    content = {"bert_jax": bert_jax.__version__, **run, "average": entry, RECORD: ancestors}
    write_synced(directory / "config.json", (json.dumps(content, indent=2) + "\n").encode())
