#!/usr/bin/env python3
"""A simulated pod: N processes with M fake CPU devices each, on this machine.

    python launch/local.py --processes 4 --devices 2 -- \
        bert-jax pretrain --config=configs/pretrain/bert_tiny.py --workdir=work/pod ...

The processes find each other over loopback and share the run as the hosts of a TPU pod do. Process
0's output is shown; every process writes a log of its own. SIGINT and SIGTERM are passed on once,
upon which the run saves and ends. When one process fails the others are ended, and its exit code is
this command's. With --restarts the pod is then started again, unless the code is one that another
try does not fix: 2 (input to correct), 3 (several saves in a row failed), 4 (a bad step), 5 (no
intact checkpoint), 7 (another run has the work directory), 8 (fine-tuning learned nothing) or 130
(interrupted). A new checkpoint in the command's --workdir starts the count of restarts anew.
"""

import argparse
import contextlib
import itertools
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

_POLL_SECONDS = 0.1
_TAIL_LINES = 20
_LOOPBACK = "127.0.0.1"
_PORTS = range(20_000, 32_000)
"""Ports below the range from which Linux and macOS take the ports of outgoing connections."""
_FINAL = {0, 2, 3, 4, 5, 7, 8, 130}
"""Exit codes after which another try would do the same again, or nothing."""


def main(argv: Sequence[str] | None = None) -> int:
    """Start the processes, wait for them and return the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    command: list[str] = arguments.command
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        parser.error("no command; give it after --, as in: -- bert-jax pretrain --config=...")
    for name in ("processes", "devices"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}; it must be at least 1")
    if arguments.restarts < 0:
        parser.error(f"--restarts is {arguments.restarts}; it must be at least 0")
    command = [_program(command[0]), *command[1:]]
    if arguments.dry_run:
        for line in _shown(_places(arguments), command, arguments.logs or Path("logs")):
            print(line)
        return 0
    if shutil.which(command[0]) is None:
        parser.error(
            f"there is no command {command[0]!r}; install bert_jax into the environment of "
            f"{sys.executable}, or give a path"
        )
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="bert_jax_pod_"))
    logs.mkdir(parents=True, exist_ok=True)
    total = arguments.processes * arguments.devices
    print(
        f"{arguments.processes} processes x {arguments.devices} devices = {total}; logs in {logs}",
        file=sys.stderr,
        flush=True,
    )
    signals: list[int] = []
    for handled in (signal.SIGINT, signal.SIGTERM):
        signal.signal(handled, lambda number, _: signals.append(number))
    first_line, left, newest = "", arguments.restarts, _newest_step(command)
    for attempt in itertools.count(2):
        code = _Pod(command, _places(arguments), logs, arguments.grace, signals).run(first_line)
        if (step := _newest_step(command)) > newest:
            left, newest = arguments.restarts, step
        if code in _FINAL or signals or not left:
            break
        left -= 1
        first_line = f"[local.py] try {attempt}, after exit code {code}\n"
        print(first_line, end="", file=sys.stderr, flush=True)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    parser.add_argument(
        "--devices", type=int, default=2, help="fake devices a process (default: %(default)s)"
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="gets process_0.log ... (default: a new one)"
    )
    parser.add_argument("--port", type=int, help="of the coordinator (default: a free one)")
    parser.add_argument(
        "--grace",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="that the others get to end by themselves when one has failed (default: %(default)s)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="of the whole pod, after an exit code that another try can fix, without a new "
        "checkpoint (default: none)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and stop")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what every process runs")
    return parser


def _newest_step(command: list[str]) -> int:
    """Return the step of the newest checkpoint in the command's --workdir; -1 for none."""
    workdir = Path(os.devnull)
    for word, following in itertools.pairwise([*command, ""]):
        name, _, value = word.partition("=")
        if name == "--workdir":
            workdir = Path(os.path.expanduser(value or following))
    found = itertools.chain(workdir.glob("checkpoints/*"), workdir.glob("resume/*"))
    return max((int(path.name) for path in found if path.name.isdecimal()), default=-1)


def _places(arguments: argparse.Namespace) -> list[dict[str, str]]:
    """Return the variables of each process; with a port that no earlier pod may still hold."""
    port = arguments.port or _free_port()
    return [
        _variables(number, arguments.processes, arguments.devices, port)
        for number in range(arguments.processes)
    ]


