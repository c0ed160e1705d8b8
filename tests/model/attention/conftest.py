"""The GPU that this process seems to have."""

import pytest
from attending import H100

from bert_jax.model.attention import library
from bert_jax.model.attention.library import Gpu


@pytest.fixture
def gpu(monkeypatch):
    """Sets the GPU that this process has; an H100 with cuDNN to begin with."""

    def become(found: Gpu):
        monkeypatch.setattr(library, "local_gpu", lambda: found)

    become(H100)
    return become
