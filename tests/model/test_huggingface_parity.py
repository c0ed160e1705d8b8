"""Logits, loss and every gradient equal Hugging Face's, from a golden file and live."""

import importlib.util
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bert_names import from_huggingface, to_huggingface
from pretraining import apply_pretraining

from bert_jax.model.config import SIZES, ModelConfig
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.objectives.objective import num_params
from bert_jax.tokenization.special_ids import SpecialIds

GOLDEN = Path(__file__).parents[1] / "golden" / "model" / "tiny.npz"
TOLERANCE = 1e-5


def tiny_config(activation, **changes):
    return ModelConfig(
        vocab_size=99, num_positions=24, hidden_dim=32, num_layers=2, num_heads=4, mlp_dim=64,
        activation=activation, dtype="float32", **changes,
    )  # fmt: skip


def loss_and_logits(params, config, inputs):
    forward = partial(
        apply_pretraining, config, params,
        inputs["tokens"], inputs["type_ids"], inputs["segment_ids"],
    )  # fmt: skip
    masked = forward(positions=inputs["positions"])
    log_p = jax.nn.log_softmax(masked.vocabulary)
    picked = jnp.take_along_axis(log_p, inputs["labels"][..., None], -1)[..., 0]
    mlm_loss = -(picked * inputs["weights"]).sum() / inputs["weights"].sum()
    rows = jnp.arange(len(inputs["nsp_labels"]))
    nsp_loss = -jax.nn.log_softmax(masked.pairs)[rows, inputs["nsp_labels"]].mean()
    everywhere = forward()
    return mlm_loss + nsp_loss, (masked, everywhere)


def assert_equal(config, weights, inputs, expected):
    inputs = {name: jnp.asarray(value) for name, value in inputs.items()}
    params = from_huggingface(weights, config)
    (loss, (masked, everywhere)), gradients = jax.jit(
        jax.value_and_grad(loss_and_logits, has_aux=True), static_argnums=1
    )(params, config, inputs)
    close = partial(np.testing.assert_allclose, atol=TOLERANCE, rtol=TOLERANCE)
    close(loss, expected["loss"])
    close(masked.pairs, expected["nsp"])
    # At padding the two differ: here padding sees padding, there it sees the text.
    real = np.asarray(inputs["segment_ids"]) > 0
    vocab = config.vocab_size
    close(np.asarray(everywhere.vocabulary)[real][:, :vocab], expected["mlm"][real])
    at_positions = np.take_along_axis(
        expected["mlm"], np.asarray(inputs["positions"])[..., None], 1
    )
    close(masked.vocabulary[..., :vocab], at_positions)
    ours = to_huggingface(gradients, config)
    assert ours.keys() == expected["gradients"].keys()
    for name, theirs in expected["gradients"].items():
        close(ours[name], theirs, err_msg=name)
        assert np.abs(theirs).max() > 0, name


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_golden_logits_loss_and_all_gradients(activation):
    with np.load(GOLDEN) as file:
        golden = dict(file)

    def under(prefix):
        return {n.removeprefix(prefix): a for n, a in golden.items() if n.startswith(prefix)}

    expected = under(f"{activation}/")
    expected["gradients"] = under(f"{activation}/gradients/")
    assert_equal(tiny_config(activation), under("weights/"), under("inputs/"), expected)


@pytest.fixture(scope="module")
def peer():
    """The script that made the golden file: it runs the same model live."""
    pytest.importorskip("torch", reason="the parity extra is not installed")
    pytest.importorskip("transformers", reason="the parity extra is not installed")
    path = GOLDEN.parents[1] / "make_model_golden.py"
    spec = importlib.util.spec_from_file_location("make_model_golden", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parity
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("changes", [{}, {"scan_unroll": 1}, {"remat": "full"}])
def test_live_logits_loss_and_all_gradients(peer, activation, changes):
    model = peer.make_model(activation, seed=7)
    inputs = peer.make_inputs(seed=8, rows=6)
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    assert_equal(tiny_config(activation, **changes), weights, inputs, peer.run(model, inputs))


@pytest.mark.parity
def test_live_state_dict_loads_both_ways(peer):
    import torch

    config = tiny_config("gelu")
    model, other = peer.make_model("gelu", seed=1), peer.make_model("gelu", seed=2)
    params = from_huggingface(model.state_dict(), config)
    ours = {name: torch.tensor(a) for name, a in to_huggingface(params, config).items()}
    report = other.load_state_dict(ours, strict=False)
    assert set(report.missing_keys) == {
        "cls.predictions.decoder.weight", "cls.predictions.decoder.bias",
    }  # fmt: skip
    assert not report.unexpected_keys
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


@pytest.mark.parity
@pytest.mark.parametrize("size", SIZES)
def test_live_parameter_counts(peer, size):
    import torch
    from transformers import BertConfig, BertForPreTraining

    config = SIZES[size]
    with torch.device("meta"):
        model = BertForPreTraining(
            BertConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_dim,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                intermediate_size=config.mlp_dim,
            )
        )
    objective = MaskedLM(config, MaskingConfig(), SpecialIds(*range(5)))
    assert num_params(objective) == sum(p.numel() for p in model.parameters())
