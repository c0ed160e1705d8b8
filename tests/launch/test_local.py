"""launch/local.py with processes that are done at once, fail, and are signalled."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stub_commands import LAUNCH, TIMEOUT

LOCAL = [sys.executable, str(LAUNCH / "local.py")]
ME = "JAX_PROCESS_ID"


def pod(tmp_path, script, *flags):
    """Runs Python code in each process of a pod."""
    return subprocess.run(
        [*LOCAL, "--logs", str(tmp_path), *flags, "--", sys.executable, "-c", script],
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip


def log(tmp_path, number):
    return (tmp_path / f"process_{number}.log").read_text()


def test_every_process_knows_its_place(tmp_path):
    names = ["JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS",
             "JAX_COORDINATOR_ADDRESS"]  # fmt: skip
    script = f"import os; print(*(os.environ[n] for n in {names}))"
    done = pod(tmp_path, script, "--processes=3", "--devices=4", "--port=5")
    assert done.returncode == 0
    assert [log(tmp_path, i) for i in range(3)] == [f"{i} 3 4 cpu 127.0.0.1:5\n" for i in range(3)]
    assert done.stdout == log(tmp_path, 0)  # and nothing of the others
    assert f"3 processes x 4 devices = 12; logs in {tmp_path}" in done.stderr


def test_another_setting_of_the_number_of_devices_gives_way(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_dump_to=x")
    done = pod(tmp_path, "import os; print(os.environ['XLA_FLAGS'])")
    assert done.stdout == "--xla_dump_to=x\n"


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(5)", 5), ("os.kill(os.getpid(), 9)", 137)])
def test_one_failure_ends_the_others(tmp_path, ending, code):
    script = f"""
import os, subprocess, sys, time
if os.environ["{ME}"] == "1":
    print("no corpus here", flush=True)
    {ending}
child = subprocess.Popen(["sleep", "600"])  # as a worker of the input pipeline
open({str(tmp_path)!r} + "/child_" + os.environ["{ME}"], "w").write(str(child.pid))
time.sleep(600)
"""
    done = pod(tmp_path, script, "--processes=3", "--grace=1")
    assert done.returncode == code
    assert f"process 1 ended with exit code {code}\n  no corpus here\n" in done.stderr
    for number in (0, 2):  # not even their children are left
        child = tmp_path / f"child_{number}"
        if child.exists():
            assert gone(int(child.read_text()))


COUNTS = f"""
import os, sys, time
me, here = os.environ["{ME}"], os.environ["TRIES"] + "/"

def tries(process):
    with open(here + process, "a+") as file:
        file.seek(0)
        return len(file.read().split())

number = tries(me) + 1
print("this is", number, flush=True)
with open(here + me, "a") as file:
    file.write(os.environ["JAX_COORDINATOR_ADDRESS"] + " ")
while tries("0") < number:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("ending", "restarts", "tries", "code"),
    [
        ("sys.exit(6 if number < 3 else 0)", 2, 3, 0),
        ("sys.exit(6 if number < 3 else 0)", 1, 2, 6),
        ("os.kill(os.getpid(), 9)", 1, 2, 137),
        *((f"sys.exit({code})", 2, 1, code) for code in (0, 2, 3, 4, 5, 7, 8, 130)),
        ("sys.exit(6)", 0, 1, 6),
    ],
)
def test_the_whole_pod_is_started_again(tmp_path, monkeypatch, ending, restarts, tries, code):
    monkeypatch.setenv("TRIES", str(tmp_path))
    failing = tries if code else tries - 1
    # The other process would wait for ever: it is ended before the next try.
    script = f"{COUNTS}\nif me == '1':\n    {ending}\nif number <= {failing}:\n    time.sleep(600)"
    done = pod(tmp_path / "logs", script, f"--restarts={restarts}", "--grace=0.2")
    assert done.returncode == code
    for number in (0, 1):
        assert len(set((tmp_path / str(number)).read_text().split())) == tries  # a port each
        lines = log(tmp_path / "logs", number).splitlines()
        said = [line for line in lines if line.startswith("this is")]
        assert said == [f"this is {i + 1}" for i in range(tries)]
        started = [line for line in lines if line.startswith("[local.py]")]
        assert len(started) == tries - 1
        assert all(line in done.stderr for line in started)
        if tries == 3:
            assert lines.index("[local.py] try 3, after exit code 6") < lines.index("this is 3")


