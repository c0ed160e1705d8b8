"""The check of all hosts before a run (`--check`), which names the first host that fails."""

import socket
import threading
from collections.abc import Callable
from importlib import metadata

import jax
from jax._src.distributed import global_state as joined  # the public store needs devices

from bert_jax.distributed.parallel import processes
from bert_jax.errors import UserError, exit_code
from bert_jax.files.remote import open_workdir
from bert_jax.training.run_plan import RunPlan
from bert_jax.training.steps.step import make_train_step


def check_hosts(workdir: str, plan: Callable[[], RunPlan], seconds: int) -> None:
    """Check versions, chips, files, data and one step on all hosts, and save nothing.

    Call this after `processes.join(..., devices=False)`. If a check fails on a host or takes longer
    than `seconds`, all processes end with code 2.
    """

    def end_after_failure() -> None:
        if store is not None and (line := store.blocking_key_value_get("check/ended", 2**31 - 1)):
            if joined.process_id == 0:
                print(line)
            processes.leave(2)

    store, mount = joined.client, "All hosts must mount the same file system, and may write there"
    waiting = threading.Thread(target=end_after_failure, daemon=True)
    waiting.start()
    _agree("versions", _versions, "Run tpu_vm.sh install again", seconds)
    _agree("chips", _chips, "See what holds chips: sudo lsof /dev/accel* /dev/vfio/*", seconds)
    _agree("work directory", lambda: _write(workdir), mount, seconds)
    _agree("data", lambda: "; ".join(plan().voice.about(0, restored=True)[0]), mount, seconds)
    _agree("step", lambda: _step(plan()), "`bert-jax plan` predicts its memory", seconds)
    if store is not None and joined.process_id == 0:
        store.key_value_set("check/ended", "")
    waiting.join()


def _agree(part: str, act: Callable[[], str], remedy: str, seconds: int) -> None:
    """Call `act` in all processes. The check fails unless all return the same text in time."""
    store = joined.client
    if store is None:
        print(f"ok      {part}: {act()}")
        return

    def fail(error: str) -> None:
        where = f"{part} on {socket.gethostname()} (process {joined.process_id})"
        store.key_value_set("check/ended", f"FAILED  {where}: {error}. {remedy}", True)

    late = threading.Timer(seconds, fail, [f"no answer in {seconds} s (--join-timeout)"])
    late.start()
    try:
        text = act()
        late.cancel()
        if joined.process_id == 0:
            store.key_value_set(f"check/{part}", text)
        if text != (first := store.blocking_key_value_get(f"check/{part}", 2000 * seconds)):
            raise UserError(f"{text}; process 0 has {first}")
        store.wait_at_barrier(f"check/{part}", 2000 * seconds)
    except Exception as error:
        late.cancel()
        fail(f"{error}".rstrip(".") if exit_code(error) else repr(error))
        threading.Event().wait()  # until `end_after_failure` ends this process
    if joined.process_id == 0:
        print(f"ok      {part}: {text}", flush=True)


def _versions() -> str:
    found = [d for n in ("jax", "jaxlib", "libtpu") for d in metadata.distributions(name=n)]
    return ", ".join(f"{each.name} {each.version}" for each in found)


def _chips() -> str:
    mine, total, count = jax.local_device_count(), jax.device_count(), joined.num_processes
    if mine * count != total:
        raise UserError(f"{mine} chips here and {total} in all, but {count} processes")
    return f"{total} ({jax.devices()[0].device_kind}), {mine} in each process"


def _write(workdir: str) -> str:
    work = open_workdir(workdir)
    own = work.checkpoints.parent / f"check.{joined.process_id}"
    with work.failures_named("cannot write, read and delete a file in the work directory"):
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text("")
        own.read_text()
        own.unlink()
    return work.name


def _step(plan: RunPlan) -> str:
    at, name = min(plan.begins, plan.num_steps - 1), plan.objective.metrics[0].name
    number, stage = next((n, each) for n, each in enumerate(plan.stages) if at in each.steps)
    batch, state = next(plan.batches.stream(at)), plan.saves.begin(number, stage).state
    _, metrics = make_train_step(stage.train, mesh=plan.mesh)(state, batch, *stage.settings)
    if metrics["bad"].any():
        raise UserError(f"{name} is {metrics[name].mean():g}, or a gradient is not finite")
    return f"{name} {metrics[name].mean():.5g}"
