"""launch/tpu_vm.sh against a gcloud that records its calls; launch/on_host.sh for real."""

import time

import pytest
from stub_commands import Stubs, words

QUEUE = ["gcloud", "compute", "tpus", "queued-resources"]
VM = ["gcloud", "compute", "tpus", "tpu-vm"]
WHERE = ["--project=p", "--zone=z"]
FLAGS = ["--project", "p", "--zone=z", "--poll=0"]
COMMAND = ["bert-jax", "pretrain", "--config=a.py", "--config.data.corpus=/mnt/my corpus",
           "--config.x=it's"]  # fmt: skip
STARTED = ["bert_jax/launch/on_host.sh", "start", "--restarts", "20", "--", "bert-jax", "pretrain",
           "--stopped-code=75", *COMMAND[2:]]  # fmt: skip

# A gcloud that answers from $STUBS/states, a line each time it is asked for the request's state,
# and from $STUBS/progress when a host is asked how the run does.
GCLOUD = """
next() { head -n 1 "$STUBS/$1"; sed -i 1d "$STUBS/$1"; }
case "$*" in
  *queued-resources\\ describe*)
    state=$(next states)
    if [[ $state == NONE ]]; then echo 'ERROR: NOT_FOUND: no such thing' >&2; exit 1; fi
    if [[ $state == BROKEN ]]; then echo 'ERROR: connection reset' >&2; exit 1; fi
    echo "$state" ;;
  *tpu-vm\\ describe*) [[ -s $STUBS/nodes ]] && next nodes || echo READY ;;
  *on_host.sh\\ status*) next progress ;;
esac
"""


@pytest.fixture
def stubs(tmp_path):
    stubs = Stubs(tmp_path)
    stubs.add("gcloud", GCLOUD)
    stubs.add("git")
    return stubs


def script_states(stubs, states, progress=(), nodes=()):
    for name, lines in {"states": states, "progress": progress, "nodes": nodes}.items():
        (stubs.directory / name).write_text("".join(f"{line}\n" for line in lines))


def remote(call):
    """The words of the command line that a call of ssh runs on the hosts."""
    return words(call[-1].removeprefix("--command="))


def kinds(calls):
    """What each call is for: its verb, or what runs on the host."""
    return [
        "on_host " + call[-1].split("on_host.sh ")[1].split()[0].strip(";")
        if "ssh" in call
        else " ".join(word for word in call[1:] if word in {"create", "delete", "scp", "archive"})
        for call in calls
        if "describe" not in call
    ]


def test_create(stubs):
    done = stubs.run("tpu_vm.sh", "create", "pod", *FLAGS, "--type=v5litepod-256", "--spot")
    assert done.returncode == 0
    assert stubs.calls == [
        [*QUEUE, "create", "pod", "--node-id=pod", "--accelerator-type=v5litepod-256",
         "--runtime-version=v2-alpha-tpuv5-lite", "--spot", *WHERE],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "runtime"),
    [
        ("v4-8", "tpu-ubuntu2204-base"),
        ("v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v5p-128", "v2-alpha-tpuv5"),
        ("v6e-256", "v2-alpha-tpuv6e"),
    ],
)
def test_the_runtime_version_follows_from_the_type(stubs, kind, runtime):
    stubs.run("tpu_vm.sh", "create", "pod", "--type", kind)
    assert f"--runtime-version={runtime}" in stubs.calls[0]
    assert "--zone=us-west4-a" in stubs.calls[0]
    assert not any(word.startswith("--project") for word in stubs.calls[0])


def test_several_slices(stubs):
    stubs.run("tpu_vm.sh", "create", "pod", *FLAGS, "--slices=2")
    stubs.run("tpu_vm.sh", "install", "pod", *FLAGS, "--slices=2")
    stubs.run("tpu_vm.sh", "logs", "pod", *FLAGS, "--slices=2")
    create, _, copy, install, logs = stubs.calls
    assert create[5:8] == ["pod", "--node-count=2", "--node-prefix=pod"]
    archive = "/tmp/bert_jax.tar.gz"
    assert copy == [*QUEUE, "scp", archive, "pod:", "--worker=all", "--node=all", *WHERE]
    assert install[:7] == [*QUEUE, "ssh", "pod", "--node=all"]
    assert logs[:8] == [*QUEUE, "ssh", "pod", "--node=0", "--worker=0"]


