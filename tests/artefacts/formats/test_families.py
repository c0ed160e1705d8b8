"""Other families under BERT's names, on arrays made here."""

import numpy as np
import pytest
from huggingface_directory import MODEL
from roberta_arrays import MLM, TYPES, WORDS, bert_arrays, bert_config, roberta

from bert_jax.artefacts.formats.families import bert_names, class_written, from_bert, to_bert
from bert_jax.artefacts.formats.huggingface_config import (
    model_config_from_huggingface,
    model_config_to_huggingface,
)
from bert_jax.artefacts.formats.huggingface_names import from_huggingface, table_of, to_huggingface
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


def assert_is_the_bert(form, without):
    """Each array of BERT is there, bit for bit, but those whose names begin as in `without`."""
    config = model_config_from_huggingface(form.config, where="config.json")
    params = from_huggingface(form.arrays, config, None)
    assert set(params) == {"encoder", "mlm"}
    wanted = bert_arrays()
    for name, array in wanted.items():
        if not name.startswith(without):
            np.testing.assert_array_equal(form.arrays[name], array, err_msg=name)
    assert config.num_positions == MODEL.num_positions
    assert config.num_types == 2


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta", "camembert"])
def test_roberta(kind):
    form = to_bert(*roberta(kind), where="config.json")
    assert_is_the_bert(form, (TYPES, "cls.seq_relationship"))
    types, wanted = form.arrays[TYPES], bert_arrays()[TYPES]
    np.testing.assert_array_equal(types, np.stack([wanted[0], wanted[0]]))
    assert form.config["architectures"] == ["BertForMaskedLM"]
    assert any("positions count from 2" in note for note in form.notes)


def test_distilbert():
    form = to_bert(*distilbert(), where="config.json")
    assert_is_the_bert(form, (TYPES, "cls.seq_relationship", "bert.pooler"))
    assert not form.arrays[TYPES].any()
    config = model_config_from_huggingface(form.config, where="config.json")
    assert (config.norm_eps, config.mlp_dim, config.num_layers) == (1e-12, 32, 2)


def test_electra():
    config, arrays = electra()
    form = to_bert(config, arrays, where="config.json")
    assert_is_the_bert(form, ("cls.seq_relationship", "bert.pooler"))


def test_an_electra_with_narrow_embeddings_and_back():
    config, arrays = electra(width=8)
    for name, array in arrays.items():
        if ".embeddings." in name or name.startswith("generator_"):
            arrays[name] = array[..., :8]
    arrays["generator_predictions.dense.weight"] = np.ones((8, 16), np.float32)
    arrays["generator_lm_head.bias"] = np.ones(20, np.float32)
    arrays["electra.embeddings_project.weight"] = np.ones((16, 8), np.float32)
    arrays["electra.embeddings_project.bias"] = np.ones(16, np.float32)
    form = to_bert(config, arrays, where="config.json")
    model = form.model_config(where="config.json")
    assert (model.embedding_dim, model.hidden_dim, model.pooler_activation) == (8, 16, "gelu")
    params = from_huggingface(form.arrays, model)
    assert params["encoder"]["embeddings"]["project"]["kernel"].shape == (8, 16)
    assert params["mlm"]["dense"]["kernel"].shape == (16, 8)
    written = to_huggingface(params, model, table_of(["mlm"], pooler=False))
    fields, back = from_bert("electra", "ForMaskedLM", model_config_to_huggingface(model), written)
    assert fields.items() >= config.items()
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
    form = to_bert(config, arrays, where="config.json")
    assert (form.dropped, form.notes) == ((), ())
    model = form.model_config(where="config.json")
    params = from_huggingface(form.arrays, model)
    assert params["rtd"]["score"]["kernel"].shape == (16, 1)
    assert "rtd" not in from_huggingface(form.arrays, model, pretraining=False)


