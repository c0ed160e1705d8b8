"""sentence-transformers reads what is written, and what it writes is read: vectors and scores."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from export_models import model_of
from vector_models import vector_model

from bert_jax.artefacts.exchange import sentence_transformers
from bert_jax.artefacts.exchange.export import export
from bert_jax.artefacts.exchange.exported_files import write_huggingface
from bert_jax.artefacts.exchange.importing import import_model
from bert_jax.artefacts.exchange.proof import PROOF_TEXTS, ProofFailedError
from bert_jax.artefacts.saved.model import Origin
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.errors import UserError
from bert_jax.infer.forward import on_device
from bert_jax.infer.loaded import LoadedModel
from bert_jax.infer.search.index import Reranker

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore:.*longer than"),
    pytest.mark.filterwarnings("ignore:.*texts are longer"),
]
package = pytest.importorskip("sentence_transformers")
torch = pytest.importorskip("torch")
FIELDS = {"query_prefix": "query: ", "document_prefix": "passage: ", "dimensions": (8,)}
TEXTS = ["", "the", "the river froze", "Paris is the capital " * 2, "the ferry stayed " * 20]
PAIRS = list(itertools.pairwise(TEXTS))


def loaded(directory, kind="SentenceTransformer", **options):
    """A directory in sentence-transformers, on the CPU."""
    return getattr(package, kind)(
        f"{directory}", device="cpu", local_files_only=True, **options
    )  # fmt: skip


def exported(saved, out, monkeypatch):
    """What an export of a fine-tuned model for CrossEncoder says."""
    saved = dataclasses.replace(saved, origin=Origin("finetune", 3, {"task": {"kind": "table"}}))
    monkeypatch.setattr("bert_jax.artefacts.exchange.export.read_model", lambda *_, **__: saved)
    return export("run", "cross-encoder", out)


@pytest.mark.parametrize(
    ("pooling", "tokenizer", "normalize", "maps"),
    [("mean", "uncased", True, ()), ("cls", "bpe", False, ("tanh",)), ("last", "unigram", True, ()),
     ("mean", "cased", False, ()), ("max", "uncased", True, ("", "gelu")),
     ("mean_sqrt_len", "uncased", False, ("relu", "silu"))],
)  # fmt: skip
def test_encode_gives_the_same_vectors(pooling, tokenizer, normalize, maps, tmp_path):
    saved = vector_model(pooling, tokenizer, normalize=normalize, maps=maps, **FIELDS)
    sentence_transformers.write(saved, tmp_path)
    found = sentence_transformers.compare(saved, tmp_path)
    assert found["texts"] >= len(PROOF_TEXTS) - 2
    theirs, mine = loaded(tmp_path), LoadedModel(read_model(tmp_path))
    largest = max(1, np.abs(theirs.encode(TEXTS)).max())
    assert found["differences"]["sentence_embedding"] <= 1e-5 * largest
    for kind, encode in (
        (None, theirs.encode), ("query", theirs.encode_query), ("document", theirs.encode_document)
    ):  # fmt: skip
        vectors = mine.embed(TEXTS, kind=kind)
        np.testing.assert_allclose(vectors, encode(TEXTS), atol=1e-5 * largest)


def test_the_proof_runs_in_an_export(tmp_path):
    (tmp_path / "source").mkdir()
    write_huggingface(model_of("class"), tmp_path / "source")
    parity = export(tmp_path / "source", "sentence-transformers", tmp_path / "out")
    assert parity["proofs"]["sentence-transformers"]["ran"]
    assert parity["differences"]["sentence_embedding"] <= 1e-5
    assert "sentence-transformers" in parity["versions"]


def test_other_vectors_of_theirs_fail(tmp_path):
    sentence_transformers.write(vector_model("mean"), tmp_path)
    found = sentence_transformers.compare(vector_model("last"), tmp_path)
    assert found["differences"]["sentence_embedding"] > 1e-2
    with pytest.raises(ProofFailedError, match=r"sentence_embedding has the shape \(.*, 16\)"):
        sentence_transformers.compare(vector_model("mean", maps=("tanh",)), tmp_path)


def test_what_they_save_is_read(tmp_path):
    saved = vector_model("cls", **FIELDS)
    sentence_transformers.write(saved, tmp_path)
    theirs = loaded(tmp_path)
    theirs.save_pretrained(f"{tmp_path / 'again'}")
    back = read_model(tmp_path / "again")
    assert back.max_length == 32
    assert (back.embedding.pooling, back.embedding.query_prefix) == ("cls", "query: ")
    texts = ["the river froze", "Paris is the capital"]
    vectors = theirs.encode_query(texts, truncate_dim=8, normalize_embeddings=True)
    mine = LoadedModel(back).embed(texts, kind="query", dimensions=8)
    np.testing.assert_allclose(mine, vectors, atol=1e-5)


@pytest.mark.parametrize("pooling", ["max", "mean_sqrt_len_tokens", "mean", "cls", "lasttoken"])
def test_modules_that_they_save_give_the_same_vectors(pooling, tmp_path):
    modules = package.sentence_transformer.modules
    sentence_transformers.write(vector_model("mean"), tmp_path)
    torch.manual_seed(3)
    theirs = package.SentenceTransformer(
        modules=[
            loaded(tmp_path)[0], modules.Pooling(16, pooling), modules.Dense(16, 24),
            modules.Dense(24, 8, bias=False, activation_function=torch.nn.Identity()),
            modules.Dense(8, 8, activation_function=torch.nn.GELU()), modules.Normalize(),
        ],
        device="cpu",
    )  # fmt: skip
    theirs.save_pretrained(f"{tmp_path / 'again'}")
    mine = LoadedModel(read_model(tmp_path / "again"))
    np.testing.assert_allclose(mine.embed(TEXTS), theirs.encode(TEXTS), atol=1e-5)
    vectors = theirs.encode(TEXTS, truncate_dim=4, normalize_embeddings=True)
    np.testing.assert_allclose(mine.embed(TEXTS, dimensions=4), vectors, atol=1e-5)
    import_model(tmp_path / "again", tmp_path / "imported")
    again = loaded(tmp_path / "imported")
    np.testing.assert_allclose(again.encode(TEXTS), theirs.encode(TEXTS), atol=1e-6)


def test_a_module_that_is_not_read_is_named(tmp_path):
    sentence_transformers.write(vector_model("mean"), tmp_path)
    norm = package.sentence_transformer.modules.LayerNorm(16)
    theirs = package.SentenceTransformer(modules=[*loaded(tmp_path), norm], device="cpu")
    theirs.save_pretrained(f"{tmp_path / 'again'}")
    with pytest.raises(UserError, match=r"modules\.json: .*Normalize, LayerNorm; they"):
        read_model(tmp_path / "again")


def of_two_classes():
    saved = model_of("classes")
    outputs = dataclasses.replace(saved.outputs, objective="single_label", labels=("no", "yes"))
    return dataclasses.replace(saved, outputs=outputs)


@pytest.mark.parametrize("kind", ["score", "class", "one of classes", "classes"])
def test_predict_gives_the_scores_of_the_model(kind, tmp_path, monkeypatch):
    saved = model_of(kind)
    assert exported(saved, tmp_path / "out", monkeypatch)["differences"]["scores"] <= 1e-5
    scores = loaded(tmp_path / "out", "CrossEncoder").predict(PAIRS).reshape(len(PAIRS), -1)
    assert scores.std(axis=0).min() > 1e-3
    answers, back = (LoadedModel(x).classify(PAIRS) for x in (saved, read_model(tmp_path / "out")))
    assert back == answers
    if kind == "score":
        mine = [[each["score"]] for each in answers]
    else:
        mine = [[each["probabilities"][name] for name in saved.outputs.labels] for each in answers]
    if kind == "class":  # logits, whose softmax is left to the caller
        scores = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    np.testing.assert_allclose(scores, mine, atol=1e-5)


def test_two_classes_become_the_probability_of_the_second(tmp_path, monkeypatch):
    saved, out = of_two_classes(), tmp_path / "out"
    assert exported(saved, out, monkeypatch)["differences"]["scores"] <= 1e-5
    theirs = loaded(out, "CrossEncoder")
    for each in (saved, read_model(out)):
        shares = [answer["probabilities"]["yes"] for answer in LoadedModel(each).classify(PAIRS)]
        np.testing.assert_allclose(theirs.predict(PAIRS), shares, atol=1e-5)
    queries, passages = map(list, zip(*PAIRS, strict=True))
    before, after = (Reranker(on_device(each)) for each in (saved, read_model(out)))
    odds = before.scores(queries, passages)
    np.testing.assert_allclose(after.scores(queries, passages), odds, atol=1e-5)
    ranked = [each["corpus_id"] for each in theirs.rank("the river", TEXTS[1:4])]
    mine = np.argsort(-before.scores(["the river"] * 3, TEXTS[1:4]))
    assert ranked == mine.tolist()


@pytest.mark.parametrize("activation", ["Identity", "Sigmoid"])
def test_a_cross_encoder_that_they_save_is_read(activation, tmp_path):
    (tmp_path / "source").mkdir()
    write_huggingface(model_of("score"), tmp_path / "source")
    function = getattr(torch.nn, activation)()
    theirs = loaded(tmp_path / "source", "CrossEncoder", activation_fn=function)
    theirs.save_pretrained(f"{tmp_path / 'theirs'}")
    settings = json.loads((tmp_path / "theirs" / "config_sentence_transformers.json").read_text())
    assert settings["model_type"] == "CrossEncoder"
    import_model(tmp_path / "theirs", tmp_path / "imported")
    scores = theirs.predict(PAIRS)
    again = loaded(tmp_path / "imported", "CrossEncoder")
    np.testing.assert_allclose(again.predict(PAIRS), scores, atol=1e-6)
    for name in ("theirs", "imported"):
        answers = LoadedModel(read_model(tmp_path / name)).classify(PAIRS)
        if activation == "Sigmoid":
            answers = [{"score": each["probabilities"]["LABEL_0"]} for each in answers]
        np.testing.assert_allclose([each["score"] for each in answers], scores, atol=1e-5)


@pytest.mark.parametrize("kind", ["tags", "span", "mlm", "bare", "vectors"])
def test_a_model_without_scores_is_no_cross_encoder(kind, tmp_path, monkeypatch):
    saved = vector_model() if kind == "vectors" else model_of(kind)
    with pytest.raises(UserError, match="it has no head for classes, labels or a number"):
        exported(saved, tmp_path / "out", monkeypatch)
    assert not (tmp_path / "out").exists()
