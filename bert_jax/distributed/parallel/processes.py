"""Joining the processes of a run: of a TPU pod, of a Slurm or MPI job, or of a simulated pod.

Call `join` before the first JAX computation. It recognises a run with several processes by:

1. `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`, set by `launch/local.py`, by
   `launch/gke.sh` on GPU nodes, or by users of other clusters. (JAX itself reads only the first.)
2. Slurm's variables inside a job step, or the variables of Open MPI 4 under `mpirun`.
3. TPU chips in this machine. JAX finds the other hosts of the slice, and the other slices, through
   the metadata server or the variables that GKE sets.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NoReturn

import jax

from bert_jax.errors import UserError

Mode = Literal["auto", "on", "off"]

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_TPU_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")  # set by GKE

# Seconds that process 0 waits after an error, so that others report it before they abort.
_LINGER_SECONDS = 2.0
# Seconds added to JAX's own timeout, at which JAX aborts the process without an exception.
_SPARE_SECONDS = 60


class JoinError(RuntimeError):
    """Error if a run's processes do not find each other. A retry may help if a process was late."""

    exit_code = 6


@dataclass(frozen=True)
class Cluster:
    """Description of the processes of a run, from environment variables."""

    source: str
    """Source of the description (variables, launcher or TPU metadata), for error messages."""
    method: str | None
    """Argument `cluster_detection_method` of `jax.distributed.initialize`."""
    address: str | None = None
    """Address of process 0, as host:port. None means that JAX finds the address."""
    count: int | None = None
    """Number of processes; None if it is not known."""
    index: int | None = None
    """Index of this process, from 0; None if it is not known."""


def find_cluster(environ: Mapping[str, str], *, on_tpu: bool) -> Cluster | None:
    """Return the cluster that `environ` describes, or None if the run has only one process.

    Raise a UserError if the variables of a cluster are incomplete or invalid.
    """
    slurm = all(name in environ for name in _SLURM)
    mpi = "OMPI_MCA_orte_hnp_uri" in environ and "OMPI_COMM_WORLD_SIZE" in environ
    given = [name for name in (ADDRESS, COUNT, INDEX) if environ.get(name)]
    found: Cluster | None = None
    # If only the address is given, JAX uses it instead of the address that the cluster reports.
    if given and not (given == [ADDRESS] and (slurm or mpi or on_tpu)):
        found = _from_variables(environ, given)
    elif slurm:
        # A shell of `salloc` is a job step with one task, even if the job has several tasks.
        tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        found = Cluster(
            "Slurm", "slurm", count=_number(environ, tasks), index=_number(environ, "SLURM_PROCID")
        )
    elif mpi:
        found = Cluster("Open MPI", "ompi", count=_number(environ, "OMPI_COMM_WORLD_SIZE"))
    elif on_tpu:
        found = _from_tpu(environ)
    elif (size := environ.get("OMPI_COMM_WORLD_SIZE", "1")) != "1":
        raise UserError(
            f"mpirun started {size} processes, but Open MPI 5 does not tell JAX where process 0 is."
            f" Set {ADDRESS}, {COUNT} and {INDEX} in each, or give --distributed=off"
        )
    return None if found is None or found.count == 1 else found


def join(mode: Mode, timeout_seconds: int = 300, *, devices: bool = True) -> None:
    """Join the other processes of the run. If there are none, do nothing.

    Afterwards, `jax.devices()` lists all devices of the run. Processes except 0 log only errors.
    Ctrl-C acts like SIGTERM: all save after the same step and stop. After an error, call `leave`.

    Mode "auto" joins a cluster if there is one, "on" requires a cluster, and "off" joins none. If
    `devices` is false, connect the processes and return before JAX looks for devices. Raise a
    UserError if the timeout is below 1, a variable is invalid, or mode "on" found no cluster. Raise
    a JoinError if not all processes joined in time, or JAX failed to connect them.
    """
    if mode == "off":
        return
    if timeout_seconds < 1:
        raise UserError(f"--join-timeout is {timeout_seconds}; it must be at least 1 second")
    cluster = find_cluster(os.environ, on_tpu=_on_tpu())
    if cluster is None:
        if mode == "auto":
            return
        cluster = Cluster("--distributed=on", None)  # JAX may detect another kind of cluster
    # A thread waits, because the wait is in C++, which handles neither signals nor our timeout.
    failed: list[BaseException] = []
    worker = threading.Thread(
        target=_initialize, args=(cluster, timeout_seconds, failed), daemon=True
    )
    _here.joined, _here.index = True, cluster.index or 0
    worker.start()
    worker.join(timeout_seconds)
    if worker.is_alive():
        known = cluster.index is not None and cluster.count is not None
        me = f"process {cluster.index} of {cluster.count}" if known else "this process"
        where = f" at {cluster.address}" if cluster.address else ""
        raise JoinError(
            f"{me} waited {timeout_seconds} s{where}, but not all processes of the run joined "
            f"(run configured by {cluster.source}). Start the command on every host within "
            "--join-timeout seconds. Each host must resolve the name of process 0's host and reach "
            "its port. To run only on this machine: --distributed=off"
        )
    nowhere = bool(failed) and "should be defined" in str(failed[0])  # JAX found no cluster
    if failed and not (nowhere and mode == "auto"):
        if nowhere:
            raise UserError(
                f"--distributed=on, but no other processes were found: {ADDRESS}, {COUNT} and "
                f"{INDEX} are not set, and this process was not started by srun (Slurm) or mpirun "
                "(Open MPI 4) or on a TPU. To run only on this machine: --distributed=off"
            ) from failed[0]
        kind = JoinError if isinstance(failed[0], RuntimeError) else UserError
        line = str(failed[0]).strip().partition("\n")[0]
        raise kind(
            f"joining the processes of the run (configured by {cluster.source}) failed: "
            f"{type(failed[0]).__name__}: {line}. To run only on this machine: --distributed=off"
        ) from failed[0]
    if not nowhere and not devices:
        return
    if nowhere or jax.process_count() == 1:  # one host with TPU chips is the only process
        _here.joined = False
        return
    _here.index = jax.process_index()
    if _here.index != 0:
        logging.getLogger("bert_jax").setLevel(logging.ERROR)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _stop_all)


