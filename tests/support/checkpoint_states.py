"""A state of a few arrays over 8 devices, and checkpoints of it."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bert_jax.config.mapping import to_dict
from bert_jax.distributed.checkpoint import storage
from bert_jax.distributed.checkpoint.manager import Checkpoints
from bert_jax.distributed.checkpoint.record import group_of, grouped, read_record
from bert_jax.distributed.checkpoint.retention import Retention
from bert_jax.training.pretrain.config import PretrainConfig

CONFIG = to_dict(PretrainConfig())


class State(NamedTuple):
    step: Any
    params: Any
    opt_state: Any


def make_state(step: int) -> State:
    keys = jax.random.split(jax.random.key(step), 2)
    params = {
        "encoder": {"w": jax.random.normal(keys[0], (8, 4096)), "b": jnp.zeros(3, jnp.bfloat16)},
        "nsp": {"w": jax.random.normal(keys[1], (16, 2))},
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return State(jnp.int32(step), params, optimizer.init(params))


def abstract(state: State, sharding=None) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), state
    )


def assert_same(a, b) -> None:
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def write(workdir: Path, steps, keep=3) -> dict[int, State]:
    """Checkpoints of `steps`, all read back."""
    checkpoints = Checkpoints(workdir / "checkpoints", Retention(keep=keep))
    states = {step: make_state(step) for step in steps}
    for step, state in states.items():
        checkpoints.save_last(
            step, state, read_back=True, config=CONFIG, extra={"mean": 0.1 + step}
        )
    checkpoints.close()
    return states


def change_a_value(checkpoint: Path, name: str) -> None:
    """Stores another value of an array, soundly, under the record with the digest of the old one.

    All checksums of files are right, and it has yet to be read back: the digest alone can tell.
    """
    record, leaves = read_record(checkpoint), {}
    for each, (shape, dtype, _) in record.arrays.items():
        leaves[each] = np.empty(shape, dtype)
        for block, start, _ in storage.host_blocks(checkpoint, *group_of(each)):
            place = zip(start, block.shape, strict=True)
            leaves[each][tuple(slice(first, first + size) for first, size in place)] = block
    leaves[name].reshape(-1).view(np.uint8)[0] ^= 1
    shutil.rmtree(checkpoint)
    arrays = grouped({each: jnp.asarray(array) for each, array in leaves.items()})
    storage.write_async(checkpoint, arrays, record.to_json()).result()


def change_a_digest(checkpoint: Path, name: str) -> None:
    """Writes another digest of an array into the record, whose own CRC is right."""
    record = read_record(checkpoint)
    shape, dtype, digest = record.arrays[name]
    other = f"{int(digest, 16) ^ 1:08x}"
    arrays = {**record.arrays, name: [shape, dtype, other]}
    content = dataclasses.replace(record, arrays=arrays).to_json()
    (checkpoint / "record" / "data.json").write_text(json.dumps(content))


def unmark(workdir: Path) -> None:
    """As if the run had been killed before its checkpoints were read back."""
    for mark in (workdir / "checkpoints").glob("*/verified.json"):
        mark.unlink()