def _variables(number: int, processes: int, devices: int, port: int) -> dict[str, str]:
    """Return the variables that `bert_jax.distributed.parallel.processes` and JAX read."""
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COORDINATOR_ADDRESS": f"{_LOOPBACK}:{port}",
        "JAX_COORDINATOR_BIND_ADDRESS": f"{_LOOPBACK}:{port}",
        "JAX_NUM_PROCESSES": str(processes),
        "JAX_PROCESS_ID": str(number),
        "PYTHONUNBUFFERED": "1",
    }


def _free_port() -> int:
    """Return a port that is free, and that no outgoing connection gets before the pod binds it."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind((_LOOPBACK, port))
            return port


def _program(name: str) -> str:
    """`bert-jax` of the environment that runs this script, activated or not."""
    beside = Path(sys.executable).parent / name
    return str(beside) if os.sep not in name and os.access(beside, os.X_OK) else name


def _shown(places: list[dict[str, str]], command: list[str], logs: Path) -> list[str]:
    """Return the same as shell commands."""
    lines = [f"mkdir -p {shlex.quote(str(logs))}"]
    for number, variables in enumerate(places):
        settings = " ".join(f"{name}={value}" for name, value in variables.items())
        log = shlex.quote(str(logs / f"process_{number}.log"))
        lines.append(f"{settings} {shlex.join(command)} > {log} 2>&1 &")
    return [*lines, "wait"]


class _Pod:
    """The running processes."""

    def __init__(
        self,
        command: list[str],
        places: list[dict[str, str]],
        logs: Path,
        grace_seconds: float,
        signals: list[int],
    ):
        self.command, self.places, self.grace_seconds = command, places, grace_seconds
        self.signals = signals  # those that this command gets
        self.logs = [logs / f"process_{number}.log" for number in range(len(places))]
        self.children: list[subprocess.Popen[bytes]] = []
        self.passed_on = 0

    def run(self, first_line: str) -> int:
        """Return the exit code; `first_line` goes behind an earlier log, "" begins a new one."""
        for log in self.logs:
            with log.open("a" if first_line else "w") as file:
                file.write(first_line)
        reader = None
        try:
            for number, variables in enumerate(self.places):
                self._start(number, variables)
            output = self.children[0].stdout
            assert output is not None
            reader = threading.Thread(target=_copy, args=(output, self.logs[0]))
            reader.start()
            return self._supervise()
        finally:
            for child in self.children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # and what it started
                child.wait()
            if reader is not None:
                reader.join()

    def _start(self, number: int, variables: dict[str, str]) -> None:
        environ = os.environ | variables
        # The other way to ask for fake devices; both at once would contradict each other.
        flags = [
            flag
            for flag in environ.pop("XLA_FLAGS", "").split()
            if not flag.startswith("--xla_force_host_platform_device_count")
        ]
        if flags:
            environ["XLA_FLAGS"] = " ".join(flags)
        with self.logs[number].open("ab") as log:
            self.children.append(
                subprocess.Popen(
                    self.command,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if number == 0 else log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches it through us only
                )
            )

    def _supervise(self) -> int:
        """Wait for all, after a failure no longer than the grace, and return the exit code."""
        code, deadline = 0, float("inf")
        while any(child.poll() is None for child in self.children):
            for number in self.signals[self.passed_on :]:
                self.passed_on += 1
                if self.passed_on > 1:
                    return 128 + number
                for child in self.children:
                    child.send_signal(number)
            code = code or self._first_failure()
            if code and deadline == float("inf"):
                deadline = time.monotonic() + self.grace_seconds
            if time.monotonic() > deadline:
                return code
            time.sleep(_POLL_SECONDS)
        return code or self._first_failure()

    def _first_failure(self) -> int:
        for number, child in enumerate(self.children):
            result = child.poll()
            if not result:
                continue
            code = result if result > 0 else 128 - result
            print(f"process {number} ended with exit code {code}", file=sys.stderr)
            if number and not self.passed_on:  # one that failed, rather than stopped as asked
                lines = self.logs[number].read_text(errors="replace").splitlines()
                print("\n".join(f"  {line}" for line in lines[-_TAIL_LINES:]), file=sys.stderr)
            sys.stderr.flush()
            return code
        return 0


def _copy(source: IO[bytes], log: Path) -> None:
    """Process 0's output, to its log and to ours."""
    with log.open("ab", buffering=0) as file:
        while chunk := os.read(source.fileno(), 1 << 16):
            file.write(chunk)
            try:
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
            except BrokenPipeError:  # nobody reads any more; the log goes on
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
