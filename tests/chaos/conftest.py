"""Long forms run with BERT_JAX_CHAOS=1 (`make test-chaos`), short forms without."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Iterator[Path]:
    """Directory of compiled steps; the same as in tests/training/test_resume.py."""
    from small_run import compiled_directory, share_compilations

    directory = compiled_directory(tmp_path_factory)
    with share_compilations(directory):
        yield directory
