"""Corruption that shows in no loss: digests, replicas, and runs in which a bit flips."""

import ml_dtypes
import numpy as np
import pytest
from bit_flips import Flip, Flipping, hashes, random_flips
from small_run import small_config, write_corpus

from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh
from bert_jax.training.pretrain.settings import step_config
from bert_jax.training.pretrain.train import train
from bert_jax.training.steps.bad_step import BadStepError
from bert_jax.training.steps.recheck import (
    GRADIENT_DIGESTS,
    Recheck,
    SilentCorruptionError,
    digest,
    minority,
)

EVERY, STEPS = 3, 9


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4)])
def test_one_flipped_bit_changes_the_digest(dtype, shape):
    random = np.random.default_rng(0)
    word = np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")
    tree = {"a": np.array(random.normal(size=shape), dtype), "b": np.ones((2, 3), np.float32)}
    right = digest(tree)
    assert right.dtype == np.uint32
    for place in range(tree["a"].size):
        for bit in (0, 7, 8 * word.itemsize - 1):
            wrong = tree["a"].copy()
            wrong.reshape(-1).view(word)[place] ^= word.type(1 << bit)
            assert digest(tree | {"a": wrong}) != right
    assert digest({"a": tree["b"], "b": tree["a"]}) != right


def test_exchanged_words_change_the_digest():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert digest(values) != digest(values[:, ::-1])


@pytest.mark.parametrize(
    ("values", "axes", "marked"),
    [
        ([[7, 7], [7, 7]], (0, 1), [[0, 0], [0, 0]]),
        ([[7, 7], [8, 7]], (0, 1), [[0, 0], [1, 0]]),
        ([[7, 8], [7, 8]], (0,), [[0, 0], [0, 0]]),  # parts that differ along another axis
        ([[7, 8], [7, 9]], (0,), [[0, 1], [0, 1]]),  # none of two prevails
        ([[7, 8], [7, 8]], (), [[0, 0], [0, 0]]),  # no replicas
        ([[7, 7, 9], [8, 8, 8]], (1,), [[0, 0, 1], [0, 0, 0]]),
    ],
)
def test_the_minority_is_marked(values, axes, marked):
    assert minority(np.array(values, np.uint32), axes).tolist() == np.array(marked, bool).tolist()


@pytest.mark.parametrize(
    ("gather", "sizes", "named"),
    [
        ("step", (2, 4, 1), "6"),
        ("layer", (2, 4, 1), "4, 5, 6, 7"),
        ("layer", (8, 1, 1), "6"),
        ("step", (2, 2, 2), "4, 5"),
        ("layer", (2, 2, 2), "4, 5, 6, 7"),
    ],
)
def test_devices_whose_gradients_were_added_up_before_the_digest_are_named(gather, sizes, named):
    """Gathers of single layers add up the gradients of a row along fsdp on the way back."""
    mesh, config = make_mesh(MeshConfig(*sizes)), small_config(training__gather=gather)
    right = np.zeros(sizes[0] * sizes[1], np.uint32)
    wrong = right.copy()
    wrong[-2] = 1
    same = np.zeros((*sizes, 1), np.uint32)  # of the states, which were not updated yet
    recheck = Recheck(step_config(config.with_vocabulary(64), None), mesh, lambda: "")
    with pytest.raises(SilentCorruptionError, match=rf"\(cpu, device ids {named} of process 0"):
        recheck._compare(3, *((same, {GRADIENT_DIGESTS: each}) for each in (right, wrong)))


def config_with(corpus_dir, every=EVERY, **changes):
    return small_config(
        mesh={"data": 4, "fsdp": 1, "tensor": 1}, guard={"recheck_every": every},
        training__num_steps=STEPS, training__phases=[{"length": 32, "batch_size": 16}],
        training__accumulation=1, training__eval_every_steps=0, checkpoint__save_every_steps=1,
        checkpoint__keep=99, data={"corpus": str(corpus_dir)}, **changes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Runs on four devices whose faults a test chooses; the first has none."""
    import jax

    from bert_jax.distributed.parallel import sharding

    here = tmp_path_factory.mktemp("recheck")
    corpus = write_corpus(here / "corpus")
    config = config_with(here / "corpus")
    devices = jax.devices()[:4]
    with pytest.MonkeyPatch.context() as patch, Flipping().patched() as flipping:
        patch.setattr(sharding.jax, "devices", lambda *_: devices)
        train(config, here / "healthy", corpus=corpus, echo=lambda _: None)
        assert flipping.executed == STEPS + STEPS // EVERY
        yield here, config, corpus, flipping, hashes(here / "healthy", config, corpus)


def flip_in(four, workdir, flip):
    """Train with a flip; return the error, if one ended the run, and hashes of the saved states."""
    _, config, corpus, flipping, _ = four
    flipping.flip, error = flip, None
    try:
        train(config, workdir, corpus=corpus, echo=lambda _: None)
    except (SilentCorruptionError, BadStepError) as caught:
        error = caught
    finally:
        flipping.flip, flipping.armed = None, False
    return error, hashes(workdir, config, corpus)


def test_wrong_gradients_of_a_device_are_named(four, tmp_path):
    flip = Flip("gradients", device=2, step=6, leaf=0.5, place=0.5, bit=20)
    error, saved = flip_in(four, tmp_path / "run", flip)
    assert str(error).startswith(
        "step 6, computed twice from the same state, gave different gradients: suspect the "
        "hardware (cpu, device ids 2 of process 0). The run stops"
    )
    assert f"The last save that was checked: {tmp_path / 'run' / 'checkpoints' / '5'}" in str(error)
    assert error.exit_code == 9
    assert saved == {step: four[-1][step] for step in range(1, 6)}


def test_a_wrong_replica_is_named_before_it_is_saved(four, tmp_path):
    flip = Flip("state", device=3, step=5, leaf=0.2, place=0.1, bit=12)
    error, saved = flip_in(four, tmp_path / "run", flip)
    assert (
        "after step 5, replicas of the state differ: suspect the hardware (cpu, device ids 3 "
        in (str(error))
    )
    assert max(saved) == 4


def test_the_same_command_goes_on_to_the_result_of_a_healthy_run(four, tmp_path):
    flip = Flip("gradients", device=1, step=3, leaf=0.1, place=0.9, bit=30)
    error, _ = flip_in(four, tmp_path / "run", flip)
    assert isinstance(error, SilentCorruptionError)
    error, saved = flip_in(four, tmp_path / "run", None)
    assert error is None
    assert saved == four[-1]


@pytest.mark.slow
def test_random_flips_are_caught_or_leave_no_trace(four, tmp_path):
    for number, flip in enumerate(random_flips(10, devices=4, steps=STEPS, every=EVERY, seed=33)):
        error, saved = flip_in(four, tmp_path / str(number), flip)
        assert saved == {step: four[-1][step] for step in saved}, flip
        assert error is not None or len(saved) == STEPS, flip
