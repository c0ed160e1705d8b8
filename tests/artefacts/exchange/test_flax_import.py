"""bert-jax import of flax_model.msgpack, beside the import of the same weights in safetensors."""

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import flax.serialization
import jax.numpy as jnp
import numpy as np
import pytest
from export_models import model_of
from flax.serialization import msgpack_serialize, to_bytes
from flax_files import into_flax, masked_lm
from huggingface_directory import MODEL, write_huggingface
from safetensors.numpy import load_file
from test_import import write_roberta

from bert_jax.artefacts.exchange import exported_files, theirs
from bert_jax.artefacts.exchange.importing import import_model
from bert_jax.artefacts.exchange.proof import Batch, logits_of
from bert_jax.artefacts.formats.flax_weights import read_flax
from bert_jax.artefacts.saved.ancestors import file_digest
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.cli import main as cli
from bert_jax.errors import UserError

FLAX = "flax_model.msgpack"
NOTE = f"the weights come from {FLAX}, under the names of PyTorch's class"


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch):
    monkeypatch.setattr(theirs, "find_spec", lambda name: None)


def both_ways(tmp_path: Path) -> list[dict[str, Any]]:
    """Import `theirs` from safetensors and from Flax; returns what the imports report."""
    first = import_model(tmp_path / "theirs", tmp_path / "first")
    into_flax(tmp_path / "theirs")
    return [first, import_model(tmp_path / "theirs", tmp_path / "second")]


@pytest.mark.parametrize("kind", ["pretraining", "mlm", "bare", "class", "tags", "relu", "gelu"])
def test_equal_to_the_import_of_safetensors(tmp_path, kind):
    """BERT's heads, a BERT without names of parts before it, DistilBERT and ELECTRA."""
    (tmp_path / "theirs").mkdir()
    exported_files.write_huggingface(model_of(kind), tmp_path / "theirs")
    first, second = both_ways(tmp_path)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert second["notes"] == [*first["notes"], NOTE]
    same = first.keys() - {"notes", "lineage"}
    assert {name: second[name] for name in same} == {name: first[name] for name in same}
    assert second["lineage"][0]["digest"] == file_digest(tmp_path / "theirs" / FLAX)


def test_a_roberta(tmp_path):
    write_roberta(tmp_path / "theirs")
    first, second = both_ways(tmp_path)
    assert first["sha256"] == second["sha256"]
    assert second["family"] == "RoBERTa"


def test_the_logits_are_those_of_flax_modules(tmp_path):
    write_huggingface(tmp_path / "theirs")
    tree = into_flax(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    random = np.random.default_rng(0)
    tokens, types = random.integers(0, MODEL.vocab_size, (2, 9)), random.integers(0, 2, (2, 9))
    batch = Batch(*(ids.astype(np.int32) for ids in (tokens, types, np.ones_like(tokens))))
    found = logits_of(read_model(tmp_path / "ours"), batch)["mlm"]
    wanted = masked_lm(tree, tokens, types, MODEL.num_heads)
    np.testing.assert_allclose(found[..., : MODEL.vocab_size], wanted, atol=1e-4, rtol=1e-5)


def test_other_forms_of_the_file(tmp_path, monkeypatch):
    """A tree under "params", half precision, and arrays that Flax wrote in pieces."""
    write_huggingface(tmp_path / "theirs")
    wanted = load_file(tmp_path / "theirs/model.safetensors")
    tree, path = into_flax(tmp_path / "theirs"), tmp_path / "theirs" / FLAX
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 100)
    path.write_bytes(to_bytes({"params": tree}))
    assert b"__msgpack_chunked_array__" in path.read_bytes()
    found = read_flax(path)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    half = {"bert": {"x": {"kernel": np.ones((2, 3), jnp.bfloat16)}}}
    path.write_bytes(to_bytes(half))
    assert read_flax(path)["bert.x.weight"].dtype == jnp.bfloat16


