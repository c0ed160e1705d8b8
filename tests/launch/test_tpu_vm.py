"""launch/tpu_vm.sh against a gcloud that records its calls."""

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
# and from $STUBS/progress when the hosts are asked how the run does: "running 5; none" of two
# hosts, "FAILS" where it fails behind what is before. $STUBS/scp has an exit code for each copy.
GCLOUD = """
next() { head -n 1 "$STUBS/$1"; sed -i 1d "$STUBS/$1"; }
case "$*" in
  *queued-resources\\ describe*)
    state=$(next states)
    if [[ $state == NONE ]]; then echo 'ERROR: NOT_FOUND: no such thing' >&2; exit 1; fi
    if [[ $state == BROKEN ]]; then echo 'ERROR: connection reset' >&2; exit 1; fi
    echo "$state" ;;
  *tpu-vm\\ describe*)
    state=$([[ -s $STUBS/nodes ]] && next nodes || echo READY)
    printf '%s\\t%s\\n' "$state" "$(cat "$STUBS/hosts")" ;;
  *scp*) [[ ! -s $STUBS/scp ]] || exit "$(next scp)" ;;
  *bert_jax\\ on*)
    number=0
    while read -r -d ';' answer; do
      [[ $answer != FAILS ]] || { echo 'ERROR: a host is out of reach' >&2; exit 255; }
      echo "bert_jax on host-$((number++)): $answer"
    done <<<"$(next progress);" ;;
esac
"""


@pytest.fixture
def stubs(tmp_path):
    stubs = Stubs(tmp_path)
    stubs.add("gcloud", GCLOUD)
    stubs.add("git", "if [[ $* == *rev-parse* ]]; then echo c0ffee; fi")
    (tmp_path / "hosts").write_text("")
    return stubs


def script_states(stubs, states, progress=(), nodes=(), **others):
    for name, lines in {
        "states": states, "progress": progress, "nodes": nodes, **others
    }.items():  # fmt: skip
        (stubs.directory / name).write_text("".join(f"{line}\n" for line in lines))


def remote(call):
    """The words of the command line that a call of ssh runs on the hosts."""
    return words(call[-1].removeprefix("--command="))


def kinds(calls):
    """What each call is for: its verb, or what runs on the host; without questions and pauses."""
    on_host = ("install", "start", "status")
    return [
        "on_host " + next(word for word in on_host if f"on_host.sh {word}" in call[-1])
        if "ssh" in call
        else " ".join(word for word in call[1:] if word in {"create", "delete", "scp", "archive"})
        for call in calls
        if not {"describe", "rev-parse"} & {*call} and call[0] != "sleep"
    ]


def pauses(calls):
    """The seconds of each pause."""
    return [int(call[1]) for call in calls if call[0] == "sleep"]


def watch(stubs, *flags):
    stubs.add("sleep")
    return stubs.run("tpu_vm.sh", "watch", "pod", *FLAGS, "--nfs=h:/x", *flags, "--", *COMMAND)


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
    assert copy[:5] == [*QUEUE, "scp"]
    assert copy[6:] == ["pod:", "--worker=all", "--node=all", *WHERE]
    assert install[:7] == [*QUEUE, "ssh", "pod", "--node=all"]
    assert logs[:8] == [*QUEUE, "ssh", "pod", "--node=0", "--worker=0"]


def test_install_and_run_keep_arguments_as_they_are(stubs):
    setup = "echo 'two  words'; export A=$B"
    stubs.run("tpu_vm.sh", "install", "pod", *FLAGS, "--nfs=10.0.0.3:/x", "--setup", setup)
    done = stubs.run("tpu_vm.sh", "run", "pod", *FLAGS, "--internal-ip", "--", *COMMAND)
    assert done.returncode == 0
    archive, copy, install, run = stubs.calls
    assert archive[:2] == ["git", "-C"]
    assert archive[-1] == "HEAD"
    output = archive[-2].removeprefix("--output=")
    assert copy == [*VM, "scp", output, "pod:", "--worker=all", *WHERE]
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


