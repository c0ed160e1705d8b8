"""What happens to a run's disk, in a process that sees a small disk of its own.

`python disk_trouble.py DISK CORPUS COMPILED`, where DISK is a file system that nobody else uses.
Ends with a traceback where something is not as it must be.
"""

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
from chaos_run import write_config  # noqa: E402
from small_run import fingerprint, small_config  # noqa: E402

from bert_jax.cli import main as cli  # noqa: E402
from bert_jax.distributed.checkpoint import storage  # noqa: E402
from bert_jax.distributed.checkpoint.manager import Checkpoints  # noqa: E402
from bert_jax.distributed.checkpoint.storage import saved_steps  # noqa: E402
from bert_jax.distributed.checkpoint.verify import verify_checkpoint  # noqa: E402
from bert_jax.training.pretrain import saves  # noqa: E402
from bert_jax.training.pretrain.corpus import open_corpus  # noqa: E402
from bert_jax.training.pretrain.train import train  # noqa: E402
from bert_jax.training.run.events import read_events  # noqa: E402
from bert_jax.training.run.telemetry import Telemetry, read_metrics  # noqa: E402

NUM_STEPS, SAVE_EVERY = 30, 2
log: list[str] = []


class Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log.append(f"{record.levelname} {record.getMessage()}")


def main(disk: Path, corpus_path: Path) -> None:
    corpus = open_corpus(str(corpus_path))
    config = small_config(
        training__num_steps=NUM_STEPS,
        training__phases=[{"length": 32, "batch_size": 16}],
        training__accumulation=1,
        training__eval_every_steps=0,
        training__log_every_steps=1,
        data={"corpus": str(corpus_path)},
        checkpoint={"save_every_steps": SAVE_EVERY, "keep": 2, "max_failed_saves": 2},
    )
    plain = disk.parent / "plain"
    assert train(config, plain, corpus=corpus, echo=lambda _: None).finished
    expected = fingerprint(plain, config, corpus)

    Telemetry.line_due = lambda out, step: True  # a line a step
    work = disk / "work"
    troubles = Troubles(work)
    said: list[str] = []

    def echo(line: str) -> None:
        said.append(line)
        if line.startswith("step "):
            troubles.at(int(line.split()[1].partition("/")[0]))

    result = train(config, work, corpus=corpus, echo=echo)
    assert result.finished, result
    assert not troubles.planned, troubles.planned
    check_trouble(work, expected, fingerprint(work, config, corpus))
    check_exit(disk, config, corpus, expected)