def test_install_and_run_keep_arguments_as_they_are(stubs):
    setup = "echo 'two  words'; export A=$B"
    stubs.run("tpu_vm.sh", "install", "pod", *FLAGS, "--nfs=10.0.0.3:/x", "--setup", setup)
    done = stubs.run("tpu_vm.sh", "run", "pod", *FLAGS, "--internal-ip", "--", *COMMAND)
    assert done.returncode == 0
    archive, copy, install, run = stubs.calls
    assert archive[:2] == ["git", "-C"]
    assert archive[-2:] == ["--output=/tmp/bert_jax.tar.gz", "HEAD"]
    assert copy == [*VM, "scp", "/tmp/bert_jax.tar.gz", "pod:", "--worker=all", *WHERE]
    assert install[:-1] == [*VM, "ssh", "pod", *WHERE, "--worker=all"]
    line = install[-1].removeprefix("--command=").split(" && ")
    assert line[:2] == ["mkdir -p bert_jax", "tar -xzf bert_jax.tar.gz"]
    assert words(" && ".join(line[2:])) == [
        "bert_jax/launch/on_host.sh", "install", "--nfs", "10.0.0.3:/x", "--mount", "/mnt/bert_jax",
        "--setup", setup,
    ]  # fmt: skip
    assert run[:-1] == [*VM, "ssh", "pod", *WHERE, "--worker=all", "--internal-ip"]
    assert remote(run) == STARTED