def test_the_archive_is_nobody_elses(stubs, tmp_path):
    (tmp_path / "tmp").mkdir()
    stubs.add(
        "git", 'out=${@: -2:1}; stat -c "%a" "$(dirname "${out#--output=}")" >>"$STUBS/rights"'
    )
    for _ in range(2):
        stubs.run("tpu_vm.sh", "install", "pod", *FLAGS, TMPDIR=str(tmp_path / "tmp"))
    copied = [call[5] for call in stubs.calls if "scp" in call]
    assert len({*copied}) == 2
    assert {path.rsplit("/", 1)[1] for path in copied} == {"bert_jax.tar.gz"}
    assert (stubs.directory / "rights").read_text() == "700\n700\n"
    assert list((tmp_path / "tmp").iterdir()) == []  # and it does not stay


RUN_ON_HOSTS = ["archive", "scp", "on_host install", "on_host start"]


def test_watch_recreates_and_restarts_after_a_preemption(stubs):
    script_states(
        stubs,
        ["NONE", "WAITING_FOR_RESOURCES", "ACTIVE", "ACTIVE", "BROKEN", "SUSPENDED", "PROVISIONING",
         "ACTIVE", "ACTIVE", "ACTIVE", "ACTIVE"],
        ["none", "running 0", "none", "none", "exit 0"],
        ["READY", "READY", "READY", "PREEMPTED"],
    )  # fmt: skip
    done = watch(stubs, "--spot")
    assert done.returncode == 0, done.stderr
    assert kinds(stubs.calls) == [
        "create", "on_host status", *RUN_ON_HOSTS, "on_host status",
        "delete", "create", "on_host status", *RUN_ON_HOSTS,  # SUSPENDED
        "delete", "create", "on_host status", *RUN_ON_HOSTS,  # a node PREEMPTED, the request ACTIVE
        "on_host status",
    ]  # fmt: skip
    deleted = [*QUEUE, "delete", "pod", "--force", "--quiet", *WHERE]
    assert stubs.calls.count(deleted) == 2
    assert all("--spot" in call for call in stubs.calls if "create" in call)
    starts = [call for call in stubs.calls if "on_host.sh start" in call[-1]]
    again = [*STARTED[:4], "--unfinished", *STARTED[4:]]  # not where the run was done
    assert [remote(call) for call in starts] == [again] * 3
    archives = [call for call in stubs.calls if "archive" in call]
    assert [call[-1] for call in archives] == ["c0ffee"] * 3  # that of the beginning


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 6, 7, 134])
@pytest.mark.parametrize("host", [0, 2])
def test_watch_ends_with_the_run_of_any_host(stubs, code, host):
    states = ["running 7", "running 7", "running 7"]
    states[host] = f"exit {code}"
    script_states(stubs, ["ACTIVE"], ["; ".join(states)], hosts=["3"])
    done = watch(stubs)
    assert done.returncode == code
    assert f"the run ended with exit code {code} on host-{host}; see: tpu_vm.sh logs" in done.stderr


def test_watch_tells_the_reason_from_what_followed(stubs):
    script_states(stubs, ["ACTIVE"], ["exit 134; exit 4; FAILS"], hosts=["3"])
    assert watch(stubs).returncode == 4


def test_watch_tells_the_first_to_fail_from_those_that_waited_for_it(stubs):
    script_states(stubs, ["ACTIVE"], ["exit 6; exit 134; exit 137; FAILS"], hosts=["4"])
    done = watch(stubs)
    assert done.returncode == 137
    assert "on host-2" in done.stderr


def test_watch_waits_for_the_last_host(stubs):
    progress = ["exit 0; running 9", "exit 0; exit 0"]
    script_states(stubs, ["ACTIVE"] * 9, progress, hosts=["2"])
    done = watch(stubs)
    assert done.returncode == 0
    assert kinds(stubs.calls) == ["on_host status"] * 2


