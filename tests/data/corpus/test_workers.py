"""Worker processes that die, at any moment: the map ends with a message and leaves nothing."""

import contextlib
import importlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
from made_texts import make_text

from bert_jax.data.corpus.workers import Guard, map_ordered
from bert_jax.errors import UserError

KILLS = int(os.environ.get("BERT_JAX_KILLS", "20"))
PATIENCE = 60.0
"""Seconds in which a build ends when one of its workers died."""
IGNORING = """
import signal
from test_workers import check_guard
if __name__ == "__main__":
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])
    check_guard()
"""
BUILD = """
import sys
from bert_jax.cli.main import main
from bert_jax.data.corpus import passes
passes.BLOCK_BYTES = 100_000  # results of many sizes, most larger than what a pipe holds
sys.exit(main(sys.argv[1:]))
"""


def count(limit: int) -> int:
    """Count to a limit without a look at the clock."""
    return sum(1 for _ in range(limit))


def check_guard() -> None:
    """Assert that a guard ends calls that count, or sleep, for too long, and no others."""
    with contextlib.closing(Guard(1.0, 4 << 30)) as guard:
        for function, ended in ((count, EOFError), (time.sleep, TimeoutError)):
            assert guard.call(count, 10) == 10
            with pytest.raises(ChildProcessError, match=r"or takes over 1 s") as raised:
                guard.call(function, 10**9)
            assert isinstance(raised.value.__cause__, ended)


def die_while_writing(item: int) -> int:
    """Send the first bytes of the answer alone, as a worker does that the system kills then."""

    def cut(self: Connection, data: bytes) -> None:
        os.write(self.fileno(), data[:10])
        os.kill(os.getpid(), signal.SIGKILL)

    if item == 1:
        Connection._send = cut
    return item


def double(item: bytes) -> bytes:
    return item * 2


def raise_for_three(item: int) -> int:
    if item == 3:
        raise KeyError(f"item {item}")
    return item


def unpicklable(item: int) -> Callable[[], int]:
    return lambda: item


def test_results_in_order_whatever_their_size():
    items = [os.urandom(size) for size in (1, 300_000, 5, 3_000_000, 0, 70_000, 9)]
    assert list(map_ordered(double, items, 2)) == [item * 2 for item in items]
    assert list(map_ordered(double, [], 2)) == []


def test_calls_have_limits_whatever_signals_the_parent_ignores(tmp_path):
    check_guard()
    script = tmp_path / "ignoring.py"
    script.write_text(IGNORING)
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    subprocess.run([sys.executable, script], env=found, check=True)


def test_the_start_of_a_guards_process_counts_for_no_call(tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text(
        "import multiprocessing, time\n"
        "time.sleep(1.5 if multiprocessing.parent_process() else 0)\n"
        "def double(n): return 2 * n\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module("slow_to_import").double
    with contextlib.closing(Guard(0.1, 4 << 30)) as guard:
        assert guard.call(function, 2) == 4


def test_errors_of_a_worker_name_where_they_were_raised():
    results = map_ordered(raise_for_three, range(9), 2)
    with pytest.raises(KeyError, match="item 3") as raised:
        list(results)
    assert "in raise_for_three" in "".join(raised.value.__notes__)
    with pytest.raises(Exception, match="pickle"):
        list(map_ordered(unpicklable, [1, 2], 2))


def test_a_worker_that_dies_in_the_middle_of_an_answer():
    def late(*_: object) -> None:
        for each in psutil.Process().children(recursive=True):
            each.kill()
        pytest.exit("the parent waits for the rest of the answer", returncode=1)

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        with pytest.raises(UserError, match="a worker process died"):
            list(map_ordered(die_while_writing, range(50), 2))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["worker", "group", "group twice"])
def test_kills_at_any_moment(tmp_path, whom):
    """SIGKILL to one worker, or SIGTERM to the group; `timeout` sends two to the parent."""
    text, vocabulary = tmp_path / "in.txt", tmp_path / "vocab.txt"
    text.write_text(make_text(20_000))
    words = sorted(set(text.read_text().lower().replace(".", " ").split()))
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *words]))
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng, ends = random.Random(seed), []
    for number in range(KILLS):
        out = tmp_path / "corpora" / "out"
        out.parent.mkdir(exist_ok=True)
        command = ["corpus", f"--input={text}", f"--tokenizer={vocabulary}", f"--out={out}"]
        build = subprocess.Popen(
            [sys.executable, "-c", BUILD, *command, "--num-workers=2", "--overwrite"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            workers: list[psutil.Process] = []
            while len(workers) < 2 and build.poll() is None:
                children = psutil.Process(build.pid).children()
                workers = [each for each in children if "spawn_main" in " ".join(each.cmdline())]
            time.sleep(rng.uniform(0.0, 1.5))
            if whom == "worker":
                rng.choice(workers).kill()
            else:
                for _ in range(whom.count(" ") + 1):
                    os.killpg(build.pid, signal.SIGTERM)
            _, said = build.communicate(timeout=PATIENCE)
        except (psutil.NoSuchProcess, ProcessLookupError):  # the build was faster
            _, said = build.communicate(timeout=PATIENCE)
        finally:
            build.kill()
        ends.append(build.returncode)
        if build.returncode == 0:
            assert {path.name for path in out.parent.iterdir()} == {"out"}
            continue
        assert {path.name for path in out.parent.iterdir()} <= {"out"}, number
        if build.returncode == -signal.SIGTERM:  # behind its work, where the handler is given back
            assert "Traceback" not in said, (number, said)
            assert out.exists() or "SIGTERM" in said, (number, said)
            continue
        assert (build.returncode, "Traceback" in said) in ((2, False), (143, False)), (number, said)
        assert "a worker process died" in said or "SIGTERM" in said, (number, said)
        for each in workers:
            assert not each.is_running() or each.wait(PATIENCE) is None
    print({code: ends.count(code) for code in sorted(set(ends))})
    assert any(ends), "no kill met a build"
