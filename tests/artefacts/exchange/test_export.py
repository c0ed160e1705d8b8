"""Exports in Hugging Face's format: what is written, what is proven, and that nothing else stays.

The proof with `transformers` is in test_export_parity.py.
"""

import dataclasses
import hashlib
import json

import numpy as np
import pytest
import safetensors.numpy
from export_models import model_of, tokenizer_of
from full_disk import files_of_at_most
from small_saved import small_saved

from bert_jax.artefacts.exchange import exported_files, huggingface, orbax_export, theirs
from bert_jax.artefacts.exchange.export import as_trained, check_differences, export, held, refusals
from bert_jax.artefacts.exchange.exported_files import write_huggingface
from bert_jax.artefacts.exchange.proof import PROOF_TEXTS, ProofFailedError, proof_rows
from bert_jax.artefacts.saved.model import Origin, digest_of
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.artefacts.saved.runs import staged
from bert_jax.cli import main as cli
from bert_jax.distributed.checkpoint.storage import read_tree
from bert_jax.errors import UserError
from bert_jax.tokenization.load import load_tokenizer

MODERN = {
    "norm_order": "pre",
    "first_norm": False,
    "positions": "rope",
    "gated": True,
    "num_types": 0,
}
NOMIC = {"positions": "rope", "gated": True, "attention_bias": False, "mlp_bias": False}
ELECTRA = {"embedding_dim": 8}
VECTORS = "sentence-transformers"
FILES = {
    "README.md", "config.json", "conformance", "model.safetensors", "parity.json",
    "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _without_transformers(monkeypatch):
    monkeypatch.setattr(theirs, "find_spec", lambda name: None)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("source")
    write_huggingface(model_of("class"), directory)
    return directory


def assert_nothing_at(out):
    assert not out.exists()
    assert not [path for path in out.parent.iterdir() if out.name in path.name]


def test_an_export_is_whole_and_proven(source, tmp_path, capsys):
    out = tmp_path / "new" / "out"
    arguments = ["export", str(source), "--to", "huggingface", "--out", str(out)]
    assert cli.main([*arguments, "--license", "cc-by-4.0", "--name", "A model"]) == 0
    said = capsys.readouterr().out
    assert "BertForSequenceClassification" in said
    assert "head 0.0e+00" in said
    assert "transformers: did not run" in said
    ours = "only bert_jax's own reading was compared"
    missing = "not compared with the source: torch, transformers is not installed"
    assert f"source_class: did not run, {missing}; {ours}" in said
    assert {path.name for path in out.iterdir()} == FILES
    parity = json.loads((out / "parity.json").read_text())
    assert parity["differences"] == {"head": 0.0, "hidden": 0.0, "pooled": 0.0}
    assert parity["texts"] == len(PROOF_TEXTS)
    assert parity["proofs"]["bert_jax"]["tensors_bit_equal"]
    assert not parity["proofs"]["transformers"]["ran"]
    assert all(
        parity["proofs"][by]["why"].endswith(ours) for by in ("transformers", "source_class")
    )
    assert (out / "README.md").read_text().count(ours) == 2
    assert parity["tokenizer_fingerprint"] == load_tokenizer(out).fingerprint
    digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    assert parity["sha256"]["model.safetensors"] == digest
    with_digests = {path.split("/")[0] for path in parity["sha256"]}
    assert with_digests == FILES - {"README.md", "parity.json"}
    assert {"bert_jax", "jax", "numpy", "safetensors", "tokenizers"} <= parity["versions"].keys()
    # From Hugging Face's format and back: the same bytes, readable as others' files are.
    assert (out / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode
    config = json.loads((out / "config.json").read_text())
    assert config["id2label"]["1"] == "ähm"
    assert config["problem_type"] == "single_label_classification"
    named = json.loads((out / "tokenizer_config.json").read_text())
    assert named["tokenizer_class"] == "BertTokenizer"
    assert named["model_max_length"] == 40


def test_the_file_of_weights_says_that_its_names_are_those_of_pytorch(source):
    with safetensors.safe_open(source / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_padded_rows_are_trimmed_and_values_in_them_do_no_harm():
    saved = model_of("pretraining")
    saved.params["encoder"]["embeddings"]["token"][saved.config.vocab_size :] = 9
    tensors = exported_files.state_dict_of(saved)
    assert tensors["bert.embeddings.word_embeddings.weight"].shape[0] == saved.config.vocab_size
    assert not any("decoder" in name for name in tensors)


def test_classes_follow_the_parts():
    names = {kind: exported_files.class_of(model_of(kind)) for kind in ("mlm", "encoder", "bare")}
    assert names == {"mlm": "BertForMaskedLM", "encoder": "BertModel", "bare": "BertModel"}
    assert "pooler.dense.weight" in exported_files.state_dict_of(model_of("bare"))
    assert exported_files.config_of(model_of("bare"))["untrained_parts"] == ["pooler"]
    assert "untrained_parts" not in exported_files.config_of(model_of("encoder"))
    assert not any("pooler" in name for name in exported_files.state_dict_of(model_of("mlm")))


def test_a_classifier_is_written_under_the_family_that_computes_it(tmp_path):
    names = {"class": "Bert", "relu": "DistilBert", "gelu": "Electra"}
    for kind, family in names.items():
        saved, out = model_of(kind), tmp_path / kind
        assert exported_files.class_of(saved) == f"{family}ForSequenceClassification"
        out.mkdir()
        write_huggingface(saved, out)
        config = json.loads((out / "config.json").read_text())
        assert config["model_type"] == family.lower()
        found = huggingface.prove(saved, out, proof_rows(saved)[:2])
        assert max(found["differences"].values()) < 1e-5
        back = read_model(out)
        assert back.config == saved.config
        assert back.outputs == saved.outputs
        inputs = json.loads((out / "tokenizer_config.json").read_text()).get("model_input_names")
        assert (inputs == ["input_ids", "attention_mask"]) == (kind == "relu")
    assert not any("type" in name for name in exported_files.state_dict_of(model_of("relu")))


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("pretraining", {}, r"embeddings of width 8 with layers of width \d+ have no head for"),
        ("mlm", {"activation": "relu"}, "model.activation is relu, but the masked-LM head"),
        ("class", {}, "its pooler has tanh, but no class of Transformers"),
    ],
)
def test_an_electra_is_written_only_as_its_classes_compute(tmp_path, kind, changes, said):
    saved = model_of(kind)
    config = dataclasses.replace(saved.config, embedding_dim=8, **changes)
    with pytest.raises(UserError, match=said):
        write_huggingface(dataclasses.replace(saved, config=config), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("relu", {"norm_eps": 1e-6}), ("encoder", {"pooler_activation": "relu"})],
)
def test_a_pooler_that_no_class_computes_is_refused(tmp_path, kind, changes):
    saved = model_of(kind)
    saved = dataclasses.replace(saved, config=dataclasses.replace(saved.config, **changes))
    with pytest.raises(UserError, match=r"its pooler has relu, but no class"):
        write_huggingface(saved, tmp_path)
    assert not list(tmp_path.iterdir())
    orbax_export.write(saved, tmp_path)
    saved = model_of("tags")  # its class has no pooler
    saved = dataclasses.replace(saved, config=dataclasses.replace(saved.config, **changes))
    (tmp_path / "tags").mkdir()
    write_huggingface(saved, tmp_path / "tags")