@pytest.mark.parametrize("states", ["none; running 5; running 5", "running 5; running 5; none"])
def test_watch_starts_a_host_that_was_restarted(stubs, states):
    script_states(stubs, ["ACTIVE"] * 9, [states, "exit 0; exit 0; exit 0"], hosts=["3"])
    done = watch(stubs)
    assert done.returncode == 0, done.stderr
    assert kinds(stubs.calls) == ["on_host status", *RUN_ON_HOSTS, "on_host status"]


def test_watch_leaves_another_run_alone(stubs):
    script_states(stubs, ["ACTIVE"], ["other; none"], hosts=["2"])
    done = watch(stubs)
    assert done.returncode == 2
    assert "another command; stop it first: tpu_vm.sh stop pod" in done.stderr
    assert kinds(stubs.calls) == ["on_host status"]


def test_watch_survives_failures_with_longer_and_longer_pauses(stubs):
    script_states(
        stubs,
        ["ACTIVE", "BROKEN", "ACTIVE", "ACTIVE", "ACTIVE", "ACTIVE", "ACTIVE", "ACTIVE"],
        ["none; none", "none; none", "running 1; FAILS", "running 1", "running 1; running 1",
         "exit 0; exit 0"],
        hosts=["2"], scp=["1", "0"],
    )  # fmt: skip
    done = watch(stubs, "--poll=60")
    assert done.returncode == 0, done.stderr
    assert kinds(stubs.calls) == [
        "on_host status", "archive", "scp",  # which fails
        "on_host status", *RUN_ON_HOSTS,
        "on_host status",  # a host is out of reach,
        "on_host status",  # or does not say a word
        "on_host status", "on_host status",
    ]  # fmt: skip
    assert pauses(stubs.calls) == [120, 240, 60, 120, 240, 60]
    assert "not all of 2 hosts answered" in done.stderr


def test_watch_gives_up_after_failures_in_a_row(stubs):
    script_states(stubs, ["BROKEN"] * 20)
    done = watch(stubs, "--poll=60")
    assert done.returncode == 1
    assert "gcloud failed 12 times in a row" in done.stderr
    assert "connection reset" in done.stderr
    assert pauses(stubs.calls) == [120, 240, 480, *[600] * 8]


def test_wait_survives_a_failure(stubs):
    script_states(stubs, ["BROKEN", "PROVISIONING", "BROKEN", "ACTIVE"])
    assert stubs.run("tpu_vm.sh", "wait", "pod", *FLAGS).returncode == 0


def test_watch_does_not_repeat_a_request_that_cannot_be_met(stubs):
    script_states(stubs, ["NONE", "FAILED", "quota"])
    done = watch(stubs)
    assert done.returncode == 3
    assert "quota" in done.stderr
    assert kinds(stubs.calls) == ["create"]


def test_watch_gives_up_where_pods_bring_no_new_checkpoint(stubs):
    pod = ["SUSPENDED", "ACTIVE"]
    script_states(stubs, pod * 9, ["running 5"] * 9)
    done = watch(stubs, "--max-recreates=2")
    assert done.returncode == 3
    assert "recreated 2 times without a new checkpoint" in done.stderr
    assert kinds(stubs.calls).count("delete") == 3  # the first checkpoint seen is one
    (stubs.directory / "calls").unlink()
    script_states(stubs, pod * 9, [f"running {step}" for step in range(9)])
    assert watch(stubs, "--max-recreates=2", "--max-failures=1").returncode == 1  # the script ends
    assert kinds(stubs.calls).count("delete") == 9


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


@pytest.mark.parametrize("verb", ["create", "wait", "install", "check", "run", "watch", "logs",
                                  "status", "stop", "delete"])  # fmt: skip
def test_dry_run_calls_nothing(stubs, verb):
    command = ["--", *COMMAND] if verb in {"check", "run", "watch"} else []
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
        (["watch", "pod", "--poll=1m", "--", "x"], "--poll is 1m; it must be a whole number"),
        (["create", "pod", "--colour=red"], "no flag --colour"),
        (["install", "pod", "--nfs=h:/x", "--bucket=b"], "--nfs and --bucket are both given"),
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
