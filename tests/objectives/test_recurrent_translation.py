"""Translation by recurrent networks: the same on every mesh, and its section."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from packed_pairs import SPECIAL, batch, random_pairs
from steps import batch_gradients

from bert_jax.config.command_line import load_config
from bert_jax.config.mapping import build, to_dict
from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh, place_batch
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.objectives.config import ObjectiveConfig, RecurrentTranslationConfig
from bert_jax.objectives.translation import Translation
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.steps.optim import OptimizerConfig
from bert_jax.training.steps.state import StepConfig, param_placement

MODEL = ModelConfig(
    vocab_size=40, num_positions=24, hidden_dim=16, num_layers=2, num_heads=1, mlp_dim=16,
    init_std=0.2, dtype="float32", hidden_dropout_rate=0.1,
)  # fmt: skip
PAIRS = random_pairs(19, MODEL.vocab_size, seed=3)
ROWS = [PAIRS[3 * n : 3 * n + 3] for n in range(5)] + [PAIRS[15:17], PAIRS[17:19], []]
BATCH = batch(ROWS, 24, 20)


def step_config(**options):
    network = RecurrentTranslationConfig(**options).network(MODEL)
    objective = Translation(MODEL, network, SPECIAL, 0.1)
    return StepConfig(objective, OptimizerConfig(), num_steps=10)


def gradients(config, mesh, params, rows):
    step = jax.jit(lambda params, rows, seed: batch_gradients(config, mesh, params, rows, seed))
    return step(params, rows, np.uint32(5))


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"cell": "lstm", "residual_from": 2}, (8, 1, 1)),
        ({"attention": "multiplicative", "wiring": "after", "tying": "output"}, (2, 2, 2)),
    ],
)
def test_every_mesh_has_the_gradients_of_one_device(options, sizes):
    """With dropout; in micro-batches where a device has more than one row."""
    config = step_config(**options)
    random, rows = np.random.default_rng(0), config.objective.prepare(BATCH, 0)
    shapes = jax.eval_shape(config.objective.init, jax.random.key(0))
    params = jax.tree.map(lambda p: random.normal(0, 0.2, p.shape).astype(np.float32), shapes)
    expected = gradients(config, make_mesh(MeshConfig(), jax.devices()[:1]), params, rows)
    config = replace(config, accumulation=1 if sizes == (8, 1, 1) else 2)
    mesh = make_mesh(MeshConfig(*sizes))
    placed = jax.device_put(params, param_placement(config, mesh))
    rows = place_batch({name: np.asarray(x) for name, x in rows.items()}, mesh)
    found = gradients(config, mesh, placed, rows)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5 * np.abs(theirs).max())


def test_the_section_names_a_network():
    values = {"name": "recurrent_translation", "cell": "lstm", "window": 3, "wiring": "after"}
    config = build(ObjectiveConfig, values)
    assert build(ObjectiveConfig, to_dict(config)) == config
    settings = config.network(MODEL).settings
    assert (settings.cell, settings.window, settings.wiring) == ("lstm", 3, "after")
    assert settings.attention == "additive"


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        *(
            (f"recurrent_{attention}", {"attention": attention, "wiring": wiring, "cell": "gru"})
            for attention, wiring in (
                ("none", "before"), ("dot", "after"), ("multiplicative", "after"),
                ("additive", "before"),
            )
        ),
        ("gnmt", {"cell": "lstm", "bidirectional": True, "residual_from": 3, "wiring": "before"}),
    ],
)  # fmt: skip
def test_recipes_build(recipe, settings):
    config = load_config(PretrainConfig, recipe).with_vocabulary(8000)
    network = config.objective.network(config.model)
    assert {name: getattr(network.settings, name) for name in settings} == settings
    # One table of 8,000 rows.
    sizes = [leaf.size for leaf in jax.tree.leaves(jax.eval_shape(network.init, jax.random.key(0)))]
    assert max(sizes) == 8064 * 256
    assert sum(sizes) < 9e6


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention": "none", "window": 4}, r"objective\.window is 4, but objective\.attention"),
        ({"label_smoothing": 1.0}, r"objective\.label_smoothing is 1\.0"),
        ({"cell": "gruu"}, r"cell is 'gruu'"),
        ({"scores": "dot"}, r"unknown field scores"),
    ],
)
def test_sections_that_name_none_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        build(ObjectiveConfig, {"name": "recurrent_translation", **values})
