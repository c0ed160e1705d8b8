"""A run that is continued on other devices, meshes and numbers of processes."""

import contextlib
import hashlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from chaos_run import LONG, Pod, write_config
from small_run import small_config, write_corpus

from bert_jax.data.pipeline import ExampleStream
from bert_jax.distributed.checkpoint.digest import block_digest, text
from bert_jax.distributed.checkpoint.manager import Checkpoints
from bert_jax.distributed.checkpoint.record import named_leaves
from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.distributed.parallel.sharding import make_mesh
from bert_jax.training.pretrain import train as train_module
from bert_jax.training.pretrain.settings import step_config
from bert_jax.training.pretrain.train import train
from bert_jax.training.run.telemetry import read_metrics
from bert_jax.training.steps.state import abstract_state

# As (devices, mesh) one after the other: by the number of devices, and from fsdp to tensor.
CHAINS: list[list[tuple[int, dict[str, int]]]] = [
    [(8, {}), (4, {"fsdp": 2, "tensor": 2, "data": 1}), (1, {})]
]
CHANGES: dict[str, Any] = {
    "training__num_steps": 6,
    "training__phases": [{"length": 32, "batch_size": 16}],
    "training__accumulation": 1,
    "training__eval_every_steps": 0,
}
if LONG:
    CHANGES = {"training__eval_every_steps": 0}  # 12 steps, a change of length after the 7th
    CHAINS = [
        [(8, {}), (4, {}), (1, {})],
        [(8, {"fsdp": 8, "data": 1}), (8, {"tensor": 2, "data": 4}), (2, {"fsdp": 2, "data": 1})],
        [(1, {}), (8, {"fsdp": 2, "tensor": 2, "data": 2})],
    ]
CHANGES["training__log_every_steps"] = 1


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))._replace(heldout=None)


class Recorder:
    """Runs `train` on some of this process's devices, and keeps the rows that it reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.rows: list[str] = []
        self._patch = monkeypatch

    @contextlib.contextmanager
    def devices(self, number: int) -> Iterator[None]:
        place = train_module.place_batch

        def recorded(batch, mesh):
            content = batch["row_index"].tobytes() + batch["tokens"].tobytes()
            self.rows.append(hashlib.sha256(content).hexdigest())
            return place(batch, mesh)

        with self._patch.context() as patch:
            patch.setattr(train_module, "make_mesh", lambda c: make_mesh(c, jax.devices()[:number]))
            patch.setattr(train_module, "place_batch", recorded)
            yield


def losses(workdir: Path) -> dict[int, float]:
    rows = read_metrics(workdir / "metrics.jsonl")
    return {row["step"]: row["train/mlm_loss"] for row in rows if "train/mlm_loss" in row}


def assert_restores(workdir: Path, config, corpus, number: int) -> dict[str, str]:
    """The newest state on a mesh: every array has the digest that was taken when it was saved."""
    config = config.with_vocabulary(corpus.train.vocab_size)
    mesh = make_mesh(config.mesh, jax.devices()[:number])
    checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint)
    restored = checkpoints.restore(abstract_state(step_config(config, corpus), mesh))
    checkpoints.close()
    assert restored is not None
    assert restored.damaged == ()
    hashes = {}
    for name, leaf in named_leaves(restored.state).items():
        assert leaf.sharding.mesh.size == number
        value = np.asarray(leaf)
        hashes[name] = hashlib.sha256(value.tobytes()).hexdigest()
        digest = text(block_digest(value, (0,) * value.ndim, value.shape))
        assert digest == restored.record.arrays[name][2], name
    return hashes


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_one_process_on_other_devices(tmp_path, cache, corpus, monkeypatch, chain):
    whole = Recorder(monkeypatch)
    config = small_config(**CHANGES)
    with whole.devices(8):
        train(config, tmp_path / "whole", corpus=corpus, echo=lambda _: None)
    expected = losses(tmp_path / "whole")
    num_steps = config.training.num_steps
    assert list(expected) == list(range(1, num_steps + 1))

    stops = [num_steps * (n + 1) // len(chain) for n in range(len(chain))]
    recorder, work, before = Recorder(monkeypatch), tmp_path / "work", chain[0]
    for (number, mesh), stop in zip(chain, stops, strict=True):
        config = small_config(**CHANGES, mesh=mesh)
        if (work / "checkpoints").exists():
            begun = [
                assert_restores(work, small_config(**CHANGES, mesh=m), corpus, n)
                for n, m in (before, (number, mesh))
            ]
            assert begun[0] == begun[1]
        before = number, mesh

        def stopping(line: str, stop: int = stop) -> None:
            # A step is spoken of when the next one has been dispatched, or before.
            if line.startswith(f"step {stop - 1}/") and stop < num_steps:
                os.kill(os.getpid(), signal.SIGTERM)

        with recorder.devices(number):
            result = train(config, work, corpus=corpus, echo=stopping)
        assert stop - 1 <= result.step <= stop
        assert result.finished == (stop == num_steps)
    assert recorder.rows == whole.rows
    found = losses(work)
    assert list(found) == list(expected)
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=2e-4)


@pytest.mark.skipif(not LONG, reason="a long form: BERT_JAX_CHAOS=1")
def test_two_processes_then_one_then_four(tmp_path, cache, corpus):
    directory = corpus.train.path.parent
    shutil.copytree(directory / "train", tmp_path / "corpus" / "train")
    whole = small_config(**CHANGES, data={"corpus": str(tmp_path / "corpus")})
    file = write_config(tmp_path / "config.py", whole)
    Pod(file, tmp_path / "whole", cache, processes=1, devices=4).finish()
    expected = losses(tmp_path / "whole")

    chain = [(2, 2, ["--config.mesh.fsdp=2"]), (1, 4, []), (4, 1, ["--config.mesh.fsdp=4"])]
    work = tmp_path / "work"
    for number, (processes, devices, fields) in enumerate(chain):
        pod = Pod(
            file, work, cache, processes=processes, devices=devices, fields=fields,
            logs=tmp_path / f"logs {number}",
        )  # fmt: skip
        if number < 2:
            pod.stop_at(4 * (number + 1))
        pod.finish()
        assert_restores(work, whole, corpus, 8)
        stopped = saved_steps(work / "checkpoints")[-1]
        assert (stopped < 12) == (number < 2), stopped
    assert "continues from step" in pod.output()
    found = losses(work)
    assert list(found) == list(expected)
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=2e-4)


@pytest.mark.parametrize("objective", ["nsp", "none"])
def test_processes_share_each_batch(corpus, objective):
    config = small_config(data={"pairing": objective})
    stream = ExampleStream(corpus.train, config.data, config.phases, config.seed)
    for step in range(config.training.num_steps):
        batch = stream.batch(step)
        for processes in (1, 2, 4, 16):
            parts = [stream.batch(step, index, processes) for index in range(processes)]
            for name, array in batch.items():
                together = np.concatenate([part[name] for part in parts])
                np.testing.assert_array_equal(together, array)
