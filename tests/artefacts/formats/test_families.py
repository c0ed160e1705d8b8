"""Families that compute what a BERT does, on arrays made here."""

import jax
import numpy as np
import pytest
from bert_names import from_huggingface
from huggingface_directory import MODEL
from roberta_arrays import MLM, TYPES, WORDS, bert_arrays, bert_config, roberta

from bert_jax.artefacts.formats.entries import to_tensors
from bert_jax.artefacts.formats.families import FAMILIES, family_to_import
from bert_jax.artefacts.formats.form import form_of
from bert_jax.artefacts.formats.model_config import config_to_huggingface
from bert_jax.errors import UserError


def distilbert():
    """The BERT without types, pooler and next-sentence head."""
    table = {
        "attention.self.query": "attention.q_lin", "attention.self.key": "attention.k_lin",
        "attention.self.value": "attention.v_lin", "attention.output.dense": "attention.out_lin",
        "attention.output.LayerNorm": "sa_layer_norm", "intermediate.dense": "ffn.lin1",
        "output.dense": "ffn.lin2", "output.LayerNorm": "output_layer_norm",
    }  # fmt: skip
    arrays = {}
    for name, array in bert_arrays().items():
        *start, part = name.rpartition(".")[0], name.rpartition(".")[2]
        stem = start[0]
        if stem.startswith("bert.encoder.layer."):
            number, _, rest = stem.removeprefix("bert.encoder.layer.").partition(".")
            arrays[f"distilbert.transformer.layer.{number}.{table[rest]}.{part}"] = array
        elif stem.startswith("bert.embeddings.") and "token_type" not in stem:
            arrays[f"distilbert.{stem.removeprefix('bert.')}.{part}"] = array
        elif stem == f"{MLM}transform.dense":
            arrays[f"vocab_transform.{part}"] = array
        elif stem == f"{MLM}transform.LayerNorm":
            arrays[f"vocab_layer_norm.{part}"] = array
        elif name == f"{MLM}bias":
            arrays["vocab_projector.bias"] = array
    arrays["vocab_projector.weight"] = arrays[f"distilbert.{WORDS}"]
    config = {
        "model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"],
        "vocab_size": 20, "max_position_embeddings": 128, "dim": 16, "n_layers": 2, "n_heads": 2,
        "hidden_dim": 32, "activation": "gelu", "dropout": 0.1, "attention_dropout": 0.1,
    }  # fmt: skip
    return config, arrays


def electra(made_by="ElectraForMaskedLM", width=16):
    arrays = {}
    for name, array in bert_arrays().items():
        if name.startswith("bert.") and ".pooler." not in name:
            arrays[name.replace("bert.", "electra.", 1)] = array
        elif name.startswith(f"{MLM}transform"):
            arrays[name.replace(f"{MLM}transform", "generator_predictions")] = array
        elif name == f"{MLM}bias":
            arrays["generator_lm_head.bias"] = array
    arrays["generator_lm_head.weight"] = arrays[f"electra.{WORDS}"]
    config = bert_config(model_type="electra", architectures=[made_by], embedding_size=width)
    return config, arrays


def imported(config, arrays):
    family_to_import(config, where="config.json")
    return form_of(config, arrays, where="config.json")


def assert_is_the_bert(form, without=()):
    """Each parameter is the BERT's, bit for bit, but token types and parts of the encoder."""
    params, wanted = form.params(None), from_huggingface(bert_arrays(), MODEL)
    assert set(params) == {"encoder", "mlm"}
    for tree in (params, wanted):
        del tree["encoder"]["embeddings"]["type"]
    for part in without:
        del wanted["encoder"][part]
    del wanted["nsp"]
    assert jax.tree.structure(params) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, params, wanted)
    assert form.model.num_positions == MODEL.num_positions
    assert form.model.num_types == 2


def types_of(form):
    return form.params(None)["encoder"]["embeddings"]["type"]


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta", "camembert"])
def test_roberta(kind):
    form = imported(*roberta(kind))
    assert_is_the_bert(form)
    wanted = bert_arrays()[TYPES]
    np.testing.assert_array_equal(types_of(form), np.stack([wanted[0], wanted[0]]))
    assert any("positions count from 2" in note for note in form.notes)


