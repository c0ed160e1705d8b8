"""Normalisers of logits, computed tile by tile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.objectives import vocabulary_kernel
from bert_jax.objectives.vocabulary_kernel import normalisers


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(vocabulary_kernel, "_ROWS", 8)
    monkeypatch.setattr(vocabulary_kernel, "_COLUMNS", 256)


@pytest.mark.parametrize("size", [700, 40])  # neither fills the last tile
@pytest.mark.parametrize("scale", [1.0, 200.0])  # exp of the second would overflow
def test_tiles_give_the_normalisers_of_all_logits(small_tiles, size, scale):
    rng = np.random.default_rng(0)
    states = jnp.asarray(scale * rng.normal(size=(21, 16)), jnp.bfloat16)
    table = jnp.asarray(rng.normal(size=(size, 16)), jnp.bfloat16)
    bias = rng.normal(size=size).astype(np.float32)
    bias[-3:] = -1e30  # padding of the vocabulary
    exact = np.asarray(states, np.float64) @ np.asarray(table, np.float64).T + bias
    labels = rng.integers(0, size - 3, 21)
    labels[:5] = exact[:5].argmax(1)

    found = jax.device_get(jax.jit(normalisers)(states, table, bias, jnp.asarray(labels, np.int32)))

    highest = exact.max(1)
    log_z = highest + np.log(np.exp(exact - highest[:, None]).sum(1))
    close = {"rtol": 1e-6, "atol": 1e-5}
    np.testing.assert_allclose(found.log_z, log_z, **close)
    np.testing.assert_allclose(found.picked, exact[np.arange(21), labels], **close)
    np.testing.assert_allclose(found.highest, highest, **close)
    np.testing.assert_array_equal(found.picked[:5], found.highest[:5])


def test_wide_tables_are_cut_so_that_a_part_fits_into_the_core(small_tiles, monkeypatch):
    """The products of a program have as few columns as the limit allows, and give the same."""
    rng = np.random.default_rng(1)
    arrays = [jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((4, 32), (512, 32))]
    bias, labels = jnp.zeros(512), jnp.zeros(4, jnp.int32)
    whole = normalisers(*arrays, bias, labels)
    monkeypatch.setattr(vocabulary_kernel, "_TABLE_ENTRIES", 1)
    program = str(jax.make_jaxpr(normalisers)(*arrays, bias, labels))
    assert "grid=(1, 4)" in program
    for mine, theirs in zip(normalisers(*arrays, bias, labels), whole, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
