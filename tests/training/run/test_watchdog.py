"""A process that stands still ends with stacks and a code of its own; one that works does not."""

import os
import subprocess
import sys
import threading
import time

import pytest

from bert_jax.training.run import watchdog
from bert_jax.training.run.events import Events, read_events
from bert_jax.training.run.watchdog import EXIT_CODE, Watchdog

TIMEOUT = 120.0


class Record:
    """What a watchdog would have done to the process."""

    def __init__(self):
        self.codes, self.ended = [], threading.Event()

    def exit(self, code):
        self.codes.append(code)
        self.ended.set()


@pytest.fixture
def record():
    return Record()


@pytest.fixture
def unarmed(monkeypatch):
    """No backstop, which would end the tests' process if the watchdog got no processor in time."""
    monkeypatch.setattr(watchdog, "_arm_backstop", lambda seconds: None)


def wait_for_a_step_that_does_not_come(over):
    over.wait(TIMEOUT)


@pytest.mark.usefixtures("unarmed")
def test_silence_ends_the_process_and_says_where_it_stood(tmp_path, record, capfd):
    report = tmp_path / "stacks.0.txt"
    report.write_text("an earlier stall\n")
    events = tmp_path / "events.jsonl"
    with Watchdog(2.0, report, events=Events(events, 1), exit=record.exit) as dog:
        dog.alive("step 12")
        wait_for_a_step_that_does_not_come(record.ended)
    assert record.codes == [EXIT_CODE] == [6]
    (event,) = read_events(events)
    message = event["message"]
    assert "nothing was completed for 2 s" in message
    assert "last completed: step 12" in message
    assert (event["kind"], event["process"]) == ("stalled", 1)
    assert (event["seconds"], event["last"]) == (2.0, "step 12")
    text = report.read_text()
    assert text.startswith("an earlier stall\n")
    assert message in text
    main = f"Thread 0x{threading.main_thread().ident:016x}"
    assert f"The main thread: {main}\n" in text
    assert f"\n{main} (most recent call first):" in text
    place = f'File "{__file__}", line '
    assert any(
        line.strip().startswith(place) and line.endswith("in wait_for_a_step_that_does_not_come")
        for line in text.splitlines()
    )
    assert text.removeprefix("an earlier stall\n") in capfd.readouterr().err


@pytest.mark.usefixtures("unarmed")
def test_signs_of_life_keep_it_quiet(tmp_path, record):
    events = Events(tmp_path / "events.jsonl")
    with Watchdog(2.5, tmp_path / "stacks", events=events, exit=record.exit) as dog:
        for number in range(120):
            time.sleep(0.05)
            dog.alive(f"step {number}")
    assert record.codes == []
    assert list(tmp_path.iterdir()) == []


def watching():
    return [thread for thread in threading.enumerate() if thread.name == "watchdog"]


def test_afterwards_nothing_is_watched(tmp_path, record, monkeypatch):
    """The interpreter's own timer, the backstop, would end the process."""
    timers = []
    monkeypatch.setattr(watchdog, "_arm_backstop", lambda *given: timers.append("armed"))
    stop = lambda: timers.append("cancelled")  # noqa: E731
    monkeypatch.setattr(watchdog.faulthandler, "cancel_dump_traceback_later", stop)
    with Watchdog(60.0, tmp_path / "stacks", exit=record.exit):
        assert len(watching()) == 1
    assert watching() == []
    assert (timers[0], timers[-1]) == ("armed", "cancelled")
    assert record.codes == []


def test_zero_is_off(tmp_path, record):
    with Watchdog(0.0, tmp_path / "stacks", exit=record.exit) as dog:
        dog.alive("step 1")
        assert watching() == []


@pytest.mark.usefixtures("unarmed")
def test_a_report_whose_directory_is_gone_still_shows_the_stacks(tmp_path, record, capfd):
    gone = tmp_path / "gone"
    events = Events(gone / "events.jsonl")
    with Watchdog(2.0, gone / "stacks", events=events, exit=record.exit):
        wait_for_a_step_that_does_not_come(record.ended)
    assert record.codes == [6]
    printed = capfd.readouterr().err
    assert "in wait_for_a_step_that_does_not_come" in printed
    assert "the stacks could not be written to a file: [Errno 2]" in printed


def hang(tmp_path, how, stderr=subprocess.PIPE):
    """A process that hangs for ever inside a watchdog."""
    script = f"""
import ctypes, os, threading, time
from pathlib import Path
from bert_jax.training.run import watchdog

def hang_here():
    {how}

watchdog._REPORT_SECONDS = 5.0
with watchdog.Watchdog(2.0, Path({str(tmp_path / "stacks")!r})) as dog:
    dog.alive("step 3")
    hang_here()
"""
    path = tmp_path / "hang.py"
    path.write_text(script)
    return subprocess.Popen(
        [sys.executable, path], env=os.environ | {"JAX_PLATFORMS": "cpu"}, text=True, stderr=stderr
    )


def end_of(started):
    """The exit code and what was printed, unless it was to be left unread."""
    try:
        if started.stderr is None:
            return started.wait(TIMEOUT), ""
        _, printed = started.communicate(timeout=TIMEOUT)
        return started.returncode, printed
    finally:
        started.kill()


def test_a_process_that_hangs_in_python(tmp_path):
    code, printed = end_of(hang(tmp_path, "threading.Lock().acquire() and time.sleep(600)"))
    assert code == 6
    assert "last completed: step 3" in printed
    assert "in hang_here" in printed
    assert (tmp_path / "stacks").read_text() in printed


def test_a_process_whose_interpreter_is_locked(tmp_path):
    how = "ctypes.PyDLL(None).sleep(600)"  # keeps the lock while it sleeps
    code, printed = end_of(hang(tmp_path, how))
    assert code == 1
    assert "Timeout (" in printed
    assert "in hang_here" in printed


def test_a_process_whose_output_nobody_reads(tmp_path):
    fill = """os.set_blocking(2, False)
    try:
        while os.write(2, b"x" * 4096): pass
    except BlockingIOError:
        os.set_blocking(2, True)
    time.sleep(600)"""
    read, write = os.pipe()
    try:
        code, _ = end_of(hang(tmp_path, fill, stderr=write))
        assert code == 6
    finally:
        os.close(read)
        os.close(write)
