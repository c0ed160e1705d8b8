"""launch/on_host.sh for real, alone and under launch/tpu_vm.sh."""

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from stub_commands import LAUNCH, Stubs, words


@pytest.fixture
def stubs(tmp_path):
    yield Stubs(tmp_path)
    for file in tmp_path.rglob("supervisor.pid"):  # of a test that has failed
        with contextlib.suppress(OSError):
            if b"supervise" in Path(f"/proc/{file.read_text().strip()}/cmdline").read_bytes():
                os.killpg(int(file.read_text()), signal.SIGKILL)


def host(stubs, *arguments):
    return stubs.run("on_host.sh", *arguments, BERT_JAX_RUN=str(stubs.directory / "run"))


def status_becomes(stubs, wanted):
    for _ in range(300):
        now = host(stubs, "status").stdout.strip()
        if now == wanted:
            return
        time.sleep(0.1)
    log = (stubs.directory / "run" / "log").read_text()
    pytest.fail(f"the run is {now!r} and not {wanted!r}:\n{log}")


def test_a_run_on_a_host_is_started_again_until_it_is_done(stubs):
    assert host(stubs, "status").stdout == "none\n"
    # Ends with 75, 134, then 0.
    stubs.add("train", 'n=$(wc -l <"$STUBS/tries" || echo 0); echo x >>"$STUBS/tries"\n'
                       'codes=(75 134 0); exit "${codes[$n]}"')  # fmt: skip
    (stubs.directory / "tries").write_text("")
    done = host(stubs, "start", "--pause", "0", "--", "train", "two words", "it's", "$HOME")
    assert done.returncode == 0, done.stderr
    status_becomes(stubs, "exit 0")
    assert stubs.calls == [["train", "two words", "it's", "$HOME"]] * 3
    log = host(stubs, "log").stdout
    assert "ended with exit code 134" in log


@pytest.mark.parametrize(
    ("code", "tries"), [(2, 1), (3, 1), (4, 1), (5, 1), (7, 1), (8, 1), (130, 1), (1, 3), (6, 3)]
)
def test_what_another_try_does_not_fix(stubs, code, tries):
    stubs.add("train", f"exit {code}")
    host(stubs, "start", "--pause", "0", "--restarts", "2", "--", "train")
    status_becomes(stubs, f"exit {code}")
    assert stubs.calls == [["train"]] * tries


def start_a_run_that_saves(stubs):
    """A run that is up, and ends with 75 at a signal."""
    stubs.add("train", "trap 'echo saved; exit 75' TERM; echo ready; while :; do sleep 0.1; done")
    host(stubs, "start", "--", "train")
    for _ in range(300):
        if "ready" in host(stubs, "log").stdout:
            break
        time.sleep(0.1)


@pytest.mark.parametrize("end", ["", "/"])
def test_the_newest_checkpoint_of_a_bucket_is_known(stubs, end):
    """A slash at the end hid all checkpoints, so that restarts were never counted anew."""
    stubs.add("gcloud", 'if [[ "$*" == *gs://b/run/checkpoints/* ]]; then\n'
                        "  echo gs://b/run/checkpoints/1200/; fi")  # fmt: skip
    start_a_run_that_saves(stubs)
    command = ["--", "train", f"--workdir=gs://b/run{end}"]
    host(stubs, "stop", "--wait", "5")
    host(stubs, "start", "--pause", "0", *command)
    assert host(stubs, "status", *command).stdout == "running 1200\n"
    host(stubs, "stop", "--wait", "5")


def test_stop_lets_the_run_save(stubs):
    start_a_run_that_saves(stubs)
    assert host(stubs, "start", "--", "train").stdout.startswith("runs already; supervisor ")
    assert host(stubs, "status", "--", "train").stdout == "running 0\n"
    other = host(stubs, "start", "--", "train", "other")
    assert other.returncode == 2
    assert "another run is there" in other.stderr
    assert host(stubs, "status", "--", "train", "other").stdout == "other\n"
    assert stubs.calls == [["train"]]
    dry = host(stubs, "stop", "--dry-run", "--wait", "1")
    assert dry.returncode == 0, dry.stderr
    assert [words(line)[0] for line in dry.stdout.splitlines()] == ["touch", "kill"]
    stopped = host(stubs, "stop")
    assert stopped.stdout == "exit 75\n", stopped.stderr
    assert "saved" in host(stubs, "log").stdout
    assert host(stubs, "stop").stdout == "nothing runs here\n"


