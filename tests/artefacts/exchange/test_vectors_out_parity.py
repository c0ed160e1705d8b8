"""The layout of sentence-transformers as `SentenceTransformer` reads and writes it."""

import numpy as np
import pytest
from export_models import model_of
from vector_models import vector_model

from bert_jax.artefacts.exchange import sentence_transformers
from bert_jax.artefacts.exchange.export import export
from bert_jax.artefacts.exchange.exported_files import write_huggingface
from bert_jax.artefacts.exchange.proof import PROOF_TEXTS, ProofFailedError
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.infer.loaded import LoadedModel

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore:.*longer than")]
pytest.importorskip("sentence_transformers")
FIELDS = {"query_prefix": "query: ", "document_prefix": "passage: ", "dimensions": (8,)}


@pytest.mark.parametrize(
    ("pooling", "tokenizer", "normalize"),
    [("mean", "uncased", True), ("cls", "bpe", False), ("last", "unigram", True),
     ("mean", "cased", False)],
)  # fmt: skip
def test_encode_gives_the_same_vectors(pooling, tokenizer, normalize, tmp_path):
    saved = vector_model(pooling, tokenizer, normalize=normalize, **FIELDS)
    sentence_transformers.write(saved, tmp_path)
    found = sentence_transformers.compare_vectors(saved, tmp_path)
    assert found["texts"] >= len(PROOF_TEXTS) - 2
    assert found["least_cosine"] >= 0.99999


def test_the_proof_runs_in_an_export(tmp_path):
    (tmp_path / "source").mkdir()
    write_huggingface(model_of("class"), tmp_path / "source")
    parity = export(tmp_path / "source", "sentence-transformers", tmp_path / "out")
    assert parity["proofs"]["sentence-transformers"]["least_cosine"] >= 0.99999
    assert "sentence-transformers" in parity["versions"]


def test_other_vectors_of_theirs_fail(tmp_path):
    sentence_transformers.write(vector_model("mean"), tmp_path)
    with pytest.raises(ProofFailedError, match=r"another vector for .*without prefix"):
        sentence_transformers.compare_vectors(vector_model("last"), tmp_path)


def test_what_they_save_is_read(tmp_path):
    from sentence_transformers import SentenceTransformer

    saved = vector_model("cls", **FIELDS)
    sentence_transformers.write(saved, tmp_path)
    theirs = SentenceTransformer(f"{tmp_path}", device="cpu", local_files_only=True)
    theirs.save_pretrained(f"{tmp_path / 'again'}")
    back = read_model(tmp_path / "again")
    assert back.max_length == 32
    assert (back.embedding.pooling, back.embedding.query_prefix) == ("cls", "query: ")
    texts = ["the river froze", "Paris is the capital"]
    vectors = theirs.encode_query(texts, truncate_dim=8, normalize_embeddings=True)
    mine = LoadedModel(back).embed(texts, kind="query", dimensions=8)
    np.testing.assert_allclose(mine, vectors, atol=1e-5)
