"""Runs of several processes that are killed, and what surrounds them."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
from compiling import same_bits

from bert_jax.config.mapping import to_dict
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.run.telemetry import read_metrics

LONG = os.environ.get("BERT_JAX_CHAOS") == "1"
TIMEOUT = 900.0
_LOCAL = Path(__file__).parents[2] / "launch" / "local.py"


def new_seed() -> int:
    """Of a test's random choices; pytest shows it on failure.

    BERT_JAX_CHAOS_SEED, else a new one in the long forms; the short ones are the same each time.
    """
    drawn = random.SystemRandom().randrange(1 << 32) if LONG else 1
    seed = int(os.environ.get("BERT_JAX_CHAOS_SEED") or drawn)
    print(f"BERT_JAX_CHAOS_SEED={seed}")
    return seed


def child_environ(cache: Path) -> dict[str, str]:
    """For processes that keep what they compile in a directory; the rest is set by conftest.py."""
    return same_bits() | {"JAX_COMPILATION_CACHE_DIR": str(cache), "OPENBLAS_NUM_THREADS": "1"}


def write_config(path: Path, config: PretrainConfig) -> Path:
    """A configuration as a file that the command line takes."""
    text = json.dumps(to_dict(config))
    path.write_text(f"import json\ndef get_config():\n    return json.loads({text!r})\n")
    return path


class Kill(NamedTuple):
    """When to kill."""

    by: Literal["seconds", "step"]
    """After the start of the processes, or once the metrics have come so far since then."""
    value: float


class Pod:
    """`bert-jax pretrain` in several processes, restarted by the launcher when it is killed."""

    def __init__(
        self, config: Path, workdir: Path, cache: Path, *,
        processes: int, devices: int, restarts: int = 0, fields: Iterable[str] = (),
        logs: Path | None = None,
    ):  # fmt: skip
        self.workdir = workdir
        self.logs = logs or workdir.with_name(f"{workdir.name} logs")
        self.logs.mkdir()
        self._killed: set[int] = set()
        command = [
            sys.executable, str(_LOCAL), f"--processes={processes}", f"--devices={devices}",
            "--grace=0.5", f"--restarts={restarts}", f"--logs={self.logs}", "--",
            sys.executable, str(Path(__file__).with_name("cached_cli.py")), "pretrain",
            f"--config={config}", f"--workdir={workdir}", *fields,
        ]  # fmt: skip
        # A cache of its own: a kill may leave half an entry, of which JAX warns.
        environ = child_environ(cache.with_name(f"{cache.name} by pods"))
        with (self.logs / "launcher.log").open("w") as log:
            self._launcher = subprocess.Popen(
                command, env=environ, stdout=log, stderr=subprocess.STDOUT
            )
        self._count = processes

    def finish(self, kills: Iterable[Kill] = (), rng: random.Random | None = None) -> int:
        """Kills one process, or all, at each point; returns when the run is finished.

        Returns:
            How many kills found a running process.
        """
        rng, hits = rng or random.Random(0), 0
        try:
            for kill in kills:
                hits += self._kill(kill, rng)
            code = self._launcher.wait(TIMEOUT)
        finally:
            self.end()
        assert code == 0, self.output()
        return hits

    def stop_at(self, step: int) -> None:
        """SIGTERM once the metrics have come to a step."""
        while self._step() < step and self._launcher.poll() is None:
            time.sleep(0.005)
        self._launcher.terminate()

    def output(self) -> str:
        """All logs."""
        return "\n".join(p.read_text(errors="replace") for p in sorted(self.logs.iterdir()))

    def end(self) -> None:
        """Leaves no process behind."""
        if self._launcher.poll() is None:
            for pid in self._children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._launcher.kill()
            self._launcher.wait()

    def _kill(self, kill: Kill, rng: random.Random) -> bool:
        while len(pids := self._children() - self._killed) < self._count:
            if self._launcher.poll() is not None:
                return False
            time.sleep(0.01)
        begin, began = time.monotonic(), self._written()
        while self._launcher.poll() is None:
            if kill.by == "seconds" and time.monotonic() - begin >= kill.value:
                break
            if kill.by == "step" and self._written() != began and self._step() >= kill.value:
                break
            time.sleep(0.005)
        chosen = sorted(pids) if rng.random() < 0.3 else [rng.choice(sorted(pids))]
        hit = False
        for pid in chosen:
            if pid in self._children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    hit = True
        self._killed |= pids
        return hit

    def _children(self) -> set[int]:
        """Processes that the launcher has started and that run."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return {each.pid for each in psutil.Process(self._launcher.pid).children()}
        return set()

    def _written(self) -> int:
        with contextlib.suppress(OSError):
            return (self.workdir / "metrics.jsonl").stat().st_mtime_ns
        return 0

    def _step(self) -> int:
        return max((row["step"] for row in read_metrics(self.workdir / "metrics.jsonl")), default=0)
