"""Muon and StableAdamW on stacked layers, against references on single tensors in float64."""

from dataclasses import replace
from functools import lru_cache

import jax
import numpy as np
import optax
import pytest

from bert_jax.distributed.checkpoint.record import named_leaves as named
from bert_jax.distributed.parallel.sharding import (
    MeshConfig,
    make_mesh,
    opt_state_shardings,
    param_shardings,
)
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import init_params, logical_axes
from bert_jax.model.lora import LoraConfig, with_lora_axes
from bert_jax.model.seq2seq.recurrent import RecurrentNetwork
from bert_jax.training.steps.optim import (
    OPTIMIZERS,
    OptimizerConfig,
    learning_rate_schedule,
    make_optimizer,
)
from bert_jax.training.steps.optim_parts import (
    CountedState,
    counted,
    is_decayed,
    matrix_sides,
)

MODEL = ModelConfig(
    vocab_size=250, num_positions=16, hidden_dim=16, num_layers=3, num_heads=4, mlp_dim=32,
    gated=True,
)  # fmt: skip
AXES = logical_axes(MODEL)
STEPS = 4
FLAT = OptimizerConfig(learning_rate=0.01, warmup_steps=2, clip_norm=None, b1=0.8)
LAYERS = "encoder/layers/"
KERNELS = {
    LAYERS + "attention/query/kernel": (1, (2, 3)),
    LAYERS + "attention/key/kernel": (1, (2, 3)),
    LAYERS + "attention/value/kernel": (1, (2, 3)),
    LAYERS + "attention/output/kernel": (3, (1, 2)),
    LAYERS + "mlp/gate/kernel": (1, (2,)),
    LAYERS + "mlp/up/kernel": (1, (2,)),
    LAYERS + "mlp/down/kernel": (2, (1,)),
}
HEAD = "mlm/dense/kernel"


def random_like(tree, seed):
    """Normal numbers; layers, and steps, differ in scale by up to 100."""
    rng = np.random.default_rng(seed)

    def one(path, leaf):
        values = rng.normal(size=leaf.shape) * 10 ** rng.uniform(-1, 1)
        if "layers" in jax.tree_util.keystr(path):
            values *= np.array([0.1, 1.0, 10.0]).reshape(-1, *[1] * (leaf.ndim - 1))
        return values.astype(np.float32)

    return jax.tree_util.tree_map_with_path(one, tree)


@pytest.fixture(scope="module")
def start():
    return random_like(jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0))), 0)


@pytest.fixture(scope="module")
def grads(start):
    return [random_like(start, 10 + step) for step in range(STEPS)]


def updates_of(config, start, grads, mesh=None):
    """The updates of each step, with parameters that move."""
    optimizer = make_optimizer(config, STEPS, AXES)

    def step(grad, state, params):
        updates, state = optimizer.update(grad, state, params)
        return updates, state, optax.apply_updates(params, updates)

    params, state = start, jax.jit(optimizer.init)(start)
    if mesh is not None:
        shardings = param_shardings(AXES, start, mesh)
        states = opt_state_shardings(optimizer, start, shardings, mesh)
        params, state = jax.device_put((params, state), (shardings, states))
        step = jax.jit(
            step,
            in_shardings=(shardings, states, shardings),
            out_shardings=(shardings, states, shardings),
        )
    else:
        step = jax.jit(step)
    made = []
    for grad in grads:
        updates, state, params = step(grad, state, params)
        made.append(jax.device_get(updates))
    assert state.num_updates == STEPS
    return made


@pytest.fixture(scope="module")
def alone(start, grads):
    """Updates on one device, by configuration."""
    return lru_cache(lambda config: updates_of(config, start, grads))


