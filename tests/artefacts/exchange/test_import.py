"""bert-jax import, without Transformers: what is written, what is refused, what is left behind."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from fast_files import write_fast
from huggingface_directory import (
    MODEL,
    TOKENIZER,
    write_huggingface,
    write_safetensors,
)
from roberta_arrays import roberta

from bert_jax.artefacts.exchange import hub, importing, theirs
from bert_jax.artefacts.exchange.importing import import_model, read_source
from bert_jax.artefacts.exchange.proof import ProofFailedError
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.cli import main as cli
from bert_jax.errors import UserError
from bert_jax.tokenization.load import load_tokenizer

GOLDEN_TF = Path(__file__).parents[2] / "golden" / "tf_checkpoint"
FILES = {
    "config.json", "import.json", "model.safetensors", "special_tokens_map.json", "tokenizer.json",
    "tokenizer_config.json", "vocab.txt",
}  # fmt: skip


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch):
    monkeypatch.setattr(theirs, "find_spec", lambda name: None)


def write_roberta(directory, made_by="RobertaForMaskedLM"):
    """The tiny BERT as a RoBERTa, with a byte-level BPE whose vocabulary is the model's."""
    write_fast(directory, "bpe")
    size = load_tokenizer(directory).vocab_size
    config, arrays = roberta(made_by=made_by)
    random = np.random.default_rng(0)
    words = random.normal(size=(size, MODEL.hidden_dim)).astype(np.float32)
    arrays["roberta.embeddings.word_embeddings.weight"] = words
    arrays["lm_head.bias"] = words[:, 0].copy()
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    write_safetensors(directory / "model.safetensors", arrays)
    return arrays


def test_a_bert_is_written_byte_for_byte(tmp_path):
    from safetensors.numpy import load_file

    weights = write_huggingface(tmp_path / "theirs")
    report = import_model(tmp_path / "theirs", tmp_path / "ours")
    assert {path.name for path in (tmp_path / "ours").iterdir()} == FILES
    assert report == json.loads((tmp_path / "ours/import.json").read_text())
    assert report["class"] == report["source_class"] == "BertForPreTraining"
    assert (report["dropped"], report["notes"], report["added_tokens"]) == ([], [], 0)
    assert report["compared"].startswith("not compared with the source: torch, transformers")
    written = load_file(tmp_path / "ours/model.safetensors")
    assert written.keys() == weights.keys()
    for name, array in weights.items():
        assert written[name].tobytes() == array.tobytes(), name
    import_model(tmp_path / "ours", tmp_path / "again")
    again = (tmp_path / "again/model.safetensors").read_bytes()
    assert again == (tmp_path / "ours/model.safetensors").read_bytes()


