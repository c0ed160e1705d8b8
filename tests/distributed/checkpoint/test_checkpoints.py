import gc
import json
import logging
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import (
    CONFIG,
    abstract,
    assert_same,
    change_a_value,
    make_state,
    unmark,
    write,
)
from jax.sharding import NamedSharding, PartitionSpec

from bert_jax.artefacts.saved.runs import pretrained_checkpoint
from bert_jax.config.mapping import build
from bert_jax.distributed.checkpoint.manager import Checkpoints
from bert_jax.distributed.checkpoint.reading import DamagedCheckpointError
from bert_jax.distributed.checkpoint.retention import Retention
from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.errors import UserError
from bert_jax.training.pretrain.config import PretrainConfig

# When a file cannot be read, Orbax's threads still call back into its closed event loop, a moment
# later; such an exception has no test of its own to fail.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True, scope="module")
def _late_callbacks():
    """Keeps them out of the next module."""
    yield
    time.sleep(0.1)
    gc.collect()


def flip_a_bit(checkpoint, group: str) -> None:
    """In the middle of the largest data file of a group of arrays."""
    files = [p for p in (checkpoint / group).rglob("d/*") if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def test_save_restore_keep(tmp_path):
    states = write(tmp_path, [2, 4, 6], keep=2)
    assert saved_steps(tmp_path / "checkpoints") == [4, 6]
    checkpoints = Checkpoints(tmp_path / "checkpoints", Retention(keep=2))
    restored = checkpoints.restore(abstract(states[6]))
    assert restored.step == 6
    assert restored.record.extra == {"mean": 6.1}
    assert_same(restored.state, states[6])
    checkpoints.save(6, states[6], config=CONFIG, extra={})  # it is there: nothing to do
    checkpoints.close()


def test_empty_directory_restores_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", Retention(keep=1))
    assert checkpoints.restore(abstract(make_state(0))) is None
    checkpoints.close()
    with pytest.raises(UserError, match="holds no checkpoint"):
        pretrained_checkpoint(tmp_path)


def test_restore_onto_another_mesh(tmp_path):
    state = write(tmp_path, [3])[3]
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def place(x):
        spec = PartitionSpec("data") if x.shape[:1] in [(8,), (16,)] else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    wanted = jax.tree.map(place, state)
    checkpoints = Checkpoints(tmp_path / "checkpoints", Retention(keep=1))
    restored = checkpoints.restore(wanted)
    checkpoints.close()
    assert_same(restored.state, state)
    for leaf, want in zip(jax.tree.leaves(restored.state), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding == want.sharding


def test_state_may_be_donated_once_save_returns(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", Retention(keep=1))
    state = make_state(1)
    expected = jax.tree.map(np.array, state)
    scramble = jax.jit(lambda s: jax.tree.map(lambda x: x * 3 + 1, s), donate_argnums=0)
    wanted = abstract(state)
    checkpoints.save(1, state, config=CONFIG, extra={})
    for _ in range(3):
        state = scramble(state)
    checkpoints.wait()
    assert_same(jax.tree.map(np.asarray, checkpoints.restore(wanted).state), expected)
    checkpoints.close()


@pytest.mark.parametrize("name", ["params/encoder/w", "opt_state/1/0/nu/encoder/w", "step"])
def test_a_flipped_bit_is_found_named_and_set_aside(tmp_path, caplog, name):
    states = write(tmp_path, [5, 10])
    change_a_value(tmp_path / "checkpoints" / "10", name)
    checkpoints = Checkpoints(tmp_path / "checkpoints", Retention(keep=3))
    with caplog.at_level(logging.WARNING):
        restored = checkpoints.restore(abstract(states[10]))
    assert restored.step == 5
    assert_same(restored.state, states[5])
    fault = f"1 of 11 arrays differ from their digest: {name}"
    assert f"Skipped damaged checkpoint 10 ({fault})" in caplog.text
    assert saved_steps(tmp_path / "checkpoints") == [5]
    assert [p.name for p in (tmp_path / "damaged").iterdir()] == ["10.0"]
    # The step is reached and saved again.
    checkpoints.save(10, states[10], config=CONFIG, extra={})
    checkpoints.close()
    assert saved_steps(tmp_path / "checkpoints") == [5, 10]


def test_missing_files_and_a_changed_record_are_found(tmp_path):
    states = write(tmp_path, [1, 2, 3])
    unmark(tmp_path)
    (tmp_path / "checkpoints" / "3" / "rest" / "manifest.ocdbt").unlink()
    (record,) = (tmp_path / "checkpoints" / "2" / "record").glob("data.json")
    content = json.loads(record.read_text())
    content["extra"]["mean"] = 7.0
    record.write_text(json.dumps(content))
    checkpoints = Checkpoints(tmp_path / "checkpoints", Retention(keep=3))
    assert checkpoints.restore(abstract(states[1])).step == 1
    checkpoints.close()
    assert sorted(p.name for p in (tmp_path / "damaged").iterdir()) == ["2.0", "3.0"]


def test_nothing_intact_is_an_error_and_moves_nothing(tmp_path):
    states = write(tmp_path, [1, 2])
    for step in (1, 2):
        flip_a_bit(tmp_path / "checkpoints" / str(step), "params")
    checkpoints = Checkpoints(tmp_path / "checkpoints", Retention(keep=3))
    with pytest.raises(DamagedCheckpointError, match=r"no checkpoint in .* is intact \(2: .*; 1: "):
        checkpoints.restore(abstract(states[1]))
    checkpoints.close()
    assert saved_steps(tmp_path / "checkpoints") == [1, 2]
    with pytest.raises(DamagedCheckpointError):
        pretrained_checkpoint(tmp_path)


def test_another_model_is_not_called_damage(tmp_path):
    state = write(tmp_path, [1])[1]
    other = state._replace(params={"encoder": {"w": jnp.zeros((8, 17))}})
    checkpoints = Checkpoints(tmp_path / "checkpoints", Retention(keep=3))
    with pytest.raises(UserError, match=r"params/encoder/b is bfloat16 \(3,\) in the checkpoint"):
        checkpoints.restore(abstract(other))
    checkpoints.close()
    assert saved_steps(tmp_path / "checkpoints") == [1]


def test_leftovers_of_an_interrupted_save_are_removed(tmp_path):
    write(tmp_path, [1])
    leftover = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    leftover.mkdir()
    (leftover / "data").write_bytes(b"x")
    Checkpoints(tmp_path / "checkpoints", Retention(keep=3)).close()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["1"]


def test_a_model_is_read_from_parameters_alone_and_changes_nothing(tmp_path, caplog):
    states = write(tmp_path, [5, 10])
    flip_a_bit(tmp_path / "checkpoints" / "10", "params")
    flip_a_bit(tmp_path / "checkpoints" / "5", "rest")  # inference does not read it
    with caplog.at_level(logging.WARNING):
        loaded = pretrained_checkpoint(tmp_path)
    assert loaded.step == 5
    assert "Skipped damaged checkpoint 10" in caplog.text
    assert build(PretrainConfig, loaded.record.config, "here") == PretrainConfig()
    assert_same(loaded.state, states[5].params)
    assert saved_steps(tmp_path / "checkpoints") == [5, 10]