def test_wait(stubs):
    script_states(stubs, ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"])
    done = stubs.run("tpu_vm.sh", "wait", "pod", *FLAGS)
    assert done.returncode == 0
    assert stubs.calls == [[*QUEUE, "describe", "pod", *WHERE, "--format=value(state.state)"]] * 3


def test_wait_for_what_will_not_come(stubs):
    script_states(stubs, ["WAITING_FOR_RESOURCES", "FAILED", "quota exceeded"])
    done = stubs.run("tpu_vm.sh", "wait", "pod", *FLAGS)
    assert done.returncode == 3
    assert "quota exceeded" in done.stderr
    assert "the request pod is FAILED" in done.stderr


def test_watch_recreates_and_restarts_after_a_preemption(stubs):
    script_states(
        stubs,
        ["NONE", "WAITING_FOR_RESOURCES", "ACTIVE", "ACTIVE", "BROKEN", "SUSPENDED", "PROVISIONING",
         "ACTIVE", "ACTIVE", "ACTIVE", "ACTIVE"],
        ["none", "running", "none", "none", "exit 0"],
        ["READY", "READY", "READY", "PREEMPTED"],
    )  # fmt: skip
    done = stubs.run("tpu_vm.sh", "watch", "pod", *FLAGS, "--spot", "--nfs=h:/x", "--", *COMMAND)
    assert done.returncode == 0, done.stderr
    begin = ["archive", "scp", "on_host install", "on_host start"]
    assert kinds(stubs.calls) == [
        "create", "on_host status", *begin, "on_host status",
        "delete", "create", "on_host status", *begin,  # SUSPENDED
        "delete", "create", "on_host status", *begin,  # a node PREEMPTED, the request still ACTIVE
        "on_host status",
    ]  # fmt: skip
    deleted = [*QUEUE, "delete", "pod", "--force", "--quiet", *WHERE]
    assert stubs.calls.count(deleted) == 2
    assert all("--spot" in call for call in stubs.calls if "create" in call)
    starts = [call for call in stubs.calls if "on_host.sh start" in call[-1]]
    assert [remote(call) for call in starts] == [STARTED] * 3


@pytest.mark.parametrize("code", [2, 3, 4, 5, 6, 134])
def test_watch_ends_with_the_run(stubs, code):
    script_states(stubs, ["ACTIVE"], [f"exit {code}"])
    done = stubs.run("tpu_vm.sh", "watch", "pod", *FLAGS, "--bucket=b", "--", *COMMAND)
    assert done.returncode == code
    assert f"the run ended with exit code {code}; see: tpu_vm.sh logs pod" in done.stderr


def test_watch_does_not_repeat_a_request_that_cannot_be_met(stubs):
    script_states(stubs, ["NONE", "FAILED", "FAILED", "quota"])
    done = stubs.run("tpu_vm.sh", "watch", "pod", *FLAGS, "--bucket=b", "--", *COMMAND)
    assert done.returncode == 3
    assert kinds(stubs.calls) == ["create"]


def test_watch_gives_up(stubs):
    script_states(stubs, ["SUSPENDED"] * 9)
    done = stubs.run(
        "tpu_vm.sh", "watch", "pod", *FLAGS, "--bucket=b", "--max-recreates=2", "--", *COMMAND
    )
    assert done.returncode == 3
    assert "recreated 2 times" in done.stderr
    script_states(stubs, ["BROKEN"] * 9)
    done = stubs.run("tpu_vm.sh", "watch", "pod", *FLAGS, "--bucket=b", "--", *COMMAND)
    assert done.returncode == 1
    assert "gcloud failed 5 times in a row" in done.stderr
    assert "connection reset" in done.stderr


def test_watch_needs_disks_that_stay(stubs):
    done = stubs.run("tpu_vm.sh", "watch", "pod", "--", *COMMAND)
    assert done.returncode == 2
    assert "a preempted pod's disks are lost; give --nfs" in done.stderr
    assert stubs.calls == []


@pytest.mark.parametrize(
    ("verb", "command"),
    [
        ("stop", ["bert_jax/launch/on_host.sh", "stop"]),
        ("logs", ["bert_jax/launch/on_host.sh", "log", "--lines", "50"]),
    ],
)
def test_verbs_on_the_hosts(stubs, verb, command):
    assert stubs.run("tpu_vm.sh", verb, "pod", *FLAGS).returncode == 0
    assert remote(stubs.calls[0]) == command


def test_status_and_delete(stubs):
    script_states(stubs, ["ACTIVE"])
    done = stubs.run("tpu_vm.sh", "status", "pod", *FLAGS)
    assert done.stdout == "ACTIVE\n"
    assert "--worker=all" in stubs.calls[1]
    stubs.run("tpu_vm.sh", "delete", "pod", *FLAGS)
    assert stubs.calls[2] == [*QUEUE, "delete", "pod", "--force", "--quiet", *WHERE]


@pytest.mark.parametrize("verb", ["create", "wait", "install", "run", "watch", "logs", "status",
                                  "stop", "delete"])  # fmt: skip
def test_dry_run_calls_nothing(stubs, verb):
    command = ["--", *COMMAND] if verb in {"run", "watch"} else []
    done = stubs.run("tpu_vm.sh", verb, "pod", *FLAGS, "--nfs=h:/x", "--dry-run", *command)
    assert done.returncode == 0, done.stderr
    assert stubs.calls == []
    printed = [words(line) for line in done.stdout.splitlines() if not line.startswith("#")]
    assert printed
    assert {line[0] for line in printed} <= {"gcloud", "git"}
    if verb == "run":  # what is printed is what is called
        stubs.run("tpu_vm.sh", verb, "pod", *FLAGS, *command)
        assert stubs.calls == printed


def test_a_failure_of_gcloud_is_passed_on(stubs):
    stubs.add("gcloud", "echo 'ERROR: no quota' >&2; exit 7")
    done = stubs.run("tpu_vm.sh", "create", "my-pod", *FLAGS)
    assert done.returncode == 7
    assert "no quota" in done.stderr
    assert "exit code 7 from: gcloud compute tpus queued-resources create my-pod" in done.stderr
    done = stubs.run("tpu_vm.sh", "wait", "my-pod", *FLAGS)
    assert done.returncode == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["create"], "name the pod"),
        (["create", "pod", "--type=v9-1"], "no runtime version is known for --type v9-1"),
        (["create", "pod", "--slices=0"], "--slices is 0"),
        (["create", "pod", "--colour=red"], "no flag --colour"),
        (["create", "pod", "other"], "unexpected other"),
        (["create", "pod", "--type"], "--type needs a value"),
        (["launch", "pod"], "no verb launch"),
        (["run", "pod"], "run needs a command after --"),
        (["stop", "pod", "--", "x"], "stop takes no command"),
    ],
)
def test_wrong_arguments(stubs, arguments, message):
    done = stubs.run("tpu_vm.sh", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert stubs.calls == []


# On a host -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("code", "tries"), [(2, 1), (3, 1), (4, 1), (5, 1), (1, 3), (6, 3)])
def test_what_another_try_does_not_mend(stubs, code, tries):
    stubs.add("train", f"exit {code}")
    host(stubs, "start", "--pause", "0", "--restarts", "2", "--", "train")
    status_becomes(stubs, f"exit {code}")
    assert stubs.calls == [["train"]] * tries


def test_stop_lets_the_run_save(stubs):
    stubs.add("train", "trap 'echo saved; exit 75' TERM; echo ready; while :; do sleep 0.1; done")
    host(stubs, "start", "--", "train")
    for _ in range(300):
        if "ready" in host(stubs, "log").stdout:
            break
        time.sleep(0.1)
    second = host(stubs, "start", "--", "train")
    assert second.returncode == 2
    assert "a run is there already" in second.stderr
    stopped = host(stubs, "stop")
    assert stopped.stdout == "exit 75\n", stopped.stderr
    assert "saved" in host(stubs, "log").stdout
    assert host(stubs, "stop").stdout == "nothing runs here\n"
