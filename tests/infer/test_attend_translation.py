"""The page of attention weights of a translation: one matrix of source and target."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_models import TOKENIZER
from attend_models import weights_in
from toy_networks import MemoryNetwork, toy_config, toy_translator

from bert_jax.artefacts.saved import reading
from bert_jax.cli.main import main
from bert_jax.errors import UserError
from bert_jax.infer.attend import attention
from bert_jax.infer.loaded import LoadedModel
from bert_jax.model.config import ModelConfig
from bert_jax.model.seq2seq.network import Side, Weights
from bert_jax.model.seq2seq.recurrent import RecurrentNetwork
from bert_jax.model.seq2seq.recurrent_layers import RecurrentConfig
from bert_jax.model.seq2seq.transformer import TransformerNetwork

SMALL = ModelConfig(
    vocab_size=TOKENIZER.vocab_size, num_positions=24, hidden_dim=16, num_layers=2, num_heads=2,
    mlp_dim=24, init_std=0.3, dtype="float32", pooler=False, attention_pattern="GL", local_window=3,
    positions="rope",
)  # fmt: skip
SOURCE = ["[CLS]", "the", "cat", "##s", "sat", "[SEP]"]
TARGET = ["[CLS]", "a", "dog", "ran"]


@pytest.fixture(scope="module")
def saved():
    return toy_translator(TransformerNetwork(SMALL, num_decoder_layers=1), scale=2.0)


def test_the_matrix_has_encoder_cross_and_decoder_in_their_places(saved):
    page = attention(saved, "the cats sat", "a dog ran").page
    data, weights = weights_in(page)
    assert data["tokens"] == [*SOURCE, *TARGET]
    assert data["words"] == ["", "the", "cat", "s", "sat", "", "", "a", "dog", "ran"]
    assert data["second_start"] == 6
    assert data["special"] == [1, 0, 0, 0, 0, 1, 1, 0, 0, 0]
    assert data["windows"] == [None, None]  # a cell between source and target is never outside
    assert weights.shape == (2, 2, 10, 10)
    ids = [[TOKENIZER.token_to_id(token) for token in side] for side in (SOURCE, TARGET)]
    sides = [Side(jnp.array([row]), jnp.ones((1, len(row)), int)) for row in ids]
    found = jax.jit(saved.network.weights)(saved.params, *sides)
    expected = np.zeros((2, 2, 10, 10))
    expected[:, :, :6, :6] = found.encoder[:, 0]
    expected[:1, :, 6:, 6:] = found.decoder[:, 0]
    expected[:1, :, 6:, :6] = found.cross[:, 0]
    np.testing.assert_allclose(weights, expected, atol=0.005)
    np.testing.assert_allclose(found.cross.sum(-1), 1, rtol=1e-5)
    for row in range(4):  # no look ahead
        assert (weights[0, :, 6 + row, 7 + row :] == 0).all()
    assert "2 layers of 2 heads · 10 tokens, 6 of the source" in page
    assert ">a dog ran<" in page


def test_without_a_target_the_model_translates(saved):
    (answer,) = LoadedModel(saved).translate("the cats sat")
    data, _ = weights_in(attention(saved, "the cats sat").page)
    ids = [TOKENIZER.token_to_id(token) for token in data["tokens"][7:]]
    assert TOKENIZER.decode(ids) == answer["translation"] != ""


def test_recurrent_networks_show_their_cross_attention():
    one = dataclasses.replace(SMALL, num_layers=1)
    network = RecurrentNetwork(one, RecurrentConfig("gru", "additive"))
    saved = toy_translator(network, scale=2.0)
    _, weights = weights_in(attention(saved, "the cats sat", "a dog ran").page)
    assert weights.shape == (1, 1, 10, 10)
    np.testing.assert_allclose(weights[0, 0, 6:, :6].sum(-1), 1, atol=0.02)
    assert (weights[0, 0, :6] == 0).all()
    assert (weights[0, 0, 6:, 6:] == 0).all()


class BlindNetwork(MemoryNetwork):
    """A network without attention."""

    def weights(self, params, source, target):
        return Weights(None, None, None)


def test_a_network_without_attention_has_nothing_to_show():
    blind = toy_translator(BlindNetwork(toy_config(TOKENIZER.vocab_size)))
    with pytest.raises(UserError, match="the network has no attention"):
        attention(blind, "the cats sat", "a dog ran")


def test_texts_that_do_not_fit_are_refused(saved):
    with pytest.raises(UserError, match=r"the translation has 31 tokens.*takes at most 24"):
        attention(saved, "the cat", "a " * 30)
    with pytest.raises(UserError, match="the text has 42 tokens"):
        attention(saved, "the " * 40)
    with pytest.raises(UserError, match="has no tokens"):
        attention(saved, " ")
    long = dataclasses.replace(saved, max_length=200)
    with pytest.raises(UserError, match=r"its translation has 273 tokens.*at most 256"):
        attention(long, "the " * 120, "a " * 150)


def test_the_command_draws_a_translation(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reading, "read_model", lambda path, **options: saved)
    out = tmp_path / "page.html"
    assert main(["attend", "x", "the [MASK] sat", "--text-b", "a dog", "--out", str(out)]) == 0
    data, _ = weights_in(out.read_text("utf-8"))
    assert "[MASK]" not in data["tokens"]  # in a text to translate it is text
    assert capsys.readouterr().out.startswith(f"{out} (")
