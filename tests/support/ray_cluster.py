"""A Ray cluster of this machine that stays on loopback: one process group for each node.

Nodes have addresses of their own, 127.0.0.2 and so on: Ray translates 127.0.0.1 into the machine's.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulators import free_port

QUIET = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # a Ray of its own takes it away
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # it writes a token into the home directory
}
"""Variables by which Ray calls nobody and leaves the home directory alone."""
_HEAD = "127.0.0.2"


class Cluster:
    """Nodes that `ray start` made."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.address = f"{_HEAD}:{free_port()}"
        self.nodes: list[subprocess.Popen] = []

    def add(self, num_cpus: int = 1) -> None:
        """Start a node; the first is the head."""
        port = self.address.partition(":")[2]
        head = ["--head", f"--port={port}", "--include-dashboard=false",
                f"--temp-dir={self.directory}"]  # fmt: skip
        log = open(self.directory / f"node{len(self.nodes)}.log", "wb")  # noqa: SIM115
        with log:
            self.nodes.append(
                subprocess.Popen(
                    [Path(sys.executable).with_name("ray"), "start", "--block",
                     f"--node-ip-address=127.0.0.{2 + len(self.nodes)}", f"--num-cpus={num_cpus}",
                     "--object-store-memory=80000000", "--disable-usage-stats",
                     *(head if not self.nodes else [f"--address={self.address}"])],
                    stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                    env={**os.environ, **QUIET},
                )
            )  # fmt: skip

    def kill(self, number: int) -> None:
        """Kill all processes of a node at once, as when its machine is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.nodes[number].pid, signal.SIGKILL)
        self.nodes[number].wait()

    def wait(self, count: int) -> bool:
        """Return true when so many nodes are there; false where one has ended before."""
        script = (
            "import time, ray\n"
            "while True:\n"
            "    try:\n"
            f"        ray.init({self.address!r}, logging_level='ERROR')\n"
            f"        if sum(node['Alive'] for node in ray.nodes()) >= {count}:\n"
            "            break\n"
            "        ray.shutdown()\n"
            "    except Exception:\n"
            "        pass\n"
            "    time.sleep(1)\n"
        )
        watcher = subprocess.Popen([sys.executable, "-c", script],
                                   env={**os.environ, **QUIET}, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)  # fmt: skip
        try:
            while watcher.poll() is None and self.nodes[-1].poll() is None:
                time.sleep(0.2)
        finally:
            watcher.kill()
            watcher.wait()
        return watcher.returncode == 0


@contextlib.contextmanager
def running_cluster(directory: Path, nodes: int) -> Iterator[Cluster]:
    """A cluster of nodes of one core each, which this process and its children may join.

    Ray ends a node whose agent takes more than 15 seconds to start, as on a machine with much else
    to do; such a node is started again.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        cluster = Cluster(directory)
        try:
            for number in range(nodes):
                for _ in range(8):
                    cluster.add()
                    if cluster.wait(number + 1):
                        break
                    cluster.kill(number)
                    cluster.nodes.pop()
                assert len(cluster.nodes) == number + 1, list(directory.iterdir())
            yield cluster
        finally:
            for number in reversed(range(len(cluster.nodes))):
                cluster.kill(number)