def test_a_check_runs_here_and_names_the_host_in_each_line(stubs):
    stubs.add("hostname", "echo host-7")
    stubs.add("train", 'echo "ok"; echo "no corpus" >&2; exit 2')
    done = host(stubs, "check", "--", "train", "--workdir=a b")
    assert done.returncode == 2
    assert sorted(done.stdout.splitlines()) == ["[host-7] no corpus", "[host-7] ok"]
    assert ["train", "--workdir=a b", "--check"] in stubs.calls
    missing = host(stubs, "check", "--", "bert-jix")
    assert missing.returncode == 127
    assert (
        "[host-7] on_host.sh: bert-jix is not installed there; run tpu_vm.sh install"
        in missing.stdout
    )
    start_a_run_that_saves(stubs)
    refused = host(stubs, "check", "--", "train")
    assert refused.returncode == 2
    assert "a run is there and has the chips" in refused.stdout
    host(stubs, "stop")


def test_the_exit_code_of_another_run_is_not_that_of_this(stubs):
    stubs.add("train", 'exit "$1"')
    host(stubs, "start", "--", "train", "4")
    status_becomes(stubs, "exit 4")
    assert host(stubs, "status", "--", "train", "4").stdout == "exit 4\n"
    assert host(stubs, "status", "--", "train", "0").stdout == "none\n"
    host(stubs, "start", "--", "train", "0")
    status_becomes(stubs, "exit 0")


def test_a_new_checkpoint_starts_the_count_of_restarts_anew(stubs):
    """Two restarts without a new checkpoint are allowed, and the second makes one."""
    work = stubs.directory / "my work" / "checkpoints"
    (work / "9").mkdir(parents=True)
    stubs.add("train", 'echo x >>"$STUBS/tries"; [[ $(wc -l <"$STUBS/tries") != 3 ]] || '
                       f'mkdir "{work}/10"; exit 134')  # fmt: skip
    command = ["train", "--workdir", str(work.parent)]
    host(stubs, "start", "--pause", "0", "--restarts", "2", "--", *command)
    status_becomes(stubs, "exit 134")
    assert stubs.calls == [command] * 5
    assert host(stubs, "log").stdout.count("ended with exit code 134") == 5


def test_a_host_that_goes_down_leaves_a_run_to_be_started_again(stubs):
    start_a_run_that_saves(stubs)
    supervisor = int((stubs.directory / "run" / "supervisor.pid").read_text())
    os.kill(supervisor, signal.SIGTERM)  # as the system does, and nobody asked for it
    status_becomes(stubs, "none")
    assert "saved" in host(stubs, "log").stdout


GCLOUD = """
last=${*: -1}
case "$*" in
  *queued-resources\\ describe*) echo ACTIVE ;;
  *tpu-vm\\ describe*) printf 'READY\\t2\\n' ;;
  *ssh*) for home in "$STUBS"/host\\ *; do (HOME=$home; cd; bash -c "${last#--command=}"); done ;;
esac
"""


@pytest.fixture
def pod(stubs):
    """Two hosts: a gcloud that runs the command of `ssh` in the home of each."""
    for number in range(2):
        home = stubs.directory / f"host {number}"
        shutil.copytree(LAUNCH, home / "bert_jax" / "launch")
        python = home / "bert_jax" / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text("#!/bin/sh\n")
        python.chmod(0o755)
    stubs.add("tar")
    stubs.add("sudo")
    stubs.add("mount.nfs")
    stubs.add("git", "if [[ $* == *rev-parse* ]]; then echo c0ffee; fi")
    stubs.add("hostname", 'basename "$HOME" | tr " " -')
    stubs.add("gcloud", GCLOUD)
    return stubs


def test_a_host_that_was_restarted_joins_the_run_of_the_others(pod):
    """Host 1 runs it, host 0 does not; both end when both have come."""
    pod.add("train", 'echo >>"$STUBS/came"; until [[ $(wc -l <"$STUBS/came") -ge 2 ]]; '
                     "do sleep 0.1; done")  # fmt: skip
    command = ["train", "it's", "$HOME", "--workdir=a b"]
    home = pod.directory / "host 1"
    variables = {"HOME": str(home), "BERT_JAX_RUN": str(home / "bert_jax_run")}
    pod.run("on_host.sh", "start", "--pause", "0", "--", *command, **variables)
    done = pod.run("tpu_vm.sh", "watch", "pod", "--poll=1", "--nfs=h:/x", "--", *command)
    assert done.returncode == 0, done.stderr
    assert [call for call in pod.calls if call[0] == "train"] == [command] * 2
    assert "run: 1 none,1 running 0" in done.stderr
    assert [call[0] for call in pod.calls].count("tar") == 1  # the other has what it runs
    assert (pod.directory / "host 0" / "bert_jax_run" / "exit").read_text() == "0\n"
