"""launch/slurm.sh against an sbatch that records its call; the job itself against srun."""

import shutil
import subprocess

import pytest
from stub_commands import Stubs

COMMAND = ["bert-jax", "pretrain", "--config=a.py", "--config.data.corpus=/my corpus",
           "--config.x=it's"]  # fmt: skip
RUN = ["bert-jax", "pretrain", "--stopped-code=75", *COMMAND[2:]]


@pytest.fixture
def stubs(tmp_path):
    stubs = Stubs(tmp_path)
    stubs.add("sbatch", 'cat >"$STUBS/job"; echo "Submitted batch job 7"')
    stubs.add("srun", 'exit "$(cat "$STUBS/code")"')
    stubs.add("squeue", 'cat "$STUBS/state"')
    stubs.add("scontrol")
    (tmp_path / "state").write_text("RUNNING\n")
    return stubs


def submit(stubs, *flags):
    done = stubs.run("slurm.sh", *flags, "--", *COMMAND)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Submitted batch job 7\n"
    return stubs.calls[0]


def run_job(stubs, code, **variables):
    """Runs the submitted script; its exit code and what it called."""
    (stubs.directory / "code").write_text(f"{code}\n")
    (stubs.directory / "calls").unlink(missing_ok=True)
    environ = {
        "PATH": f"{stubs.directory}:/usr/bin:/bin", "SLURM_JOB_ID": "7",
        "STUB_CALLS": str(stubs.directory / "calls"), "STUBS": str(stubs.directory), **variables,
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(stubs.directory / "job")], env=environ, cwd=stubs.directory, check=False
    )
    return done.returncode, stubs.calls


def test_processes_have_the_cores_that_the_job_has(stubs):
    stubs.add("srun", 'echo "${SRUN_CPUS_PER_TASK-none}" >"$STUBS/cores"')
    submit(stubs, "--cpus-per-task=16")
    for given, wanted in ({"SLURM_CPUS_PER_TASK": "16"}, "16"), ({}, "none"):
        assert run_job(stubs, 0, **given)[0] == 0
        assert (stubs.directory / "cores").read_text() == f"{wanted}\n"


def test_one_process_a_gpu(stubs):
    call = submit(stubs, "--nodes=2", "--gpus-per-node=4", "--partition=long", "--time=2:00:00",
                  "--sbatch-flag=--constraint=a b", "--name=base")  # fmt: skip
    assert call == [
        "sbatch", "--job-name=base", "--nodes=2", "--gpus-per-node=4", "--ntasks-per-node=4",
        "--time=2:00:00", "--signal=TERM@180", "--requeue", "--open-mode=append",
        "--output=%x-%j.out", "--partition=long", "--constraint=a b",
    ]  # fmt: skip
    code, calls = run_job(stubs, 0)
    assert code == 0
    waits = ["--kill-on-bad-exit=0", "--wait=60"]
    assert calls == [["srun", *waits, "--ntasks-per-node=4", "env", *RUN]]


def test_one_process_a_node_sees_all_its_gpus(stubs):
    call = submit(stubs, "--nodes=2", "--gpus-per-node=4", "--per=node")
    assert "--ntasks-per-node=1" in call
    _, ((*_, task, env, devices, _, _, _, _, _, _),) = run_job(stubs, 0)
    assert (task, env) == ("--ntasks-per-node=1", "env")
    assert devices == "JAX_LOCAL_DEVICE_IDS=0,1,2,3"


def test_set_up_comes_before_the_run(stubs):
    submit(stubs, "--setup", "export WHERE='/a b'", "--setup", 'echo "$WHERE" >"$STUBS/where"')
    run_job(stubs, 0)
    assert (stubs.directory / "where").read_text() == "/a b\n"


def test_what_is_sourced_by_the_set_up_may_use_unset_variables(stubs):
    (stubs.directory / "activate").write_text('export WHERE="$UNSET/env"\n')
    submit(stubs, "--setup", 'source "$STUBS/activate"')
    code, calls = run_job(stubs, 0)
    assert (code, calls[0][0]) == (0, "srun")


@pytest.mark.parametrize("words", [["/venv/bin/bert-jax"], ["env", "TF_X=1 2", "bert-jax"]])
def test_a_command_with_a_path_or_with_words_before_it_is_continued(stubs, words):
    assert stubs.run("slurm.sh", "--", *words, *COMMAND[1:]).returncode == 0
    _, (run, *_) = run_job(stubs, 75)
    assert run[run.index("env") + 1 :] == [*words, *RUN[1:]]


@pytest.mark.parametrize(
    ("code", "state", "restarts", "requeued"),
    [
        (75, "RUNNING", "0", True),
        (75, "COMPLETING", "0", False),  # cancelled
        (75, "RUNNING", "20", False),
        (0, "RUNNING", "0", False),
        (2, "RUNNING", "0", False),
        (3, "RUNNING", "0", False),
        (4, "RUNNING", "0", False),
        (5, "RUNNING", "0", False),
        (7, "RUNNING", "0", False),
        (8, "RUNNING", "0", False),
        (130, "RUNNING", "0", False),
        (6, "RUNNING", "19", True),  # all stood still
        (134, "RUNNING", "0", True),  # some lost their peer,
        (137, "RUNNING", "0", True),  # and some were killed
        (137, "RUNNING", "20", False),
        (143, "CANCELLED", "0", False),
    ],
)
def test_what_goes_back_into_the_queue(stubs, code, state, restarts, requeued):
    submit(stubs)
    (stubs.directory / "state").write_text(f"{state}\n")
    ended, calls = run_job(stubs, code, SLURM_RESTART_COUNT=restarts)
    assert ended == code
    assert (["scontrol", "requeue", "7"] in calls) == requeued


