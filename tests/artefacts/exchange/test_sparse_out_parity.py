"""Sparse encoders as sentence-transformers' `SparseEncoder` reads and writes them."""

import subprocess
import sys

import numpy as np
import pytest
from vector_models import vector_model

from bert_jax.artefacts.exchange import sentence_transformers
from bert_jax.artefacts.exchange.export import export
from bert_jax.artefacts.exchange.exported_files import write_huggingface
from bert_jax.artefacts.exchange.proof import PROOF_TEXTS
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.infer.loaded import LoadedModel

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("sentence_transformers")
FIELDS = {"query_prefix": "find ", "document_prefix": "text: "}


def made_texts(count=500):
    """Texts of 0 to 59 words in many scripts, most of few; both packages cut the longest."""
    random, words = np.random.default_rng(0), " ".join(PROOF_TEXTS).split()
    words = [word for word in words if "[" not in word and "<" not in word]
    lengths = random.integers(0, 60, count) // random.integers(1, 12, count)
    return [" ".join(words[n] for n in random.integers(0, len(words), k)) for k in lengths]


def encoded(theirs, texts):
    kinds = {None: theirs.encode, "query": theirs.encode_query, "document": theirs.encode_document}
    return {
        kind: np.stack([each.to_dense().numpy() for each in encode(texts)])
        for kind, encode in kinds.items()
    }


@pytest.mark.parametrize("static", [False, True])
def test_encode_of_500_texts_there_and_back(static, tmp_path):
    from sentence_transformers import SparseEncoder

    saved, texts = vector_model("splade", static_queries=static, **FIELDS), made_texts()
    assert 20 < texts.count("") < 100
    write_huggingface(saved, tmp_path)
    theirs = SparseEncoder(f"{tmp_path}", device="cpu", local_files_only=True)
    expected = encoded(theirs, texts)
    theirs.save_pretrained(f"{tmp_path / 'again'}")
    for place in (tmp_path, tmp_path / "again"):
        model = LoadedModel(read_model(place))
        assert model.model.embedding == saved.embedding
        for kind, wanted in expected.items():
            found = model.embed(texts, kind=kind)
            np.testing.assert_allclose(found, wanted, atol=1e-4)
            other = (found > 0) != (wanted > 0)  # only rounding separates these from 0
            assert np.maximum(found, wanted)[other].max(initial=0) < 1e-5
    few = np.count_nonzero(expected["query"], axis=1).mean()
    assert (few < 30) == static
    assert theirs.similarity_fn_name == "dot"


@pytest.mark.parametrize("static", [False, True])
def test_an_export_has_the_proof_and_the_check(static, tmp_path):
    (tmp_path / "source").mkdir()
    write_huggingface(vector_model("splade", static_queries=static, **FIELDS), tmp_path / "source")
    parity = export(tmp_path / "source", "sentence-transformers", tmp_path / "out")
    found = parity["proofs"]["sentence-transformers"]
    assert found["ran"]
    assert max(found["differences"].values()) < 1e-4
    card = (tmp_path / "out" / "README.md").read_text()
    assert "from sentence_transformers import SparseEncoder" in card
    assert "sparse, a weight for each token of the vocabulary" in card
    check = tmp_path / "out" / "conformance" / "check.py"
    assert subprocess.run([sys.executable, check], check=False).returncode == 0


def test_other_vectors_of_theirs_fail(tmp_path):
    sentence_transformers.write(vector_model("splade", static_queries=True), tmp_path)
    other = vector_model("splade", static_queries=True)
    other.params["queries"][7:90] += 1
    found = sentence_transformers.compare(other, tmp_path)
    assert max(found["differences"].values()) > 0.9