def test_an_untrained_pooler_stays_marked(tmp_path):
    write_huggingface(model_of("bare"), tmp_path)
    back = read_model(tmp_path)
    assert exported_files.untrained_parts(back) == ["pooler"]
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    again = exported_files.state_dict_of(back)
    assert again.keys() == tensors.keys()
    assert all(np.array_equal(again[name], tensors[name]) for name in tensors)
    odd = dataclasses.replace(back, origin=Origin("huggingface", config={"untrained_parts": 3}))
    assert "pooler.dense.bias" in exported_files.state_dict_of(odd)


def test_a_pooler_that_other_software_has_trained_is_read(tmp_path):
    """Transformers keeps the fields of the encoder's config.json when it adds a head."""
    saved, path = model_of("class"), tmp_path / "config.json"
    write_huggingface(saved, tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "untrained_parts": ["pooler"]}))
    assert digest_of(read_model(tmp_path).params) == digest_of(saved.params)


def _transposed(monkeypatch):
    to_tensors = exported_files.to_tensors

    def wrong(*arguments):
        found = to_tensors(*arguments)
        name = "bert.encoder.layer.1.attention.self.query.weight"
        return {**found, name: np.ascontiguousarray(found[name].T)}

    monkeypatch.setattr(exported_files, "to_tensors", wrong)


def _without_a_tensor(monkeypatch):
    to_tensors = exported_files.to_tensors
    monkeypatch.setattr(
        exported_files,
        "to_tensors",
        lambda *arguments: {
            name: array
            for name, array in to_tensors(*arguments).items()
            if name != "bert.pooler.dense.bias"
        },
    )


def _with_swapped(first, second):
    """Two entries of the vocabulary change places."""

    def change(monkeypatch):
        made = tokenizer_of("uncased")
        vocab = list(made.vocab)
        a, b = vocab.index(first), vocab.index(second)
        vocab[a], vocab[b] = vocab[b], vocab[a]
        swapped = type(made)(vocab, made.options)
        write = exported_files.write_tokenizer
        other = dataclasses.replace(model_of("class"), tokenizer=swapped)
        monkeypatch.setattr(
            exported_files, "write_tokenizer", lambda saved, directory: write(other, directory)
        )

    return change