@pytest.mark.parametrize("workdir", ["work", "~/work"])
def test_a_new_checkpoint_starts_the_count_of_restarts_anew(stubs, workdir):
    (stubs.directory / "work" / "checkpoints" / "9").mkdir(parents=True)
    stubs.add("srun", '[[ ! -e $STUBS/next ]] || mv "$STUBS/next" work/checkpoints/10; exit 134')
    command = ["bert-jax", "finetune", "--workdir", workdir]
    done = stubs.run("slurm.sh", "--restarts=2", "--", *command)
    assert done.returncode == 0
    requeued = []
    for restart in range(40, 44):
        if restart == 41:
            (stubs.directory / "next").mkdir()
        code, calls = run_job(
            stubs, 134, SLURM_RESTART_COUNT=str(restart), HOME=str(stubs.directory)
        )
        assert code == 134
        requeued.append(["scontrol", "requeue", "7"] in calls)
    assert requeued == [False, True, True, False]  # 41 made a checkpoint
    assert "--stopped-code=75" in calls[0]
    stubs.add("srun")
    assert run_job(stubs, 0)[0] == 0
    assert not list(stubs.directory.glob(".bert_jax*"))  # nothing stays


def test_checkpoints_of_starts_that_a_preemption_killed_count(stubs):
    checkpoints = stubs.directory / "work" / "checkpoints"
    checkpoints.mkdir(parents=True)
    stubs.add("srun", 'mkdir "work/checkpoints/$SLURM_RESTART_COUNT"; kill -KILL "$PPID"')
    done = stubs.run("slurm.sh", "--restarts=2", "--", "bert-jax", "pretrain", "--workdir=work")
    assert done.returncode == 0
    for restart in range(1, 5):  # the script, too, is killed; Slurm puts the job back
        run_job(stubs, 0, SLURM_RESTART_COUNT=str(restart))
    stubs.add("srun", "exit 6")
    calls = [run_job(stubs, 6, SLURM_RESTART_COUNT=str(restart))[1] for restart in (5, 6)]
    assert [["scontrol", "requeue", "7"] in each for each in calls] == [True, False]


@pytest.mark.parametrize("command", ["squeue", "scontrol"])
def test_a_controller_that_does_not_answer_is_asked_again(stubs, command):
    submit(stubs)
    stubs.add("sleep")
    behaviour = 'cat "$STUBS/state"' if command == "squeue" else "exit 0"
    stubs.add(command, f'mkdir "$STUBS/asked" 2>/dev/null && exit 1\n{behaviour}')
    _, calls = run_job(stubs, 134)
    assert [call[0] for call in calls].count(command) == 2
    assert ["sleep", "10"] in calls
    assert calls[-1] == ["scontrol", "requeue", "7"]


def test_dry_run_prints_what_would_be_submitted(stubs):
    flags = ["--nodes=2", "--sbatch-flag=--constraint=a b", "--setup=module load cuda"]
    printed = stubs.run("slurm.sh", *flags, "--dry-run", "--", *COMMAND)
    assert printed.returncode == 0
    assert stubs.calls == []
    wanted = submit(stubs, *flags)
    job = (stubs.directory / "job").read_text()
    subprocess.run(
        ["bash", "-c", printed.stdout], check=True, stdout=subprocess.DEVNULL,
        env={"PATH": f"{stubs.directory}:/usr/bin:/bin", "STUBS": str(stubs.directory),
             "STUB_CALLS": str(stubs.directory / "calls")},
    )  # fmt: skip
    assert stubs.calls[1] == wanted
    assert (stubs.directory / "job").read_text() == job


def test_a_failure_of_sbatch_is_passed_on(stubs):
    stubs.add("sbatch", "echo 'invalid partition' >&2; exit 9")
    done = stubs.run("slurm.sh", "--", *COMMAND)
    assert done.returncode == 9
    assert "invalid partition" in done.stderr
    assert "slurm.sh: exit code 9 from: sbatch --job-name=bert_jax" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no command"),
        (["--per=core", "--", "x"], "--per is core; it must be gpu or node"),
        (["--nodes=two", "--", "x"], "--nodes is two; it must be a number above 0"),
        (["--restarts=x", "--", "x"], "--restarts is x; it must be a whole number"),
        (["--colour=red", "--", "x"], "no flag --colour"),
        (["pretrain"], "unexpected pretrain; the command comes after --"),
    ],
)
def test_wrong_arguments(stubs, arguments, message):
    done = stubs.run("slurm.sh", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert stubs.calls == []


@pytest.mark.skipif(
    shutil.which("sbatch", path="/usr/bin:/bin") is not None, reason="Slurm is installed here"
)
def test_no_slurm_here(stubs):
    (stubs.directory / "sbatch").unlink()
    done = stubs.run("slurm.sh", "--", *COMMAND)
    assert done.returncode == 127
    assert "sbatch is not installed" in done.stderr