def orthogonal(matrix):
    """Five steps of Newton and Schulz with the published coefficients, in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def muon_of_one_layer(config, params, grads, sides):
    """Updates of one kernel of one layer, in float64."""
    embed, others = sides[0] - 1, tuple(axis - 1 for axis in sides[1])
    rate = learning_rate_schedule(config, STEPS)
    p, m = np.asarray(params, np.float64), np.zeros(params.shape)
    made = []
    for number, grad in enumerate(np.asarray(grads, np.float64)):
        t = number + 1
        m = config.momentum * m + (1 - config.momentum) * grad
        ahead = config.momentum * m / (1 - config.momentum ** (t + 1))
        ahead = ahead + (1 - config.momentum) * grad / (1 - config.momentum**t)
        order = (embed, *others)
        matrix = ahead.transpose(order).reshape(p.shape[embed], -1)
        step = 0.2 * np.sqrt(max(matrix.shape)) * orthogonal(matrix)
        step = step.reshape([p.shape[axis] for axis in order]).transpose(np.argsort(order))
        made.append(-float(rate(number)) * (step + config.weight_decay * p))
        p = p + made[-1]
    return made


def assert_near(updates, expected, name):
    """Within 1e-5 of the update's maximum."""
    limit = 1e-5 * np.max(np.abs(expected))
    np.testing.assert_allclose(updates, expected, rtol=0, atol=limit, err_msg=name)


MUON = replace(FLAT, name="muon", weight_decay=0.1, momentum=0.9)


@pytest.fixture(scope="module")
def muon_updates(alone):
    return alone(MUON)


def test_hidden_matrices_are_kernels_with_the_embedding_on_one_side():
    sides = {name: (s.reduction_axis, s.output_axis) for name, s in matrix_sides(AXES).items()}
    kernels = {name: ((embed,), others) for name, (embed, others) in KERNELS.items()}
    assert sides == {**kernels, HEAD: ((0,), (1,))}
    square = {"encoder": {"layers": {"kernel": ("layers", None, "mlp"), "bias": ("layers", "mlp")}}}
    ((name, side),) = matrix_sides(square).items()
    assert (name, side.reduction_axis, side.output_axis) == ("encoder/layers/kernel", (1,), (2,))


def test_the_sides_of_a_low_rank_update_are_its_rank_and_all_else():
    """A of the output projection was heads against head_dim x rank."""
    axes = with_lora_axes(LoraConfig(rank=2, targets=("query", "output", "down")), AXES)["lora"]
    found = {n: (*s.reduction_axis, *s.output_axis) for n, s in matrix_sides(axes).items()}
    ranks = {n: axis for n, a in named(axes, is_leaf=lambda x: isinstance(x, tuple)).items()
             for axis, name in enumerate(a) if name is None}  # fmt: skip
    assert found.keys() == ranks.keys() != set()
    for name, (first, *others) in found.items():
        assert first == ranks[name] or others == [ranks[name]], name


@pytest.mark.parametrize("name", KERNELS)
def test_muon_of_stacked_layers_is_muon_of_each(start, grads, muon_updates, name):
    for layer in range(MODEL.num_layers):
        history = [named(grad)[name][layer] for grad in grads]
        expected = muon_of_one_layer(MUON, named(start)[name][layer], history, KERNELS[name])
        for step in range(STEPS):
            assert_near(named(muon_updates[step])[name][layer], expected[step], f"{name} {layer}")


def test_muon_of_the_heads_dense_layer(start, grads, muon_updates):
    history = [named(grad)[HEAD] for grad in grads]
    expected = muon_of_one_layer(MUON, named(start)[HEAD], history, (1, (2,)))
    for step in range(STEPS):
        assert_near(named(muon_updates[step])[HEAD], expected[step], HEAD)


def test_muon_leaves_all_else_to_adamw(start, alone, muon_updates):
    adamw = alone(replace(MUON, name="adamw"))
    others = [name for name in named(start) if name not in (*KERNELS, HEAD)]
    assert "encoder/embeddings/token" in others
    assert "mlm/dense/bias" in others
    for a, b in zip(muon_updates, adamw, strict=True):
        for name in others:
            np.testing.assert_array_equal(named(a)[name], named(b)[name], err_msg=name)


@pytest.mark.parametrize(
    "axes", [{"head": AXES["nsp"]}, RecurrentNetwork(MODEL).axes()], ids=["head alone", "recurrent"]
)
def test_muon_needs_a_matrix_of_layers(axes):
    with pytest.raises(UserError, match=r"optimizer\.name is 'muon', but .* choose 'adamw'"):
        make_optimizer(MUON, STEPS, axes)


