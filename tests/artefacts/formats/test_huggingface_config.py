"""config.json: both ways, equal to Transformers' defaults, and what is refused by its field."""

import dataclasses

import pytest

from bert_jax.artefacts.formats.families import is_read, unread
from bert_jax.artefacts.formats.model_config import config_from_huggingface, config_to_huggingface
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig

OTHER = ModelConfig(
    vocab_size=99, num_positions=24, num_types=3, hidden_dim=32, num_layers=2, num_heads=4,
    mlp_dim=64, hidden_dropout_rate=0.0, attention_dropout_rate=0.25, norm_eps=1e-5,
    init_std=0.01, activation="relu",
)  # fmt: skip


def read(**fields):
    found = {"model_type": "bert", **fields}
    if not is_read(found):
        raise unread(found, where="x/config.json")
    return config_from_huggingface(found, where="x/config.json")


def refused(**fields):
    with pytest.raises(UserError) as caught:
        read(**fields)
    assert "x/config.json" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu"])
def test_there_and_back(activation):
    for config in (ModelConfig(activation=activation),
                   dataclasses.replace(OTHER, activation=activation)):  # fmt: skip
        found = config_to_huggingface("bert", config)
        assert found["model_type"] == "bert"
        assert read(**found) == config


def test_every_field_of_the_architecture_is_carried():
    """One that is forgotten would come back as its default; `OTHER` has none of them."""
    computed = {"dtype", "attention_impl", "scan_unroll", "remat"}
    computed.add("pooler_activation")  # config.json has none: the class of the head says so
    computed.add("embedding_dim")  # BERT has one width
    # No BERT has anything but the default of these.
    computed |= {
        "num_kv_heads", "gated", "embedding_dropout_rate", "mlp_dropout_rate", "norm", "norm_bias",
        "norm_order", "embedding_norm", "first_norm", "positions", "rope_theta",
        "local_rope_theta", "local_window", "attention_pattern", "attention_bias", "mlp_bias",
        "init", "pooler", "head_transform", "head_bias", "head_activation", "decoder_bias", "tied",
        "scale_embeddings", "relative_terms", "relative_buckets", "relative_distance",
        "relative_shared", "relative_norm",
    }  # fmt: skip
    for field in dataclasses.fields(ModelConfig):
        if field.name not in computed:
            assert getattr(OTHER, field.name) != field.default, field.name
    assert read(**config_to_huggingface("bert", OTHER)) == OTHER


def test_defaults_and_fields_of_heads():
    assert read() == ModelConfig()
    harmless = {"num_labels": 7, "is_decoder": False, "position_embedding_type": "absolute"}
    assert read(**harmless, pruned_heads={}) == ModelConfig()
    assert read(hidden_dropout_prob=0) == ModelConfig(hidden_dropout_rate=0.0)
    assert read(hidden_act="gelu_pytorch_tanh").activation == "gelu_tanh"
    assert read(hidden_act="gelu_new").activation == "gelu_tanh"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "roberta"}, "model_type is 'roberta', and this class is not read directly"),
        ({"model_type": None}, 'add "model_type": "bert"'),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'; it must be one of gelu, gelu_new"),
        ({"hidden_act": ["gelu"]}, "hidden_act is a list of 1"),
        ({"position_embedding_type": "relative_key"}, "learned absolute positions"),
        ({"is_decoder": True}, "is_decoder is True; a decoder"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is an object of 1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is an object of 1"),
        ({"hidden_size": 32, "num_attention_heads": 5}, "32 is not divisible by num_attention"),
        ({"vocab_size": "99"}, "vocab_size is '99'; it must be from 1 to 16,777,216"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; .* from 1 to 1,024"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"hidden_dropout_prob": 1}, r"hidden_dropout_prob is 1; it must be in \[0, 1\)"),
        ({"attention_probs_dropout_prob": 10**400}, "attention_probs_dropout_prob is 1000"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps is 0.0; it must be between 0 and 1"),
        ({"initializer_range": float("nan")}, "initializer_range is nan"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_its_field(fields, message):
    with pytest.raises(UserError, match=message):
        read(**fields)


def test_everything_is_told_at_once():
    message = refused(vocab_size=0, hidden_act="mish", is_decoder=True, layer_norm_eps=2.0)
    for name in ("vocab_size", "hidden_act", "is_decoder", "layer_norm_eps"):
        assert f"{name} is" in message


@pytest.mark.parity
def test_live_defaults_and_fields_are_those_of_transformers():
    from transformers import BertConfig

    assert read(**BertConfig().to_dict()) == ModelConfig()
    theirs = BertConfig(**config_to_huggingface("bert", OTHER))
    assert read(**theirs.to_dict()) == OTHER
    for name, value in config_to_huggingface("bert", OTHER).items():
        assert getattr(theirs, name) == value
