"""Rotations of queries and keys (Su et al. 2021)."""

import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.rotation import (
    make_context,
    restarting_positions,
    rotate,
    rotation,
    sinusoids,
)


def test_positions_restart_in_each_segment():
    segments = jnp.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 3, 3, 3]])
    expected = [[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 0, 1, 2]]
    np.testing.assert_array_equal(restarting_positions(segments), expected)


def test_a_pair_of_halves_turns_by_position_times_frequency():
    positions = jnp.array([[0, 1, 700]])
    cos, sin = rotation(positions, theta=100.0, head_dim=4)
    x = np.zeros((1, 3, 1, 4), np.float32)
    x[..., 1] = 1.0  # first of the second pair, (1, 3), whose frequency is 100^(-2/4) = 0.1
    turned = np.asarray(rotate(jnp.asarray(x), cos, sin))
    angles = 0.1 * np.array([0, 1, 700])
    np.testing.assert_allclose(turned[0, :, 0, 1], np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(turned[0, :, 0, 3], np.sin(angles), atol=1e-5)
    np.testing.assert_array_equal(turned[..., [0, 2]], 0)


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(0)
    q, k = jnp.asarray(rng.standard_normal((2, 1, 1, 1, 16)), jnp.float32)

    def score(at: int, distance: int) -> float:
        place = lambda n: rotation(jnp.array([[n]]), 10000.0, 16)  # noqa: E731
        return float((rotate(q, *place(at)) * rotate(k, *place(at + distance))).sum())

    np.testing.assert_allclose(score(0, 3), score(50, 3), rtol=1e-4)
    assert abs(score(0, 3) - score(0, 4)) > 1e-3


def test_angles_keep_their_bits_far_out_in_bfloat16_models():
    cos, _ = rotation(jnp.array([[8191]]), 160_000.0, 64)
    exact = np.cos(8191 * 160_000.0 ** -(np.arange(0, 64, 2) / 64))
    assert cos.dtype == jnp.float32
    np.testing.assert_allclose(cos[0, 0], exact, atol=2e-3)


def test_each_kind_of_layer_has_its_own_angles():
    config = ModelConfig(
        positions="rope", attention_pattern="GLL", local_window=4, rope_theta=160_000.0
    )
    context = make_context(config, jnp.ones((1, 8), jnp.uint8))
    assert set(context.rotations) == {"G", "L"}
    assert not np.array_equal(context.rotations["G"][0], context.rotations["L"][0])
    assert not make_context(ModelConfig(), jnp.ones((1, 8), jnp.uint8)).rotations


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_pattern": "GX"}, "attention_pattern is 'GX'; expected letters G"),
        ({"attention_pattern": ""}, "attention_pattern is ''"),
        ({"attention_pattern": "GLL"}, "local_window is 0"),
        ({"positions": "rope", "rope_theta": -1.0}, "rope_theta is -1.0; it must be above 0"),
        ({"positions": "rope", "hidden_dim": 36}, "rotates pairs of numbers, but a head has 3"),
        ({"first_norm": False}, "first_norm is false, but model.norm_order is 'post'"),
        ({"num_kv_heads": 5}, "num_heads 12 is not divisible by model.num_kv_heads 5"),
    ],
)
def test_fields_that_do_not_fit_are_named(fields, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        ModelConfig(**fields)


def test_sinusoids_alternate_sines_and_cosines():
    # Vaswani et al. 2017, section 3.5, at positions 0 and 1 and width 4.
    found = np.asarray(sinusoids(jnp.array([0, 1]), 4))
    assert found.dtype == np.float32
    expected = [[0, 1, 0, 1], [0.841471, 0.540302, 0.0099998, 0.99995]]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    far = np.asarray(sinusoids(jnp.array([[511]]), 64), np.float64)[0, 0]
    angles = 511 / 10000 ** (2 * (np.arange(64) // 2) / 64)
    wanted = np.where(np.arange(64) % 2, np.cos(angles), np.sin(angles))
    np.testing.assert_allclose(far, wanted, atol=1e-4)
