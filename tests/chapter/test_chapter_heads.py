"""Station 10: weights, measures and a layer without a head are what the package computes."""

import jax
import jax.numpy as jnp
import numpy as np
from chapter import formulas, heads_of, normal
from flax import nnx

from bert_jax.model.config import ModelConfig
from bert_jax.model.encoder import SelfAttention
from bert_jax.model.heads import init_params, layer_outputs
from bert_jax.model.rotation import make_context

LENGTH, WIDTH, HEADS = 6, 12, 3
TOKENS = np.array([5, 7, 6, 5, 5, 8])
MODEL = ModelConfig(
    vocab_size=9, num_positions=LENGTH, hidden_dim=WIDTH, num_heads=HEADS, num_layers=1, mlp_dim=8,
    init_std=0.5, dtype="float32",
)  # fmt: skip
formula, attention = formulas("heads"), formulas("self_attention")


def test_weights_of_the_package_have_the_measures_of_the_formulas():
    params = init_params(MODEL, jax.random.key(0))
    ones = jnp.ones((1, LENGTH), jnp.int32)
    outputs = layer_outputs(
        MODEL, params, jnp.asarray(TOKENS)[None], 0 * ones, ones, with_weights=True
    )
    own = jax.tree.map(lambda leaf: leaf[0], params["encoder"]["layers"]["attention"])
    heads, _, _ = heads_of(own)
    x = np.array(outputs.states[0, 0])
    seen = attention.visible(np.ones(LENGTH))
    for head, found in zip(heads, np.array(outputs.weights[0, 0]), strict=True):
        weights = attention.head(x, *head, seen)[0]
        np.testing.assert_allclose(found, weights, atol=1e-5)
        entropy = jax.scipy.special.entr(found).sum(-1).mean()
        np.testing.assert_allclose(formula.entropy(weights), entropy, atol=1e-5)
        before = np.mean([found[n, n - 1] for n in range(1, LENGTH)])
        np.testing.assert_allclose(formula.on_offset(weights, -1), before, atol=1e-5)
        same = found[0, 3] + found[0, 4] + found[3, 0] + found[3, 4] + found[4, 0] + found[4, 3]
        np.testing.assert_allclose(formula.on_same_word(weights, TOKENS), same / 3, atol=1e-5)


def test_a_head_whose_output_map_is_zero_is_the_head_that_the_formula_leaves_out():
    layer = SelfAttention(MODEL, nnx.Rngs(params=0))
    x = normal(LENGTH, WIDTH)
    context = make_context(MODEL, jnp.ones((1, LENGTH), jnp.int32))
    heads, W_o, b_o = heads_of(nnx.to_pure_dict(nnx.state(layer, nnx.Param)))
    seen = attention.visible(np.ones(LENGTH))
    means = np.stack([attention.head(np.array(x), *head, seen)[1] for head in heads])
    whole = layer(x[None], context, 0, "G")[0]
    layer.output.kernel[...] = layer.output.kernel[...].at[1].set(0.0)
    found = layer(x[None], context, 0, "G")[0]
    np.testing.assert_allclose(found, formula.without_head(means, W_o, b_o, 1), atol=1e-5)
    assert np.abs(np.array(found) - np.array(whole)).max() > 0.1
