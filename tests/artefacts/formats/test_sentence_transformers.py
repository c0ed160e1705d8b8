"""The layout of sentence-transformers: what is written is read, what is not computed is named."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
from export_models import model_of
from scipy.special import expit
from vector_models import vector_model

from bert_jax.artefacts.exchange import theirs
from bert_jax.artefacts.exchange.exported_files import write_huggingface
from bert_jax.artefacts.exchange.importing import import_model
from bert_jax.artefacts.exchange.proof import batch_of, logits_of, unequal
from bert_jax.artefacts.formats.sentence_transformers import read_sentence_files
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.cli import main as cli
from bert_jax.errors import UserError
from bert_jax.infer.loaded import LoadedModel
from bert_jax.tokenization.tokenizer import make_row

FIELDS = {"query_prefix": "query: ", "document_prefix": "passage: ", "dimensions": (16, 8)}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("vectors")
    write_huggingface(vector_model("cls", **FIELDS), directory)
    return directory


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A model with two linear maps, from 16 to 12 and 9 dimensions, and where it was written."""
    directory = tmp_path_factory.mktemp("dense")
    saved = vector_model("max", maps=("tanh", ""))
    write_huggingface(saved, directory)
    return saved, directory


@pytest.fixture
def copy(written, tmp_path):
    shutil.copytree(written, tmp_path / "model")
    return tmp_path / "model"


def change(path, **fields):
    content = json.loads(path.read_text())
    content.update(fields)
    path.write_text(json.dumps({name: each for name, each in content.items() if each != "gone"}))


@pytest.mark.parametrize("pooling", ["mean", "mean_sqrt_len", "max", "cls", "last"])
@pytest.mark.parametrize("normalize", [True, False])
def test_what_is_written_is_read(pooling, normalize, tmp_path):
    saved = vector_model(pooling, normalize=normalize, **FIELDS)
    write_huggingface(saved, tmp_path)
    back = read_model(tmp_path)
    assert back.embedding == saved.embedding
    assert back.max_length == 32
    assert (tmp_path / "2_Normalize").exists() is False
    modules = json.loads((tmp_path / "modules.json").read_text())
    assert [each["path"] for each in modules] == ["", "1_Pooling", "2_Normalize"][: 2 + normalize]


def test_linear_maps_are_read_bit_for_bit(dense):
    saved, directory = dense
    back = read_model(directory)
    assert back.embedding == saved.embedding
    assert not unequal(back.params["pooling"], saved.params["pooling"])
    assert back.vector_width() == 9
    modules = json.loads((directory / "modules.json").read_text())
    kinds = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    assert [each["type"].rpartition(".")[2] for each in modules] == kinds
    vectors = LoadedModel(back).embed(["the river froze", "the ferry"])
    assert vectors.shape == (2, 9)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    bare = dataclasses.replace(back, params={"encoder": back.params["encoder"]})
    pooled = LoadedModel(bare).embed(["the river froze", "the ferry"], normalize=False)
    first, second = (back.params["pooling"]["maps"][name] for name in ("0_tanh", "1_"))
    by_hand = np.tanh(pooled @ first["kernel"] + first["bias"]) @ second["kernel"]
    by_hand /= np.linalg.norm(by_hand, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors, by_hand, atol=1e-5)
    assert LoadedModel(back).embed(["the"], dimensions=4).shape == (1, 4)
    with pytest.raises(UserError, match="dimensions is 10; it must be from 1 to 9"):
        LoadedModel(back).embed(["the"], dimensions=10)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"activation_function": "torch.nn.modules.activation.Softsign"},
            "Softsign.*; Identity, GELU",
        ),
        ({"activation_function": "mine.Tanh"}, "3_Dense/config.json: activation_function is 'mine"),
        ({"use_residual": True}, "3_Dense/config.json: use_residual is True; only False is supp"),
        ({"module_input_name": "token_embeddings"}, "module_input_name is 'token_embeddings'"),
        (
            {"out_features": 4},
            r"3_Dense/model.safetensors: linear.weight is \(9, 12\), but .*needs \(4, 12\)",
        ),
        ({"bias": True}, r"model.safetensors: linear.bias is \(0,\), but .* \(9,\)"),
    ],
)
def test_maps_that_are_not_computed_are_named(dense, tmp_path, fields, message):
    shutil.copytree(dense[1], tmp_path / "model")
    change(tmp_path / "model" / "3_Dense" / "config.json", **fields)
    with pytest.raises(UserError, match=message):
        read_model(tmp_path / "model")


