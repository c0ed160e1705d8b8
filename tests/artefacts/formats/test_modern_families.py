"""Modern families against Transformers: logits, gradients, and the mistakes that must show."""

import copy
import dataclasses
import json
import tempfile
from functools import cache, partial
from pathlib import Path

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from modern_models import VARIANTS, modern_model  # noqa: E402

from bert_jax.artefacts.exchange.theirs import quiet  # noqa: E402
from bert_jax.artefacts.formats.form import form_of  # noqa: E402
from bert_jax.artefacts.formats.huggingface_files import read_weights  # noqa: E402
from bert_jax.model.heads import encode, vocabulary_projection  # noqa: E402

LENGTH = 40
LENGTHS = (LENGTH, 29)
"""Tokens of the two rows; the second one is padded on the right."""


def batch():
    tokens = np.random.default_rng(0).integers(5, 101, (2, LENGTH))
    mask = (np.arange(LENGTH) < np.array(LENGTHS)[:, None]).astype(int)
    return tokens, mask


@cache
def weights():
    """Weights of the logits in the sum that is differentiated; 0 for padding."""
    return np.random.default_rng(1).normal(size=(2, LENGTH, 101)) * batch()[1][..., None]


def read(model):
    """Our configuration and parameters, from files that Transformers writes."""
    with quiet(), tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model.save_pretrained(directory)
        found = json.loads((directory / "config.json").read_text())
        form = form_of(found, read_weights(directory, ""), where="config.json")
        return form.model, form.params(None)


@cache
def files(variant):
    return read(modern_model(variant))


@cache
def their_logits(variant):
    tokens, mask = batch()
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask)}
        return modern_model(variant)(**inputs).logits.numpy()


@partial(jax.jit, static_argnums=0)
def our_logits(config, params, tokens, segment_ids):
    hidden = encode(config, params, tokens, tokens * 0, segment_ids)
    return vocabulary_projection(config, params, hidden).logits()[..., : config.vocab_size]


def gap(variant, config, params):
    difference = np.abs(np.asarray(our_logits(config, params, *batch())) - their_logits(variant))
    return difference[batch()[1] > 0].max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_theirs(variant):
    assert np.abs(their_logits(variant)).max() > 1
    assert gap(variant, *files(variant)) < 1e-5


@pytest.mark.parametrize(
    "variant",
    [
        "modernbert",
        "biases",
        "eurobert",
        "nomic",
        *(each for each in VARIANTS if "deberta" in each),
    ],
)
def test_gradients_are_theirs(variant):
    config, params = files(variant)
    model = modern_model(variant)
    tokens, mask = batch()
    logits = model(input_ids=torch.tensor(tokens), attention_mask=torch.tensor(mask)).logits
    (logits * torch.tensor(weights(), dtype=torch.float32)).sum().backward()
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in gradients.named_parameters():
            parameter.copy_(dict(model.named_parameters())[name].grad)
    _, theirs = read(gradients)
    ours = jax.grad(lambda params: (our_logits(config, params, *batch()) * weights()).sum())(params)
    if not config.first_norm:  # a row that neither reads
        scale = theirs["encoder"]["layers"]["attention_norm"]
        for array in scale.values():
            array[0] = 0
    for (path, mine), other in zip(
        jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        mine = np.asarray(mine)
        name = jax.tree_util.keystr(path)
        assert np.abs(mine - other).max() < 1e-5 * max(1.0, np.abs(other).max()), name


def swapped(params):
    mlp = params["encoder"]["layers"]["mlp"]
    changed = {**mlp, "gate": mlp["up"], "up": mlp["gate"]}
    layers = {**params["encoder"]["layers"], "mlp": changed}
    return {**params, "encoder": {**params["encoder"], "layers": layers}}


MUTANTS = {
    "a window one narrower": {"local_window": 7},
    "a window one wider": {"local_window": 9},
    "a norm in layer 0": {"first_norm": True},
    "one theta": {"local_rope_theta": 160_000.0},
    "the tanh form of GELU": {"activation": "gelu_tanh", "head_activation": "gelu"},
}


@pytest.mark.parametrize("name", [*MUTANTS, "halves of the gated network swapped"])
def test_a_mistake_shows(name):
    config, params = files("modernbert")
    assert config.local_window == 8
    if name in MUTANTS:
        config = dataclasses.replace(config, **MUTANTS[name])
    else:
        params = swapped(params)
    assert gap("modernbert", config, params) > 1e-4


@pytest.mark.parametrize("variant", ["modernbert", "eurobert", "nomic", "deberta"])
def test_a_packed_row_is_its_texts_alone(variant):
    config, params = files(variant)
    tokens = np.random.default_rng(2).integers(5, 101, (1, LENGTH))
    parts = np.split(tokens, [17, 30], axis=1)
    segment_ids = np.concatenate([np.full_like(p, n) for n, p in enumerate(parts, 1)], axis=1)
    packed = our_logits(config, params, tokens, segment_ids)
    alone = [our_logits(config, params, part, np.ones_like(part)) for part in parts]
    np.testing.assert_allclose(packed, np.concatenate(alone, axis=1), atol=1e-5)
