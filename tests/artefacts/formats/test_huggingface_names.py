"""Hugging Face's names: there and back, their variants, and every mismatch at once."""

import jax
import ml_dtypes
import numpy as np
import pytest
from bert_names import from_huggingface, table_of, to_huggingface

from bert_jax.artefacts.formats.entries import affine, read_tensors
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import init_params
from bert_jax.model.task_heads import TaskHeadConfig, init_task_params

MODEL = ModelConfig(
    vocab_size=20, num_positions=24, hidden_dim=16, num_layers=3, num_heads=2, mlp_dim=32
)
HEADS = {
    "pretraining": None,
    "classification": TaskHeadConfig("classification", 3),
    "tagging": TaskHeadConfig("tagging", 5),
    "span": TaskHeadConfig("span"),
}
NORM = "bert.embeddings.LayerNorm"
QUERY = "bert.encoder.layer.{}.attention.self.query.weight"


def make(head):
    """Random parameters whose padding rows are 0."""
    random, key = np.random.default_rng(0), jax.random.key(0)
    shapes = jax.eval_shape(
        lambda: init_params(MODEL, key) if head is None else init_task_params(MODEL, head, key)
    )
    params = jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), shapes)
    params["encoder"]["embeddings"]["token"][MODEL.vocab_size :] = 0
    if head is None:
        params["mlm"]["bias"][MODEL.vocab_size :] = 0
    return params


@pytest.fixture(scope="module")
def weights():
    return to_huggingface(make(None), MODEL)


def refused(state_dict, config=MODEL, head=None):
    with pytest.raises(UserError) as caught:
        from_huggingface(state_dict, config, head)
    return str(caught.value)


def state_dict_of(params, head):
    """Their classes for tags and spans have no pooler."""
    if head is None:
        return to_huggingface(params, MODEL)
    table = table_of((), head, pooler=head.kind == "classification")
    return to_huggingface(params, MODEL, table)


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("kind", HEADS)
def test_there_and_back(kind):
    params = make(HEADS[kind])
    state_dict = state_dict_of(params, HEADS[kind])
    has_pooler = kind in ("pretraining", "classification")
    assert ("bert.pooler.dense.weight" in state_dict) == has_pooler
    if not has_pooler:
        del params["encoder"]["pooler"]
    assert_equal(from_huggingface(state_dict, MODEL, HEADS[kind]), params)
    encoder = from_huggingface(state_dict, MODEL, pretraining=False)
    assert_equal(encoder, {"encoder": params["encoder"]})


@pytest.mark.parametrize("kind", ["tagging", "span"])
def test_a_pooler_of_a_model_that_needs_none_is_kept(kind):
    """Transformers before 4.0 gave one to every class."""
    params = make(HEADS[kind])
    state_dict = to_huggingface(params, MODEL, table_of((), HEADS[kind]))
    found = from_huggingface(state_dict, MODEL, HEADS[kind])["encoder"]["pooler"]["dense"]
    np.testing.assert_array_equal(found["kernel"].T, state_dict["bert.pooler.dense.weight"])


def test_older_names_and_a_bare_encoder(weights):
    old = {
        name.removeprefix("bert.")
        .replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta"): array
        for name, array in weights.items()
        if name.startswith("bert.")
    }
    old["embeddings.position_ids"] = np.arange(24)[None]
    assert "encoder.layer.1.output.LayerNorm.gamma" in old
    assert_equal(from_huggingface(old, MODEL), {"encoder": make(None)["encoder"]})


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_weights_of_other_precisions_become_float32(weights, dtype):
    narrow = {name: array.astype(dtype) for name, array in weights.items()}
    expected = from_huggingface({n: a.astype(np.float32) for n, a in narrow.items()}, MODEL)
    found = from_huggingface(narrow, MODEL)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(found))
    assert_equal(found, expected)


