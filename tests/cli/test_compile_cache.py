import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bert_jax.cli.compile_cache import keep_programs

DIRECTORY, SIZE = "JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE"


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Callable[..., str | None]:
    """The directory that a machine with a processor of such features keeps programs in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def kept(features: str, bugs: str = "taa") -> str | None:
        for variable in (DIRECTORY, SIZE):
            monkeypatch.setenv(variable, "")  # so that the value of before comes back
            monkeypatch.delenv(variable)
        info = tmp_path / "cpuinfo"
        info.write_text(f"processor\t: 0\nflags\t\t: {features}\nbugs\t\t: {bugs}\n")
        keep_programs(info)
        return os.environ.get(DIRECTORY)

    return kept


def test_programs_are_kept_for_processors_with_the_same_features(kept, tmp_path):
    one, other = kept("sse avx"), kept("sse avx avx512f")
    assert one != other
    assert kept("sse avx") == one
    assert Path(one).is_dir()
    assert Path(one).is_relative_to(tmp_path / "cache")
    assert int(os.environ[SIZE]) == 4 << 30


def test_no_programs_are_kept_where_xla_refuses_them_or_nothing_can_be_written(kept, tmp_path):
    assert kept("sse avx", "taa gds") is None
    (tmp_path / "cache").write_text("a file")
    assert kept("sse avx") is None


def test_a_directory_that_is_named_stays(monkeypatch, tmp_path):
    monkeypatch.delenv(SIZE, raising=False)
    for named in ("", str(tmp_path)):
        monkeypatch.setenv(DIRECTORY, named)
        keep_programs()
        assert os.environ[DIRECTORY] == named
        assert SIZE not in os.environ
