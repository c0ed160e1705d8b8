import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.model.counter_hash import hash_u32, threshold_u32


def test_numpy_jax_and_jit_give_equal_bits():
    rows = np.arange(7, dtype=np.uint32)[:, None]
    columns = np.arange(-3, 10, dtype=np.int32)
    want = hash_u32(5, rows, columns)
    assert isinstance(want, np.ndarray)
    assert want.dtype == np.uint32
    assert want.shape == (7, 13)
    np.testing.assert_array_equal(hash_u32(5, jnp.asarray(rows), jnp.asarray(columns)), want)
    np.testing.assert_array_equal(jax.jit(hash_u32)(5, rows, columns), want)


def test_scalars_wrap_quietly():
    assert hash_u32(-1) == hash_u32(2**32 - 1)
    assert hash_u32(0) != 0
    assert hash_u32(1, 2) != hash_u32(2, 1)
    assert hash_u32(1) != hash_u32(1, 0)


def test_every_input_bit_flips_half_of_the_output():
    # Avalanche over (seed, counter): each of 64 input bits times 32 output bits near 1/2.
    counters = np.arange(1 << 14, dtype=np.uint32)
    base = hash_u32(3, counters)
    for word in range(2):
        for bit in range(32):
            flipped = (
                hash_u32(3 ^ (1 << bit), counters)
                if word == 0
                else hash_u32(3, counters ^ np.uint32(1 << bit))
            )
            changed = (base ^ flipped)[:, None] >> np.arange(32, dtype=np.uint32) & 1
            rates = changed.mean(axis=0)
            assert np.abs(rates - 0.5).max() < 0.03, (word, bit)


def test_neighbouring_streams_are_uncorrelated_and_uniform():
    rows, columns = np.arange(2048)[:, None], np.arange(512)
    uniform = hash_u32(0, 1, rows, columns) / 2.0**32
    buckets = np.bincount((uniform * 256).astype(int).ravel(), minlength=256)
    expected = uniform.size / 256
    assert ((buckets - expected) ** 2 / expected).sum() < 330  # chi-square, 255 d.f., p = 0.001
    for other in (uniform[1:], hash_u32(0, 2, rows, columns)[1:] / 2.0**32):
        correlation = np.corrcoef(uniform[:-1].ravel(), other.ravel())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(uniform.size)


def test_threshold():
    assert threshold_u32(0.0) == 0
    assert threshold_u32(1.0) == 2**32 - 1
    assert threshold_u32(0.25) == 2**30