class Troubles:
    """What happens at which step, before that step is saved."""

    def __init__(self, work: Path):
        self.work, self.checkpoints = work, work / "checkpoints"
        self.filler = work.parent / "filler"
        self.planned: dict[int, Callable[[], None]] = {
            6: lambda: fill(self.filler),
            7: self.filler_gone,
            10: self.read_only,
            11: self.writable,
            14: lambda: self.rename(self.checkpoints),
            15: lambda: self.rename_back(self.checkpoints),
            18: lambda: self.rename(self.work),
            19: lambda: self.rename_back(self.work),
            22: self.vanish_during_the_save,
            23: self.found_after_the_save,
        }
        self.before: list[int] = []

    def at(self, step: int) -> None:
        """Called when the step is done."""
        if step not in self.planned:
            return
        if step % SAVE_EVERY == 0:  # before the trouble; no thread has anything left to do
            wait_for(lambda: (self.checkpoints / str(step - SAVE_EVERY) / "verified.json").exists())
            wait_for(lambda: all(thread.name != "verify" for thread in threading.enumerate()))
            self.before = saved_steps(self.checkpoints)
            self.planned.pop(step)()
        else:
            failure = f"checkpoint of step {step - 1} could not be written"
            wait_for(lambda: any(failure in line for line in log))  # reported by another thread
            self.planned.pop(step)()
            assert saved_steps(self.checkpoints) == self.before, step
            for kept in self.before:
                assert verify_checkpoint(self.checkpoints / str(kept)).intact

    def filler_gone(self) -> None:
        self.filler.unlink()

    def read_only(self) -> None:
        subprocess.run(["mount", "--bind", self.checkpoints, self.checkpoints], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", self.checkpoints], check=True)

    def writable(self) -> None:
        subprocess.run(["umount", self.checkpoints], check=True)

    def rename(self, path: Path) -> None:
        path.rename(path.with_name(path.name + " away"))

    def rename_back(self, path: Path) -> None:
        assert not path.exists(), f"{path} was made again: {sorted(path.rglob('*'))[:20]}"
        path.with_name(path.name + " away").rename(path)

    def found_after_the_save(self) -> None:
        # Orbax's threads make a directory again that they are about to write to.
        assert saved_steps(self.checkpoints) == []
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        self.rename_back(self.checkpoints)

    def vanish_during_the_save(self) -> None:
        write = storage.write_async

        def writes_and_loses_it(*arguments):
            storage.write_async = write
            pending = write(*arguments)
            self.rename(self.checkpoints)
            return pending

        storage.write_async = writes_and_loses_it


def check_trouble(work: Path, expected: dict[str, str], found: dict[str, str]) -> None:
    """Each failure was said, at once and for good, and the run is what it would have been."""
    failed = [6, 10, 14, 18, 22]
    events = [e for e in read_events(work / "events.jsonl") if e["kind"] == "save_failed"]
    assert [e["step"] for e in events] == failed, events
    rows = read_metrics(work / "metrics.jsonl")
    assert [row["event/save_failed"] for row in rows if "event/save_failed" in row] == failed
    steps = [row["step"] for row in rows if "train/mlm_loss" in row]
    assert steps == list(range(1, NUM_STEPS + 1)), steps
    errors = [line for line in log if line.startswith("ERROR")]
    for step, reason in zip(failed, ["disk is full", "read-only", "", "", ""], strict=True):
        start = f"ERROR The checkpoint of step {step} could not be written to "
        assert any(line.startswith(start) and reason in line for line in errors), (step, errors)
    assert {name: found[name] for name in expected if name != "metrics"} == {
        name: expected[name] for name in expected if name != "metrics"
    }
    kept = saved_steps(work / "checkpoints")
    assert kept[-1] == NUM_STEPS, kept
    assert all(verify_checkpoint(work / f"checkpoints/{step}").intact for step in kept)
    print("survived", failed)


def check_exit(disk: Path, config, corpus, expected: dict[str, str]) -> None:
    """Exit code 3 after failures in a row; the same command then continues."""
    work, filler = disk / "given up", disk / "filler"
    command = ["pretrain", f"--config={write_config(disk.parent / 'config.py', config)}",
               f"--workdir={work}"]  # fmt: skip

    class Filling(Checkpoints):
        def save(self, step, state, **content):
            if step == 3 * SAVE_EVERY:
                self.wait()
                wait_for(lambda: (work / f"checkpoints/{step - 2}/verified.json").exists())
                fill(filler)
            super().save(step, state, **content)

    saves.Checkpoints = Filling
    code = cli.main(command)
    saves.Checkpoints = Checkpoints
    assert code == 3, code
    kept = saved_steps(work / "checkpoints")
    assert kept == [SAVE_EVERY, 2 * SAVE_EVERY], kept
    filler.unlink()
    assert all(verify_checkpoint(work / f"checkpoints/{step}").intact for step in kept)
    assert cli.main(command) == 0
    assert fingerprint(work, config, corpus)["step"] == str(NUM_STEPS)
    events = read_events(work / "events.jsonl")
    kinds = [(e["kind"], e["step"]) for e in events if e["kind"] not in ("start", "finished")]
    # The disk may have been too full for the events of the first start; never for those after.
    assert {kind for kind, _ in kinds} <= {"save_failed", "error", "plateau"}, kinds
    found = fingerprint(work, config, corpus)
    assert {name for name in expected if found[name] != expected[name]} <= {"metrics"}
    shutil.rmtree(work)
    print("exit code 3, and continued")


def fill(filler: Path) -> None:
    """Leaves no byte."""
    file = os.open(filler, os.O_WRONLY | os.O_CREAT)
    for size in (1 << 20, 4096, 1):
        try:
            while os.write(file, b"x" * size):
                pass
        except OSError:
            continue
    os.close(file)


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited for a minute")


if __name__ == "__main__":
    logging.getLogger("bert_jax").addHandler(Handler())
    main(Path(sys.argv[1]), Path(sys.argv[2]))
