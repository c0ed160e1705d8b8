"""Several processes that share a run write what one process writes; how they find each other."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import small_finetuning
from compiling import same_bits
from small_run import fingerprint, small_config, write_corpus

from bert_jax.artefacts.saved.runs import pretrained_checkpoint
from bert_jax.config.mapping import to_dict
from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.distributed.parallel import processes
from bert_jax.distributed.parallel.processes import JoinError, find_cluster
from bert_jax.errors import UserError
from bert_jax.training.pretrain.train import train
from bert_jax.training.run.events import read_events
from bert_jax.training.run.telemetry import read_metrics

CHANGES = {
    "training__num_steps": 6,
    "training__phases": [{"length": 32, "batch_size": 16}],
    "training__accumulation": 1,  # compiles in less time; test_step.py has it on every mesh
    "training__eval_every_steps": 3,
    "training__log_every_steps": 1,
    "checkpoint__save_every_steps": 4,
}
TIMEOUT = 800.0
long = pytest.mark.skipif(
    os.environ.get("BERT_JAX_CHAOS") != "1", reason="takes a minute; BERT_JAX_CHAOS=1 runs it"
)
LOCAL = Path(__file__).parents[3] / "launch" / "local.py"


def write_config(path: Path, config) -> Path:
    path.write_text(
        f"import json\ndef get_config():\n    return json.loads({json.dumps(config)!r})\n"
    )
    return path


def launch(
    logs: Path, number: int, command: list[str], environ: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    pod = [sys.executable, str(LOCAL), "--processes", str(number), "--logs", str(logs)]
    return subprocess.run(
        [*pod, "--grace=1", "--", *command], env=environ, capture_output=True, text=True,
        timeout=TIMEOUT, check=False,
    )  # fmt: skip


def run_pod(
    number: int, here: Path, mesh: dict[str, int], workdir: Path, program: Sequence[str | Path]
) -> list[str]:
    """What each of `number` processes with 2 devices printed; the run in `workdir` is finished."""
    arguments = [
        "pretrain", f"--config={here / 'config.py'}", f"--workdir={workdir}",
        *(f"--config.mesh.{axis}={size}" for axis, size in mesh.items()),
    ]  # fmt: skip
    done = launch(here / "logs", number, [*map(str, program), *arguments], same_bits())
    logs = [(here / "logs" / f"process_{i}.log").read_text() for i in range(number)]
    assert done.returncode == 0, done.stderr + "\n".join(logs)
    assert done.stdout == logs[0]
    return logs


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A directory with a corpus, a configuration and the run of one process with 8 devices."""
    here = tmp_path_factory.mktemp("processes")
    corpus = write_corpus(here / "corpus")
    config = small_config(**CHANGES, data={"corpus": str(here / "corpus")})
    write_config(here / "config.py", to_dict(config))
    train(config, here / "one", corpus=corpus, echo=lambda _: None)
    return here, config, corpus


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "mesh"),
    [
        pytest.param(2, {"data": 1, "fsdp": 4, "tensor": 1}, marks=long),
        (4, {"data": 2, "fsdp": 2, "tensor": 2}),
    ],
    ids=["2 processes", "4 processes"],
)
def test_processes_train_evaluate_and_save_as_one_does(number, mesh, alone):
    here, config, corpus = alone
    pod = here / "pod"
    printed = run_pod(number, here, mesh, workdir=pod, program=["bert-jax"])

    layout = " x ".join(f"{name} {size}" for name, size in mesh.items())
    assert f"devices  {2 * number} (cpu) of {number} processes, as {layout}" in printed[0]
    assert "step 6 of 6 reached" in printed[0]
    assert not any("step 6 of 6" in text for text in printed[1:])  # the first speaks for all
    assert saved_steps(pod / "checkpoints") == [4, 6]

    rows, expected = (read_metrics(path / "metrics.jsonl") for path in (pod, here / "one"))
    # The last row also says that so short a run has not left the plateau.
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert sum("event/plateau" in row for row in rows) == 1
    for row, wanted in zip(rows, expected, strict=True):
        names = {name for name in wanted if not name.startswith("perf/")}
        assert names == {name for name in row if not name.startswith("perf/")}
        for name in names:
            np.testing.assert_allclose(row[name], wanted[name], rtol=1e-5, err_msg=name)

    # Written by several processes, verified and read by one, on other devices.
    assert fingerprint(pod, config, corpus)["step"] == "6"
    params, wanted = (pretrained_checkpoint(path).state for path in (pod, here / "one"))
    differences = jax.tree.map(lambda a, b: np.abs(a - b), params, wanted)
    for path, difference in jax.tree_util.tree_leaves_with_path(differences):
        # The gradient of a key's bias is rounding noise, since softmax takes no notice of a shift;
        # Adam turns the noise into steps of the learning rate.
        name = jax.tree_util.keystr(path)
        assert np.median(difference) < 1e-5 or name.endswith("['key']['bias']"), name
    pod.rename(here / f"pod of {number}")