def test_distilbert():
    form = imported(*distilbert())
    assert_is_the_bert(form, ["pooler"])
    assert not types_of(form).any()
    config = form.model
    assert (config.norm_eps, config.mlp_dim, config.num_layers) == (1e-12, 32, 2)


def test_a_distilbert_with_the_field_names_of_other_families():
    """Transformers reads them as its own; with n_heads 12, the states would be others."""
    config, arrays = distilbert()
    names = {
        "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    }  # fmt: skip
    other = {names.get(name, name): value for name, value in config.items()}
    for found in (other, config | {"n_heads": 4, "num_attention_heads": 2}):
        assert imported(found, arrays).model == imported(config, arrays).model


def test_electra():
    assert_is_the_bert(imported(*electra()), ["pooler"])


def written(kind, form, parts=(), head=None):
    """The tensors that a class of the family has."""
    table = FAMILIES[kind].table(parts, None if head is None else head.kind)
    return to_tensors(form.params(head), form.model, table)


def test_an_electra_with_narrow_embeddings_and_back():
    config, arrays = electra(width=8)
    for name, array in arrays.items():
        if ".embeddings." in name or name.startswith("generator_"):
            arrays[name] = array[..., :8]
    arrays["generator_predictions.dense.weight"] = np.ones((8, 16), np.float32)
    arrays["generator_lm_head.bias"] = np.ones(20, np.float32)
    arrays["electra.embeddings_project.weight"] = np.ones((16, 8), np.float32)
    arrays["electra.embeddings_project.bias"] = np.ones(16, np.float32)
    form = imported(config, arrays)
    model = form.model
    assert (model.embedding_dim, model.hidden_dim, model.pooler_activation) == (8, 16, "gelu")
    params = form.params(None)
    assert params["encoder"]["embeddings"]["project"]["kernel"].shape == (8, 16)
    assert params["mlm"]["dense"]["kernel"].shape == (16, 8)
    fields = config_to_huggingface("electra", model)
    assert {**config, **fields} == config
    back = written("electra", form, ["mlm"])
    del arrays["generator_lm_head.weight"]  # the table
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)


def test_the_discriminators_head_keeps_its_names():
    config, arrays = electra("ElectraForPreTraining")
    arrays = {n: a for n, a in arrays.items() if not n.startswith("generator")}
    for name, shape in (("dense", (16, 16)), ("dense_prediction", (1, 16))):
        arrays[f"discriminator_predictions.{name}.weight"] = np.ones(shape, np.float32)
        arrays[f"discriminator_predictions.{name}.bias"] = np.ones(shape[0], np.float32)
    form = imported(config, arrays)
    assert (form.dropped, form.notes) == ((), ())
    assert form.params(None)["rtd"]["score"]["kernel"].shape == (16, 1)
    assert "rtd" not in form.params(None, pretraining=False)


def test_the_classifier_of_a_roberta_is_a_pooler_and_a_classifier():
    config, arrays = roberta(made_by="RobertaForSequenceClassification")
    dense = arrays["roberta.pooler.dense.weight"] + 1
    arrays["classifier.dense.weight"] = dense
    arrays["classifier.dense.bias"] = arrays["roberta.pooler.dense.bias"] + 1
    arrays["classifier.out_proj.weight"] = np.ones((3, 16), np.float32)
    arrays["classifier.out_proj.bias"] = np.ones(3, np.float32)
    for order in (list, lambda items: list(items)[::-1]):
        form = imported(config, dict(order(arrays.items())))
        params = form.params(form.outputs().head)
        np.testing.assert_array_equal(params["encoder"]["pooler"]["dense"]["kernel"].T, dense)
        assert params["head"]["kernel"].shape == (16, 3)
        assert sorted(form.dropped) == ["roberta.pooler.dense.bias", "roberta.pooler.dense.weight"]