def test_a_model_with_an_adapter_beside_it_is_refused(tmp_path):
    """Transformers loads both as one."""
    write_huggingface(tmp_path / "theirs")
    (tmp_path / "theirs" / "adapter_config.json").write_text("[")
    with pytest.raises(UserError, match=r"theirs has adapter_config\.json: .* another directory"):
        import_model(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    with pytest.raises(UserError, match=r"theirs has adapter_config\.json: .* another directory"):
        read_model(tmp_path / "theirs")


def test_a_path_need_not_be_utf8(tmp_path):
    theirs = tmp_path / os.fsdecode(b"caf\xe9")
    write_huggingface(theirs)
    import_model(theirs, tmp_path / "ours")
    assert json.loads((tmp_path / "ours/import.json").read_text())["source"].endswith("caf?")
    assert read_model(tmp_path / "ours").params


def test_a_roberta_becomes_a_bert_with_its_tokenizer(tmp_path):
    arrays = write_roberta(tmp_path / "theirs")
    report = import_model(tmp_path / "theirs", tmp_path / "ours")
    saved = read_model(tmp_path / "ours")
    assert (report["family"], report["class"]) == ("RoBERTa", "BertForMaskedLM")
    assert report["dropped"] == ["pooler"], "their class for masked words has none"
    assert saved.tokenizer.kind == "fast"
    assert saved.tokenizer.id_to_token(saved.tokenizer.special_ids.mask) == "<mask>"
    assert saved.config.num_positions == MODEL.num_positions
    positions = saved.params["encoder"]["embeddings"]["position"]
    theirs = arrays["roberta.embeddings.position_embeddings.weight"]
    np.testing.assert_array_equal(positions, theirs[2:])
    assert saved.origin.config["pad_token_id"] == saved.tokenizer.special_ids.pad == 1


@pytest.mark.parametrize("pad", [0, 4])
def test_positions_of_a_roberta_count_from_the_padding_of_its_tokenizer(tmp_path, pad):
    write_roberta(tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": pad}))
    with pytest.raises(UserError, match=f"pad_token_id is {pad}, but the tokenizer's pad is 1"):
        import_model(tmp_path / "theirs", tmp_path / "ours")


def test_without_a_field_the_padding_is_that_of_the_class(tmp_path):
    write_roberta(tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    config = json.loads(path.read_text())
    del config["pad_token_id"]
    path.write_text(json.dumps(config))
    import_model(tmp_path / "theirs", tmp_path / "ours")  # 1, as the tokenizer's
    special = {"pad_token": "<mask>", "mask_token": "<pad>"}
    (tmp_path / "theirs/special_tokens_map.json").write_text(json.dumps(special))
    with pytest.raises(UserError, match="pad_token_id is 1, but the tokenizer's pad is 4"):
        import_model(tmp_path / "theirs", tmp_path / "other")


def test_a_classifier_of_a_roberta(tmp_path):
    write_roberta(tmp_path / "theirs", "RobertaForSequenceClassification")
    from bert_jax.files.untrusted.safetensors_file import read_safetensors

    path = tmp_path / "theirs/model.safetensors"
    arrays = {name: found.copy() for name, found in read_safetensors(path).items()}
    for part in ("weight", "bias"):
        arrays[f"classifier.dense.{part}"] = arrays.pop(f"roberta.pooler.dense.{part}")
        arrays.pop(f"lm_head.dense.{part}")
        arrays.pop(f"lm_head.layer_norm.{part}")
        shape = (3, 16) if part == "weight" else (3,)
        arrays[f"classifier.out_proj.{part}"] = np.full(shape, 0.5, np.float32)
    arrays.pop("lm_head.bias")
    write_safetensors(path, arrays)
    report = import_model(tmp_path / "theirs", tmp_path / "ours")
    saved = read_model(tmp_path / "ours")
    assert report["class"] == "BertForSequenceClassification"
    assert saved.outputs.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    pooler = saved.params["encoder"]["pooler"]["dense"]["kernel"]
    np.testing.assert_array_equal(pooler, arrays["classifier.dense.weight"].T)


def test_a_tensorflow_checkpoint(tmp_path):
    report = import_model(GOLDEN_TF, tmp_path / "tanh")
    assert report["source_class"] == "TensorFlow 1"
    assert "gelu is read as its tanh form" in report["notes"][0]
    assert read_model(tmp_path / "tanh").config.activation == "gelu_tanh"
    exact = read_source(GOLDEN_TF / "bert_model.ckpt", gelu="erf").saved
    assert exact.config.activation == "gelu"


def test_a_neighbouring_checkpoint_is_no_part_of_the_lineage(tmp_path):
    home = tmp_path / "theirs"
    shutil.copytree(GOLDEN_TF, home)
    lone = import_model(home / "bert_model.ckpt", tmp_path / "lone")["lineage"]
    (home / "bert_model.ckpt-2.data-00000-of-00001").write_bytes(b"of another step")
    assert import_model(home / "bert_model.ckpt", tmp_path / "beside")["lineage"] == lone


def test_added_tokens(tmp_path, capsys):
    write_huggingface(tmp_path / "theirs")
    (tmp_path / "tokens.txt").write_text("catdog\n\nrandog\ncat\n")
    report = import_model(
        tmp_path / "theirs", tmp_path / "ours", add_tokens=tmp_path / "tokens.txt"
    )
    saved = read_model(tmp_path / "ours")
    assert report["added_tokens"] == 2
    out = ["--out", str(tmp_path / "again"), "--add-tokens", str(tmp_path / "tokens.txt")]
    assert cli.main(["import", str(tmp_path / "theirs"), *out]) == 0
    assert "tokens.txt: 2 tokens are new; each begins as the mean" in (
        said := capsys.readouterr().out
    )
    assert "; 1 was in the vocabulary already; 2 start, at least in part, as [UNK]\n" in said
    assert saved.tokenizer.vocab_size == TOKENIZER.vocab_size + 2
    assert len(saved.tokenizer.encode("catdog randog").ids) == 2
    (tmp_path / "tokens.txt").write_text("two words\n")
    with pytest.raises(UserError, match=r"tokens.txt, line 1"):
        import_model(tmp_path / "theirs", tmp_path / "b", add_tokens=tmp_path / "tokens.txt")


@pytest.mark.parametrize("part", ["weights", "tokenizer", "config"])
def test_what_is_not_read_back_bit_for_bit_is_refused(tmp_path, monkeypatch, part):
    write_huggingface(tmp_path / "theirs")
    write = importing.write_huggingface

    def damaging(saved, directory):
        write(saved, directory)
        if part == "weights":
            raw = bytearray((directory / "model.safetensors").read_bytes())
            raw[-1] ^= 1
            (directory / "model.safetensors").write_bytes(raw)
        elif part == "config":
            config = json.loads((directory / "config.json").read_text())
            config["layer_norm_eps"] = 1e-6
            (directory / "config.json").write_text(json.dumps(config))
        else:
            vocab = (directory / "vocab.txt").read_text().replace("cat\ndog", "dog\ncat")
            (directory / "vocab.txt").write_text(vocab)
            (directory / "tokenizer.json").unlink()

    monkeypatch.setattr(importing, "write_huggingface", damaging)
    said = {"weights": "mlm/|nsp/|encoder/", "tokenizer": "the tokenizer", "config": "the config"}
    with pytest.raises(ProofFailedError, match=f"when they are read back: .*({said[part]})"):
        import_model(tmp_path / "theirs", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "albert"}, "an ALBERT cannot be imported"),
        ({"model_type": "t5"}, "model_type is 't5'"),
        ({"model_type": "electra", "embedding_size": 0}, "embedding_size is 0"),
        ({"auto_map": {"AutoModel": "a.B"}}, "code of its own"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ({"num_hidden_layers": 3}, r"layer.2.* is missing"),
        ({"vocab_size": 9}, "the tokenizer has 17 tokens, but the model has embeddings for 9"),
        ({"bert_jax": "0.1.0"}, "a work directory of bert-jax"),
        ({"is_decoder": True}, "a decoder, which attends only to the past"),
    ],
)
def test_refusals_leave_nothing(tmp_path, fields, said):
    write_huggingface(tmp_path / "theirs", **fields)
    with pytest.raises(UserError, match=said):
        import_model(tmp_path / "theirs", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_sources_that_are_none(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty has no config.json"):
        import_model(tmp_path / "empty", tmp_path / "ours")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="file is a file; give a directory"):
        import_model(tmp_path / "file", tmp_path / "ours")
    with pytest.raises(UserError, match="does not exist; give a directory"):
        import_model(f"{tmp_path}/not/there", tmp_path / "ours")
    write_huggingface(tmp_path / "theirs")
    with pytest.raises(UserError, match=r"--gelu is for TensorFlow checkpoints"):
        import_model(tmp_path / "theirs", tmp_path / "ours", gelu="tanh")
    (tmp_path / "theirs/model.safetensors").rename(tmp_path / "theirs/pytorch_model.bin")
    with pytest.raises(UserError, match=r"only the weights pytorch_model.bin, which are not read"):
        import_model(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("cased", [True, False])
def test_a_vocabulary_alone_says_whether_text_is_cased(tmp_path, cased):
    write_huggingface(tmp_path / "theirs")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "theirs" / name).unlink()
    vocab = tmp_path / "theirs/vocab.txt"
    vocab.write_text(vocab.read_text().replace("hill", "Hill" if cased else "hill"))
    report = import_model(tmp_path / "theirs", tmp_path / "ours")
    words, outcome = ("words", "not lower-cased") if cased else ("no words", "lower-cased")
    wanted = f"vocab.txt has {words} in upper case, so text is {outcome}"
    assert any(wanted in note for note in report["notes"])
    assert read_model(tmp_path / "ours").tokenizer.options.lowercase != cased


def test_a_name_on_the_hub(tmp_path, monkeypatch):
    write_huggingface(tmp_path / "cache")
    asked = []
    monkeypatch.setattr(hub, "fetch", lambda *given: asked.append(given) or tmp_path / "cache")
    report = import_model("some-one/tiny@main", tmp_path / "ours")
    assert asked == [("some-one/tiny@main", None)]
    assert report["source"] == "some-one/tiny@main"


def test_code_beside_a_tokenizer_is_named_and_not_run(tmp_path):
    write_huggingface(tmp_path / "theirs")
    path = tmp_path / "theirs/tokenizer_config.json"
    config = json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["x.Y", None]}}
    path.write_text(json.dumps(config))
    (tmp_path / "theirs/x.py").write_text("raise SystemExit")
    report = import_model(tmp_path / "theirs", tmp_path / "ours")
    assert any("auto_map" in note for note in report["notes"])
    assert not (tmp_path / "ours/x.py").exists()


