"""AdamW, LAMB and the decay mask, against closed forms and unstacked parameters."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import init_params, logical_axes
from bert_jax.training.steps.optim import (
    OptimizerConfig,
    clip_factor,
    learning_rate_schedule,
    make_optimizer,
)
from bert_jax.training.steps.optim_parts import is_decayed

TINY = ModelConfig(
    vocab_size=64, num_positions=16, hidden_dim=8, num_layers=3, num_heads=2, mlp_dim=16
)
FLAT = OptimizerConfig(learning_rate=0.1, warmup_steps=0, clip_norm=None)
"""The first update has exactly the peak learning rate."""
AXES = {"a": {"kernel": ("embed", "mlp"), "bias": ("mlp",)}}


def random_like(tree, seed, scale=1.0):
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    return structure.unflatten(
        [np.asarray(scale * rng.normal(size=leaf.shape), np.float32) for leaf in leaves]
    )


def small_params():
    return random_like({"a": {"kernel": np.zeros((4, 6)), "bias": np.zeros(6)}}, 0)


def first_update(optimizer, grads, params):
    """Updates and state after one step, in one program."""

    @jax.jit
    def run(grads, params):
        return optimizer.update(grads, optimizer.init(params), params)

    return run(grads, params)


def decayed_paths(params):
    paths = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    }
    return {path for path in paths if is_decayed(path)}


def test_decayed_paths_are_exactly_these():
    params = jax.eval_shape(lambda: init_params(TINY, jax.random.key(0)))
    layers = "encoder/layers/"
    assert decayed_paths(params) == {
        "encoder/embeddings/token",
        "encoder/embeddings/position",
        "encoder/embeddings/type",
        layers + "attention/query/kernel",
        layers + "attention/key/kernel",
        layers + "attention/value/kernel",
        layers + "attention/output/kernel",
        layers + "mlp/up/kernel",
        layers + "mlp/down/kernel",
        "encoder/pooler/dense/kernel",
        "mlm/dense/kernel",
        "nsp/kernel",
    }


@pytest.mark.parametrize("bias_correction", [True, False])
def test_first_update_in_closed_form(bias_correction):
    config = replace(FLAT, bias_correction=bias_correction)
    params, optimizer = small_params(), make_optimizer(config, 10, AXES)
    grads = random_like(params, 1, 1e-3)
    updates, state = first_update(optimizer, grads, params)
    for name, decay in (("kernel", config.weight_decay), ("bias", 0.0)):
        g = np.asarray(grads["a"][name], np.float64)
        m, v = (g, g**2) if bias_correction else (0.1 * g, 0.001 * g**2)
        expected = -0.1 * (m / (np.sqrt(v) + 1e-6) + decay * np.asarray(params["a"][name]))
        np.testing.assert_allclose(updates["a"][name], expected, rtol=1e-5)
    assert state.num_updates == 1


def test_adamw_equals_optax_over_steps():
    config = replace(FLAT, warmup_steps=3, clip_norm=0.5, schedule="cosine")
    params = small_params()
    ours = make_optimizer(config, 8, AXES)
    theirs = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(
            learning_rate_schedule(config, 8),
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask={"a": {"kernel": True, "bias": False}},
        ),
    )

    def run(optimizer):
        @jax.jit
        def update(grads, state, p):
            updates, state = optimizer.update(grads, state, p)
            return optax.apply_updates(p, updates), state

        p, state = params, jax.jit(optimizer.init)(params)
        for step in range(8):
            p, state = update(random_like(p, 10 + step), state, p)
        return p

    for a, b in zip(*map(jax.tree.leaves, (run(ours), run(theirs))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def lamb_unstacked(config, grads_per_step, param, decayed):
    """LAMB on one tensor in float64, as the paper writes it."""
    p = np.asarray(param, np.float64)
    m = v = np.zeros_like(p)
    rate = learning_rate_schedule(config, len(grads_per_step))
    for step, grad in enumerate(grads_per_step):
        g = np.asarray(grad, np.float64)
        m = config.b1 * m + (1 - config.b1) * g
        v = config.b2 * v + (1 - config.b2) * g**2
        m_hat = m / (1 - config.b1 ** (step + 1))
        v_hat = v / (1 - config.b2 ** (step + 1))
        update = m_hat / (np.sqrt(v_hat) + config.eps)
        if decayed:
            update = update + config.weight_decay * p
            update = update * np.linalg.norm(p) / np.linalg.norm(update)
        p = p - float(rate(step)) * update
    return p


def test_lamb_scales_each_layer_by_its_own_norm():
    config = replace(FLAT, name="lamb", learning_rate=0.01)
    params = random_like(jax.eval_shape(lambda: init_params(TINY, jax.random.key(0))), 0)
    # Layers whose norms differ by 100: one ratio for the stack would be far off.
    layer_scale = np.array([0.1, 1.0, 10.0], np.float32)
    params["encoder"]["layers"] = jax.tree.map(
        lambda x: x * layer_scale.reshape(-1, *[1] * (x.ndim - 1)),
        params["encoder"]["layers"],
    )
    axes = logical_axes(TINY)
    grads = [random_like(params, 20 + step) for step in range(3)]
    optimizer = make_optimizer(config, 3, axes)

    @jax.jit
    def train(params, grads):
        state = optimizer.init(params)
        for grad in grads:
            updates, state = optimizer.update(grad, state, params)
            params = optax.apply_updates(params, updates)
        return params

    trained = jax.device_get(train(params, grads))

    decayed = decayed_paths(params)
    per_step = [jax.tree.leaves(grad) for grad in grads]
    rows = jax.tree_util.tree_leaves_with_path(params)
    num_stacked = 0
    for i, ((path, start), end) in enumerate(zip(rows, jax.tree.leaves(trained), strict=True)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        history = [leaves[i] for leaves in per_step]
        if name.startswith("encoder/layers/"):
            num_stacked += 1
            expected = np.stack([
                lamb_unstacked(config, [g[n] for g in history], start[n], name in decayed)
                for n in range(TINY.num_layers)
            ])  # fmt: skip
        else:
            expected = lamb_unstacked(config, history, start, name in decayed)
        np.testing.assert_allclose(end, expected, rtol=2e-4, atol=1e-5, err_msg=name)
    assert num_stacked == 16


def test_lamb_leaves_biases_and_zero_tensors_to_adam():
    params, axes = small_params(), AXES
    params["a"]["kernel"] *= 0
    grads = random_like(params, 1)
    updates = [
        first_update(optimizer, grads, params)[0]
        for optimizer in (
            make_optimizer(replace(FLAT, name=name), 10, axes) for name in ("lamb", "adamw")
        )
    ]
    for a, b in zip(*map(jax.tree.leaves, updates), strict=True):
        np.testing.assert_array_equal(a, b)


def test_clipping_uses_the_norm_over_all_tensors():
    params, grads = small_params(), random_like(small_params(), 1, 3.0)
    norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in jax.tree.leaves(grads)))
    optimizer = make_optimizer(replace(FLAT, clip_norm=1.0), 10, AXES)
    _, state = first_update(optimizer, grads, params)
    for g, m in zip(jax.tree.leaves(grads), jax.tree.leaves(state.mu), strict=True):
        np.testing.assert_allclose(m, 0.1 * g / norm, rtol=1e-5)
    factor = jax.jit(clip_factor, static_argnums=1)
    assert factor(np.float32(0.5), 1.0) == 1
    assert factor(np.float32(0.0), 1.0) == 1


def test_state_is_float32_and_shaped_like_the_parameters():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), small_params())
    state = jax.eval_shape(make_optimizer(FLAT, 10, AXES).init, params)
    for moments in (state.mu, state.nu):
        assert jax.tree.structure(moments) == jax.tree.structure(params)
        assert {x.dtype for x in jax.tree.leaves(moments)} == {jnp.dtype("float32")}