def test_half_precision_is_written_as_float32(tmp_path):
    write_huggingface(tmp_path / "theirs")
    tree = into_flax(tmp_path / "theirs")
    dense = tree["bert"]["pooler"]["dense"]
    dense["kernel"] = np.asarray(dense["kernel"], jnp.bfloat16)
    (tmp_path / "theirs" / FLAX).write_bytes(to_bytes(tree))
    report = import_model(tmp_path / "theirs", tmp_path / "ours")
    assert "weights of type bfloat16 are written as float32" in report["notes"]


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.pkl", pickle.dumps({"a": 1}))
    return file.getvalue()


@pytest.mark.parametrize(
    "raw",
    [
        b"", pickle.dumps({"bert": 1}), zipped(), b"version https://git-lfs.github.com/spec/v1\n",
        msgpack_serialize([1, 2]), msgpack_serialize({"params": 1}), b"\x81" * 2000,
        msgpack_serialize({"__msgpack_chunked_array__": True}), b"\x81\xa1a\xc7\x02\x01\x93\xff",
        msgpack_serialize({"a": {"kernel": np.ones((2, 2))}})[:-1],
    ],
)  # fmt: skip
def test_damaged_files_are_refused(tmp_path, raw):
    write_huggingface(tmp_path / "theirs")
    (tmp_path / "theirs/model.safetensors").unlink()
    (tmp_path / "theirs" / FLAX).write_bytes(raw)
    with pytest.raises(UserError, match=rf"{FLAX} is not a sound msgpack file of Flax, or is cut"):
        import_model(tmp_path / "theirs", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"a": {"kernel": 1.5}}, r"has 'a\.weight' as float, not as an array"),
        ({"a": {"kernel": np.ones((2, 2)), "scale": np.ones(2)}}, r"has 'a\.weight' twice"),
        ({"..": {"kernel": np.ones((2, 2))}}, "would be unsafe as a file path"),
        ({"a\n": np.ones(2)}, "holds a control character"),
    ],
)
def test_what_is_no_tree_of_arrays_is_refused(tmp_path, tree, said):
    path = tmp_path / FLAX
    path.write_bytes(to_bytes(tree))
    with pytest.raises(UserError, match=f"{FLAX}.*{said}"):
        read_flax(path)


def test_missing_and_unexpected_tensors_are_refused(tmp_path):
    write_huggingface(tmp_path / "theirs")
    tree = into_flax(tmp_path / "theirs")
    layer = tree["bert"]["encoder"]["layer"]["1"]
    layer["other"] = layer.pop("intermediate")
    (tmp_path / "theirs" / FLAX).write_bytes(to_bytes(tree))
    said = r"theirs: .*intermediate\.dense\.weight is missing.*other\.dense\.weight is unexpected"
    with pytest.raises(UserError, match=said):
        import_model(tmp_path / "theirs", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_safetensors_go_first_and_pickles_last(tmp_path):
    write_huggingface(tmp_path / "theirs")
    (tmp_path / "theirs" / FLAX).write_bytes(b"not read")
    report = import_model(tmp_path / "theirs", tmp_path / "first")
    assert NOTE not in report["notes"]
    digest = file_digest(tmp_path / "theirs/model.safetensors")
    assert report["lineage"][0]["digest"] == digest
    into_flax(tmp_path / "theirs")
    (tmp_path / "theirs/pytorch_model.bin").write_bytes(b"not read")
    assert import_model(tmp_path / "theirs", tmp_path / "second")["sha256"] == report["sha256"]


def test_the_command_and_every_other_reader(tmp_path, capsys):
    write_huggingface(tmp_path / "theirs")
    into_flax(tmp_path / "theirs")
    assert cli.main(["import", str(tmp_path / "theirs"), "--out", str(tmp_path / "ours")]) == 0
    assert NOTE in capsys.readouterr().out
    assert json.loads((tmp_path / "ours/import.json").read_text())["read_back"] == "bit for bit"
    direct, imported = read_model(tmp_path / "theirs"), read_model(tmp_path / "ours")
    np.testing.assert_array_equal(
        direct.params["encoder"]["embeddings"]["token"],
        imported.params["encoder"]["embeddings"]["token"],
    )
