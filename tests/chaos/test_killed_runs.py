"""A run that is killed at random moments and restarted is, bit for bit, the run that was not."""

import random
import time

import pytest
from chaos_run import LONG, Kill, Pod, new_seed, write_config
from small_run import fingerprint, small_config, write_corpus

from bert_jax.training.run.telemetry import read_metrics

# test_resume.py kills a run of one process with sentence pairs, test_stalled.py one of two.
CASES = [("none", 1, 4)]
CHANGES = {}
KILLS = 1
if LONG:
    CASES = [("nsp", 1, 4), ("none", 1, 4), ("nsp", 2, 2), ("none", 2, 2)]
    KILLS = 5
    CHANGES = {
        "model": {"num_positions": 512, "hidden_dim": 32, "num_layers": 2, "num_heads": 2,
                  "mlp_dim": 64, "scan_unroll": 1},
        "training__num_steps": 60,
        "training__phases": [
            {"length": 128, "batch_size": 16, "share": 0.7},
            {"length": 512, "batch_size": 16, "share": 0.3},
        ],
        "training__eval_every_steps": 10,
        "checkpoint__save_every_steps": 7,
    }  # fmt: skip


def random_kills(rng: random.Random, num_steps: int, seconds: float) -> list[Kill]:
    """Half of them as the run comes to a step, the others after some time.

    Args:
        rng: Chooses.
        num_steps: Of the run.
        seconds: What the whole run took, compilations included.
    """
    steps = sorted(rng.sample(range(2, num_steps - 2), (KILLS + 1) // 2))
    kills = [Kill("step", step) for step in steps]
    for _ in range(KILLS // 2):
        place = rng.randrange(len(kills) + 1)
        kills.insert(place, Kill("seconds", rng.uniform(0.2, 0.7) * seconds))
    return kills


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "processes", "devices"), CASES)
def test_killed_runs_equal_the_whole_one(tmp_path, cache, objective, processes, devices):
    seed = new_seed()
    rng = random.Random(seed)
    corpus = write_corpus(tmp_path / "corpus")
    config = small_config(
        **CHANGES, data={"corpus": str(tmp_path / "corpus"), "pairing": objective}
    )
    assert config.model.hidden_dropout_rate > 0
    assert config.training.accumulation > 1
    file = write_config(tmp_path / "config.py", config)
    shape = {"processes": processes, "devices": devices}

    begin = time.monotonic()
    Pod(file, tmp_path / "whole", cache, **shape).finish()
    seconds = time.monotonic() - begin
    expected = fingerprint(tmp_path / "whole", config, corpus)
    assert expected["step"] == str(config.training.num_steps)
    assert any("eval/mlm_loss" in row for row in read_metrics(tmp_path / "whole/metrics.jsonl"))

    kills = random_kills(rng, config.training.num_steps, seconds)
    killed = Pod(file, tmp_path / "killed", cache, **shape, restarts=KILLS)
    hits = killed.finish(kills, rng)
    print(f"{hits} of {len(kills)} kills hit a running process: {kills}")
    assert hits > 0
    assert "after exit code 137" in killed.output()
    if LONG:  # a single kill may come before the first checkpoint
        assert "continues from step" in killed.output()
    assert fingerprint(tmp_path / "killed", config, corpus) == expected
