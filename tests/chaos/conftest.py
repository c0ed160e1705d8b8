"""Long forms run with BERT_JAX_CHAOS=1 (`make test-chaos`), short forms without."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def cache(compiled_programs) -> Path:
    """Directory of compiled programs."""
    return compiled_programs