def test_weights_of_maps_are_checked(dense, tmp_path):
    shutil.copytree(dense[1], tmp_path / "model")
    weights = tmp_path / "model" / "2_Dense" / "model.safetensors"
    tensors = dict(safetensors.numpy.load_file(weights))
    tensors["linear.bias"][3] = np.nan
    safetensors.numpy.save_file(tensors, weights)
    with pytest.raises(
        UserError, match=r"2_Dense/model\.safetensors: linear.bias has values that are not finite"
    ):
        read_model(tmp_path / "model")
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(UserError, match=r"2_Dense/model\.safetensors: no such file"):
        read_model(tmp_path / "model")


def test_a_learned_pooling_has_no_files(tmp_path):
    write_huggingface(vector_model("weighted"), tmp_path)
    assert not (tmp_path / "modules.json").exists()


def test_the_files_of_version_6(copy, caplog):
    names = {"Transformer": "base.modules.transformer", "Pooling": "sentence_transformer.modules"}
    modules = json.loads((copy / "modules.json").read_text())[:2]
    for each in modules:
        kind = each["type"].rpartition(".")[2]
        each["type"] = f"sentence_transformers.{names[kind]}.{kind}"
    (copy / "modules.json").write_text(json.dumps(modules))
    pooling = {"embedding_dimension": 16, "pooling_mode": "lasttoken", "include_prompt": True}
    (copy / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    config = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
    states = {"method": "forward", "method_output_name": "last_hidden_state"}
    config["modality_config"] = {"text": states}
    (copy / "sentence_bert_config.json").write_text(json.dumps(config))
    change(copy / "tokenizer_config.json", model_max_length=24)
    prompts = {"query": "q: ", "passage": "p: ", "clustering": "c: "}
    settings = {"prompts": prompts, "similarity_fn_name": "dot"}
    (copy / "config_sentence_transformers.json").write_text(json.dumps(settings))
    found = read_sentence_files(copy)
    assert found.embedding == dataclasses.replace(
        vector_model("last").embedding, normalize=False, query_prefix="q: ", document_prefix="p: "
    )
    assert found.max_length == 24
    assert found.notes == (
        "the prompts 'clustering' are not kept",
        "the similarity 'dot' is not kept; cosine is used",
    )
    read_model(copy)
    assert caplog.messages == [f"{copy}: {note}" for note in found.notes]


def test_an_encoder_in_a_folder_of_its_own(copy):
    """As version 1 wrote them."""
    folder = copy / "0_Transformer"
    folder.mkdir()
    for path in [each for each in copy.iterdir() if each.is_file() and each.name != "modules.json"]:
        if path.name != "config_sentence_transformers.json":
            path.rename(folder / path.name)
    modules = json.loads((copy / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (copy / "modules.json").write_text(json.dumps(modules))
    assert read_model(copy).embedding == vector_model("cls", **FIELDS).embedding


SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"


@pytest.fixture
def scoring(tmp_path):
    """A cross-encoder as version 6 writes it, with the problem type of other software."""
    directory = tmp_path / "scoring"
    directory.mkdir()
    write_huggingface(model_of("score"), directory)
    change(directory / "config.json", sentence_transformers="gone", problem_type=None)
    kind = "sentence_transformers.base.modules.transformer.Transformer"
    modules = [{"idx": 0, "name": "0", "path": "", "type": kind}]
    (directory / "modules.json").write_text(json.dumps(modules))
    config = {"transformer_task": "sequence-classification", "module_output_name": "scores"}
    (directory / "sentence_bert_config.json").write_text(json.dumps(config))
    settings = {"model_type": "CrossEncoder", "activation_fn": SIGMOID, "prompts": {}}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return directory


def test_a_cross_encoder_has_the_length_of_its_module(scoring):
    change(scoring / "sentence_bert_config.json", max_seq_length=16)
    assert read_model(scoring).max_length == 16
    assert read_model(scoring, encoder_only=True).max_length > 16


@pytest.mark.parametrize(
    ("place", "fields", "objective"),
    [
        ("config_sentence_transformers.json", {}, "multi_label"),
        ("config_sentence_transformers.json", {"activation_fn": IDENTITY}, "regression"),
        ("config.json", {"sentence_transformers": {"activation_fn": SIGMOID}}, "multi_label"),
        ("config.json", {"sentence_transformers": {"activation_fn": IDENTITY}}, "regression"),
        ("config.json", {"sbert_ce_default_activation_function": SIGMOID}, "multi_label"),
        (
            "config.json",
            {"sentence_transformers": {"activation_fn": SIGMOID}, "problem_type": "regression"},
            "multi_label",
        ),
        ("config.json", {"problem_type": "regression"}, "regression"),
    ],
)
def test_the_activation_of_a_cross_encoder_is_what_its_head_means(
    scoring, place, fields, objective
):
    if place == "config.json":  # as versions 1 to 5 write it
        (scoring / "modules.json").unlink()
    change(scoring / place, **fields)
    back = read_model(scoring)
    assert (back.embedding, back.outputs.objective) == (None, objective)
    assert read_model(scoring, encoder_only=True).outputs is None
    (answer,) = LoadedModel(back).classify([("the river", "it froze")])
    ids = map(back.tokenizer.encode, ("the river", "it froze"))
    row = make_row(back.tokenizer, *(each.ids for each in ids)).ids.tolist()
    ((logit,),) = logits_of(back, batch_of(back, [row]))["head"]
    if objective == "regression":
        assert answer == {"score": pytest.approx(logit, abs=1e-5)}
    else:
        assert answer["probabilities"] == {"LABEL_0": pytest.approx(expit(logit), abs=1e-5)}


@pytest.mark.parametrize(
    ("place", "fields", "message"),
    [
        (
            "config_sentence_transformers.json",
            {"activation_fn": "mine.f"},
            "activation_fn is 'mine",
        ),
        (
            "config_sentence_transformers.json",
            {"activation_fn": "torch.nn.Tanh"},
            "Identity, Sigmoid of torch.nn",
        ),
        ("config_sentence_transformers.json", {"default_prompt_name": "q"}, "default_prompt_name"),
        ("sentence_bert_config.json", {"transformer_task": "text-generation"}, "transformer_task"),
    ],
)
def test_what_is_not_computed_of_a_cross_encoder_is_named(scoring, place, fields, message):
    change(scoring / place, **fields)
    with pytest.raises(UserError, match=message):
        read_model(scoring)


def test_other_modules_of_a_cross_encoder_are_named(scoring):
    modules = json.loads((scoring / "modules.json").read_text())
    for kind in ("Pooling", "Dense"):
        modules.append(
            {**modules[0], "path": f"1_{kind}", "type": f"sentence_transformers.x.{kind}"}
        )
    (scoring / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(
        UserError, match=r"modules.json: .*Dense; they must be a single Transformer"
    ):
        read_model(scoring)


def test_a_model_without_limit_has_that_of_its_positions(copy):
    change(copy / "sentence_bert_config.json", max_seq_length=None)
    change(copy / "tokenizer_config.json", model_max_length=10**30)
    assert read_model(copy).max_length == 40


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        (
            "1_Pooling/config.json",
            {"pooling_mode_max_tokens": True},
            "pooling is 'cls' and 'max'; it must be one of cls, max.*lasttoken",
        ),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "pooling is 'weightedmean'"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt is False"),
        ("1_Pooling/config.json", {"word_embedding_dimension": 8}, "8, but the encoder has 16"),
        (
            "1_Pooling/config.json",
            {"word_embedding_dimension": "gone"},
            "width None, but the encoder has 16",
        ),
        ("config_sentence_transformers.json", {"truncate_dim": 8}, "truncate_dim is 8; .*N"),
        (
            "config_sentence_transformers.json",
            {"default_prompt_name": "query"},
            "only .* is supported. Remove",
        ),
        ("config_sentence_transformers.json", {"prompts": [1]}, "expected an object of texts"),
        ("config_sentence_transformers.json", {"matryoshka_dimensions": [64]}, "at most 16"),
        ("config_sentence_transformers.json", {"matryoshka_dimensions": "8"}, "dimensions"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case is True"),
        ("sentence_bert_config.json", {"transformer_task": "retrieval"}, "transformer_task is"),
        ("sentence_bert_config.json", {"max_seq_length": 2}, "max_seq_length is 2"),
        ("sentence_bert_config.json", {"config_args": {"hidden_act": "relu"}}, "config_args is"),
        ("sentence_bert_config.json", {"config_kwargs": {"a": 1}}, "config_kwargs is"),
        ("sentence_bert_config.json", {"tokenizer_args": {"a": 1}}, "tokenizer_args is"),
        ("sentence_bert_config.json", {"processor_kwargs": {"a": 1}}, "processor_kwargs is"),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": {"method_output_name": ["hidden_states", -2]}}},
            "modality_config is .*-2.*; it must be .*last_hidden_state",
        ),
    ],
)
def test_what_is_not_computed_is_named(copy, file, fields, message):
    change(copy / file, **fields)
    with pytest.raises(UserError, match=message):
        read_model(copy)


@pytest.mark.parametrize(
    ("place", "module", "message"),
    [
        (
            2,
            {"type": "sentence_transformers.models.LayerNorm", "path": "2_LayerNorm"},
            "Pooling, LayerNorm; they must be Transformer, Pooling, any number of Dense",
        ),
        (
            2,
            {"type": "sentence_transformers.models.Dense", "path": "2_Dense"},
            "2_Dense/model.safetens.*: no such file",
        ),
        (1, {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}, "Dense, Normalize;"),
        (1, {"type": "mine.Pooling", "path": "1_Pooling"}, "the model's own code"),
        (1, {"type": "sentence_transformers.models.Pooling", "path": "../x"}, "of its folder"),
        (1, {"type": 5}, "of its folder"),
    ],
)
def test_modules_that_are_not_read(copy, place, module, message):
    path = copy / "modules.json"
    modules = json.loads(path.read_text())
    modules[place] = module
    path.write_text(json.dumps(modules))
    with pytest.raises(UserError, match=message):
        read_model(copy)


@pytest.fixture
def _without_transformers(monkeypatch):
    monkeypatch.setattr(theirs, "find_spec", lambda name: None)


@pytest.mark.usefixtures("_without_transformers")
def test_import_keeps_the_vectors(written, tmp_path):
    out = tmp_path / "out"
    assert cli.main(["import", str(written), "--out", str(out)]) == 0
    assert read_model(out).embedding == read_model(written).embedding


def test_kinds_and_dimensions():
    saved = vector_model("mean", **FIELDS)
    model = LoadedModel(saved)
    texts = ["the river froze", "the ferry"]
    plain, queries = model.embed(texts), model.embed(texts, kind="query")
    np.testing.assert_allclose(np.linalg.norm(plain, axis=1), 1, atol=1e-6)
    by_hand = model.embed([f"query: {text}" for text in texts])
    np.testing.assert_array_equal(queries, by_hand)
    passages = model.embed([f"passage: {text}" for text in texts])
    np.testing.assert_array_equal(model.embed(texts, kind="document"), passages)
    cut = model.embed(texts, dimensions=8)
    expected = plain[:, :8] / np.linalg.norm(plain[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(cut, expected, atol=1e-6)
    raw = model.embed(texts, dimensions=8, normalize=False)
    np.testing.assert_array_equal(raw, model.embed(texts, normalize=False)[:, :8])
    assert model.embed([], dimensions=8).shape == (0, 8)
    for options, message in (
        ({"dimensions": 17}, "dimensions is 17; it must be from 1 to 16"),
        ({"dimensions": 0}, "dimensions is 0"),
        ({"pooling": "weighted"}, "no learned token weights"),
    ):
        with pytest.raises(UserError, match=message):
            model.embed(texts, **options)


def test_the_verb_takes_kind_and_dimensions(written, tmp_path):
    out = tmp_path / "vectors.npy"
    options = ["--kind=query", "--dimensions=8", "--no-normalize", "--out", str(out)]
    lines = tmp_path / "texts.txt"
    lines.write_text("the river froze\nthe ferry\n")
    assert cli.main(["embed", str(written), "--input", str(lines), *options]) == 0
    model = LoadedModel(read_model(written))
    expected = model.embed(
        ["the river froze", "the ferry"], kind="query", dimensions=8, normalize=False
    )
    np.testing.assert_allclose(np.load(out), expected, atol=1e-6)


@pytest.mark.usefixtures("_without_transformers")
def test_import_says_what_is_not_kept(copy, tmp_path):
    change(copy / "config_sentence_transformers.json", prompts={"query": "", "clustering": "c"})
    assert "the prompts 'clustering' are not kept" in import_model(copy, tmp_path / "out")["notes"]