def label() -> str:
    """Return "process N" if this process has joined others or has tried to, else ""."""
    return f"process {_here.index}" if _here.joined else ""


def leave(code: int) -> None:
    """End this process at once with `code` after an error, if it is one of several processes.

    A normal exit would wait for the other processes, which may wait for this process in a step.
    """
    if not _here.joined:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    end(code)


def end(code: int) -> NoReturn:
    """End this process with `code`, without cleaning up.

    Other processes abort when process 0 ends, so process 0 first waits 2 s for their reports.
    """
    if _here.joined and _here.index == 0:
        time.sleep(_LINGER_SECONDS)
    os._exit(code)


_here = SimpleNamespace(joined=False, index=0)  # state of this process in a run


def _on_tpu() -> bool:
    """Return true if this machine has TPU chips that JAX may use, without starting a backend."""
    # This module of JAX is private. Without it, we would need our own list of chips on the PCI bus.
    from jax._src import cloud_tpu_init

    platforms = getattr(jax.config, "jax_platforms", None) or ""
    wanted = not platforms or "tpu" in platforms.split(",")
    return wanted and bool(cloud_tpu_init.running_in_cloud_tpu_vm)


def _from_variables(environ: Mapping[str, str], given: list[str]) -> Cluster:
    missing = [name for name in (ADDRESS, COUNT, INDEX) if name not in given]
    if missing:
        raise UserError(
            f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} set but "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not. A process of a "
            "run needs all three: host:port of process 0, the number of processes, and the "
            "index of this process, from 0. To run only on this machine: --distributed=off"
        )
    address = environ[ADDRESS]
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"{ADDRESS} is {address!r}; it must be host:port, as in 10.0.0.2:8482")
    count, index = _number(environ, COUNT), _number(environ, INDEX)
    if count < 1:
        raise UserError(f"{COUNT} is {count}; it must be at least 1")
    if not 0 <= index < count:
        raise UserError(f"{INDEX} is {index}; with {COUNT}={count} it must be 0 to {count - 1}")
    return Cluster("the JAX_* variables", "deactivate", address, count, index)


def _from_tpu(environ: Mapping[str, str]) -> Cluster | None:
    hosts = next((environ[name] for name in _TPU_HOSTS if environ.get(name)), None)
    if hosts is None:
        # If the metadata server must not be asked, other hosts cannot be found.
        return None if "TPU_SKIP_MDS_QUERY" in environ else Cluster("this TPU VM's metadata", None)
    slices = _number(environ, "MEGASCALE_NUM_SLICES") if "MEGASCALE_NUM_SLICES" in environ else 1
    return Cluster("the TPU_* variables", None, count=len(hosts.split(",")) * slices)


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise UserError(f"{name} is {environ[name]!r}; it must be a whole number") from None


def _initialize(cluster: Cluster, timeout_seconds: int, failed: list[BaseException]) -> None:
    # For Slurm and MPI, JAX also chooses the GPUs of a process; a TPU slice numbers its own hosts.
    explicit = cluster.method == "deactivate"
    try:
        jax.distributed.initialize(
            coordinator_address=cluster.address,
            num_processes=cluster.count if explicit or cluster.method == "slurm" else None,
            process_id=cluster.index if explicit else None,
            cluster_detection_method=cluster.method,
            initialization_timeout=timeout_seconds + _SPARE_SECONDS,
        )
    except BaseException as error:
        failed.append(error)


def _stop_all(number: int, _: Any) -> None:
    """Handle the first SIGINT: stop the run by SIGTERM. A second SIGINT ends this process."""
    signal.signal(number, lambda number, _: os._exit(128 + number))
    text = "\nSIGINT: all processes save after this step; a second SIGINT ends this process\n"
    os.write(2, text.encode())
    os.kill(os.getpid(), signal.SIGTERM)
