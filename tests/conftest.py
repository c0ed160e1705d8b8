"""Test set-up: fake devices, run-time shape checks, and where real data lies."""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import psutil
import pytest
from compiling import xla_flags
from jax._src.lib import xla_client
from matplotlib.figure import Figure
from signature_checks import check_signatures

# Most of the tests' time is XLA's: machine code that is not optimised takes half of it to make,
# from the older emitters of loops half of that again. What the tests look at (values, partitioning,
# donation) is decided before that stage.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for child processes
# gcsfs reads this when it is imported: emulators do not answer when it asks for a bucket's type.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
with pytest.MonkeyPatch.context() as _patch:  # libtpu, here or in a child, refuses the flag
    _patch.setenv("XLA_FLAGS", xla_flags())
    jax.devices()

# Programs and their traces are a million objects that stay; looking through them for what may go
# took 6% of the time of the tests of model, finetune and checkpoint.
gc.set_threshold(100_000, 20, 100)


@pytest.hookimpl(optionalhook=True)  # a child process may run without xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use one process more than cores, at most 4: some tests wait for a clock or a cluster."""
    return min(4, (os.cpu_count() or 1) + 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests last: where time is short, they are what is left out."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path in slow)


_SLOW_UNTIL = float(os.environ.get("BERT_JAX_SLOW_UNTIL", "inf"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a slow test that would begin after BERT_JAX_SLOW_UNTIL, in seconds since 1970."""
    if item.get_closest_marker("slow") and time.time() > _SLOW_UNTIL:
        pytest.skip("a slow test, and its time is over")


# Time says nothing here: a process that gets no processor for a moment is late.
hypothesis.settings.register_profile(
    "suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")

# Every signature's shapes and dtypes are checked while tests run, and only then.
check_signatures("bert_jax")


_DAYS = 14
"""Days for which a compiled program stays on disk without being read."""


@pytest.fixture(scope="session", autouse=True)
def compiled_programs(request, tmp_path_factory) -> Path:
    """Directory of compiled programs: for all workers, their children, and the next test run.

    An entry may be half written, by another worker at this moment or by a child that was killed, or
    not be writable, in a test of full disks. JAX then warns, which pyproject.toml ignores, and
    compiles.
    """
    if named := os.environ.get("JAX_COMPILATION_CACHE_DIR"):  # planted bugs share the tests' own
        directory = Path(named)
    elif (cache := getattr(request.config, "cache", None)) is not None:
        directory = cache.mkdir("compiled")
        if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
            _remove_unread(directory)
    else:
        base = tmp_path_factory.getbasetemp()
        directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    settings = {
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    return directory


def _remove_unread(directory: Path) -> None:
    """Remove programs that no test run has read for `_DAYS`."""
    oldest = time.time() - _DAYS * 86_400
    for path in directory.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # another worker's, renamed meanwhile
            if path.stat().st_atime < oldest:
                path.unlink()


_FEW_BYTES = 1 << 30


@pytest.fixture(scope="module", autouse=True)
def released_programs() -> Iterator[None]:
    """After a module, let a large process drop its programs, of which few serve another module."""
    yield
    # A profile leaves other keys of compiled programs; the next module would find none on disk.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)
    if psutil.Process().memory_info().rss > _FEW_BYTES:
        jax.clear_caches()
        gc.collect()
        if sys.platform == "linux":  # what malloc keeps of freed memory goes back
            ctypes.CDLL(None).malloc_trim(0)


LIMIT = 3600 if os.environ.get("BERT_JAX_CHAOS") else 900
"""Seconds after which a test counts as hung; the longest take one on an idle machine, or ten."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Fail a test that hangs; if it waits where Python cannot interrupt it, end the process."""

    def late(number: int, frame: Any) -> None:
        pytest.fail(f"{item.nodeid} took longer than {LIMIT} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    faulthandler.dump_traceback_later(LIMIT + 60, exit=True, file=sys.__stderr__)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that must be without libtpu in a new process, if libtpu is loaded in this one."""
    if not pyfuncitem.get_closest_marker("without_libtpu"):
        return None
    if not xla_client.pjrt_plugin_loaded("tpu"):
        return None
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
    environ = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    done = subprocess.run(
        [*command, pyfuncitem.nodeid], cwd=pyfuncitem.config.rootpath, env=environ, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return True


_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000"
    "000a49444154789c636000000002000148afa4710000000049454e44ae426082"
)
"""A picture of one grey pixel."""


_savefig, _rendered = Figure.savefig, False


def _write_picture(figure: Figure, file: Any, **options: Any) -> None:
    """Render a picture in tests marked `drawn`, else write one pixel: rendering takes 0.1 s."""
    if _rendered:
        _savefig(figure, file, **options)
    else:
        file.write(_PNG)


Figure.savefig = _write_picture


@pytest.fixture(autouse=True)
def pictures(request, monkeypatch) -> None:
    """Render the pictures of a test marked `drawn`."""
    monkeypatch.setitem(globals(), "_rendered", "drawn" in request.keywords)


@pytest.fixture(autouse=True)
def progress_lines(request, monkeypatch) -> None:
    """Print a line after each step of a run, and none about other work: time decides nothing.

    Tests marked `timed` print lines by seconds, as users see them.
    """
    from bert_jax.terminal import Intervals
    from bert_jax.training.run.telemetry import Telemetry

    if "timed" not in request.keywords:
        monkeypatch.setattr(Intervals, "due", lambda intervals: False)
        monkeypatch.setattr(Telemetry, "line_due", lambda out, step: out._bar is None)


@pytest.fixture(scope="module")
def reused_steps() -> Iterator[None]:
    """Pretraining runs of one configuration, in one module, trace and compile their steps once."""
    from bert_jax.training import loop
    from bert_jax.training.pretrain import evaluate, saves
    from bert_jax.training.steps import state

    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (loop, "make_train_step"), (evaluate, "make_eval_step"), (state, "jitted_init"),
            (saves, "abstract_state"),
        ):  # fmt: skip
            patch.setattr(module, name, functools.cache(getattr(module, name)))
        yield


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Directory of real corpora, named by BERT_JAX_DATA; tests that need it skip without it."""
    where = os.environ.get("BERT_JAX_DATA", "")
    if not where or not Path(where).is_dir():
        pytest.skip("BERT_JAX_DATA does not name a directory of real data")
    return Path(where)
