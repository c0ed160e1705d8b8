"""20 fine-tuning steps give the losses of Transformers' classes under torch's AdamW.

From a golden file, and live with other weights, data and orders.
"""

import importlib.util
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from bert_names import from_huggingface

from bert_jax.distributed.parallel.sharding import MeshConfig, make_trial_mesh
from bert_jax.model.config import ModelConfig
from bert_jax.model.task_heads import TaskHeadConfig, init_task_params
from bert_jax.objectives.task import TaskObjective
from bert_jax.training.steps.optim import OptimizerConfig
from bert_jax.training.steps.state import StepConfig, state_from
from bert_jax.training.steps.step import make_train_step
from bert_jax.training.steps.trials import place_params, place_rows, place_settings

GOLDEN = Path(__file__).parents[2] / "golden" / "finetuning" / "tiny.npz"
TOLERANCE = 1e-4
GOLDEN_TOLERANCE = 3e-5
"""Four times what was seen; less than what the tanh form of GELU or an epsilon of 1e-5 make."""
NUM_STEPS = 20
MODEL = ModelConfig(
    vocab_size=99, num_positions=24, hidden_dim=32, num_layers=2, num_heads=4, mlp_dim=64,
    hidden_dropout_rate=0.0, attention_dropout_rate=0.0, dtype="float32", scan_unroll=1,
)  # fmt: skip
HEADS = {
    "class": TaskHeadConfig("classification", 3, dropout_rate=0.0),
    "classes": TaskHeadConfig("classification", 4, dropout_rate=0.0),
    "score": TaskHeadConfig("classification", 1, dropout_rate=0.0),
    "tags": TaskHeadConfig("tagging", 5, dropout_rate=0.0),
    "span": TaskHeadConfig("span", dropout_rate=0.0),
}
"""By run of the golden file."""
KINDS = {"class": "single_label", "classes": "multi_label", "score": "regression"}
"""Kinds of heads of runs with another name."""
RATE = 5e-3
OPTIMIZER = OptimizerConfig(
    learning_rate=1.0, warmup_steps=4, weight_decay=0.1, eps=1e-6, clip_norm=1.0
)


def train(objective, weights, batches, order):
    """Losses and norms of the gradient before clipping, of the step that a sweep takes."""
    config = StepConfig(
        TaskObjective(MODEL, HEADS[objective], KINDS.get(objective, objective)),
        OPTIMIZER,
        NUM_STEPS,
    )
    mesh = make_trial_mesh(MeshConfig(), 1, jax.devices()[:1])
    head = HEADS[objective]
    params = from_huggingface(weights, MODEL, head)
    complete = init_task_params(MODEL, head, jax.random.key(0), encoder=params["encoder"])
    params |= {"encoder": complete["encoder"]}  # their classes for tags and spans have no pooler
    params = jax.tree.map(lambda x: np.asarray(x)[None], params)
    state = jax.vmap(partial(state_from, config))(place_params(config, mesh, params))
    settings = place_settings([RATE], [0], mesh)
    step = make_train_step(config, mesh)
    rows = batches["tokens"].shape[1]
    losses, norms = [], []
    for number in order:
        batch = {name: array[number][None] for name, array in batches.items()}
        batch["weights"] = np.ones((1, rows), np.float32)
        batch["row_index"] = np.arange(rows, dtype=np.uint32)[None]
        state, metrics = step(state, place_rows(batch, mesh), settings)
        losses.append(float(metrics["loss"][0]))
        norms.append(float(metrics["grad_norm"][0]))
    return np.array(losses), np.array(norms)


def assert_equal(objective, weights, batches, order, expected, tolerance=TOLERANCE):
    losses, norms = train(objective, weights, batches, order)
    assert np.ptp(losses) > 1000 * tolerance
    np.testing.assert_allclose(losses, expected["losses"], rtol=0, atol=tolerance)
    np.testing.assert_allclose(norms, expected["grad_norms"], rtol=1e-3)


@pytest.mark.parametrize("objective", ["class", "tags", "span"])
def test_golden_losses(objective):
    with np.load(GOLDEN) as file:
        golden = dict(file)

    def under(prefix):
        return {n.removeprefix(prefix): a for n, a in golden.items() if n.startswith(prefix)}

    run = under(f"{objective}/")
    encoder = under("weights/")
    if objective in ("tags", "span"):
        encoder = {name: array for name, array in encoder.items() if "pooler" not in name}
    weights = encoder | under(f"{objective}/weights/")
    assert_equal(
        objective, weights, under(f"{objective}/batches/"), run["order"], run, GOLDEN_TOLERANCE
    )


@pytest.fixture(scope="module")
def peer():
    """The script that made the golden file: it trains the same models live."""
    pytest.importorskip("torch", reason="the parity extra is not installed")
    pytest.importorskip("transformers", reason="the parity extra is not installed")
    path = GOLDEN.parents[1] / "make_finetuning_golden.py"
    spec = importlib.util.spec_from_file_location("make_finetuning_golden", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parity
@pytest.mark.parametrize("objective", HEADS)
def test_live_losses(peer, objective):
    model = peer.make_model(objective, seed=7)
    batches, order = peer.make_batches(objective, seed=8), peer.make_order(seed=9)
    weights = peer.weights_of(model)
    assert_equal(objective, weights, batches, order, peer.train(objective, model, batches, order))