@pytest.mark.parametrize("workdir", ["{home}/work", "~/work"])
def test_a_new_checkpoint_starts_the_count_of_restarts_anew(tmp_path, monkeypatch, workdir):
    """One restart without a new checkpoint is allowed; the second start makes a checkpoint."""
    monkeypatch.setenv("TRIES", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "work" / "resume" / "9").mkdir(parents=True)
    made = f"(Path({str(tmp_path)!r}) / 'work' / 'resume' / '10').mkdir(exist_ok=True)"
    script = f"{COUNTS}\nfrom pathlib import Path\nif number == 2:\n    {made}\nsys.exit(6)"
    command = [sys.executable, "-c", script, "--workdir", workdir.format(home=tmp_path)]
    done = subprocess.run(
        [*LOCAL, "--logs", str(tmp_path / "logs"), "--processes=1", "--restarts=1", "--", *command],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 6
    assert len((tmp_path / "0").read_text().split()) == 3


def test_a_signal_is_the_end_of_all_tries(tmp_path):
    script = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("ready", flush=True)
time.sleep(600)
"""
    started = subprocess.Popen(
        [*LOCAL, "--logs", str(tmp_path), "--restarts=5", "--", sys.executable, "-c", script],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for_ready(tmp_path)
    started.send_signal(signal.SIGTERM)
    output, _ = started.communicate(timeout=TIMEOUT)
    assert started.returncode == 75
    assert output == log(tmp_path, 1) == "ready\n"


def gone(pid):
    """Return whether a process ends, within seconds, as one that was just killed does."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_the_first_failure_is_the_exit_code(tmp_path):
    mark = tmp_path / "mark"  # the processes wait for process 1, which ends first
    script = f"""
import os, pathlib, sys, time
n, mark = int(os.environ['{ME}']), pathlib.Path({str(mark)!r})
if n == 1:
    mark.touch()
else:
    while not mark.exists():
        time.sleep(0.05)
    time.sleep(5 + n)
sys.exit(2 + n)
"""
    done = pod(tmp_path, script, "--processes=3")
    assert done.returncode == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_each_process_once(tmp_path, number):
    script = f"""
import os, signal, time
seen = []
signal.signal({int(number)}, lambda *_: seen.append(1))
print("ready", flush=True)
while not seen:
    time.sleep(0.05)
time.sleep(0.5)
print("saved after", len(seen), flush=True)
"""
    started = subprocess.Popen(
        [*LOCAL, "--logs", str(tmp_path), "--", sys.executable, "-c", script],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    wait_for_ready(tmp_path)
    os.killpg(started.pid, number)  # as a terminal does; the processes are out of its reach
    output, _ = started.communicate(timeout=TIMEOUT)
    assert started.returncode == 0
    assert output == log(tmp_path, 0) == log(tmp_path, 1) == "ready\nsaved after 1\n"


def test_a_second_signal_ends_everything(tmp_path):
    script = "import signal, time; signal.signal(2, lambda *_: None); print('ready', flush=True)\n"
    started = subprocess.Popen(
        [*LOCAL, "--logs", str(tmp_path), "--", sys.executable, "-c",
         script + "while True: time.sleep(1)"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for_ready(tmp_path)
    for _ in range(2):
        started.send_signal(signal.SIGINT)
        time.sleep(2)
    started.communicate(timeout=TIMEOUT)
    assert started.returncode == 130


def wait_for_ready(tmp_path):
    for _ in range(600):
        logs = [tmp_path / f"process_{i}.log" for i in range(2)]
        if all(path.exists() and "ready" in path.read_text() for path in logs):
            return
        time.sleep(0.1)
    pytest.fail("the processes did not start")


def test_dry_run_prints_commands_for_a_shell(tmp_path):
    mark = tmp_path / "mark"
    command = [sys.executable, "-c", f"open({str(mark)!r} + ' 1', 'a').write('it\\'s\\n')"]
    logs = tmp_path / "some logs"
    printed = subprocess.run(
        [*LOCAL, "--dry-run", "--logs", str(logs), "--port=5", "--", *command],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert list(tmp_path.iterdir()) == []
    lines = printed.splitlines()
    assert lines[0] == f"mkdir -p {shlex.quote(str(logs))}"
    assert "JAX_PROCESS_ID=1" in shlex.split(lines[2])
    subprocess.run(["bash", "-c", printed], check=True, timeout=TIMEOUT)
    assert (tmp_path / "mark 1").read_text() == "it's\n" * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no command"),
        (["--processes=0", "--", "true"], "--processes is 0; it must be at least 1"),
        (["--restarts=-1", "--", "true"], "--restarts is -1; it must be at least 0"),
        (["--", "no-such-command"], "there is no command 'no-such-command'"),
    ],
)
def test_wrong_arguments(arguments, message):
    done = subprocess.run([*LOCAL, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
