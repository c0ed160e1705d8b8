"""Google's original checkpoints: the one that TensorFlow wrote, and what is wrong with others."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pretraining import apply_pretraining
from tensor_bundle_writer import write_bundle

from bert_jax.artefacts.formats.tf_checkpoint import is_tf_checkpoint, read_tf_checkpoint
from bert_jax.errors import UserError
from bert_jax.files.untrusted.tensor_bundle import open_tensor_bundle

GOLDEN = Path(__file__).parents[2] / "golden" / "tf_checkpoint"
INDEX = "bert_model.ckpt.index"


@pytest.fixture
def variables() -> dict[str, np.ndarray]:
    return {name: tensor.array for name, tensor in open_tensor_bundle(GOLDEN / INDEX).items()}


def write(directory: Path, variables: dict[str, np.ndarray], **changes: Any) -> Path:
    """The golden model's other files with such variables and fields; None takes a field away."""
    directory.mkdir(exist_ok=True)
    shutil.copy(GOLDEN / "vocab.txt", directory)
    config = json.loads((GOLDEN / "bert_config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if value is not None}
    (directory / "bert_config.json").write_text(json.dumps(config))
    write_bundle(directory / "bert_model.ckpt", variables, num_shards=2)
    return directory


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        read_tf_checkpoint(path, **options)
    return str(caught.value)


def test_logits_are_those_of_tensorflow() -> None:
    found = read_tf_checkpoint(GOLDEN)
    config = found.model
    params = jax.tree.map(jnp.asarray, found.params(None))
    golden = np.load(GOLDEN / "logits.npz")
    real = golden["tokens"] != 0
    rows = map(jnp.asarray, (golden["tokens"], golden["types"], real.astype(np.int32)))
    logits = jax.jit(apply_pretraining, static_argnums=0)(config, params, *rows)
    mlm = np.asarray(logits.vocabulary)[..., : config.vocab_size]
    np.testing.assert_allclose(mlm[real], golden["mlm"][real], atol=2e-5)
    np.testing.assert_allclose(logits.pairs, golden["nsp"], atol=2e-5)
    assert config.activation == "gelu_tanh"
    assert found.files == GOLDEN / "vocab.txt"
    assert found.config["architectures"] == ["BertForPreTraining"]
    assert found.dropped == ()
    assert len(found.arrays) == 4 + 1 + 2 * 16 + 2 + 5 + 2  # no slot of the optimizer


def test_what_gelu_means() -> None:
    assert read_tf_checkpoint(GOLDEN, gelu="tanh").config["hidden_act"] == "gelu_new"
    assert read_tf_checkpoint(GOLDEN, gelu="erf").config["hidden_act"] == "gelu"


def test_how_a_checkpoint_is_named(tmp_path: Path, variables: dict[str, np.ndarray]) -> None:
    whole = read_tf_checkpoint(write(tmp_path / "a", variables, hidden_act="relu"))
    assert whole.config["hidden_act"] == "relu"
    for name in ("bert_model.ckpt", INDEX):
        other = read_tf_checkpoint(tmp_path / "a" / name)
        assert other.arrays.keys() == whole.arrays.keys()
        assert is_tf_checkpoint(tmp_path / "a" / name)
    assert is_tf_checkpoint(tmp_path / "a")
    assert not is_tf_checkpoint(tmp_path)
    write_bundle(tmp_path / "a" / "model.ckpt-20", variables)
    message = refused(tmp_path / "a")
    assert "holds 2 checkpoints; name one of them: bert_model.ckpt, model.ckpt-20" in message
    assert read_tf_checkpoint(tmp_path / "a" / "model.ckpt-20").arrays.keys() == whole.arrays.keys()


def test_parts_that_a_model_need_not_have(
    tmp_path: Path, variables: dict[str, np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    bare = {n: a for n, a in variables.items() if n.startswith(("bert/em", "bert/enc", "global"))}
    assert read_tf_checkpoint(write(tmp_path, bare)).config["architectures"] == ["BertModel"]
    mlm = bare | {n: a for n, a in variables.items() if n.startswith("cls/predictions/")}
    assert read_tf_checkpoint(write(tmp_path, mlm)).config["architectures"] == ["BertForMaskedLM"]
    assert not caplog.records
    tuned = bare | {n: a for n, a in variables.items() if n.startswith("bert/pooler/")}
    tuned |= {"output_weights": np.zeros((3, 8), "f4"), "output_bias": np.zeros(3, "f4")}
    found = read_tf_checkpoint(write(tmp_path, tuned))
    assert found.dropped == ("output_bias", "output_weights")
    assert "the fine-tuned head (output_bias, output_weights) is not read" in caplog.text
    del mlm["cls/predictions/output_bias"]
    assert "cls/predictions/output_bias is missing" in refused(write(tmp_path, mlm))


def test_everything_that_does_not_fit_is_said(
    tmp_path: Path, variables: dict[str, np.ndarray]
) -> None:
    del variables["bert/encoder/layer_1/output/dense/bias"]
    variables["bert/pooler/dense/bias"] = np.zeros(9, np.float32)
    variables["bert/extra"] = np.zeros(1, np.float32)
    message = refused(write(tmp_path, variables))
    assert f"{tmp_path / INDEX} does not fit bert_config.json: " in message
    assert "bert/encoder/layer_1/output/dense/bias is missing" in message
    assert "bert/pooler/dense/bias is (9,), but the configuration needs (8,)" in message
    assert "bert/extra is unexpected" in message
    message = refused(write(tmp_path, variables, num_hidden_layers=4, vocab_size=13))
    assert message.endswith("and 17 more")
    assert "vocab_size" in refused(write(tmp_path, variables, vocab_size=1 << 40))
    assert "has no vocab_size, hidden_act" in refused(
        write(tmp_path, variables, vocab_size=None, hidden_act=None)
    )
    assert "hidden_act is 'tanh'; gelu and relu" in refused(
        write(tmp_path, variables, hidden_act="tanh")
    )


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("bert/encoder/transformer/group_0/inner_group_0/LayerNorm/beta", "is an ALBERT"),
        ("electra/embeddings/word_embeddings", "is an ELECTRA"),
        ("_CHECKPOINTABLE_OBJECT_GRAPH", "is an object-based checkpoint of TensorFlow 2"),
        ("model/layer/.ATTRIBUTES/VARIABLE_VALUE", "is an object-based checkpoint"),
    ],
)
def test_models_of_another_kind(tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / "vocab.txt").write_text("")
    write_bundle(tmp_path / "model.ckpt", {name: np.zeros(2, np.float32)})
    assert what in refused(tmp_path)


def test_files_that_are_not_there(tmp_path: Path, variables: dict[str, np.ndarray]) -> None:
    directory = write(tmp_path / "a", variables)
    for name in ("bert_config.json", "vocab.txt"):
        content = (directory / name).read_text()
        (directory / name).unlink()
        assert f"has no {name}, which belongs beside" in refused(directory)
        (directory / name).write_text(content)
    (directory / INDEX).rename(directory / "bert_model.ckpt")
    assert "holds no TensorFlow checkpoint: it has no *.index" in refused(directory)
    assert "(bert_model.ckpt has the old format" in refused(directory)
    assert "in a single file have the old format" in refused(directory / "bert_model.ckpt")
    assert "is not a directory, and there is no" in refused(tmp_path / "nothing")