def test_a_tokenizer_that_cuts_the_beginning_is_noted(tmp_path):
    write_huggingface(tmp_path / "theirs")
    path = tmp_path / "theirs/tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation_side": "left"}))
    report = import_model(tmp_path / "theirs", tmp_path / "ours")
    assert any(
        "cuts long texts at the start, but bert_jax at the end" in note for note in report["notes"]
    )


def test_the_command(tmp_path, capsys):
    write_roberta(tmp_path / "theirs")
    out = str(tmp_path / "ours")
    assert cli.main(["import", str(tmp_path / "theirs"), "--out", out]) == 0
    said = capsys.readouterr().out
    assert "(RobertaForMaskedLM) ->" in said
    assert "positions count from 2" in said
    assert "not compared with the source" in said
    assert cli.main(["import", str(tmp_path / "theirs"), "--out", out]) == 2
    assert "exists" in capsys.readouterr().err
    assert cli.main(["import", str(tmp_path / "theirs"), "--out", f"{out}2", "--tolerance=-1"]) == 2
    assert "--tolerance is -1.0" in capsys.readouterr().err


def test_other_parts_of_the_source_are_not_copied(tmp_path):
    write_huggingface(tmp_path / "theirs")
    for name in ("train.py", "pytorch_model.bin", "README.md"):
        (tmp_path / "theirs" / name).write_text("x")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    assert {path.name for path in (tmp_path / "ours").iterdir()} == FILES
