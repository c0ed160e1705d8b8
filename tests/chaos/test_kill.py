"""SIGKILL at any moment, in the middle of a save included: what was saved stays, and is right."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from chaos_run import LONG, new_seed

from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.distributed.checkpoint.verify import verify_checkpoint

KILLS = 32 if LONG else 4
MAX_DELAY = 2.0
"""Seconds of saving, of some tenths of a second each."""


SUPPORT = Path(__file__).parents[1] / "support"


class Saver:
    """A process that saves, started ahead: what it imports takes longer than it lives."""

    def __init__(self, directory: Path, log: Path):
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, SUPPORT / "saving_loop.py", directory],
                stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip

    def steps(self, word: str) -> list[int]:
        """The steps of which it said `word`."""
        lines = [line.split() for line in self.log.read_text().splitlines()]
        return [int(line[1]) for line in lines if len(line) == 2 and line[0] == word]

    def begin(self) -> int:
        """Lets it restore; the step that it found."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        while not (restored := self.steps("restored")):
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.005)
        return restored[0]

    def kill(self) -> None:
        assert self.process.poll() is None, self.log.read_text()
        os.kill(self.process.pid, signal.SIGKILL)
        self.end()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()


def unfinished(directory: Path) -> list[str]:
    if not directory.exists():
        return []
    return sorted(path.name for path in directory.iterdir() if not path.name.isdigit())


def test_killed_while_saving(tmp_path):
    rng = random.Random(new_seed())
    directory = tmp_path / "checkpoints"
    durable, hits = 0, 0
    savers = [Saver(directory, tmp_path / "log 0")]
    try:
        for number in range(KILLS):
            savers.append(Saver(directory, tmp_path / f"log {number + 1}"))
            saver, newest = savers.pop(0), max(saved_steps(directory), default=0)
            assert saver.begin() == newest
            while number % 2 and not saver.steps("saved"):  # else a slow machine saves nothing
                assert saver.process.poll() is None, saver.log.read_text()
                time.sleep(0.005)
            time.sleep(rng.uniform(0, MAX_DELAY))
            saver.kill()

            steps, left = saved_steps(directory), unfinished(directory)
            hits += any("orbax-checkpoint-tmp" in name for name in left)
            durable = max([durable, newest, *saver.steps("saved")])
            assert max(steps, default=0) >= durable, "a save that was complete is lost"
            for step in steps:
                assert verify_checkpoint(directory / str(step)).fault == ""
        newest = max(saved_steps(directory))
        assert savers[0].begin() == newest
        while max(savers[0].steps("saved"), default=0) < newest + 4:  # saving goes on
            assert savers[0].process.poll() is None, savers[0].log.read_text()
            time.sleep(0.05)
    finally:
        for saver in savers:
            saver.end()
    print(f"{hits} of {KILLS} kills were in the middle of a save; {newest} saves")
    assert not list((tmp_path).glob("damaged/*"))
    assert newest >= KILLS // 2
    if LONG:
        assert hits > 0
