"""Masks are a pure function of (seed, site, row, position), look random, and are not stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.model.dropout import DropoutStream, dropout, keep_mask

ROWS, LENGTH, WIDTH = 32, 64, 128
SHAPE = (ROWS, LENGTH, WIDTH)
SIGMAS = 5


keep = jax.jit(keep_mask, static_argnums=(0, 1, 3))


def mask(shape=SHAPE, rate=0.5, seed=0, site=0, first_row=0):
    rows = np.arange(first_row, first_row + shape[0], dtype=np.uint32)
    return np.asarray(keep(shape, rate, np.uint32(seed), site, rows))


def assert_independent(a, b):
    """Fair coins agree half the time."""
    agreement = (a == b).mean()
    assert abs(agreement - 0.5) < SIGMAS * 0.5 / np.sqrt(a.size), agreement


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_keep_rate_overall_and_per_row(rate):
    kept = mask(rate=rate)
    std = np.sqrt(rate * (1 - rate))
    assert abs(kept.mean() - (1 - rate)) < SIGMAS * std / np.sqrt(kept.size)
    for axes in [(1, 2), (0, 2), (0, 1)]:  # each row, each token, each unit
        means = kept.mean(axes)
        deviations = (means - (1 - rate)) / (std / np.sqrt(kept.size / means.size))
        assert np.abs(deviations).max() < SIGMAS
        assert 0.6 < deviations.std() < 1.4  # neither clumped nor evenly spread


def test_rates_share_one_uniform_number():
    low, high = mask(rate=0.1), mask(rate=0.3)
    assert (low | ~high).all()
    # Among the elements the lower rate keeps, the higher drops its share.
    assert abs(high[low].mean() - 0.7 / 0.9) < 0.01


def test_rows_are_independent():
    kept = mask()
    for n in range(1, ROWS):
        assert_independent(kept[:-n], kept[n:])


@pytest.mark.parametrize("change", [{"seed": 1}, {"seed": 2**31}, {"site": 1}, {"first_row": ROWS}])
def test_steps_sites_and_rows_are_independent(change):
    assert_independent(mask(), mask(**change))


def test_seed_site_and_row_do_not_add_up():
    # A key of seed + site + row would make these equal.
    base = mask(seed=10, site=10, first_row=100)
    assert_independent(base, mask(seed=11, site=9, first_row=100))
    assert_independent(base, mask(seed=11, site=10, first_row=99))
    assert_independent(base, mask(seed=10, site=11, first_row=99))


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 7, 8, 16, 32])
def test_neighbours_are_independent(lag):
    kept = mask()
    assert_independent(kept[:, :, :-lag], kept[:, :, lag:])
    assert_independent(kept[:, :-lag], kept[:, lag:])


def test_attention_shaped_masks():
    kept = mask((8, 4, 64, 64))
    assert abs(kept.mean() - 0.5) < SIGMAS * 0.5 / np.sqrt(kept.size)
    assert_independent(kept[:, :-1], kept[:, 1:])  # heads
    above, below = np.triu_indices(64, 1), np.tril_indices(64, -1)
    assert_independent(kept[..., *above], kept.swapaxes(2, 3)[..., *above])
    assert_independent(kept[..., *above], kept[..., *below])


def test_depends_on_the_row_of_the_stream_not_of_the_batch():
    whole = mask()
    np.testing.assert_array_equal(whole[8:16], mask((8, LENGTH, WIDTH), first_row=8))
    order = np.random.default_rng(0).permutation(ROWS).astype(np.uint32)
    shuffled = keep(SHAPE, 0.5, np.uint32(0), 0, order)
    np.testing.assert_array_equal(whole[order], shuffled)


def test_values_and_gradient_use_one_mask():
    x = np.float32(np.random.default_rng(0).normal(size=SHAPE))

    @jax.jit
    def run(x):
        rows = jnp.arange(ROWS, dtype=jnp.uint32)
        y, pull_back = jax.vjp(lambda x: dropout(x, 0.1, DropoutStream(jnp.uint32(3), rows), 5), x)
        return y, pull_back(x)[0]

    kept = mask(rate=0.1, seed=3, site=5)
    y, gradient = run(x)
    np.testing.assert_allclose(y, np.where(kept, x / np.float32(0.9), 0), rtol=1e-6)
    np.testing.assert_allclose(gradient, y, rtol=1e-6)


def test_scale_is_unbiased_in_bfloat16():
    x = np.random.default_rng(0).uniform(1, 2, SHAPE).astype(jnp.bfloat16)
    rows = np.arange(ROWS, dtype=np.uint32)
    y = jax.jit(lambda x, rows: dropout(x, 0.1, DropoutStream(jnp.uint32(3), rows), 5))(x, rows)
    assert y.dtype == jnp.bfloat16
    ratio = (np.asarray(y, np.float64) / np.asarray(x, np.float64))[np.asarray(y) != 0]
    assert abs(ratio.mean() * 0.9 - 1) < 2e-4  # a rounded factor is off by 1.6e-3


def test_no_mask_is_stored_for_the_backward_pass():
    stream = DropoutStream(jnp.uint32(3), jnp.arange(ROWS, dtype=jnp.uint32))
    _, pull_back = jax.vjp(lambda x: dropout(x, 0.1, stream, 5), jnp.ones(SHAPE))
    assert sum(leaf.size for leaf in jax.tree.leaves(pull_back)) <= ROWS + 2


def test_no_dropout_without_stream_or_rate():
    x = jnp.ones((2, 3))
    assert dropout(x, 0.1, None, 0) is x
    assert dropout(x, 0.0, DropoutStream(jnp.uint32(1), jnp.arange(2, dtype=jnp.uint32)), 0) is x


@pytest.mark.parametrize(
    "spec", [("data",), (("data", "tensor"),), ("data", None, "tensor"), (None, None, "tensor")]
)
def test_sharded_masks_are_equal_and_need_no_communication(spec):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "tensor"))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    x, rows = np.ones(SHAPE, np.float32), np.arange(ROWS, dtype=np.uint32)

    def forward_and_backward(x, seed, rows):
        y, pull_back = jax.vjp(lambda x: dropout(x, 0.1, DropoutStream(seed, rows), 7), x)
        return y, pull_back(y)[0]

    expected = jax.jit(forward_and_backward)(x, np.uint32(1), rows)
    replicated = NamedSharding(mesh, PartitionSpec())
    row_sharding = NamedSharding(mesh, PartitionSpec(*spec[:1]))
    sharded = jax.jit(
        forward_and_backward,
        in_shardings=(sharding, replicated, row_sharding),
        out_shardings=sharding,
    )
    compiled = sharded.lower(x, np.uint32(1), rows).compile()
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in compiled.as_text()
    for a, b in zip(compiled(x, np.uint32(1), rows), expected, strict=True):
        np.testing.assert_array_equal(a, b)
