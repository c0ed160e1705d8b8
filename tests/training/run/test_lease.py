"""One run at a time in a work directory; "machines" are processes that are told different names."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gcs_emulator import make_bucket, running_emulator

from bert_jax.errors import UserError
from bert_jax.files import lease
from bert_jax.files.claims import BucketClaims, Claims, LocalClaims
from bert_jax.files.lease import EXIT_CODE, Lease, Times
from bert_jax.files.remote import open_workdir
from bert_jax.training.run.session import hold_workdir

SCRIPT = Path(__file__).parents[2] / "support" / "lease_holder.py"
QUICK = Times(beat=0.05, lapse=1.0, patience=0.5, poll=0.01)
LONG = 600.0


class Holder:
    """A process that wants the directory."""

    def __init__(self, directory: Path | str, machine: str, lapse: float, patience: float):
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(directory), machine, str(lapse), str(patience)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.said: list[str] = []

    def says(self, text: str) -> str:
        """Read its output up to the line that has `text`."""
        while text not in (line := self.process.stdout.readline()):
            assert line, (self.said, self.process.stderr.read())
            self.said.append(line)
        return line

    def end(self) -> str:
        """Kill it as the kernel does when memory is short; what it said last."""
        self.process.kill()
        out, err = self.process.communicate()
        return out + err


@pytest.fixture
def start() -> Iterator:
    with contextlib.ExitStack() as stack:

        def run(
            directory: Path | str, machine: str = "", *, lapse: float = LONG, patience: float = LONG
        ) -> Holder:
            holder = Holder(directory, machine, lapse, patience)
            stack.callback(holder.end)
            return holder

        yield run


def everything(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "lines"}


def wait_for_line(directory: Path, holder: Holder) -> None:
    """Return when a holder has written a line, not only taken the lease."""
    lines = directory / "lines"
    while not lines.exists() or str(holder.process.pid) not in lines.read_text():
        assert holder.process.poll() is None
        time.sleep(0.01)


def leases(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("lease-*")]


def test_a_second_start_on_this_machine_is_refused_at_once(tmp_path, start):
    first = start(tmp_path / "run")
    first.says("held")
    before = everything(tmp_path / "run")
    with (
        pytest.raises(UserError) as refused,
        hold_workdir(tmp_path / "run", times=Times(lapse=LONG)),
    ):
        pytest.fail("two runs hold the directory")
    said = str(refused.value)
    record = json.loads(before["lease-1.json"])
    assert f"in use by process {first.process.pid} of {record['user']} on {record['host']}" in said
    assert f"(since {record['since']})" in said
    assert "free as soon as that process ends" in said
    assert everything(tmp_path / "run") == before

    first.process.send_signal(signal.SIGSTOP)
    while lease._process(first.process.pid)[0] != "T":
        time.sleep(0.01)
    with (
        pytest.raises(UserError, match="stopped; `kill -CONT` continues"),
        hold_workdir(tmp_path / "run"),
    ):
        pytest.fail("two runs hold the directory")


def test_a_killed_run_starts_again_at_once(tmp_path, start):
    first = start(tmp_path)
    first.says("held")
    first.process.kill()  # not waited for: a zombie is dead, too
    second = start(tmp_path)
    assert f"process {first.process.pid} of" in second.says("has ended")
    second.says("held")
    assert leases(tmp_path) == ["lease-2.json"]


def test_a_process_that_got_the_number_of_the_dead_one_is_another(tmp_path):
    record = lease._myself() | {"process_start": "1"}
    LocalClaims(tmp_path).create(1, json.dumps(record).encode())
    said: list[str] = []
    with hold_workdir(tmp_path, echo=said.append, times=Times(lapse=LONG)):
        assert leases(tmp_path) == ["lease-2.json"]
    assert "has ended" in said[0]


def test_the_lease_of_another_machine_lapses(tmp_path, start):
    first = start(tmp_path, "elsewhere")
    first.says("held")
    first.end()
    os.utime(tmp_path / "lease-1.json", (0, 4e9))  # its clock is decades ahead
    said: list[str] = []
    before = time.monotonic()
    with hold_workdir(tmp_path, echo=said.append, times=QUICK):
        assert time.monotonic() - before > QUICK.lapse
        assert leases(tmp_path) == ["lease-2.json"]
    assert leases(tmp_path) == []
    assert "Waiting until that process ends or shows no sign of life for 1 s" in said[0]
    assert "taking over" in said[1]
    assert len(said) == 2


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"machine": 3}'])
def test_a_lease_that_was_cut_off_lapses(tmp_path, content):
    LocalClaims(tmp_path).create(1, content)
    with hold_workdir(tmp_path, echo=lambda _: None, times=QUICK):
        assert leases(tmp_path) == ["lease-2.json"]


def test_a_live_holder_elsewhere_is_waited_for_and_then_respected(tmp_path, start):
    first = start(tmp_path, "elsewhere")
    first.says("held")
    times = Times(lapse=LONG, patience=0.5, poll=0.01)
    with (
        pytest.raises(UserError, match=r"last sign of life was \d s ago; 600 s after it, the"),
        hold_workdir(tmp_path, echo=lambda _: None, times=times),
    ):
        pytest.fail("two runs hold the directory")

    second = start(tmp_path)
    second.says("Waiting until that process ends")
    first.process.send_signal(signal.SIGINT)  # leaves as a run that was stopped does
    second.says("held")


def test_a_suspended_holder_that_lost_its_lease_writes_nothing_more(tmp_path, start):
    first = start(tmp_path, "elsewhere")
    wait_for_line(tmp_path, first)
    first.process.send_signal(signal.SIGSTOP)
    second = start(tmp_path, lapse=0.5)
    wait_for_line(tmp_path, second)
    assert leases(tmp_path) == ["lease-2.json"]
    first.process.send_signal(signal.SIGCONT)
    assert first.process.wait(60) == EXIT_CODE
    _, said = first.process.communicate()
    assert f"{tmp_path} was taken over by another run" in said
    lines = (tmp_path / "lines").read_text().split()
    after = lines[lines.index(str(second.process.pid)) :]
    assert after.count(str(first.process.pid)) <= 1  # the line that it was stopped in
    assert second.process.poll() is None


def test_a_holder_that_was_suspended_and_lost_nothing_goes_on(tmp_path, start):
    first = start(tmp_path)
    wait_for_line(tmp_path, first)
    first.process.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    size = (tmp_path / "lines").stat().st_size
    first.process.send_signal(signal.SIGCONT)
    while (tmp_path / "lines").stat().st_size <= size:
        assert first.process.poll() is None
        time.sleep(0.01)


def test_one_of_many_takes_a_lease_over(tmp_path, start):
    start(tmp_path, "elsewhere").says("held")
    first = json.loads((tmp_path / "lease-1.json").read_text())
    os.kill(first["pid"], signal.SIGKILL)
    many = [start(tmp_path, f"machine {n}", lapse=10.0, patience=12.0) for n in range(4)]
    codes = []
    while len(codes) < 3:
        codes = [code for each in many if (code := each.process.poll()) is not None]
        time.sleep(0.02)
    assert codes == [2, 2, 2]
    (left,) = (each for each in many if each.process.poll() is None)
    left.says("held")


def test_a_refused_start_leaves_no_directory(tmp_path):
    with contextlib.suppress(UserError), hold_workdir(tmp_path / "runs" / "one"):
        assert leases(tmp_path / "runs" / "one") == ["lease-1.json"]
        raise UserError("no corpus")
    assert list(tmp_path.iterdir()) == []

    with hold_workdir(tmp_path / "runs" / "one"):
        (tmp_path / "runs" / "one" / "config.json").write_text("{}")
    assert leases(tmp_path / "runs" / "one") == []
    assert (tmp_path / "runs" / "one" / "config.json").exists()


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalClaims, "create", refuse)
    with (
        pytest.raises(UserError, match="cannot write to the work directory"),
        hold_workdir(tmp_path),
    ):
        pytest.fail("nothing was written")


def test_a_file_system_that_is_away_for_a_while_costs_nothing(tmp_path, monkeypatch, caplog):
    held = Lease(LocalClaims(tmp_path), "run", QUICK, say=print, exit=lambda _: pytest.fail("lost"))
    assert held.take()

    def fail(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(LocalClaims, "renew", fail)
        held.confirm()
    assert "cannot be renewed" in caplog.text
    held.confirm()
    held.release()
    assert leases(tmp_path) == []


def test_a_release_leaves_the_lease_of_another_run(tmp_path):
    """One that was taken over, left, and taken again under the same number meanwhile."""
    claims = LocalClaims(tmp_path)
    held = Lease(claims, "run", Times(beat=LONG), say=print, exit=lambda _: None)
    assert held.take()
    claims.remove(1)
    claims.create(1, b"another run")
    held.release()
    assert claims.read(1)[0] == b"another run"


def test_two_that_create_at_once_both_retreat(tmp_path):
    """One saw an empty directory, the other a lease that has gone since."""

    class Slow(LocalClaims):
        def create(self, number: int, content: bytes) -> bool:
            if not late:
                late.append(1)
                LocalClaims(tmp_path).create(7, b"another start")
            return super().create(number, content)

    late: list[int] = []
    said: list[str] = []
    held = Lease(Slow(tmp_path), "run", QUICK, say=said.append)
    while not held.take():
        time.sleep(0.01)
    assert "in use by another process" in said[0]
    assert leases(tmp_path) == ["lease-8.json"]
    held.release()


# The same in a bucket.


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_emulator(tmp_path_factory.mktemp("emulator") / "log"):
        make_bucket("held")
        yield "gs://held"


def bucket_claims(url: str) -> Claims:
    claims = open_workdir(url).claims()
    assert isinstance(claims, BucketClaims)
    return claims


@pytest.mark.parametrize("kind", ["local", "bucket"])
def test_claims(kind, tmp_path, bucket):
    url = f"{bucket}/claims"
    one, other = (
        LocalClaims(tmp_path / "run") if kind == "local" else bucket_claims(url) for _ in range(2)
    )
    assert one.numbers() == []
    assert one.read(1) is None
    assert one.create(1, b"mine")
    assert not other.create(1, b"theirs")
    assert other.numbers() == [1]
    content, version = other.read(1)
    assert content == b"mine"
    assert other.read(1) == (b"mine", version)
    assert one.renew(1, b"mine")
    assert other.read(1)[1] != version
    assert not other.renew(1, b"theirs")
    assert other.read(1)[0] == b"mine"
    assert other.create(12, b"theirs")
    assert one.numbers() == [1, 12]
    other.remove(1)
    assert not one.renew(1, b"mine")
    assert one.numbers() == [12]
    other.remove(1)
    other.remove(12)


def test_a_run_in_a_bucket_is_held(bucket, start):
    url = f"{bucket}/runs/one"
    first = start(url, "elsewhere")
    first.says("held")
    with (
        pytest.raises(UserError, match="in use by process"),
        hold_workdir(url, echo=lambda _: None, times=Times(lapse=LONG, patience=0.5, poll=0.01)),
    ):
        pytest.fail("two runs hold the directory")
    first.process.send_signal(signal.SIGSTOP)
    with hold_workdir(url, echo=lambda _: None, times=QUICK) as place:
        assert leases(place.local) == []  # a lease is no file of the run
        assert bucket_claims(url).numbers() == [2]
        first.process.send_signal(signal.SIGCONT)
        assert first.process.wait(60) == EXIT_CODE
    assert bucket_claims(url).numbers() == []


def test_a_directory_that_is_away_for_a_while_is_held_again(tmp_path):
    """As a share that is not mounted for a moment: nobody has taken the directory over."""
    directory, away = tmp_path / "work", tmp_path / "away"
    claims, ended = LocalClaims(directory), []
    held = Lease(claims, "work", Times(beat=LONG), say=lambda _: None, exit=ended.append)
    assert held.take()
    directory.rename(away)
    held.confirm()
    away.rename(directory)
    held.confirm()
    assert not ended
    claims.remove(1)
    assert claims.create(2, b"{}")
    held.confirm()
    assert ended == [EXIT_CODE]
    held.release()


def test_process_numbers_of_a_container_are_its_own():
    """Number 1 there and number 1 here are two processes, on one host with one name."""
    code = "import json; from bert_jax.files import lease; print(json.dumps(lease._myself()))"
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"]).returncode:
        pytest.skip("no namespaces may be made here")
    done = subprocess.run(
        [*unshare, sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    there, here = json.loads(done.stdout), lease._myself()
    assert (there["host"], there["pid"]) == (here["host"], 1)
    assert lease._lives_here(there) is None
    assert lease._lives_here(here)