@pytest.mark.parametrize("name", ["muon", "stable_adamw"])
@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 1, 4), (2, 2, 2)])
def test_every_mesh_gives_the_updates_of_one_device(start, grads, alone, name, sizes):
    config = replace(MUON, name=name)
    on_mesh = updates_of(config, start, grads, make_mesh(MeshConfig(*sizes)))
    for a, b in zip(on_mesh, alone(config), strict=True):
        for path in named(a):
            assert_near(named(a)[path], named(b)[path], path)


STABLE = replace(FLAT, name="stable_adamw", b2=0.98, weight_decay=0.1, eps=0.1)


FUSED = {"query": ("query", "key", "value"), "up": ("gate", "up")}


def stable_adamw(config, params, grads, decayed):
    """Updates of one tensor in float64: decay apart from the step, debiased betas, one ratio."""
    rate = learning_rate_schedule(config, STEPS)
    p, m, v = np.asarray(params, np.float64), np.zeros(params.shape), np.zeros(params.shape)
    full_decay = config.weight_decay * config.learning_rate if decayed else 0.0
    made, ratios = [], []
    for number, g in enumerate(np.asarray(grads, np.float64)):
        t = number + 1
        b1, b2 = config.b1, config.b2
        if config.bias_correction:
            b1, b2 = ((beta - beta**t) / (1 - beta**t) for beta in (b1, b2))
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        rms = np.sqrt(np.mean(g**2 / np.maximum(v, config.eps**2)))
        lr = float(rate(number)) / max(1.0, rms)
        after = p * (1 - full_decay * lr / config.learning_rate)
        after = after - lr * m / (np.sqrt(v) + config.eps)
        made.append(after - p)
        ratios.append(rms)
        p = after
    return made, ratios


@pytest.mark.parametrize("bias_correction", [True, False])
def test_stable_adamw_is_the_published_one_on_fused_tensors_of_each_layer(
    start, grads, bias_correction
):
    config = replace(STABLE, bias_correction=bias_correction)
    updates = updates_of(config, start, grads)
    ratios = []
    for name in named(start):
        if any(f"/{part}/" in name for part in ("key", "value", "gate")):
            continue  # with the queries, or with the other half, as one tensor
        part = next((each for each in FUSED if f"/{each}/" in name), "")
        members = [name.replace(part, other) for other in FUSED.get(part, [part])]
        stacked = name.startswith(LAYERS)
        for layer in range(MODEL.num_layers) if stacked else [...]:

            def fused(tree, members=members, layer=layer):
                return np.concatenate([np.ravel(named(tree)[each][layer]) for each in members])

            history = [fused(grad) for grad in grads]
            expected, rms = stable_adamw(config, fused(start), history, is_decayed(name))
            ratios.append(rms[1:])
            for step in range(STEPS):
                assert_near(fused(updates[step]), expected[step], f"{name} {layer}")
    assert np.max(ratios) > 1.5  # some steps are shortened, some are not
    assert np.min(ratios) < 1


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_checkpoints_have_both_moments_but_of_muons_matrices(start, name):
    optimizer = make_optimizer(replace(FLAT, name=name), STEPS, AXES)
    state = jax.eval_shape(optimizer.init, start)
    if isinstance(state, CountedState):  # optax's own state, whatever its entries
        return
    without = (*KERNELS, HEAD) if name == "muon" else ()
    paths = [f"mu/{path}" for path in named(start)]
    paths += [f"nu/{path}" for path in named(start) if path not in without]
    assert list(named(state)) == ["num_updates", *paths]


def test_an_optimizer_is_what_its_entry_builds(monkeypatch, start, grads):
    monkeypatch.setitem(OPTIMIZERS, "adamw", lambda config, axes: counted(optax.scale_by_lion()))
    rate = learning_rate_schedule(FLAT, STEPS)
    updates = updates_of(FLAT, start, grads, make_mesh(MeshConfig(2, 2, 2)))
    for number, (update, grad) in enumerate(zip(updates, grads, strict=True)):
        for path, values in named(update).items():
            np.testing.assert_allclose(np.abs(values), rate(number), rtol=1e-6, err_msg=path)
            if number == 0:
                np.testing.assert_array_equal(np.sign(values), -np.sign(named(grad)[path]))