def test_the_decoder_may_be_there_twice_but_not_differ(weights):
    decoder = {
        "cls.predictions.decoder.weight": weights["bert.embeddings.word_embeddings.weight"],
        "cls.predictions.decoder.bias": weights["cls.predictions.bias"],
    }
    expected = make(None)
    assert_equal(from_huggingface(weights | decoder, MODEL), expected)
    second_name = {n: a for n, a in weights.items() if n != "cls.predictions.bias"} | decoder
    assert_equal(from_huggingface(second_name, MODEL), expected)
    message = refused(weights | {name: array + 1 for name, array in decoder.items()})
    assert "cls.predictions.decoder.weight differs from bert.embeddings.word_emb" in message
    assert "cls.predictions.decoder.bias differs from cls.predictions.bias" in message
    # The encoder alone does not depend on it.
    other = weights | {n: a + 1 for n, a in decoder.items()}
    assert set(from_huggingface(other, MODEL, pretraining=False)) == {"encoder"}
    with pytest.raises(UserError, match="differs from cls"):
        from_huggingface(other, MODEL)


def test_each_head_is_there_or_not(weights):
    expected = make(None)
    for prefix, name in (("cls.predictions.", "mlm"), ("cls.seq_relationship.", "nsp")):
        some = {n: a for n, a in weights.items() if not n.startswith(prefix)}
        found = from_huggingface(some, MODEL)
        assert_equal(found, {key: tree for key, tree in expected.items() if key != name})
    with pytest.raises(UserError, match=r"cls\.predictions\.bias is missing"):
        from_huggingface({n: a for n, a in weights.items() if n != "cls.predictions.bias"},
                               MODEL)  # fmt: skip
    # Of a multiple choice, say.
    assert_equal(from_huggingface(weights | {"classifier.bias": np.zeros(1)}, MODEL), expected)


def test_every_mismatch_is_told_at_once(weights):
    bad = dict(weights)
    del bad[QUERY.format(1)], bad["cls.seq_relationship.bias"]
    for layer in range(3):
        name = f"bert.encoder.layer.{layer}.output.dense.weight"
        bad[name] = bad[name].T
    bad[f"{NORM}.bias"] = np.full(16, np.nan, np.float32)
    bad["bert.pooler.dense.bias"] = np.zeros(16, np.int8)
    bad["bert.pooler.dense.weight"] = np.full((16, 16), 1e300)
    bad["bert.encoder.layer.3.x"] = np.zeros(1)
    message = refused(bad)
    for part in (
        "bert.encoder.layer.1.attention.self.query.weight is missing",
        "cls.seq_relationship.bias is missing",
        "bert.encoder.layer.0,1,2.output.dense.weight is (32, 16), but the configuration needs "
        "(16, 32)",
        f"{NORM}.bias has values that are not finite",
        "bert.pooler.dense.weight has values that are not finite",
        "bert.pooler.dense.bias has numbers of type int8",
        "bert.encoder.layer.3.x is unexpected",
    ):
        assert part in message


def test_a_long_list_is_cut(weights):
    message = refused(weights | {f"extra.{n}": np.zeros(1) for n in range(99)})
    assert message.count("is unexpected") == 40
    assert message.endswith("and 59 more")


def test_a_half_of_a_pooler_is_no_pooler_that_is_missing(weights):
    bad = {n: a for n, a in weights.items() if n != "bert.pooler.dense.bias"}
    with pytest.raises(UserError, match=r"bert\.pooler\.dense\.bias is missing"):
        from_huggingface(bad, MODEL)


def test_one_parameter_under_two_names(weights):
    for second in (f"{NORM}.gamma", "embeddings.LayerNorm.weight"):
        message = refused(weights | {second: weights[f"{NORM}.weight"]})
        assert f"two names, {NORM}.weight and {second}" in message


def test_a_head_of_another_number_of_labels(weights):
    state_dict = state_dict_of(make(HEADS["tagging"]), HEADS["tagging"])
    message = refused(state_dict, head=TaskHeadConfig("tagging", 4))
    assert "classifier.weight is (5, 16), but the configuration needs (4, 16)" in message
    message = refused(state_dict, head=HEADS["span"])
    assert "qa_outputs.weight is missing" in message


def test_a_kernel_of_any_size_is_transposed():
    """Strips of 32 rows are; numbers whose sum is infinite are finite."""
    theirs = np.random.default_rng(0).normal(size=(77, 45)).astype(np.float32)
    theirs[40] = 3e38
    shapes = {"map": {"kernel": jax.ShapeDtypeStruct((9, 5, 77), np.float32)}}
    table = affine("map", "map", num_inputs=2)
    found = read_tensors(table, shapes, {"map.weight": theirs}, MODEL, {})
    assert np.array_equal(found["map"]["kernel"], theirs.T.reshape(9, 5, 77))
