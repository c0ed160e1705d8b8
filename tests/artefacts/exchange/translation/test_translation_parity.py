"""Exported translators as `transformers` reads them: logits, translations, what must fail."""

import ast
import json
import runpy

import numpy as np
import pytest
import safetensors.numpy
from translators import FORMS, translator_of

from bert_jax.artefacts.exchange.export import check_differences, export
from bert_jax.artefacts.exchange.huggingface import prove, write
from bert_jax.artefacts.exchange.proof import ProofFailedError, batch_of, proof_rows
from bert_jax.artefacts.exchange.searches import SEARCHES, compare_searches, translated
from bert_jax.artefacts.exchange.theirs import TheirModel
from bert_jax.artefacts.saved.reading import read_model

pytestmark = pytest.mark.parity
pytest.importorskip("transformers")
ROWS = 8


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads of torch that wait for each other take seconds where other tests run."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_translates_the_same_there(form, tmp_path):
    saved = translator_of(form, "unigram" if "," in form else "uncased")
    write(saved, tmp_path)
    rows = proof_rows(saved)[:ROWS]
    found = prove(saved, tmp_path, rows)
    check_differences(found["differences"], 1e-4)
    theirs = found["proofs"]["transformers"]
    assert theirs["class"] == FORMS[form][0]
    for counts in theirs["translations"].values():
        assert counts["equal"] + counts["ties"] == ROWS
        assert counts["ties"] <= 1
    ours = translated(saved, batch_of(saved, rows), SEARCHES["beam"], 32)
    assert len({*map(tuple, ours)}) > 2  # the sources are not without effect


def test_other_weights_and_another_search_fail(tmp_path):
    saved = translator_of("pair", "uncased")
    write(saved, tmp_path)
    rows = proof_rows(saved)[:ROWS]
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    other = {**settings, "length_penalty": 0.0}
    (tmp_path / "generation_config.json").write_text(json.dumps(other))
    theirs = TheirModel(tmp_path, "EncoderDecoderModel")
    with pytest.raises(ProofFailedError, match="beam search translates"):
        compare_searches(saved, rows, theirs.translate)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    tensors["decoder.bert.encoder.layer.0.crossattention.self.key.weight"][:] = 0
    bias = tensors.pop("decoder.bert.encoder.layer.0.intermediate.dense.bias")
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ProofFailedError, match=r"missing_keys.*intermediate"):
        TheirModel(tmp_path, "EncoderDecoderModel").whole()
    tensors["decoder.bert.encoder.layer.0.intermediate.dense.bias"] = bias
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = TheirModel(tmp_path, "EncoderDecoderModel")
    with pytest.raises(ProofFailedError, match="greedy search translates"):
        compare_searches(saved, rows, theirs.translate)


def test_the_snippet_of_the_card_translates(tmp_path, capsys):
    """The model card's code prints what `generate` gives for each text alone."""
    import torch

    saved = translator_of("pair", "uncased")
    (tmp_path / "source").mkdir()
    write(saved, tmp_path / "source")
    out = tmp_path / "out"
    parity = export(tmp_path / "source", "huggingface", out)
    assert parity["class"] == "EncoderDecoderModel"
    assert parity["untrained_parts"] == ["pooler"]
    assert parity["proofs"]["transformers"]["ran"]
    card = (out / "README.md").read_text()
    beam = parity["proofs"]["transformers"]["translations"]["beam"]
    assert f"Translations by beam search: {beam['equal']} equal" in card
    code = card.split("```python\n")[1].split("```")[0].replace('"DIR"', repr(str(out)))
    (tmp_path / "card.py").write_text(code)
    runpy.run_path(f"{tmp_path / 'card.py'}")
    shown = ast.literal_eval(capsys.readouterr().out)
    special = saved.tokenizer.special_ids
    model = TheirModel(out, parity["class"]).model
    ids = [special.cls, *saved.tokenizer.encode("A text.").ids.tolist(), special.sep]
    (found,) = model.generate(torch.tensor([ids]))
    assert shown[0] == saved.tokenizer.decode(
        np.array([n for n in found.tolist() if n not in vars(special).values()])
    )


def test_what_they_save_is_read_here(tmp_path):
    """Tensors that `save_pretrained` leaves out or writes twice, and types of the decoder."""
    saved = translator_of("pair, three tables", "uncased")
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    write(saved, first)
    theirs = TheirModel(first, "EncoderDecoderModel")
    types = theirs.model.decoder.bert.embeddings.token_type_embeddings.weight
    types.data += 0.25
    theirs.model.save_pretrained(second)
    for path in first.iterdir():
        if path.name not in {"config.json", "generation_config.json", "model.safetensors"}:
            (second / path.name).write_bytes(path.read_bytes())
    back = read_model(second)
    meant = saved.params["output"]["decoder"][: saved.config.vocab_size]
    np.testing.assert_array_equal(back.params["output"]["decoder"][: len(meant)], meant)
    shifted = saved.params["decoder"]["embeddings"]["position"] + 0.25
    np.testing.assert_allclose(back.params["decoder"]["embeddings"]["position"], shifted, 1e-6)
