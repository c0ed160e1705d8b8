"""`launch/tpu_vm.sh check`: what it makes of the hosts' words, and two hosts for real."""

import os
import shutil
import sys

import pytest
from emulators import free_port
from small_finetuning import write_config
from small_run import small_config, write_corpus
from stub_commands import LAUNCH, Stubs, words

COMMAND = ["bert-jax", "pretrain", "--config=a.py", "--workdir=/mnt/a b"]
# A gcloud that describes $NODES with two hosts each, and whose `ssh` prints the file `said`.
GCLOUD = """
case "$*" in
  *tpu-vm\\ describe*) printf 'READY\\t2\\n' ;;
  *ssh*) cat "$STUBS/said"; exit "$(cat "$STUBS/code")" ;;
esac
"""
LOST = "FAILED  data on host-1 (process 1): the corpus x does not exist. Mount it"


def check(stubs, said, code=0, *flags):
    stubs.add("gcloud", GCLOUD)
    (stubs.directory / "said").write_text("".join(f"{line}\n" for line in said))
    (stubs.directory / "code").write_text(str(code))
    return stubs.run("tpu_vm.sh", "check", "pod", *flags, "--", *COMMAND)


def test_hosts_that_are_ready(tmp_path):
    stubs = Stubs(tmp_path)
    said = ["[host-0] ok      versions: jax 1", *(f"bert_jax on host-{n}: exit 0" for n in (0, 1))]
    done = check(stubs, said)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == said
    assert "all of 2 hosts are ready" in done.stderr
    ssh = stubs.calls[1]
    assert "--worker=all" in ssh
    start, on_host = ssh[-1].removeprefix("--command=").split(" || ")[0].split("; ")
    assert start == "code=0"
    assert words(on_host) == ["bert_jax/launch/on_host.sh", "check", "--", *COMMAND]


@pytest.mark.parametrize(
    ("said", "ssh", "code", "message"),
    [
        # All processes end with 2; the line that process 0 prints names the host.
        ([f"[host-0] {LOST}", *(f"bert_jax on host-{n}: exit 2" for n in (0, 1))], 0, 2,
         "the check failed: data on host-1 (process 1): the corpus x does not exist. Mount it"),
        # A host fails before the processes join. The other waits, and ends with 6.
        (["[host-0] bert-jax pretrain: waited", "[host-1] bert-jax is not installed there",
          "bert_jax on host-0: exit 6", "bert_jax on host-1: exit 127"], 0, 127,
         "the check failed on host-1: bert-jax is not installed there"),
        (["bert_jax on host-0: exit 6", "bert_jax on host-1: exit 126"], 0, 126,
         "the check failed on host-1: bert_jax is not there; run: tpu_vm.sh install pod"),
        (["bert_jax on host-0: exit 134", "[host-1] out of memory", "bert_jax on host-1: exit 2"],
         0, 2, "the check failed on host-1: out of memory"),
        (["bert_jax on host-0: exit 0"], 255, 255, "gcloud does not reach all hosts"),
        (["bert_jax on host-0: exit 0"], 0, 1, "not all of 2 hosts answered"),
    ],
)  # fmt: skip
def test_the_first_failure_is_named(tmp_path, said, ssh, code, message):
    done = check(Stubs(tmp_path), said, ssh)
    assert done.returncode == code
    assert f"tpu_vm.sh: {message}" in done.stderr.splitlines()[-1]
    assert "ready" not in done.stderr


def test_slices_are_counted(tmp_path):
    done = check(
        Stubs(tmp_path), [f"bert_jax on host-{n}: exit 0" for n in range(3)], 0, "--slices=2"
    )
    assert done.returncode == 1
    assert "not all of 4 hosts answered" in done.stderr


def test_a_command_that_is_no_run(tmp_path):
    stubs = Stubs(tmp_path)
    stubs.add("gcloud")
    done = stubs.run("tpu_vm.sh", "check", "pod", "--", "bert-jax", "corpus")
    assert done.returncode == 2
    assert "check needs the command of a run" in done.stderr
    assert stubs.calls == []


# What follows runs two processes of the real command under the real on_host.sh.

