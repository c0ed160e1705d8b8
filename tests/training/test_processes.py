"""Two processes that share a run write what one process writes."""

import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from small_run import fingerprint, share_compilations, small_config, write_corpus

from bert_jax.training.checkpoint import load_params, saved_steps
from bert_jax.training.telemetry import read_metrics
from bert_jax.training.train import train

CHANGES = {
    "training__num_steps": 6,
    "training__phases": [{"length": 32, "batch_size": 16}],
    "training__accumulation": 1,  # compiles in less time; test_step.py has it on every mesh
    "training__eval_every_steps": 3,
    "training__log_every_steps": 1,
    "checkpoint__save_every_steps": 4,
}
TIMEOUT = 120.0

_CHILD = """
import sys
from pathlib import Path
import jax
here, corpus, workdir, compiled, port, number = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(
    f"127.0.0.1:{port}", 2, int(number), initialization_timeout=60, heartbeat_timeout_seconds=20
)
assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 4, 2)
sys.path.insert(0, here)
from small_run import share_compilations, small_config
from test_processes import CHANGES
from bert_jax.training.train import train
config = small_config(**CHANGES, data={"corpus": corpus}, mesh={"data": 1, "fsdp": 4})
with share_compilations(Path(compiled)):
    result = train(config, Path(workdir))
assert result.finished and result.step == 6
print(f"process {number} is done")
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_two_processes(corpus: Path, workdir: Path, compiled: Path) -> list[str]:
    """Everything that each process printed; both have ended well."""
    port = free_port()
    logs = [workdir.parent / f"process_{number}.log" for number in range(2)]
    children = []
    try:
        for number, log in enumerate(logs):
            arguments = [Path(__file__).parent, corpus, workdir, compiled, port, number]
            with log.open("w") as output:
                children.append(
                    subprocess.Popen(
                        [sys.executable, "-c", _CHILD, *map(str, arguments)],
                        stdout=output, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        codes = [child.wait(TIMEOUT) for child in children]
    except subprocess.TimeoutExpired:
        pytest.fail("a process hangs:\n" + "\n".join(log.read_text() for log in logs))
    finally:
        for child in children:
            child.kill()
            child.wait()
    printed = [log.read_text() for log in logs]
    assert codes == [0, 0], "\n".join(printed)
    return printed


def test_two_processes_train_evaluate_and_save_as_one_does(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    config = small_config(**CHANGES)
    with share_compilations(tmp_path / "compiled"):
        train(config, tmp_path / "one", corpus=corpus, echo=lambda _: None)
    printed = run_two_processes(tmp_path / "corpus", tmp_path / "two", tmp_path / "compiled")

    assert "devices  4 (cpu) of 2 processes, as data 1 x fsdp 4 x tensor 1" in printed[0]
    assert "step 6/6" in printed[0]
    assert "step 6/6" not in printed[1]  # the first process speaks for all
    assert saved_steps(tmp_path / "two" / "checkpoints") == [4, 6]

    rows, expected = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("two", "one"))
    assert [row["step"] for row in rows] == [1, 2, 3, 3, 4, 5, 6, 6]
    for row, wanted in zip(rows, expected, strict=True):
        names = {name for name in wanted if not name.startswith("perf/")}
        assert names == {name for name in row if not name.startswith("perf/")}
        for name in names:
            np.testing.assert_allclose(row[name], wanted[name], rtol=1e-5, err_msg=name)

    # Written by two processes, verified and read by one, on other devices.
    assert fingerprint(tmp_path / "two", config, corpus)["step"] == "6"
    params, wanted = (load_params(tmp_path / name).params for name in ("two", "one"))
    differences = jax.tree.map(lambda a, b: np.abs(a - b), params, wanted)
    for path, difference in jax.tree_util.tree_leaves_with_path(differences):
        # As in test_step: Adam turns rounding noise (key biases) into steps of the learning rate.
        assert np.median(difference) < 1e-5 or "key" in jax.tree_util.keystr(path)
