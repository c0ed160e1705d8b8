"""Four processes that hold the same parameters, until one bit flips without a visible sign."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bit_flips import hashes
from chaos_run import LONG, TIMEOUT, child_environ, new_seed
from small_run import small_config, write_corpus

from bert_jax.config.mapping import to_dict
from bert_jax.training.run.telemetry import read_metrics

LOCAL = Path(__file__).parents[2] / "launch" / "local.py"
SUPPORT = Path(__file__).parents[1] / "support"
FLIPS, EVERY, STEPS = (20, 4, 12) if LONG else (2, 3, 6)


def small(corpus, every, **changes):
    return small_config(
        mesh={"data": 4, "fsdp": 1, "tensor": 1}, guard={"recheck_every": every},
        training__phases=[{"length": 32, "batch_size": 16}], training__accumulation=1,
        training__eval_every_steps=0, data={"corpus": str(corpus)}, **changes,
    )  # fmt: skip


def in_four_processes(logs, cache, command, timeout=10 * TIMEOUT):
    """Run a command in four processes of one device each; return what process 0 printed."""
    done = subprocess.run(
        [sys.executable, str(LOCAL), "--processes=4", "--devices=1", "--grace=2",
         f"--logs={logs}", "--", *map(str, command)],
        env=child_environ(cache), capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + (logs / "process_0.log").read_text()[-4000:]
    return done.stdout


@pytest.mark.slow
def test_flips_are_caught_or_leave_no_trace_and_are_never_saved(tmp_path, cache):
    corpus = write_corpus(tmp_path / "corpus")
    config = small(
        tmp_path / "corpus", EVERY, training__num_steps=STEPS, checkpoint__save_every_steps=2,
        checkpoint__keep=99,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
    seed = new_seed()
    printed = in_four_processes(
        tmp_path / "logs", cache,
        [sys.executable, SUPPORT / "flipped_runs.py", tmp_path / "config.json",
         tmp_path / "corpus", tmp_path / "runs", seed, EVERY, FLIPS],
    )  # fmt: skip
    runs = [json.loads(line) for line in printed.splitlines() if line.startswith('{"run"')]
    assert len(runs) == 1 + 2 * FLIPS
    assert not runs[0]["error"]
    healthy = hashes(tmp_path / "runs" / "0", config, corpus)
    assert max(healthy) == STEPS
    for run in runs[1:]:
        saved = hashes(tmp_path / "runs" / str(run["run"]), config, corpus)
        assert saved == {step: healthy[step] for step in saved}, run
        assert run["error"] or saved == healthy, run
        print(run)
    caught = [run for run in runs[1:] if run["error"].startswith("SilentCorruptionError")]
    named = [run for run in caught if f" of process {run['flip'][1]})" in run["error"]]
    print(f"{len(caught)} of {len(runs) - 1} caught, {len(named)} with the right device; {seed=}")
    assert all(run["error"] for run in runs[1:] if run["flip"][0] == "gradients")
    assert named == caught


@pytest.mark.skipif(not LONG, reason="takes minutes; BERT_JAX_CHAOS=1 runs it")
@pytest.mark.slow
def test_ten_thousand_steps_give_no_false_alarm(tmp_path, cache):
    write_corpus(tmp_path / "corpus")
    config = small(
        tmp_path / "corpus", 10, training__num_steps=10_000, training__log_every_steps=1000,
        checkpoint__save_every_steps=2000,
    )  # fmt: skip
    file = tmp_path / "config.py"
    file.write_text(
        f"import json\ndef get_config():\n    return json.loads({json.dumps(to_dict(config))!r})\n"
    )
    in_four_processes(
        tmp_path / "logs", cache,
        [sys.executable, "-m", "bert_jax.cli", "pretrain", f"--config={file}",
         f"--workdir={tmp_path / 'run'}"],
    )  # fmt: skip
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 10_000
