"""`config.json` of modern families: both generations of keys, what is refused, and names."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from bert_jax.artefacts.formats.entries import to_tensors
from bert_jax.artefacts.formats.families import FAMILIES
from bert_jax.artefacts.formats.form import form_of
from bert_jax.artefacts.formats.model_config import (
    config_from_huggingface,
    config_to_huggingface,
    kind_of,
    plain,
    unlike,
)
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import encode, init_params, vocabulary_projection

SIZES = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
OLD = {
    **SIZES, "model_type": "modernbert", "global_attn_every_n_layers": 3, "local_attention": 16,
    "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
}  # fmt: skip
NEOBERT = {
    **SIZES, "model_type": "neobert", "max_length": 64, "norm_eps": 1e-5,
    "auto_map": {"AutoModel": "model.NeoBERT"},
}  # fmt: skip


def rope(full, sliding):
    return {
        "full_attention": {"rope_theta": full, "rope_type": "default"},
        "sliding_attention": {"rope_theta": sliding, "rope_type": "default"},
    }


def read(found, **changes):
    return config_from_huggingface({**found, **changes}, where="config.json")


def refused(found, **changes):
    with pytest.raises(UserError) as caught:
        read(found, **changes)
    return str(caught.value)


def test_both_generations_say_the_same():
    types = ["full_attention", "sliding_attention", "sliding_attention"] * 2
    new = {**SIZES, "model_type": "modernbert", "local_attention": 16}
    new |= {"layer_types": types, "rope_parameters": rope(160000.0, 10000.0)}
    config = read(OLD)
    assert read(new) == config
    assert (config.attention_pattern, config.local_window) == ("GLL", 8)
    assert (config.rope_theta, config.local_rope_theta) == (160000.0, 10000.0)
    assert not config.first_norm


@pytest.mark.parametrize("number", range(1, 9))
def test_every_list_of_layers_comes_in_and_goes_out(number):
    """A cycle need not end with the last layer: G L L G G is the cycle GLLG."""
    names = {"G": "full_attention", "L": "sliding_attention"}
    for letters in itertools.product("GL", repeat=number):
        types = [names[letter] for letter in letters]
        config = read(OLD, num_hidden_layers=number, layer_types=types)
        assert letters == tuple(config.layer_kind(n).letter for n in range(number))
        assert config_to_huggingface("modernbert", config)["layer_types"] == types
        for cycle in range(1, number + 1):  # one that a recipe says, of any length
            if "L" in letters[cycle:]:
                continue  # each cycle once
            pattern = "".join(letters[:cycle])
            model = dataclasses.replace(config, attention_pattern=pattern)
            written = config_to_huggingface("modernbert", model)
            kinds = [names[pattern[n % cycle]] for n in range(number)]
            assert written["layer_types"] == kinds
            every = written.get("global_attn_every_n_layers", 1)
            if every > 1:
                assert kinds == [names["L" if n % every else "G"] for n in range(number)]
            found = config_from_huggingface(written, where="config.json")
            assert found == plain(model) == plain(plain(model))


def test_each_part_has_its_own_dropout():
    given = {"embedding_dropout": 0.1, "mlp_dropout": 0.2, "attention_dropout": 0.3}
    config = read(OLD, **given)
    assert given.items() <= config_to_huggingface("modernbert", config).items()
    unset = dataclasses.replace(config, embedding_dropout_rate=None, mlp_dropout_rate=None)
    rates = dict.fromkeys(("embedding_dropout", "mlp_dropout"), config.hidden_dropout_rate)
    assert rates.items() <= config_to_huggingface("modernbert", unset).items()


def test_keys_of_today_count_before_the_older_ones():
    config = read(OLD, rope_parameters=rope(5.0, 7.0), layer_types=["full_attention"] * 6)
    assert (config.rope_theta, config.local_rope_theta) == (5.0, 7.0)
    assert config.attention_pattern == "G"
    part = {"full_attention": {"rope_theta": 5.0}}
    config = read(OLD, rope_parameters=part, local_rope_theta=9.0)
    assert (config.rope_theta, config.local_rope_theta) == (5.0, 9.0)


@pytest.mark.parametrize("theta", [None, -1, 0, "10000", True])
def test_a_theta_that_is_no_base_is_refused_by_name(theta):
    message = refused(OLD, local_rope_theta=theta)
    assert message.startswith(f"config.json: local_rope_theta is {theta!r}; it must be a number")
    assert ("the theta of the global layers" in message) == (theta in (None, -1))
    message = refused(OLD, rope_parameters=rope(1.0, theta))
    assert "rope_parameters.sliding_attention.rope_theta is" in message
    assert "global_rope_theta is" in refused(OLD, global_rope_theta=theta)


def test_all_that_is_wrong_is_told_at_once():
    message = refused(
        OLD, norm_bias="no", layer_types=["full_attention"], hidden_size=0, rope_scaling={"a": 1},
        hidden_activation="swoosh",
    )  # fmt: skip
    for part in ("norm_bias is 'no'", "layer_types is a list of 1", "hidden_size is 0",
                 "rope_scaling is an object of 1", "hidden_activation is 'swoosh'"):  # fmt: skip
        assert part in message
    del (found := dict(OLD))["num_hidden_layers"]
    assert "num_hidden_layers is missing" in refused(found)
    said = "rope_parameters.full_attention is 3; an object with rope_theta is needed"
    assert said in refused(OLD, rope_parameters=3)
    yarn = rope(1.0, 2.0)
    yarn["full_attention"]["rope_type"] = "yarn"
    assert "full_attention.rope_type is 'yarn'" in refused(OLD, rope_parameters=yarn)


@pytest.mark.parametrize("model_type", ["modernbert", "eurobert"])
def test_a_scaled_rotation_under_its_older_name_is_refused(model_type):
    part = {"type": "linear", "factor": 4.0, "rope_theta": 100.0}
    part = {"full_attention": part} if model_type == "modernbert" else part
    message = refused(SIZES, model_type=model_type, rope_parameters=part)
    assert ".type is 'linear'; only 'default' is supported" in message


def test_an_old_name_of_the_pooling_is_refused():
    assert read(EUROBERT, clf_pooling="late") == read(EUROBERT)
    message = refused(EUROBERT, clf_pooling="mean")
    assert "clf_pooling is 'mean'; rename this old field to classifier_pooling" in message


def test_a_window_may_not_have_two_sizes():
    assert read(OLD, sliding_window=8) == read(OLD)
    message = refused(OLD, sliding_window=16)
    assert "sliding_window is 16, not 8, half of local_attention" in message


EUROBERT = {**SIZES, "model_type": "eurobert", "num_key_value_heads": 2, "rope_theta": 250000.0}
NOMIC = {**SIZES, "model_type": "nomic_bert", "type_vocab_size": 2, "layer_norm_eps": 1e-12}


@pytest.mark.parametrize("found", [OLD, EUROBERT, NOMIC, NEOBERT], ids=lambda f: f["model_type"])
def test_what_is_read_is_written(found):
    config = read(found)
    assert kind_of(config) == found["model_type"]
    written = config_to_huggingface(found["model_type"], config)
    assert read(written) == config
    assert {name: written[name] for name in SIZES.keys() & found.keys() & written.keys()} == {
        name: found[name] for name in SIZES.keys() & written.keys()
    }


def test_older_and_newer_keys_are_both_written():
    written = config_to_huggingface("modernbert", read(OLD))
    assert written["global_attn_every_n_layers"] == 3
    assert written["layer_types"][:4] == [
        "full_attention", "sliding_attention", "sliding_attention", "full_attention",
    ]  # fmt: skip
    assert (written["global_rope_theta"], written["local_rope_theta"]) == (160000.0, 10000.0)
    assert written["rope_parameters"] == rope(160000.0, 10000.0)
    assert written["local_attention"] == 16


def test_a_model_of_no_family_is_told_what_is_unlike():
    config = dataclasses.replace(read(OLD), first_norm=True)
    assert kind_of(config) is None
    assert unlike("modernbert", config) == ["model.first_norm is True, not False"]
    eurobert = dataclasses.replace(read(EUROBERT), decoder_bias=True)
    assert unlike("eurobert", eurobert) == ["model.decoder_bias is True, unlike model.mlp_bias"]
    assert kind_of(ModelConfig()) == "bert"
    scaled = dataclasses.replace(read(OLD), scale_embeddings=True)
    assert unlike("modernbert", scaled) == ["model.scale_embeddings is True, not False"]
    assert kind_of(ModelConfig(scale_embeddings=True)) is None
    assert kind_of(ModelConfig(positions="sinusoidal")) is None


def small(found):
    config = read(found)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), shapes)
    params["encoder"]["embeddings"]["token"][100:] = 0
    for part in ("decoder", "bias"):
        if part in params["mlm"]:
            params["mlm"][part][100:] = 0
    if not config.first_norm:
        params["encoder"]["layers"]["attention_norm"]["scale"][0] = 1
    return config, params


@pytest.mark.parametrize("found", [OLD, EUROBERT, NEOBERT], ids=lambda f: f["model_type"])
def test_parameters_go_there_and_back(found):
    config, params = small(found)
    arrays = to_tensors(params, config, FAMILIES[found["model_type"]].table(["mlm"]))
    assert all("{" not in name for name in arrays)
    form = form_of(found, arrays, where="config.json")
    back = form.params(None)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    encoder = form.params(None, pretraining=False)
    if found["model_type"] == "modernbert":  # whose heads share the map of the masked-LM head
        shared = {part: params["mlm"][part] for part in ("dense", "norm")}
        jax.tree.map(np.testing.assert_array_equal, encoder.pop("transform"), shared)
    assert encoder.keys() == {"encoder"}
    prefix = form.family.prefix
    bare = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
    alone = form_of(found, bare, where="config.json").params(None)
    jax.tree.map(np.testing.assert_array_equal, alone, encoder)


def test_the_first_layer_has_no_norm_in_a_file():
    config, params = small(OLD)
    arrays = to_tensors(params, config, FAMILIES["modernbert"].table(["mlm"]))
    assert "model.layers.0.attn_norm.weight" not in arrays
    assert "model.layers.1.attn_norm.weight" in arrays
    assert arrays["model.layers.0.attn.Wqkv.weight"].shape == (96, 32)
    assert arrays["model.layers.0.mlp.Wi.weight"].shape == (96, 32)
    arrays["model.layers.0.attn_norm.weight"] = np.ones(32, np.float32)
    del arrays["model.layers.2.mlp.Wo.weight"]
    with pytest.raises(UserError) as caught:
        form_of(OLD, arrays, where="config.json").params(None)
    assert "model.layers.2.mlp.Wo.weight is missing" in str(caught.value)
    assert "model.layers.0.attn_norm.weight is unexpected" in str(caught.value)


def test_a_tied_decoder_may_be_there_twice_but_not_differ():
    config, params = small(OLD)
    arrays = to_tensors(params, config, FAMILIES["modernbert"].table(["mlm"]))
    arrays["decoder.weight"] = arrays["model.embeddings.tok_embeddings.weight"]
    form = form_of(OLD, arrays, where="config.json")
    jax.tree.map(np.testing.assert_array_equal, form.params(None), params)
    arrays["decoder.weight"] = arrays["decoder.weight"] + 1
    with pytest.raises(UserError, match=r"decoder\.weight differs from model\.embed"):
        form_of(OLD, arrays, where="config.json").params(None)


def neobert(arrays, tokens, heads):
    """Logits of one row in float64, written from the published description.

    Rows of `qkv` are head by head [q k v]; neighbouring numbers are rotated together.
    """
    w = {name.removeprefix("model."): a.astype(np.float64) for name, a in arrays.items()}
    x = w["encoder.weight"][tokens]
    length, dim = x.shape
    width = dim // heads
    angles = np.arange(length)[:, None] * 10000.0 ** -(np.arange(0, width, 2) / width)
    turn = np.exp(1j * angles)[:, None]

    def normed(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"]

    def pairs(y):
        return (y[..., 0::2] + 1j * y[..., 1::2]) * turn

    for n in range(6):
        layer = f"transformer_encoder.{n}"
        rows = normed(x, f"{layer}.attention_norm") @ w[f"{layer}.qkv.weight"].T
        query, key, value = np.split(rows.reshape(length, heads, 3 * width), 3, axis=-1)
        scores = np.einsum("lhk,shk->hls", pairs(query), pairs(key).conj()).real / np.sqrt(width)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        y = np.einsum("hls,shk->lhk", shares, value).reshape(length, dim)
        x = x + y @ w[f"{layer}.wo.weight"].T
        both = normed(x, f"{layer}.ffn_norm") @ w[f"{layer}.ffn.w12.weight"].T
        first, second = np.split(both, 2, axis=-1)
        x = x + (first / (1 + np.exp(-first)) * second) @ w[f"{layer}.ffn.w3.weight"].T
    return normed(x, "layer_norm") @ w["decoder.weight"].T + w["decoder.bias"]


@pytest.mark.parametrize(("size", "width"), [(48, 32), (50, 40), (60, 40), (61, 40), (3072, 2048)])
def test_the_width_of_a_neobert_is_two_thirds_rounded_up_to_eights(size, width):
    assert read(NEOBERT, intermediate_size=size).mlp_dim == width


def test_neobert_computes_what_its_description_says():
    config, params = small(NEOBERT)
    params = jax.tree.map(lambda leaf: leaf * np.float32(0.3), params)
    arrays = to_tensors(params, config, FAMILIES["neobert"].table(["mlm"]))
    assert arrays["model.transformer_encoder.1.qkv.weight"].shape == (96, 32)
    tokens = np.random.default_rng(1).integers(0, 100, (1, 24))
    form = form_of(NEOBERT, arrays, where="config.json")
    params = form.params(None)

    @jax.jit
    def logits(params, tokens):
        hidden = encode(config, params, tokens, tokens * 0, tokens * 0 + 1)
        return vocabulary_projection(config, params, hidden).logits()[..., :100]

    expected = neobert(arrays, tokens[0], config.num_heads)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits(params, tokens)[0], expected, atol=1e-5)
    assert config.mlp_dim == 32
    assert config_to_huggingface("neobert", config)["intermediate_size"] == 48
    assert "was not run" in form.notes[0]


DEBERTA = {
    **SIZES, "model_type": "deberta-v2", "relative_attention": True, "position_buckets": 16,
    "position_biased_input": False, "pos_att_type": "p2c|c2p", "share_att_key": True,
    "norm_rel_ebd": "layer_norm", "max_relative_positions": -1, "layer_norm_eps": 1e-7,
}  # fmt: skip


def test_the_relative_positions_of_a_deberta():
    config = read(DEBERTA)
    assert (config.positions, config.relative_terms) == ("relative", "c2p|p2c")
    assert (config.relative_buckets, config.relative_distance) == (16, 0)
    assert (config.relative_shared, config.relative_norm) == (True, True)
    plain_config = read(DEBERTA, pos_att_type=["c2p"], position_buckets=-1, norm_rel_ebd="none")
    assert (plain_config.relative_terms, plain_config.relative_norm) == ("c2p", False)
    assert plain_config.relative_buckets == 0
    for given in (config, plain_config):
        written = config_to_huggingface("deberta-v2", given)
        assert "rope_theta" not in written
        assert read(written) == given


def test_a_table_of_positions_in_a_file_of_a_deberta_is_not_read():
    """Some files of DeBERTa-v3 have one, which their configurations do not use."""
    config, params = small(DEBERTA)
    arrays = to_tensors(params, config, FAMILIES["deberta-v2"].table(["mlm"]))
    wanted = form_of(DEBERTA, arrays, where="config.json").params(None)
    name = "deberta.embeddings.position_embeddings.weight"
    form = form_of(DEBERTA, arrays | {name: np.ones((64, 32), np.float32)}, where="config.json")
    assert (form.dropped, form.notes) == ((name,), ())
    jax.tree.map(np.testing.assert_array_equal, form.params(None), wanted)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"relative_attention": None}, "relative_attention is False"),
        ({"position_biased_input": None}, "position_biased_input is True"),
        ({"type_vocab_size": 2}, "type_vocab_size is 2; token types are not supported"),
        ({"conv_kernel_size": 3}, "a convolution (DeBERTa-v2 xlarge) is not supported"),
        ({"legacy": False}, "legacy is False"),
        ({"embedding_size": 16}, "model.embedding_dim is 16, not 0"),
        ({"pos_att_type": "p2p"}, "pos_att_type is 'p2p'; it must be one of p2c|c2p"),
        ({"norm_rel_ebd": "batch"}, "norm_rel_ebd is 'batch'; it must be one of layer_norm, none"),
        ({"position_buckets": -2}, "position_buckets is -2; it must be from -1"),
        ({"pos_att_type": None}, "pos_att_type is ''; it must be one of p2c|c2p"),
    ],
)
def test_what_a_deberta_must_not_have(fields, said):
    found = {name: value for name, value in {**DEBERTA, **fields}.items() if value is not None}
    assert said in refused(found)
