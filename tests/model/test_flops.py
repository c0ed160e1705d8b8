"""The analytic count against XLA's own, and by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from pretraining import apply_pretraining

from bert_jax.model.config import SIZES, ModelConfig
from bert_jax.model.flops import TRAIN_OVER_FORWARD, seen_keys, train_flops
from bert_jax.model.heads import init_params


def test_base_by_hand():
    base = SIZES["base"]
    layer = 2 * 128 * (4 * 768**2 + 2 * 768 * 3072) + 4 * 128**2 * 768
    heads = 2 * 768**2 + 4 * 768 + 20 * 2 * 768 * (768 + 30592)
    assert train_flops(base, 128, 20) == 3 * (12 * layer + heads)


@pytest.mark.parametrize("embedding_dim", [0, 128])
def test_forward_count_is_what_xla_counts(embedding_dim):
    config = ModelConfig(
        vocab_size=1000, embedding_dim=embedding_dim, hidden_dim=256, num_layers=2, num_heads=4,
        mlp_dim=1024, dtype="float32",
    )  # fmt: skip
    rows, length, num_masked = 2, 64, 8
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    positions = jax.ShapeDtypeStruct((rows, num_masked), jnp.int32)
    lowered = jax.jit(partial(apply_pretraining, config)).lower(
        params, ids, ids, ids, positions=positions
    )
    counted = lowered.cost_analysis()["flops"]
    # XLA also counts elementwise work, here 2 to 4 percent of the whole.
    forward = train_flops(config, length, num_masked) // TRAIN_OVER_FORWARD
    assert 1.0 <= counted / (rows * forward) < 1.06


@pytest.mark.parametrize(("length", "window"), [(8, 2), (8, 7), (8, 20), (100, 64), (1, 3)])
def test_keys_of_a_window_are_counted_one_by_one(length, window):
    config = ModelConfig(attention_pattern="GL", local_window=window)
    pairs = sum(abs(i - j) <= window for i in range(length) for j in range(length))
    assert seen_keys(config, length, "L") == pairs
    assert seen_keys(config, length, "G") == length * length
