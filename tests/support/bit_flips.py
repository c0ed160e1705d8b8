"""Single bits that flip on one device of a run: in its gradients, or in the state that it keeps."""

import contextlib
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.distributed.checkpoint.reading import restore_step
from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.distributed.parallel.sharding import make_mesh
from bert_jax.training import loop
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus
from bert_jax.training.pretrain.settings import step_config
from bert_jax.training.steps import step as step_module
from bert_jax.training.steps.recheck import Recheck
from bert_jax.training.steps.state import abstract_state


class Flip(NamedTuple):
    """A bit that flips once."""

    where: Literal["gradients", "state"]
    """gradients: in the first computation of a step. state: just before a step."""
    device: int
    step: int
    leaf: float
    """Array, as a fraction of all arrays: parameters, then those of the optimizer."""
    place: float
    """Element, as a fraction of the array."""
    bit: int

    def index(self, shapes: list[tuple[int, ...]]) -> tuple[int, int]:
        """Array and element."""
        leaf = int(self.leaf * len(shapes))
        return leaf, int(self.place * max(1, int(np.prod(shapes[leaf]))))


def random_flips(count: int, *, devices: int, steps: int, every: int, seed: int) -> list[Flip]:
    """As many flips of gradients in checked steps as of the state at any step before the last."""
    random = np.random.default_rng(seed)
    flips = []
    for number in range(2 * count):
        where: Literal["gradients", "state"] = "gradients" if number < count else "state"
        step = every * random.integers(1, steps // every + 1)
        if where == "state":
            step = random.integers(1, steps + 1)
        flips.append(
            Flip(
                where,
                int(random.integers(devices)),
                int(step),
                random.random(),
                random.random(),
                int(random.integers(32)),
            )
        )
    return flips


class Flipping:
    """The faults of the runs of this process; steps are compiled once for all of them."""

    def __init__(self) -> None:
        self.flip: Flip | None = None
        self.armed = False
        self.executed = 0

    @contextlib.contextmanager
    def patched(self) -> Iterator["Flipping"]:
        """Steps that are made in the `with` block may flip a bit."""
        summed, rechecked = step_module._summed, Recheck.step
        flipping = self

        def host(device: np.ndarray, number: int, size: int) -> np.ndarray:
            mask = np.zeros(size, np.uint32)
            flip = self.flip
            if self.armed and flip is not None and int(device) == flip.device:
                leaf, place = flip.index(self.shapes)
                if leaf == number:
                    self.armed = False
                    mask[place] = 1 << flip.bit
            return mask

        def summed_with_a_fault(config: Any, differentiate: Any, params: Any, rows: Any) -> Any:
            grads, sums = summed(config, differentiate, params, rows)
            leaves, tree = jax.tree.flatten(grads)
            self.shapes = [leaf.shape for leaf in leaves]
            device = jax.lax.axis_index("data")
            wrong = []
            for number, leaf in enumerate(leaves):
                mask = jax.pure_callback(
                    lambda at, n=number, size=leaf.size: host(at, n, size),
                    jax.ShapeDtypeStruct((leaf.size,), jnp.uint32), device,
                )  # fmt: skip
                bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32) ^ mask.reshape(leaf.shape)
                wrong.append(jax.lax.bitcast_convert_type(bits, leaf.dtype))
            return jax.tree.unflatten(tree, wrong), sums

        def step(self: Recheck, number: int, run: Any, state: Any, *inputs: Any) -> Any:
            flip = flipping.flip

            def counted(*arguments: Any) -> Any:
                flipping.executed += 1
                return run(*arguments)

            if flip is not None and number == flip.step:
                if flip.where == "gradients":
                    flipping.armed = True
                else:
                    state = flipped(state, self._mesh.devices.flat[flip.device], flip)
            return rechecked(self, number, counted, state, *inputs)

        with (
            mock.patch.object(step_module, "_summed", summed_with_a_fault),
            mock.patch.object(Recheck, "step", step),
            mock.patch.object(
                loop, "make_train_step", functools.cache(step_module.make_train_step)
            ),
        ):
            yield self


def flipped(state: Any, device: Any, flip: Flip) -> Any:
    """A state with one wrong bit on one device."""
    leaves, tree = jax.tree.flatten((state.params, state.opt_state))
    number, place = flip.index([leaf.shape for leaf in leaves])
    parts = []
    for shard in leaves[number].addressable_shards:
        data = np.array(shard.data)
        if shard.device == device:
            data.reshape(-1).view(np.uint32)[place % data.size] ^= np.uint32(1 << flip.bit)
        parts.append(jax.device_put(data, shard.device))
    array = leaves[number]
    leaves[number] = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
    params, opt_state = jax.tree.unflatten(tree, leaves)
    return state._replace(params=params, opt_state=opt_state)


def hashes(workdir: Path, config: PretrainConfig, corpus: Corpus) -> dict[int, str]:
    """SHA-256 of each saved state."""
    config = config.with_vocabulary(corpus.train.vocab_size)
    abstract = abstract_state(
        step_config(config, corpus), make_mesh(config.mesh, jax.devices()[:4])
    )
    found = {}
    for step in saved_steps(workdir / "checkpoints"):
        state = restore_step(workdir / "checkpoints", step, abstract).state
        content = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state))
        found[step] = hashlib.sha256(content).hexdigest()
    return found