def _with_other_fields(**fields):
    def change(monkeypatch):
        config_of = exported_files.config_of
        monkeypatch.setattr(exported_files, "config_of", lambda saved: config_of(saved) | fields)

    return change


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_transposed, "encoder/layers/attention/query/kernel"),
        (_without_a_tensor, "pooler.dense.bias is missing"),
        (_with_swapped("the", "and"), "wrong token ids for 'The river froze"),
        (_with_swapped("[SEP]", "[MASK]"), "the special tokens are"),
        (_with_other_fields(id2label={"0": "a", "1": "b", "2": "c"}), "the outputs are"),
        (_with_other_fields(hidden_act="relu"), "largest differences are head"),
    ],
)
def test_what_is_written_wrongly_is_never_there(fault, said, source, tmp_path, monkeypatch, capsys):
    fault(monkeypatch)
    out = tmp_path / "out"
    arguments = ["export", str(source), "--to", "huggingface", "--out", str(out)]
    assert cli.main(arguments) == (2 if "missing" in said else 1)
    assert said in capsys.readouterr().err
    assert_nothing_at(out)


def test_the_tolerance_is_a_limit_and_nan_is_above_it():
    check_differences({"mlm": 1e-4}, 1e-4)
    for gap in (1.1e-4, float("nan"), float("inf")):
        with pytest.raises(ProofFailedError, match="mlm") as caught:
            check_differences({"hidden": 0.0, "mlm": gap}, 1e-4)
        assert caught.value.exit_code == 1


def test_parts_that_were_never_trained_are_left_out():
    run = Origin("pretrain", config={"data": {"pairing": "none"}})
    saved = as_trained(dataclasses.replace(model_of("pretraining"), origin=run))
    assert exported_files.class_of(saved) == "BertForMaskedLM"
    assert not saved.has_pooler
    kept = dataclasses.replace(saved, origin=Origin("huggingface", config=run.config))
    assert as_trained(kept) is kept


def test_a_head_for_pairs_is_left_out_of_a_modern_encoder(tmp_path, monkeypatch, capsys):
    made = tokenizer_of("uncased")
    sizes = {"vocab_size": made.vocab_size, "num_positions": 40}
    saved = dataclasses.replace(small_saved("pretraining", **MODERN, **sizes), tokenizer=made)
    unread = saved.params["encoder"]["layers"]["attention_norm"]  # in the first layer
    unread["scale"][0], unread["bias"][0] = 1, 0
    monkeypatch.setattr("bert_jax.artefacts.exchange.export.read_model", lambda *_, **__: saved)
    out = tmp_path / "out"
    assert cli.main(["export", "run", "--to", "huggingface", "--out", str(out)]) == 0
    assert "nsp: left out, since ModernBertForMaskedLM has no such head" in capsys.readouterr().out
    assert json.loads((out / "parity.json").read_text())["left_out"] == ["nsp"]
    assert "lacks the parts nsp" in (out / "README.md").read_text()
    back = read_model(out)
    assert (back.params.keys(), back.has_pooler) == ({"encoder", "mlm"}, False)


def test_a_pretraining_head_beside_a_task_is_left_out():
    """A file may have both; each format failed its proof, or wrote a graph with one name twice."""
    both = dataclasses.replace(model_of("class"), origin=Origin("huggingface"))
    both.params["mlm"] = model_of("pretraining").params["mlm"]
    for format in ("huggingface", "cross-encoder", "onnx", "stablehlo"):
        assert "mlm" not in held(both, format).params
    assert held(both, "orbax").params.keys() == both.params.keys()


def test_other_models_keep_their_heads_for_pairs():
    for fields in ({}, {**MODERN, "norm": "rms"}):  # BERT's, and no class's
        saved = small_saved("pretraining", **fields)
        assert exported_files.without_pairs(saved) is saved
    nomic = small_saved("pretraining", **NOMIC)
    assert exported_files.class_of(exported_files.without_pairs(nomic)) == ("NomicBertForMaskedLM")


def test_a_full_disk_and_signals_leave_nothing(source, tmp_path):
    out = tmp_path / "out"
    with (
        files_of_at_most(20_000),
        pytest.raises(UserError, match=r"out: the file would be larger|Nothing was left"),
    ):
        export(source, "huggingface", out)
    assert_nothing_at(out)
    for signal in (KeyboardInterrupt, SystemExit):
        with pytest.raises(signal):
            _end_with(signal, out)
        assert_nothing_at(out)


def _end_with(signal, out):
    with staged(out) as directory:
        (directory / "config.json").write_text("{}")
        raise signal