_STALE = """
import os, sys
from bert_jax.distributed.checkpoint import reading
from bert_jax.training import workdir
if os.environ["JAX_PROCESS_ID"] == "1":
    for module in (reading, workdir):
        module.saved_steps = lambda directory: [4]
from bert_jax.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 1, "fsdp": 4}, {"data": 4}], ids=["fsdp", "data"])
def test_with_a_stale_listing_in_one_process_all_restore_the_same_checkpoint(mesh, alone, tmp_path):
    here, _, _ = alone
    pod = tmp_path / "pod"
    shutil.copytree(here / "one", pod)
    (tmp_path / "stale.py").write_text(_STALE)
    printed = run_pod(2, here, mesh, workdir=pod, program=[sys.executable, tmp_path / "stale.py"])
    assert "continues from step 6" in printed[0]
    assert saved_steps(pod / "checkpoints") == [4, 6]
    assert not (pod / "damaged").exists()


@pytest.mark.slow
def test_an_error_in_one_process_does_not_wait_for_the_others(alone):
    here, _, _ = alone
    environ = os.environ | {"CLI": f"{sys.executable} -m bert_jax.cli", "HERE": str(here)}
    pretrain = (
        '$CLI pretrain --config="$HERE/config.py" --workdir="$HERE/lost" '
        '--config.data.corpus="$HERE/${where[JAX_PROCESS_ID]}"'
    )
    command = ["bash", "-c", f"where=(corpus nowhere); exec {pretrain}"]
    done = launch(here / "lost logs", 2, command, environ)
    assert done.returncode == 2
    assert "pretrain, process 1: the corpus" in done.stderr
    assert "nowhere does not exist" in done.stderr


_SIGNALLED = """
import os, signal, sys, time
from bert_jax.training.loop import _Run
score = _Run._score

def score_under_signal(run, due):
    score(run, due)
    if run.now.wave == 0 and run.now.ended and os.environ["JAX_PROCESS_ID"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(3)  # JAX's service looks for a signal once a second

_Run._score = score_under_signal
from bert_jax.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_sigterm_in_the_evaluation_that_ends_a_wave_early_stops_all_processes(tmp_path):
    """In one of two processes; the next wave saves at its first step, and the run goes on."""
    rates = {"learning_rate": 1e-12}  # no evaluation is better than the first
    training = {"num_epochs": 4.0, "patience": 1, "eval_batch_size": 24, "max_buckets": 1}
    config = small_finetuning.small_config(
        small_finetuning.write_files(tmp_path / "files"),
        sweep={"seeds": 2, "at_once": 1}, optimizer=rates, training=training,
    )  # fmt: skip
    write_config(tmp_path / "config.py", to_dict(config))
    (tmp_path / "signalled.py").write_text(_SIGNALLED)
    work = tmp_path / "work"
    command = ["finetune", f"--config={tmp_path / 'config.py'}", f"--workdir={work}"]
    program = [sys.executable, str(tmp_path / "signalled.py")]
    done = launch(tmp_path / "logs", 2, [*program, *command], same_bits())
    assert done.returncode == 0, done.stderr
    assert "stopped by SIGTERM, saved; the same command continues" in done.stdout
    kinds = [event["kind"] for event in read_events(work / "events.jsonl")]
    assert (kinds.count("early_stop"), kinds[-1]) == (1, "stopped")
    again = launch(tmp_path / "logs", 2, ["bert-jax", *command], same_bits())
    assert again.returncode == 8, again.stderr
    kinds = [event["kind"] for event in read_events(work / "events.jsonl")]
    assert (kinds.count("early_stop"), kinds[-1]) == (2, "finished")


GIVEN = {
    "JAX_COORDINATOR_ADDRESS": "10.0.0.2:8482", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9", "SLURM_LOCALID": "1",
}  # fmt: skip
GKE = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}