# Both hosts at once, each in its home, with what makes JAX join the two.
PARALLEL = """
last=${*: -1}
case "$*" in
  *tpu-vm\\ describe*) printf 'READY\\t2\\n' ;;
  *ssh*)
    for JAX_PROCESS_ID in 0 1; do
      export JAX_PROCESS_ID HOME="$STUBS/host $JAX_PROCESS_ID"
      (cd && bash -c "${last#--command=}") &
    done
    wait ;;
esac
"""
# The name of the machine is the name of the host, and a host may have packages of its own.
PROGRAM = f"""#!{sys.executable}
import os, socket, sys
sys.path.insert(0, os.path.join(os.environ["HOME"], "packages"))
socket.gethostname = lambda: "host-" + os.environ["JAX_PROCESS_ID"]
from bert_jax.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
NAMES = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "JAX_DISABLE_MOST_OPTIMIZATIONS")


@pytest.fixture
def hosts(tmp_path):
    """Directories of two hosts, each with a checkout that has links to a shared directory."""
    stubs = Stubs(tmp_path)
    stubs.add("gcloud", PARALLEL)
    stubs.add("hostname", 'basename "$HOME" | tr " " -')
    shared = tmp_path / "shared"
    (shared / "work").mkdir(parents=True)
    write_corpus(shared / "corpus")
    config = small_config(data={"corpus": "corpus"}, training__accumulation=1)
    for number in range(2):
        home = tmp_path / f"host {number}"
        shutil.copytree(LAUNCH, home / "bert_jax" / "launch")
        (home / "bert_jax" / ".venv" / "bin").mkdir(parents=True)
        program = home / "bert_jax" / ".venv" / "bin" / "bert-jax"
        program.write_text(PROGRAM)
        program.chmod(0o755)
        for name in ("corpus", "work"):
            (home / "bert_jax" / name).symlink_to(shared / name)
        write_config(home / "bert_jax" / "config.py", config)
    return stubs


def run_check(stubs):
    variables = {name: os.environ[name] for name in NAMES if name in os.environ}
    address = f"127.0.0.1:{free_port()}"
    return stubs.run(
        "tpu_vm.sh", "check", "pod", "--", "bert-jax", "pretrain", "--config=config.py",
        "--workdir=work/run",
        **variables, PYTHONPATH=str(LAUNCH.parent), JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="2",
        JAX_NUM_PROCESSES="2", JAX_COORDINATOR_ADDRESS=address,
        JAX_COORDINATOR_BIND_ADDRESS=address,
    )  # fmt: skip


@pytest.mark.slow
def test_two_hosts_are_ready(hosts):
    done = run_check(hosts)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = [line.split(":")[0] for line in done.stdout.splitlines() if "ok  " in line]
    parts = ["versions", "chips", "work directory", "data", "step"]
    assert passed == [f"[host-0] ok      {part}" for part in parts]
    assert "chips: 4 (cpu), 2 in each process" in done.stdout
    assert "all of 2 hosts are ready" in done.stderr
    assert list((hosts.directory / "shared" / "work" / "run").iterdir()) == []


def other_version(checkout):
    package = checkout.parent / "packages" / "jax-9.9.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 9.9\n")


def unwritable(checkout):
    (checkout / "work").unlink()
    (checkout / "work").write_text("a file, for the tests may run as root")


def no_corpus(checkout):
    (checkout / "corpus").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "part", "message"),
    [
        (other_version, "versions", "jax 9.9, jax 0."),
        (unwritable, "work directory", "cannot write, read and delete a file in the work directory "
         "work/run: [Errno 20] Not a directory"),
        (no_corpus, "data", "the corpus corpus does not exist. Give the directory that"),
    ],
)  # fmt: skip
def test_the_host_at_fault_is_named(hosts, spoil, part, message):
    spoil(hosts.directory / "host 1" / "bert_jax")
    done = run_check(hosts)
    assert done.returncode == 2, done.stdout + done.stderr
    last = done.stderr.splitlines()[-1]
    assert f"the check failed: {part} on host-1 (process 1): {message}" in last
    remedy = "tpu_vm.sh install" if part == "versions" else "mount the same file system"
    assert remedy in last
    assert done.stdout.count("FAILED") == 1
    assert "ok      step" not in done.stdout
