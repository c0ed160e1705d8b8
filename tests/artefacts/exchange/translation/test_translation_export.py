"""Exports of models that translate: what is written is what is read, or nothing is there."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
from toy_networks import MemoryNetwork
from translators import FORMS, translator_of

from bert_jax.artefacts.exchange import searches as proof
from bert_jax.artefacts.exchange.export import export
from bert_jax.artefacts.exchange.exported_files import class_name, write_huggingface
from bert_jax.artefacts.exchange.huggingface import read_back
from bert_jax.artefacts.exchange.proof import (
    ProofFailedError,
    compare,
    inputs_of,
    logits_of,
    proof_rows,
    row_batches,
    unequal,
)
from bert_jax.artefacts.formats.translators import FAMILIES, family_of, shapes_of
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.errors import UserError


@pytest.mark.parametrize("form", FORMS)
def test_tensors_of_each_class_come_back(form):
    saved = translator_of(form, "uncased")
    family, network = family_of(saved.network, "a model")
    assert family.class_name == FORMS[form][0]
    arrays = family.arrays(network, saved.params)
    back = family.network(family.config(network), arrays, "config.json")
    assert (back.tying, back.decoder.num_layers) == (network.tying, network.decoder.num_layers)
    assert shapes_of(back) == shapes_of(network)
    params = family.params(back, arrays)
    assert not unequal(saved.params, params, vocab_size=network.model.vocab_size)


def test_half_precision_tables_are_added_in_full_precision():
    """The decoder's positions include the vector of type 0; position_ids are no parameters."""
    saved = translator_of("pair", "uncased")
    family, network = family_of(saved.network, "a model")
    arrays = family.arrays(network, saved.params)
    under, random = "decoder.bert.embeddings", np.random.default_rng(0)
    for name in ("position_embeddings.weight", "token_type_embeddings.weight"):
        shape = arrays[f"{under}.{name}"].shape
        arrays[f"{under}.{name}"] = random.normal(size=shape).astype(np.float16)
    for name in (under, "encoder.embeddings"):
        arrays[f"{name}.position_ids"] = np.arange(40)[None]
    positions, types = (
        arrays[f"{under}.{name}_embeddings.weight"].astype(np.float32)
        for name in ("position", "token_type")
    )
    found = family.params(network, arrays)["decoder"]["embeddings"]["position"]
    np.testing.assert_array_equal(found, positions + types)


def test_the_order_of_the_width_is_theirs():
    """Even places, then odd ones, on every axis of the model's width and on no other."""
    saved = translator_of("marian", "uncased")
    arrays = FAMILIES["marian"].arrays(saved.network, saved.params)
    order = [*range(0, 16, 2), *range(1, 16, 2)]
    layer = jax.tree.map(lambda leaf: leaf[1], saved.params["encoder"]["layers"])
    under = "model.encoder.layers.1"
    table = saved.params["encoder"]["embeddings"]["token"][: saved.config.vocab_size]
    np.testing.assert_array_equal(arrays["model.shared.weight"], table[:, order])
    for name, meant in {
        "self_attn.q_proj.weight": layer["attention"]["query"]["kernel"][order].reshape(16, 16).T,
        "self_attn.q_proj.bias": layer["attention"]["query"]["bias"].reshape(16),
        "self_attn.out_proj.weight":
            layer["attention"]["output"]["kernel"].reshape(16, 16)[:, order].T,
        "fc1.weight": layer["mlp"]["up"]["kernel"][order].T,
        "fc1.bias": layer["mlp"]["up"]["bias"],
        "fc2.bias": layer["mlp"]["down"]["bias"][order],
        "final_layer_norm.weight": layer["mlp_norm"]["scale"][order],
    }.items():  # fmt: skip
        np.testing.assert_array_equal(arrays[f"{under}.{name}"], meant, err_msg=name)


@pytest.mark.parametrize(
    ("form", "changes", "said"),
    [
        ("marian", {"norm_eps": 1e-6}, "MarianMTModel, but model.norm_eps is 1e-06, not 1e-05"),
        ("marian", {"gated": True}, "model.gated is True, not False"),
        ("pair", {"positions": "rope"}, "EncoderDecoderModel, but model.positions is 'rope'"),
        ("pair", {"scale_embeddings": True}, "model.scale_embeddings is True, not False"),
        ("pegasus", {"num_types": 2}, "Pegasus.*model.num_types is 2, not 0"),
        ("pegasus", {"tying": "none"}, "Marian.*, but model.norm_order is 'pre', not 'post'"),
        ("marian", {"tying": "output", "feature_dim": 8},
         "Marian.*, but TransformerNetwork.feature_dim is 8, not 0"),
    ],
)  # fmt: skip
def test_what_no_class_computes_is_named(form, changes, said):
    saved = translator_of(form, "uncased")
    of_network = {name: changes[name] for name in ("tying", "feature_dim") if name in changes}
    of_model = {name: value for name, value in changes.items() if name not in of_network}
    model = dataclasses.replace(saved.config, **of_model)
    network = dataclasses.replace(saved.network, model=model, **of_network)
    with pytest.raises(UserError, match=f"(?s)my model: .*{said}"):
        family_of(network, "my model")
    assert class_name(dataclasses.replace(saved, network=network)) == "TransformerNetwork"


@pytest.mark.parametrize(("tying", "fits"), [("all", True), ("output", False), ("none", False)])
def test_tables_that_a_class_cannot_share_are_named(tying, fits):
    """Of the three only Pegasus has a single table."""
    network = dataclasses.replace(translator_of("pegasus", "uncased").network, tying=tying)
    said = FAMILIES["pegasus"].unlike(network)
    assert said == [f"objective.tying is {tying!r}, not 'all'"] * (not fits)
    for kind in ("marian", "encoder-decoder"):
        assert not any("tying" in text for text in FAMILIES[kind].unlike(network))