def test_the_classifier_of_a_roberta_is_a_pooler_and_a_classifier():
    config, arrays = roberta(made_by="RobertaForSequenceClassification")
    dense = arrays["roberta.pooler.dense.weight"] + 1
    arrays["classifier.dense.weight"] = dense
    arrays["classifier.dense.bias"] = arrays["roberta.pooler.dense.bias"] + 1
    arrays["classifier.out_proj.weight"] = np.ones((3, 16), np.float32)
    arrays["classifier.out_proj.bias"] = np.ones(3, np.float32)
    for order in (list, lambda items: list(items)[::-1]):
        form = to_bert(config, dict(order(arrays.items())), where="config.json")
        np.testing.assert_array_equal(form.arrays["bert.pooler.dense.weight"], dense)
        assert form.arrays["classifier.weight"].shape == (3, 16)
        assert sorted(form.dropped) == ["roberta.pooler.dense.bias", "roberta.pooler.dense.weight"]
        assert form.config["architectures"] == ["BertForSequenceClassification"]


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
    config["architectures"] = [class_written(kind, "ForSequenceClassification")]
    form = to_bert(config, arrays, where="config.json")
    assert form.pooler_activation == activation
    assert form.dropped == ()
    np.testing.assert_array_equal(
        form.arrays["bert.pooler.dense.weight"], arrays[f"{names[0]}weight"]
    )
    np.testing.assert_array_equal(form.arrays["classifier.weight"], arrays[f"{names[1]}weight"])
    assert len(form.arrays[TYPES]) == (1 if family is distilbert else 2)
    fields, back = from_bert(kind, "ForSequenceClassification", form.config, form.arrays)
    assert fields.items() >= config.items()
    assert back.keys() == arrays.keys()
    assert all(back[name] is array for name, array in arrays.items())
    assert bert_names(kind, "ForSequenceClassification", arrays).keys() == form.arrays.keys() - (
        {TYPES} if family is distilbert else set()
    )
    other = to_bert(config | {"architectures": ["AutoModel"]}, arrays, where="config.json")
    assert set(other.dropped) == {name for name in arrays if "classifier" in name}
    assert other.pooler_activation == "tanh"


def test_a_bert_stays_as_it_is():
    arrays = bert_arrays()
    form = to_bert(bert_config(architectures=["BertForPreTraining"]), arrays, where="config.json")
    assert form.arrays.keys() == arrays.keys()
    assert all(form.arrays[name] is array for name, array in arrays.items())
    assert (form.dropped, form.notes) == ((), ())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "albert", "embedding_size": 128, "num_hidden_layers": 12},
         r"its \d+ layers share 1 set of parameters, which training here would not keep equal"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; what can be imported is bert, roberta"),
        ({"model_type": None}, "model_type is None"),
        ({"model_type": ["roberta"]}, r"model_type is \['roberta'\]"),
        ({"auto_map": {"AutoModel": "modeling.X"}}, "code of its own .auto_map.*never run"),
        ({"model_type": "electra", "embedding_size": "8"}, "embedding_size is '8'; it must be"),
        ({"model_type": "electra", "embedding_size": 0}, "embedding_size is 0; it must be from 1"),
        ({"model_type": "roberta", "pad_token_id": 200}, "positions begin after the id of padding"),
        ({"model_type": "roberta", "pad_token_id": True}, "pad_token_id True"),
        ({"model_type": "roberta", "max_position_embeddings": "9"}, "is '9' and pad_token_id 1"),
    ],
)  # fmt: skip
def test_what_is_refused(changes, said):
    with pytest.raises(UserError, match=f"(?s)^config.json.*{said}"):
        to_bert(bert_config(**changes), {}, where="config.json")


def test_all_that_does_not_fit_is_said_at_once():
    config, arrays = roberta()
    del arrays["roberta.encoder.layer.0.attention.self.query.weight"]
    del arrays["roberta.encoder.layer.1.attention.self.query.weight"]
    arrays["lm_head.bias"] = np.zeros(3, np.float32)
    arrays["roberta.encoder.layer.0.extra"] = np.zeros(3, np.float32)
    form = to_bert(config, arrays, where="config.json")
    bert = model_config_from_huggingface(form.config, where="config.json")
    with pytest.raises(UserError) as error:
        from_huggingface(form.arrays, bert, None)
    for said in (
        r"bert.encoder.layer.0,1.attention.self.query.weight is missing",
        "cls.predictions.bias is (3,), the configuration wants (20,)",
        "bert.encoder.layer.0.extra is unexpected",
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
    form = to_bert(config, old, where="config.json")
    assert_is_the_bert(form, (TYPES, "cls.seq_relationship"))
