"""Tasks of a build, and engines that map a function over them: local processes or Ray."""

import contextlib
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from typing_extensions import override

from bert_jax.data.corpus.documents import Source
from bert_jax.data.corpus.workers import grouped, map_ordered, worker_count
from bert_jax.errors import UserError, needs_package

SHARD_BYTES = 1 << 30
"""Default number of input bytes per shard; input of less than twice this size makes one shard."""


@dataclass(frozen=True)
class Task:
    """Consecutive sources, or parts of sources, that become one shard."""

    number: int
    """Index of the task. Tasks are numbered in the order of their sources."""
    sources: tuple[Source, ...]

    @property
    def name(self) -> str:
        """Name of the shard."""
        return f"{self.number:05d}"

    @property
    def size(self) -> int:
        """Sum of the sources' sizes in bytes, or in examples for a source that counts examples."""
        return sum(source.size for source in self.sources)

    @property
    def on_bad(self) -> list[str | None]:
        """Reactions of the sources to bad records; `identity` does not include them."""
        return [each.options.on_bad if each.options else None for each in self.sources]

    def identity(self) -> list[dict[str, Any]]:
        """Return values that identify the task's documents, without reading the documents."""
        return [source.identity() for source in self.sources]


def plan_tasks(sources: Sequence[Source], shard_bytes: int = SHARD_BYTES) -> list[Task]:
    """Divide sources, in order, into tasks that each read about `shard_bytes` bytes of files.

    The division depends only on names, sizes and the content at the cuts. Larger files are cut
    between documents if their format allows it; smaller files share a task. Raise a UserError if
    `shard_bytes` is below 1, or a file cannot be read.
    """
    if shard_bytes < 1:
        raise UserError(f"a shard of {shard_bytes} bytes is too small; give at least 1 byte.")
    if sum(source.size for source in sources) < 2 * shard_bytes:
        return [Task(0, tuple(sources))]
    parts = [part for source in sources for part in source.divided(shard_bytes)]
    # Parts are a little smaller than a shard, so with half the limit no two share a task.
    groups = grouped(parts, lambda part: part.size, max(1, shard_bytes // 2))
    return [Task(number, tuple(group)) for number, group in enumerate(groups)]


T = TypeVar("T")
R = TypeVar("R")

_RETRIES = 20
"""Number of times that Ray repeats a task whose process or node, such as a spot node, is killed."""
_REACH_SECONDS, _PROBE_SECONDS = 30.0, 5.0
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Environment variable that makes Ray use 127.0.0.1 as this machine's address, so that other
machines cannot connect to a cluster that was started here."""


class Engine:
    """Engine that runs tasks in local processes, by default one per core.

    Raise a UserError if `num_workers` is out of range.
    """

    is_local = True

    def __init__(self, num_workers: int | None = None) -> None:
        self.num_workers = worker_count(num_workers)
        """Number of processes on this machine, also for work that is not divided into tasks."""

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
        """Apply a picklable function to items, and yield the results in the order of the items.

        Raise a UserError if a process was killed. Errors of `function` are raised as they are.
        """
        return map_ordered(function, items, self.num_workers)

    def close(self) -> None:
        """Disconnect from the cluster, if there is one. Local processes end with each `map`."""


class RayEngine(Engine):
    """Engine that runs tasks on a Ray cluster, each in one process with one core.

    The tasks of killed processes run again. Raise a UserError if Ray is missing or unreachable.

    Args:
        address: HOST:PORT of the head node, `auto` for this machine's cluster, or
            `ray://HOST:PORT`; None starts a cluster of only this machine, which `close` ends.
        num_workers: number of processes of a cluster started here, and for undivided local work.
    """

    is_local = False

    def __init__(self, address: str | None = None, num_workers: int | None = None) -> None:
        super().__init__(num_workers)
        if address is None:
            os.environ.update(_LOOPBACK)
        with needs_package(
            "--engine=ray needs Ray on every node: pip install 'bert_jax[cluster]'."
        ):
            import ray
        self._ray: Any = ray
        options: dict[str, Any] = {"num_cpus": self.num_workers, "include_dashboard": False}
        try:
            # Try once to connect to the head node, since Ray would retry for minutes.
            host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
            if colon:
                socket.create_connection((host, int(port)), timeout=_REACH_SECONDS).close()
            found = ray.init(
                address=address or "local", **({} if address else options),
                log_to_driver=False, logging_level="WARNING",
            )  # fmt: skip
            head = (address if colon else None) or found.address_info["gcs_address"]
            self._head: str = head.removeprefix("ray://")
        except Exception as error:  # Ray's errors have no common class
            ray.shutdown()
            where = f" at {address}" if address else ""
            if "AuthenticationError" in f"{error!r} {error.__cause__}":
                mode = os.environ.get("RAY_AUTH_MODE", "not set")
                raise UserError(
                    f"the Ray cluster{where} refused the token: it is missing or incorrect here "
                    f"(RAY_AUTH_MODE is {mode}). Set RAY_AUTH_MODE=token, and the cluster's token "
                    "in RAY_AUTH_TOKEN, ~/.ray/auth_token or the file RAY_AUTH_TOKEN_PATH"
                ) from error
            reason = (str(error).strip().splitlines() or [""])[0]
            raise UserError(
                f"no Ray cluster{where}: {reason}. Start one with `ray start --head`; `ray status` "
                "shows its state."
            ) from error

    @override
    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
        ray = self._ray
        remote = ray.remote(_call).options(
            num_cpus=1, max_retries=_RETRIES, scheduling_strategy="SPREAD"
        )
        shared = ray.put(function)  # sent to each node once, since it contains the tokenizer
        pending, told = deque(remote.remote(shared, item) for item in items), False
        try:
            while pending:
                while not told and not ray.wait([pending[0]], timeout=_PROBE_SECONDS)[0]:
                    told = self._has_no_head()
                result = ray.get(pending[0])
                pending.popleft()
                yield result
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.OutOfMemoryError as error:
            raise UserError(
                "a task was killed repeatedly because its node lacked memory. Use smaller shards "
                "(--shard-mb), or nodes with more memory per core."
            ) from error
        except ray.exceptions.RayError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"a task was lost {_RETRIES + 1} times, or the Ray cluster is no longer reachable: "
                f"{reason}. Rerun the command; complete tasks are kept."
            ) from error
        finally:
            for left in pending:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.cancel(left, force=False)

    def _has_no_head(self) -> bool:
        """Return true, and print an error, if the head node is gone. Ray then ends this process."""
        host, _, port = self._head.rpartition(":")
        with contextlib.suppress(OSError):
            socket.create_connection((host, int(port)), timeout=_REACH_SECONDS).close()
            return False
        said = f"the head of the Ray cluster at {self._head} is gone, and Ray ends this command."
        print(f"{said} Start a cluster, and rerun the command; complete tasks are kept.",
              file=sys.stderr, flush=True)  # fmt: skip
        return True

    @override
    def close(self) -> None:
        self._ray.shutdown()  # also ends a Ray that was started here


def open_engine(
    name: str = "local", *, address: str | None = None, num_workers: int | None = None
) -> Engine:
    """Open the engine `name`; raise a UserError if it does not exist or cannot start."""
    if name == "ray":
        return RayEngine(address, num_workers)
    if name != "local":
        raise UserError(f"there is no engine {name!r}; the engines are local and ray.")
    if address is not None:
        raise UserError(f"--engine=local:{address}: only --engine=ray takes an address.")
    return Engine(num_workers)


def _call(function: Callable[[T], R], item: T) -> R:
    return function(item)