def test_other_networks_have_no_class():
    model = translator_of("pair", "uncased").config
    with pytest.raises(
        UserError, match="my model: no class of Transformers computes a MemoryNetwork"
    ):
        family_of(MemoryNetwork(model), "my model")


@pytest.fixture
def written(tmp_path):
    saved = translator_of("marian", "unigram")
    write_huggingface(saved, tmp_path)
    return saved, tmp_path


def test_the_search_is_in_the_directory(written):
    saved, directory = written
    special = saved.tokenizer.special_ids
    assert json.loads((directory / "generation_config.json").read_text()) == {
        "pad_token_id": special.pad, "bos_token_id": special.cls, "eos_token_id": special.sep,
        "decoder_start_token_id": special.cls, "num_beams": 5, "length_penalty": 1.0,
        "early_stopping": "never", "max_length": 41, "do_sample": False,
        "forced_eos_token_id": None, "bad_words_ids": [[special.cls]],
    }  # fmt: skip
    back = read_back(saved, directory)
    assert back.verbs == ("translate",)
    assert back.network == dataclasses.replace(saved.network, model=back.config)


def test_a_changed_tensor_is_found(written):
    saved, directory = written
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    tensors["final_logits_bias"][0, 3] += 1
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ProofFailedError, match="when they are read back: output/bias"):
        read_back(saved, directory)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"decoder_start_token_id": 0}, "decoder_start_token_id is 0; .*begin with cls"),
        ({"decoder_ffn_dim": 7}, "decoder_ffn_dim is 7; expected 24"),
        ({"encoder_layers": 0}, "encoder_layers is 0; it must be from 1"),
        ({"scale_embedding": 1}, "scale_embedding is 1; it must be true or false"),
        ({"encoder_layers": 3}, r"model.encoder.layers.2.fc1.weight is missing"),
        ({"share_encoder_decoder_embeddings": False}, "embed_tokens.weight is missing"),
    ],
)
def test_configurations_that_are_refused(written, changes, said):
    _, directory = written
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UserError, match=said):
        read_model(directory)


@pytest.mark.parametrize(
    ("part", "changes", "said"),
    [
        ("decoder", {"add_cross_attention": False}, "decoder.add_cross_attention is False"),
        ("decoder", {"hidden_act": "relu"}, "activation is 'relu'; it must be 'gelu'"),
        ("encoder", {"model_type": "gpt2"}, "encoder: model_type is 'gpt2'"),
    ],
)
def test_pairs_that_are_refused(part, changes, said):
    saved = translator_of("pair", "uncased")
    family = FAMILIES["encoder-decoder"]
    config = family.config(saved.network)
    config[part] |= changes
    with pytest.raises(UserError, match=said):
        family.network(config, {}, "config.json")


def test_onnx_has_no_search(written, tmp_path):
    _, directory = written
    with pytest.raises(UserError, match=r"only encoders.*huggingface or stablehlo or orbax"):
        export(directory, "onnx", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_orbax_holds_any_network(written, tmp_path):
    saved, directory = written
    parity = export(directory, "orbax", tmp_path / "out", name="En to de")
    assert (parity["class"], parity["differences"]) == ("MarianMTModel", {})
    described = json.loads((tmp_path / "out" / "network.json").read_text())
    assert described["network"] == "TransformerNetwork"
    assert described["model"]["hidden_dim"] == 16
    assert described["special_ids"] == vars(saved.tokenizer.special_ids)
    assert "A model that translates" in (tmp_path / "out" / "README.md").read_text()


def test_the_proof_has_sources_of_the_models_length():
    saved = translator_of("marian", "unigram")
    rows = proof_rows(saved)
    assert max(map(len, rows)) == saved.max_length


@pytest.mark.parametrize("gap", [0.5, np.nan, np.inf])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_the_largest_gap_counts_in_whichever_batch_it_is(gap, bad):
    saved, seen = translator_of("pair", "uncased"), []

    def other(sides):
        found = logits_of(saved, sides)["logits"].copy()
        found[0, 1, 3] += gap if len(seen) == bad else 0.125
        seen.append(sides)
        return {"logits": found}

    (found,) = compare(saved, row_batches(proof_rows(saved)[:6], 2), other)
    assert found["logits"] == pytest.approx(0.5 if gap == 0.5 else np.inf)


def test_translations_of_beams_are_ties_where_the_means_are_equal(monkeypatch):
    monkeypatch.setattr(proof, "_log_probs", lambda saved, row, tokens: -np.array(tokens, float))
    saved = translator_of("pair", "uncased")

    def tie(first, second, *, greedy=False):
        return proof._is_tie(saved, [2, 3], first, second, 4, greedy=greedy)

    assert tie([1, 3], [2, 2, 2])
    assert not tie([1, 3], [2, 1, 1])
    assert not tie([1, 3], [2, 2], greedy=True)  # where they part
    assert not tie([1, 2], [1, 2, 3, 7])
    saved = dataclasses.replace(saved, network=dataclasses.replace(saved.network, forces_end=True))
    assert tie([1, 2], [1, 2, 3, 7])  # the last of the four tokens was forced


def test_a_target_in_a_proof_is_another_rows_text():
    saved, rows = translator_of("pair", "uncased"), [[2, 7, 3], [2, 8, 9, 3], [2, 10, 3]]
    source, target = inputs_of(saved, rows, 5)
    real = [tokens[ids > 0].tolist() for tokens, ids in zip(*target[::2], strict=True)]
    assert real == [[2, 10], [2, 7], [2, 8, 9]]
    assert source.tokens[:, :3].tolist() == [[2, 7, 3], [2, 8, 9], [2, 10, 3]]