@pytest.mark.parametrize(
    ("family", "names", "activation"),
    [
        (electra, ("classifier.dense.", "classifier.out_proj."), "gelu"),
        (distilbert, ("pre_classifier.", "classifier."), "relu"),
    ],
)
def test_a_classifier_of_another_family_and_back(family, names, activation):
    config, arrays = family()
    kind = config["model_type"]
    arrays = {name: array for name, array in arrays.items() if name.startswith(f"{kind}.")}
    random = np.random.default_rng(0)
    for name, rows in zip(names, (16, 3), strict=True):
        arrays[f"{name}weight"] = random.normal(size=(rows, 16)).astype(np.float32)
        arrays[f"{name}bias"] = random.normal(size=rows).astype(np.float32)
    config["architectures"] = [FAMILIES[kind].class_of("ForSequenceClassification")]
    form = imported(config, arrays)
    head = form.outputs().head
    assert form.model.pooler_activation == activation
    assert form.dropped == ()
    params = form.params(head)
    kernels = params["encoder"]["pooler"]["dense"]["kernel"], params["head"]["kernel"]
    for name, kernel in zip(names, kernels, strict=True):
        np.testing.assert_array_equal(kernel.T, arrays[f"{name}weight"])
    types = params["encoder"]["embeddings"]["type"]
    assert len(types) == (1 if family is distilbert else 2)
    assert {**config, **config_to_huggingface(kind, form.model)}.items() >= config.items()
    back = written(kind, form, head=head)
    extra = {f"distilbert.{TYPES.removeprefix('bert.')}"} if family is distilbert else set()
    assert back.keys() == arrays.keys() | extra
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)
    other = imported(config | {"architectures": ["AutoModel"]}, arrays)
    assert set(other.dropped) == {name for name in arrays if "classifier" in name}
    assert other.model.pooler_activation == "tanh"


def test_a_bert_stays_as_it_is():
    arrays = bert_arrays()
    form = imported(bert_config(architectures=["BertForPreTraining"]), arrays)
    assert form.arrays.keys() == arrays.keys()
    assert all(form.arrays[name] is array for name, array in arrays.items())
    assert (form.dropped, form.notes) == ((), ())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "albert", "embedding_size": 128, "num_hidden_layers": 12},
         r"its layers share their parameters, and .* them equal.*the ALBERT's tokenizer\.json"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; it must be one of bert, roberta"),
        ({"model_type": None}, "model_type is None"),
        ({"model_type": ["roberta"]}, r"model_type is \['roberta'\]"),
        ({"auto_map": {"AutoModel": "modeling.X"}}, "code of its own .auto_map.*never run"),
        ({"model_type": "electra", "embedding_size": "8"}, "embedding_size is '8'; it must be"),
        ({"model_type": "electra", "embedding_size": 0}, "embedding_size is 0; it must be from 1"),
        ({"model_type": "roberta", "pad_token_id": 200}, "positions begin after the padding id"),
        ({"model_type": "roberta", "pad_token_id": True}, "pad_token_id is True"),
        ({"model_type": "roberta", "max_position_embeddings": "9"}, "is '9' and pad_token_id is 1"),
    ],
)  # fmt: skip
def test_what_is_refused(changes, said):
    with pytest.raises(UserError, match=f"(?s)^config.json.*{said}"):
        imported(bert_config(**changes), {})


def test_all_that_does_not_fit_is_said_at_once():
    config, arrays = roberta()
    del arrays["roberta.encoder.layer.0.attention.self.query.weight"]
    del arrays["roberta.encoder.layer.1.attention.self.query.weight"]
    arrays["lm_head.bias"] = np.zeros(3, np.float32)
    arrays["roberta.encoder.layer.0.extra"] = np.zeros(3, np.float32)
    form = imported(config, arrays)
    with pytest.raises(UserError) as error:
        form.params(None)
    for said in (
        r"roberta.encoder.layer.0,1.attention.self.query.weight is missing",
        "lm_head.bias is (3,), but the configuration needs (20,)",
        "roberta.encoder.layer.0.extra is unexpected",
    ):
        assert said in str(error.value)


def test_the_names_of_the_first_releases():
    config, arrays = roberta()
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): array
        for name, array in arrays.items()
    }
    old["roberta.embeddings.position_ids"] = np.arange(130)
    assert_is_the_bert(imported(config, old))
