"""Directories that Transformers writes: states, pooled states and tokens equal to its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.artefacts.saved.reading import read_model
from bert_jax.errors import UserError
from bert_jax.model.heads import encode, pool
from bert_jax.model.task_heads import TaskHeadConfig, init_task_params

pytestmark = pytest.mark.parity

TOLERANCE = 1e-5
POOLED = ("BertModel", "BertForPreTraining", "BertForSequenceClassification")
UNPOOLED = ("BertForMaskedLM", "BertForTokenClassification", "BertForQuestionAnswering")
WORDS = ["the", "cat", "sat", "on", "##s", "mat", ",", "d", "##og", "."]
TEXTS = ("The cats sat on the mat.", "Dog, cat -- dogs")


def make_theirs(model_class, **fields):
    """A random model whose biases and norms are not 0 and 1."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=24, attn_implementation="eager", **fields,
    )  # fmt: skip
    model = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def save_tokenizer(directory, cased=False):
    from transformers import BertTokenizer

    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    if cased:
        vocab.append("The")
    tokenizer = BertTokenizer(
        vocab={token: id for id, token in enumerate(vocab)}, do_lower_case=not cased
    )
    tokenizer.save_pretrained(directory)
    return tokenizer


def assert_same_states(found, theirs, *, pooled):
    """On rows of three lengths, at their real tokens."""
    import torch

    random = np.random.default_rng(1)
    lengths = np.array([24, 11, 5])
    segment_ids = (np.arange(24) < lengths[:, None]).astype(np.int32)
    tokens = random.integers(5, 99, (3, 24)).astype(np.int32) * segment_ids
    type_ids = (np.arange(24) >= 4).astype(np.int32) * segment_ids
    # A pooler that is missing is fresh.
    head, key = TaskHeadConfig("tagging"), jax.random.key(0)
    params = init_task_params(found.config, head, key, encoder=found.params["encoder"])
    params = jax.tree.map(jnp.asarray, params)
    hidden = encode(
        found.config, params, jnp.asarray(tokens), jnp.asarray(type_ids), jnp.asarray(segment_ids)
    )
    ours_pooled = pool(found.config, params, hidden)
    encoder = getattr(theirs, "bert", theirs)
    with torch.no_grad():
        out = encoder(
            input_ids=torch.tensor(tokens).long(),
            token_type_ids=torch.tensor(type_ids).long(),
            attention_mask=torch.tensor(segment_ids).long(),
        )
    real = segment_ids > 0
    np.testing.assert_allclose(
        np.asarray(hidden)[real], out.last_hidden_state.numpy()[real], atol=TOLERANCE
    )
    assert found.has_pooler == pooled
    if pooled:
        np.testing.assert_allclose(ours_pooled, out.pooler_output.numpy(), atol=TOLERANCE)


def assert_same_tokens(found, theirs):
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        np.testing.assert_array_equal(found.tokenizer.encode(text).ids, ids)
        assert len(set(ids)) > 2


@pytest.mark.parametrize("model_class", [*POOLED, *UNPOOLED])
def test_every_class(tmp_path, model_class):
    theirs, tokenizer = make_theirs(model_class), save_tokenizer(tmp_path)
    theirs.save_pretrained(tmp_path)
    found = read_model(tmp_path)
    assert found.name == f"{tmp_path}, {model_class}"
    assert_same_states(found, theirs, pooled=model_class in POOLED)
    assert_same_tokens(found, tokenizer)


@pytest.mark.parametrize("model_class", ["BertModel", "BertForMaskedLM"])
def test_shards(tmp_path, model_class):
    theirs = make_theirs(model_class)
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    save_tokenizer(tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert_same_states(read_model(tmp_path), theirs, pooled=model_class in POOLED)


@pytest.mark.parametrize("model_class", ["BertModel", "BertForPreTraining"])
def test_names_of_the_first_releases(tmp_path, model_class):
    """gamma and beta, position ids, a decoder under its own name."""
    import torch
    from safetensors.torch import save_file

    theirs = make_theirs(model_class)
    theirs.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor.clone()
        for name, tensor in theirs.state_dict().items()
    }
    prefix = "" if model_class == "BertModel" else "bert."
    old[f"{prefix}embeddings.position_ids"] = torch.arange(24)[None]
    assert f"{prefix}encoder.layer.2.output.LayerNorm.beta" in old
    assert ("cls.predictions.decoder.weight" in old) == (model_class == "BertForPreTraining")
    save_file(old, tmp_path / "model.safetensors")
    assert_same_states(read_model(tmp_path), theirs, pooled=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "gelu_new"},
        {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 0.1},
        {"hidden_act": "relu", "type_vocab_size": 5, "classifier_dropout": 0.3},
    ],
)
def test_other_configurations(tmp_path, fields):
    theirs = make_theirs("BertForSequenceClassification", **fields)
    theirs.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert_same_states(read_model(tmp_path), theirs, pooled=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_saved_in_half_precision(tmp_path, dtype):
    import torch

    theirs = make_theirs("BertForMaskedLM").to(getattr(torch, dtype))
    theirs.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert_same_states(read_model(tmp_path), theirs.float(), pooled=False)


def test_a_cased_tokenizer_and_one_of_a_vocabulary_alone(tmp_path):
    make_theirs("BertModel").save_pretrained(tmp_path)
    tokenizer = save_tokenizer(tmp_path, cased=True)
    assert_same_tokens(read_model(tmp_path), tokenizer)
    for file in tmp_path.glob("*token*"):
        file.unlink()
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token, _ in vocab))
    assert_same_tokens(read_model(tmp_path), tokenizer)


def test_roberta_is_refused_although_its_names_are_those_of_bert(tmp_path):
    from transformers import RobertaConfig, RobertaModel

    RobertaModel(
        RobertaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                      intermediate_size=64)
    ).save_pretrained(tmp_path)  # fmt: skip
    save_tokenizer(tmp_path)
    with pytest.raises(UserError, match="model_type is 'roberta', and this class is not read"):
        read_model(tmp_path)
