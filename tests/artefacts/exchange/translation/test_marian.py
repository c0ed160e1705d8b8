"""Marian in the files of opus-mt: read, imported and written again without a changed byte."""

import json

import numpy as np
import pytest
import safetensors.numpy
from marian_files import random_marian, sentences
from translators import translator_of

from bert_jax.artefacts.exchange import importing
from bert_jax.artefacts.exchange.exported_files import write_huggingface
from bert_jax.artefacts.exchange.importing import import_model
from bert_jax.artefacts.exchange.proof import batch_of
from bert_jax.artefacts.exchange.searches import SEARCHES, translated
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.errors import UserError
from bert_jax.infer.loaded import LoadedModel
from bert_jax.tokenization.tokenizer import make_row

FILES = ("source.spm", "target.spm", "vocab.json", "tokenizer_config.json", "model.safetensors")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    where = tmp_path_factory.mktemp("marian")
    (where / "model").mkdir()
    write_huggingface(random_marian(where / "tokenizer"), where / "model")
    config = json.loads((where / "model/config.json").read_text())
    theirs = {"activation_function": "swish", "static_position_embeddings": True, "num_beams": 6}
    (where / "model/config.json").write_text(json.dumps(config | theirs))
    return where / "model"


@pytest.fixture
def alone(monkeypatch):
    """Import without Transformers; test_marian_parity.py compares with its classes."""
    why = "not compared: no Transformers in this test"
    monkeypatch.setattr(importing, "compare_with_source", lambda *_: why)


def test_an_import_changes_no_byte_of_weights_and_tokenizer(source, alone, tmp_path):
    report = import_model(source, tmp_path / "out")
    assert (report["family"], report["class"]) == ("marian", "MarianMTModel")
    assert (report["dropped"], report["untrained"], report["notes"]) == ([], [], [])
    for name in FILES:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((tmp_path / "out/config.json").read_text())
    special = read_model(source).tokenizer.special_ids
    assert config["decoder_start_token_id"] == config["pad_token_id"] == special.pad
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation["bad_words_ids"] == [[special.pad]]
    import_model(tmp_path / "out", tmp_path / "again")
    for name in (*FILES, "config.json", "generation_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_words_cannot_be_added(source, alone, tmp_path):
    (tmp_path / "words.txt").write_text("Donau\n")
    with pytest.raises(UserError, match="tokenizer is of the kind marian"):
        import_model(source, tmp_path / "out", add_tokens=tmp_path / "words.txt")
    assert not (tmp_path / "out").exists()


def test_a_translation_is_the_search_over_the_sources_pieces(source):
    saved = read_model(source)
    texts = sentences(6, seed=2)[0]
    rows = [
        make_row(saved.tokenizer, ids).ids.tolist() for ids in saved.tokenizer.encode_batch(texts)
    ]
    assert all(row[-1] == 0 and saved.tokenizer.special_ids.pad not in row for row in rows)
    answers = LoadedModel(saved).translate(texts, max_length_rate=0)
    found = translated(saved, batch_of(saved, rows), SEARCHES["beam"], saved.max_length)
    for answer, ids in zip(answers, found, strict=True):
        text = saved.tokenizer.decode([id for id in ids if id])
        assert answer["translation"] == text.strip()
        assert saved.tokenizer.special_ids.pad not in ids


@pytest.mark.parametrize("form", ["marian", "pair"])
def test_the_begin_token_is_never_chosen(form):
    """Not even where it is by far the most probable; other probabilities stay as they are."""
    saved = translator_of(form, "uncased")
    begin, rows = saved.tokenizer.special_ids.cls, [[2, 7, 9, 3], [2, 12, 3]]
    plain = translated(saved, batch_of(saved, rows), SEARCHES["beam"], 12)
    bias = np.array(saved.params["output"]["bias"])
    bias[begin] += 30
    params = {**saved.params, "output": {**saved.params["output"], "bias": bias}}
    for settings in SEARCHES.values():
        found = translated(
            saved.__class__(**{**vars(saved), "params": params}),
            batch_of(saved, rows),
            settings,
            12,
        )
        assert not any(begin in row for row in found)
    assert all(begin not in row for row in plain)


def test_another_start_of_the_decoder_is_refused(source, tmp_path):
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"decoder_start_token_id": 0}))
    with pytest.raises(UserError, match="decoder_start_token_id is 0; it must be"):
        read_model(tmp_path)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    del tensors["final_logits_bias"]
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="final_logits_bias is missing"):
        read_model(tmp_path)


def test_opus_mts_forced_end_is_read_kept_and_searched(source, alone, tmp_path):
    """The end token at the maximum length costs nothing, and stands in no text."""
    (tmp_path / "model").mkdir()
    for path in source.iterdir():
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "model/generation_config.json"
    generation = json.loads(path.read_text())
    assert generation["forced_eos_token_id"] is None
    path.write_text(json.dumps(generation | {"forced_eos_token_id": 0}))
    import_model(tmp_path / "model", tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["forced_eos_token_id"] == 0
    text, asked = sentences(1, seed=2)[0], {"num_beams": 1, "max_length_rate": 0, "length_alpha": 0}
    plain, forced = (LoadedModel(read_model(each)) for each in (source, tmp_path / "out"))
    (free,) = plain.translate(text, max_length=3, **asked)
    (ended,) = forced.translate(text, max_length=4, **asked)
    assert free == ended  # the fourth token is the end, which costs nothing
    assert ended["cut"]
    (seen,) = forced.translate(text, max_length=4, alignments=True, **asked)
    assert "</s>" not in json.dumps(seen)
    path.write_text(json.dumps(generation | {"forced_eos_token_id": 7}))
    with pytest.raises(UserError, match=r"generation_config.json: forced_eos_token_id is 7; it mu"):
        read_model(tmp_path / "model")