@pytest.mark.parametrize(
    ("environ", "on_tpu", "method", "count"),
    [
        (GIVEN, False, "deactivate", 4),
        (GIVEN | SLURM, True, "deactivate", 4),  # what is said outright comes first
        (SLURM, False, "slurm", 16),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "8"}, False, "slurm", 8),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "10.0.0.2:8482"}, False, "slurm", 16),
        ({"OMPI_MCA_orte_hnp_uri": "1.0;tcp://h:1", "OMPI_COMM_WORLD_SIZE": "2"}, False, "ompi", 2),
        (GKE, True, None, 2),
        (GKE | {"MEGASCALE_NUM_SLICES": "4"}, True, None, 8),
        ({}, True, None, None),  # the metadata server is asked
    ],
)
def test_what_joins(environ, on_tpu, method, count):
    found = find_cluster(environ, on_tpu=on_tpu)
    assert found is not None
    assert (found.method, found.count) == (method, count)


@pytest.mark.parametrize(
    ("environ", "on_tpu"),
    [
        ({}, False),
        (GKE, False),  # computing on the CPU of a TPU host
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, True),
        ({"TPU_SKIP_MDS_QUERY": "1"}, True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
        (SLURM | {"SLURM_NTASKS": "1"}, False),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, False),  # a shell of salloc
        ({k: v for k, v in SLURM.items() if "STEP" not in k}, False),  # sbatch without srun
        (GIVEN | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, False),  # Open MPI 5
    ],
)
def test_what_stays_alone(environ, on_tpu):
    assert find_cluster(environ, on_tpu=on_tpu) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"JAX_PROCESS_ID": ""}, "JAX_NUM_PROCESSES are set but JAX_PROCESS_ID is not"),
        ({"JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID is 4; .* must be 0 to 3"),
        ({"JAX_NUM_PROCESSES": "four"}, "JAX_NUM_PROCESSES is 'four'; it must be a whole number"),
        ({"JAX_NUM_PROCESSES": "0"}, "JAX_NUM_PROCESSES is 0"),
        ({"JAX_COORDINATOR_ADDRESS": "10.0.0.2"}, "it must be host:port"),
    ],
)
def test_variables_that_cannot_be(changes, message):
    with pytest.raises(UserError, match=message):
        find_cluster(GIVEN | changes, on_tpu=False)


def test_processes_of_open_mpi_5_do_not_each_take_themselves_for_the_run():
    environ = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
    with pytest.raises(UserError, match="mpirun started 4 processes, but Open MPI 5 does"):
        find_cluster(environ, on_tpu=False)
    found = find_cluster(environ | GIVEN, on_tpu=False)
    assert found is not None
    assert found.index == 3


def test_off_looks_at_nothing(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "four")
    processes.join("off")
    assert processes.label() == ""
    processes.leave(3)  # alone: the caller's exit code does
    with pytest.raises(UserError, match="JAX_NUM_PROCESSES is set"):
        processes.join("auto")


@pytest.fixture
def on_tpu_vm(monkeypatch):
    """Sets what JAX answers on a machine with TPU chips when it is asked to join."""
    for name in ("TPU_SKIP_MDS_QUERY", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processes, "_on_tpu", lambda: True)
    monkeypatch.setattr(processes, "_here", SimpleNamespace(joined=False, index=0))

    def answer(error):
        def initialize(**_):
            raise error

        monkeypatch.setattr(jax.distributed, "initialize", initialize)

    return answer


def test_chips_in_a_machine_that_is_no_tpu_vm(on_tpu_vm):
    on_tpu_vm(ValueError("coordinator_address should be defined."))
    processes.join("auto")
    assert processes.label() == ""
    with pytest.raises(UserError, match="no other processes were found"):
        processes.join("on")


def test_a_join_that_fails(on_tpu_vm):
    on_tpu_vm(RuntimeError("port 8482 is taken\nand more"))
    with pytest.raises(JoinError, match=r"RuntimeError: port 8482 is taken\. To run") as failed:
        processes.join("auto")
    assert "this TPU VM's metadata" in str(failed.value)
    assert processes.label() == "process 0"  # an exit must not wait for others


def test_processes_that_do_not_come():
    given = GIVEN | {"JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_ADDRESS": "127.0.0.1:9"}
    command = ["pretrain", "--config=pretrain/bert_tiny", "--workdir=unused", "--join-timeout=1"]
    missed = subprocess.run(
        [sys.executable, "-m", "bert_jax.cli", *command], env=os.environ | given,
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert missed.returncode == 6  # another try may find them
    assert "process 3 of 4 waited 1 s at 127.0.0.1:9" in missed.stderr
    assert "--distributed=off" in missed.stderr