def test_what_is_there_is_left_alone(source, tmp_path):
    for place, said in (
        (source, "not overwritten"),
        (source / "config.json", "is a file"),
        ("gs://bucket/out", "bucket"),
    ):
        with pytest.raises(UserError, match=said):
            export(source, "huggingface", place)
    (tmp_path / "empty").mkdir()
    with staged(tmp_path / "empty") as directory:
        (directory / "a").write_text("b")
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"license": "MIT, I think"}, "license"),
        ({"name": "---\nlicense: mit"}, "name"),
        ({"tolerance": float("nan")}, "tolerance"),
    ],
)
def test_options_are_checked_before_anything_is_read(options, said, tmp_path):
    with pytest.raises(UserError, match=said):
        export(tmp_path / "nothing", "huggingface", tmp_path / "out", **options)
    with pytest.raises(UserError, match="does not exist"):
        export(tmp_path / "nothing", "huggingface", tmp_path / "out")


def test_a_sentencepiece_model_stays_the_one_that_is_read(tmp_path):
    saved = model_of("mlm", "unigram")
    write_huggingface(saved, tmp_path)
    back = read_model(tmp_path)
    assert back.tokenizer.fingerprint == saved.tokenizer.fingerprint
    names = json.loads((tmp_path / "special_tokens_map.json").read_text())
    assert names["mask_token"] == "[MASK]"
    assert (tmp_path / "tokenizer.json").is_file()


def test_rows_of_the_proof_fit_the_model():
    saved = model_of("pretraining")
    rows = proof_rows(saved)
    assert max(map(len, rows)) == 40
    assert any(row.count(saved.tokenizer.special_ids.sep) == 2 for row in rows)
    assert safetensors.numpy.save is exported_files.safetensors.numpy.save


@pytest.mark.parametrize("format", ["huggingface", "orbax"])
def test_a_pretraining_head_of_no_known_kind_is_left_out_and_named(tmp_path, monkeypatch, format):
    saved = model_of("mlm")
    saved = dataclasses.replace(
        saved, params={**saved.params, "order": {"bias": np.ones(3, np.float32)}},
        origin=Origin("pretrain", 3, {"data": {"pairing": "none"}, "objective": {}}),
    )  # fmt: skip
    monkeypatch.setattr("bert_jax.artefacts.exchange.export.read_model", lambda *_, **__: saved)
    parity = export("run", format, tmp_path / "out")
    assert ("order" in parity["left_out"]) == (format == "huggingface")
    if format == "orbax":
        assert read_tree(tmp_path / "out/params")["order"]["bias"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("kind", "fields", "formats"),
    [
        ("pretraining", {}, set()),
        ("pretraining", MODERN, set()),  # the head for pairs is left out
        ("mlm", MODERN, set()),  # a pooler that nothing has trained is
        ("mlm", {**MODERN, "attention_pattern": "GLG", "local_window": 4, "num_layers": 4}, set()),
        ("mlm", {**MODERN, "norm": "rms"}, {"huggingface", VECTORS}),
        ("rtd", MODERN, set()),  # the head for replaced tokens is left out
        ("pretraining", ELECTRA, {"huggingface"}),
        ("mlm", {**ELECTRA, "activation": "relu"}, {"huggingface"}),
        ("pretraining", {"pooler_activation": "relu"}, {"huggingface", VECTORS}),
        ("mlm", {"pooler_activation": "relu"}, {VECTORS}),
        ("mlm", {"num_types": 0}, {"huggingface", VECTORS}),
        ("mlm", {"num_types": 1}, set()),
        ("rtd", {"num_types": 1}, {"huggingface"}),
    ],
)
def test_what_pretraining_says_of_exports_is_what_they_do(
    tmp_path, monkeypatch, kind, fields, formats
):
    sizes = {"vocab_size": tokenizer_of("uncased").vocab_size, "num_positions": 40}
    saved = small_saved(kind, **{**fields, **sizes})
    saved = dataclasses.replace(saved, tokenizer=tokenizer_of("uncased"))
    if "first_norm" in fields:
        unread = saved.params["encoder"]["layers"]["attention_norm"]  # in the first layer
        unread["scale"][0] = 1
        unread.get("bias", unread["scale"])[0] = 1 - ("bias" in unread)
    if kind == "mlm":
        saved = saved.without({"pooler"})
    said = refusals(saved)
    assert said.keys() == {*formats, "cross-encoder", "peft"}
    monkeypatch.setattr("bert_jax.artefacts.exchange.export.read_model", lambda *_, **__: saved)
    for format in formats | {"huggingface"}:
        if format in formats:
            with pytest.raises(UserError) as caught:
                export("run", format, tmp_path / format)
            assert said[format] in f"{caught.value}"
            assert not (tmp_path / format).exists()
        else:
            export("run", format, tmp_path / format)
