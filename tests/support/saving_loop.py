"""Saves as fast as it can, until it is killed: `python saving_loop.py DIRECTORY`.

Waits for a line on standard input, restores the newest checkpoint and compares it with what that
step must hold, and goes on from there. Says on standard output, one a line: `restored STEP`, and
`saved STEP` once a save was waited for.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.distributed.checkpoint.manager import Checkpoints
from bert_jax.distributed.checkpoint.retention import Retention

NUM_ARRAYS, ROWS, COLUMNS = 4, 64, 10_240  # 2.6 MB each


class State(NamedTuple):
    step: Any
    params: Any
    opt_state: Any


def arrays_of(step: int) -> dict[str, np.ndarray]:
    """What the checkpoint of a step holds; no two steps share an element."""
    index = np.arange(ROWS * COLUMNS, dtype=np.uint32).reshape(ROWS, COLUMNS)
    return {
        f"array_{number}": (index * np.uint32(NUM_ARRAYS) + np.uint32(number))
        ^ np.uint32(step * 0x9E3779B9 & 0xFFFFFFFF)
        for number in range(NUM_ARRAYS)
    }


def main(directory: Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    split, copied = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))

    def state_of(step: int) -> State:
        arrays = {name: jax.device_put(x, split) for name, x in arrays_of(step).items()}
        last = arrays.pop(f"array_{NUM_ARRAYS - 1}")
        return State(jax.device_put(jnp.int32(step), copied), arrays, {"moment": last})

    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0)
    )
    sys.stdin.readline()
    checkpoints = Checkpoints(directory, Retention(keep=2))
    left = [p.name for p in directory.glob("*") if not p.name.isdigit()]
    assert not left, f"of an interrupted save: {left}"
    restored = checkpoints.restore(abstract)
    step = 0
    if restored is not None:
        step = restored.step
        assert restored.record.extra == {"step": step}
        jax.tree.map(np.testing.assert_array_equal, restored.state, state_of(step))
    print("restored", step, flush=True)
    while True:
        step += 1
        # Some saves are waited for, some are followed by the next at once, as in a run.
        checkpoints.save(step, state_of(step), config={}, extra={"step": step})
        if step % 2:
            assert checkpoints.wait()
            print("saved", step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
