"""Imports against Transformers: every family, every head, states, logits and token ids."""

import dataclasses
import json
import sys

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.parity
pytest.importorskip("torch")
pytest.importorskip("transformers")

import family_models  # noqa: E402
from family_models import WORDS, save_family  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

from bert_jax.artefacts.exchange import importing  # noqa: E402
from bert_jax.artefacts.exchange.exported_files import write_huggingface  # noqa: E402
from bert_jax.artefacts.exchange.huggingface import prove  # noqa: E402
from bert_jax.artefacts.exchange.importing import import_model, read_source  # noqa: E402
from bert_jax.artefacts.exchange.proof import ProofFailedError, logits_of, proof_rows  # noqa: E402
from bert_jax.artefacts.saved.reading import read_model  # noqa: E402
from bert_jax.errors import UserError  # noqa: E402
from bert_jax.tokenization.load import load_tokenizer  # noqa: E402

TOLERANCE = 2e-5  # float32, logits of up to 7
HEADS = {
    "Model": {"hidden"},
    "ForMaskedLM": {"hidden", "mlm"},
    "ForTokenClassification": {"hidden", "head"},
    "ForQuestionAnswering": {"hidden", "head"},
    "ForSequenceClassification": {"hidden", "head"},
}
CASES = [
    (family, task, outputs)
    for family in ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra", "DistilBert")
    for task, outputs in HEADS.items()
] + [
    ("Bert", "ForPreTraining", {"hidden", "mlm", "nsp"}),
    ("Bert", "ForNextSentencePrediction", {"hidden", "nsp"}),
    ("Electra", "ForPreTraining", {"hidden", "rtd"}),
    ("Bert", "ForMultipleChoice", {"hidden", "head"}),
    ("Roberta", "ForMultipleChoice", {"hidden"}),
    ("DistilBert", "ForMultipleChoice", {"hidden"}),
    ("Electra", "ForMultipleChoice", {"hidden"}),
]


@pytest.mark.parametrize(("family", "task", "outputs"), CASES)
def test_every_head_of_every_family(tmp_path, family, task, outputs):
    save_family(tmp_path / "theirs", family, task, num_labels=2)
    report = import_model(tmp_path / "theirs", tmp_path / "ours", tolerance=TOLERANCE)
    compared = report["compared"]
    assert set(compared["differences"]) - {"pooled"} == outputs
    pooled = ["Model", "ForMultipleChoice"] if family not in ("Electra", "DistilBert") else []
    if family == "Bert":
        pooled += ["ForPreTraining", "ForNextSentencePrediction", "ForSequenceClassification"]
    assert ("pooled" in compared["differences"]) == (task in pooled)
    assert compared["texts_with_equal_ids"] > 30
    assert compared["pairs_have_equal_ids"]
    saved = read_model(tmp_path / "ours")
    assert ("head" in saved.params) == ("head" in outputs)
    assert report["untrained"] == (
        ["pooler"]
        if report["class"] == "BertModel" and not read_source(tmp_path / "theirs").saved.has_pooler
        else []
    )
    dropped = task == "ForMultipleChoice" and family != "Bert"
    assert any("only the encoder is imported" in note for note in report["notes"]) == dropped


@pytest.mark.parametrize("task", [*HEADS, "ForPreTraining"])
def test_narrow_embeddings_come_in_and_go_out(tmp_path, task):
    """The shape of google/electra-small: the tables are narrower than the layers."""
    theirs = save_family(tmp_path / "theirs", "Electra", task, num_labels=2, embedding_size=8)
    report = import_model(tmp_path / "theirs", tmp_path / "ours", tolerance=1e-5)
    outputs = HEADS.get(task, {"hidden", "rtd"})
    assert set(report["compared"]["differences"]) == outputs
    assert report["class"] == f"Electra{task}"
    saved = read_model(tmp_path / "ours")
    assert (saved.config.embedding_dim, saved.config.hidden_dim) == (8, 16)
    written = load_file(tmp_path / "ours/model.safetensors")
    wanted = load_file(tmp_path / "theirs/model.safetensors")
    for name, array in written.items():
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)
    proof = prove(saved, tmp_path / "ours", proof_rows(saved))
    assert proof["proofs"]["transformers"]["class"] == type(theirs).__name__
    assert proof["differences"].keys() >= outputs
    assert max(proof["differences"].values()) < 1e-5


@pytest.mark.parametrize(
    ("problem", "labels", "objective"),
    [
        ("single_label_classification", 3, "single_label"),
        ("multi_label_classification", 1, "multi_label"),
        ("multi_label_classification", 3, "multi_label"),
        ("regression", 1, "regression"),
    ],
)
@pytest.mark.parametrize("family", ["DistilBert", "Electra", "Roberta", "Bert"])
def test_classifiers_come_in_and_go_out(tmp_path, family, problem, labels, objective):
    """Logits of the source, of what was imported, and of what was exported after a change."""
    import torch
    import transformers

    theirs = save_family(
        tmp_path / "theirs", family, "ForSequenceClassification", num_labels=labels,
        problem_type=problem,
    )  # fmt: skip
    report = import_model(tmp_path / "theirs", tmp_path / "ours", tolerance=TOLERANCE)
    written = family if family in ("DistilBert", "Electra") else "Bert"
    assert report["class"] == f"{written}ForSequenceClassification"
    saved = read_model(tmp_path / "ours")
    assert (saved.outputs.objective, saved.outputs.head.num_labels) == (objective, labels)
    rate = 0.2 if family == "DistilBert" else 0.1  # its seq_classif_dropout
    assert saved.outputs.head.dropout_rate == rate
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    inputs = tokenizer(["the dog", "sat, a"], ["sleeps on", "."], return_tensors="pt", padding=True)
    plain = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        wanted, found = theirs(**plain).logits, again.eval()(**plain).logits
        again(**inputs)  # with what else its own tokenizer gives
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
    # A fine-tuned model has other numbers everywhere.
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda a: a + 0.1 * random.normal(size=a.shape), saved.params)
    tuned = dataclasses.replace(saved, params=jax.tree.map(np.float32, params))
    (tmp_path / "tuned").mkdir()
    write_huggingface(tuned, tmp_path / "tuned")
    proof = prove(tuned, tmp_path / "tuned", proof_rows(tuned))
    assert proof["proofs"]["transformers"]["class"] == report["class"]
    assert proof["differences"]["head"] < TOLERANCE


@pytest.mark.parametrize("task", ["ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("family", ["Roberta", "DistilBert", "XLMRoberta"])
def test_what_was_written_computes_the_same_in_transformers(tmp_path, family, task):
    """Both ways: source in its class, and what was written as a BERT, pairs with types too."""
    import torch
    import transformers

    theirs = save_family(tmp_path / "theirs", family, task, num_labels=3)
    if (family, task) == ("DistilBert", "ForSequenceClassification"):
        pytest.skip("its class has no types; see the test above")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    ours = getattr(transformers, f"AutoModel{task}").from_pretrained(tmp_path / "ours")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    original = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    text = f"the dog {original.mask_token}, sleeps don't"
    assert tokenizer(text)["input_ids"] == original(text)["input_ids"]
    found = tokenizer(
        ["the dog", "the box"], ["sleeps.", "heavy; jugs"], return_tensors="pt", padding=True
    )
    assert found["token_type_ids"].max() == 1
    inputs = {name: found[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        first = ours.eval()(**found).logits
        second = theirs(**inputs).logits
    where = found["attention_mask"] > 0 if task == "ForMaskedLM" else slice(None)
    np.testing.assert_allclose(first[where], second[where], atol=TOLERANCE)
    row = [found["input_ids"][0][found["attention_mask"][0] > 0].tolist()]
    special = load_tokenizer(tmp_path / "ours").special_ids
    assert row[0].count(special.sep) == (2 if family == "DistilBert" else 3)
    pair = original("the dog", "sleeps.")["input_ids"]
    assert tokenizer("the dog", "sleeps.")["input_ids"] == pair == row[0]


@pytest.mark.parametrize("family", ["Bert", "Roberta", "XLMRoberta", "Camembert"])
def test_tokens_lie_where_they_did_in_their_texts(tmp_path, family):
    """Offsets, of which the pipelines of Transformers make words."""
    import transformers

    save_family(tmp_path / "theirs", family, "ForTokenClassification", num_labels=2)
    report = import_model(tmp_path / "theirs", tmp_path / "ours", tolerance=TOLERANCE)
    compared = report["compared"]
    assert compared["texts_with_equal_offsets"] == compared["texts_with_equal_ids"] > 30
    answers = []
    for name in ("theirs", "ours"):
        pipeline = transformers.pipeline(
            "token-classification", str(tmp_path / name), aggregation_strategy="simple",
            device="cpu",
        )  # fmt: skip
        found = pipeline("The quick brown  dog sleeps.")
        answers.append([(each["start"], each["end"], each["word"]) for each in found])
    assert answers[0] == answers[1]


def test_offsets_that_are_lost_are_found(tmp_path, monkeypatch):
    save_family(tmp_path / "theirs", "Roberta", "Model")
    write = importing.write_huggingface

    def without_trimming(saved, directory):
        write(saved, directory)
        path = directory / "tokenizer.json"
        whole = json.loads(path.read_text())
        whole["post_processor"]["processors"][0]["trim_offsets"] = False
        path.write_text(json.dumps(whole))

    def read_back(meant, back):
        pass

    monkeypatch.setattr(importing, "write_huggingface", without_trimming)
    monkeypatch.setattr(importing, "check_read_back", read_back)
    with pytest.raises(ProofFailedError, match="differ between the source and the written files"):
        import_model(tmp_path / "theirs", tmp_path / "ours")


def test_a_cased_vocabulary_alone(tmp_path):
    save_family(tmp_path / "theirs", "Bert", "Model")
    for path in (tmp_path / "theirs").glob("*token*"):
        path.unlink()
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    text = "\n".join(vocab).replace("paris", "Paris")
    (tmp_path / "theirs/vocab.txt").write_text(f"{text}\n")
    report = import_model(tmp_path / "theirs", tmp_path / "ours", tolerance=TOLERANCE)
    assert report["compared"]["texts_with_equal_ids"] > 30
    assert any("text is not lower-cased" in note for note in report["notes"])
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    ours = read_model(tmp_path / "ours").tokenizer
    assert tokenizer.tokenize("Paris paris") == ["Paris", "[UNK]"]
    assert ours.encode("Paris paris").ids.tolist() == [vocab.index("paris"), 1]


@pytest.mark.parametrize("family", ["Bert", "Roberta", "XLMRoberta"])
@pytest.mark.parametrize("special", [True, False])
def test_added_tokens_come_in_and_go_out(tmp_path, family, special):
    import transformers

    model = save_family(tmp_path / "theirs", family, "ForMaskedLM")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    names = ["<ent>", "</ent>", "covid"]
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": names})
    else:
        tokenizer.add_tokens(names)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    report = import_model(tmp_path / "theirs", tmp_path / "ours", tolerance=TOLERANCE)
    assert report["compared"]["texts_with_equal_ids"] > 30
    (tmp_path / "out").mkdir()
    saved = read_model(tmp_path / "ours")
    write_huggingface(saved, tmp_path / "out")
    prove(saved, tmp_path / "out", proof_rows(saved))
    for name in ("ours", "out"):
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        for text in ("the <ent> dog</ent>, a<ent>b <ENT> Covid", "covid the covid19"):
            wanted = tokenizer(text, return_offsets_mapping=True)
            found = theirs(text, return_offsets_mapping=True)
            assert found["input_ids"] == wanted["input_ids"], (name, text)
            assert found["offset_mapping"] == wanted["offset_mapping"], (name, text)
            ours = load_tokenizer(tmp_path / name).encode(text).ids.tolist()
            assert ours == wanted["input_ids"][1:-1]
        assert theirs.convert_tokens_to_ids(names) == tokenizer.convert_tokens_to_ids(names)
        decoded = theirs.decode(wanted["input_ids"], skip_special_tokens=True)
        assert ("covid" in decoded) == (not special)


def test_labels_and_rates(tmp_path):
    save_family(
        tmp_path / "theirs", "Roberta", "ForSequenceClassification",
        id2label={0: "bad", 1: "fair", 2: "good"}, label2id={"bad": 0, "fair": 1, "good": 2},
        classifier_dropout=0.3, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.05,
        layer_norm_eps=1e-5,
    )  # fmt: skip
    import_model(tmp_path / "theirs", tmp_path / "ours", tolerance=TOLERANCE)
    saved = read_model(tmp_path / "ours")
    assert saved.outputs.labels == ("bad", "fair", "good")
    assert saved.outputs.head.dropout_rate == 0.3
    assert (saved.config.hidden_dropout_rate, saved.config.attention_dropout_rate) == (0.2, 0.05)
    assert saved.config.norm_eps == 1e-5
    assert saved.config.num_positions == 138


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("Bert", {"hidden_act": "gelu_new"}),
        ("DistilBert", {"activation": "relu"}),
        ("DistilBert", {"activation": "gelu_new"}),
        ("DistilBert", {"sinusoidal_pos_embds": True}),
        ("Roberta", {"type_vocab_size": 3}),
    ],
)
def test_other_configurations_of_a_masked_lm(tmp_path, family, fields):
    save_family(tmp_path / "theirs", family, "ForMaskedLM", **fields)
    report = import_model(tmp_path / "theirs", tmp_path / "ours", tolerance=TOLERANCE)
    assert set(report["compared"]["differences"]) == {"hidden", "mlm"}


def test_a_model_whose_padding_is_not_that_of_its_tokenizer_is_refused(tmp_path):
    """Theirs would count positions from another token."""
    save_family(tmp_path / "theirs", "Roberta", "ForMaskedLM", pad_token_id=0)
    with pytest.raises(UserError, match="pad_token_id is 0, but the tokenizer's pad is 1"):
        import_model(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize("family", ["Roberta", "Electra"])
def test_a_head_with_another_activation_than_the_encoder_is_left_out(tmp_path, family):
    save_family(tmp_path / "theirs", family, "ForMaskedLM", hidden_act="gelu_new")
    report = import_model(tmp_path / "theirs", tmp_path / "ours", tolerance=TOLERANCE)
    assert set(report["compared"]["differences"]) == {"hidden"}
    assert any("exact GELU" in note for note in report["notes"])
    assert report["class"] == "BertModel"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_written_as_float32(tmp_path, dtype):
    import torch

    save_family(tmp_path / "theirs", "Roberta", "ForMaskedLM").to(
        getattr(torch, dtype)
    ).save_pretrained(tmp_path / "theirs")
    report = import_model(tmp_path / "theirs", tmp_path / "ours", tolerance=TOLERANCE)
    assert any(dtype in note for note in report["notes"])


def test_a_model_that_differs_is_refused_and_nothing_is_left(tmp_path, monkeypatch):
    save_family(tmp_path / "theirs", "Electra", "ForMaskedLM")
    exact = logits_of

    def inexact(saved, batch):
        found = exact(saved, batch)
        return found | {"mlm": found["mlm"] + 2e-4}

    monkeypatch.setattr("bert_jax.artefacts.exchange.proof.logits_of", inexact)
    with pytest.raises(ProofFailedError, match=r"mlm 2\.0\de-04, but at most 1e-04 is allowed"):
        import_model(tmp_path / "theirs", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
    import_model(tmp_path / "theirs", tmp_path / "ours", tolerance=1e-3)


def test_another_tokenizer_is_refused_and_nothing_is_left(tmp_path, monkeypatch):
    save_family(tmp_path / "theirs", "Roberta", "Model")
    module = sys.modules["bert_jax.tokenization.fast_tokenizer"]
    encode = module.FastTokenizer.encode_batch
    monkeypatch.setattr(
        module.FastTokenizer,
        "encode_batch",
        lambda self, texts: [a[:9] for a in encode(self, texts)],
    )
    with pytest.raises(ProofFailedError, match="Transformers give different token ids for"):
        import_model(tmp_path / "theirs", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    "task", ["Model", "ForPreTraining", "ForMaskedLM", "ForTokenClassification"]
)
def test_a_bert_comes_back_byte_for_byte(tmp_path, task):
    from safetensors.numpy import load_file

    save_family(tmp_path / "theirs", "Bert", task)
    import_model(tmp_path / "theirs", tmp_path / "ours")
    before = load_file(tmp_path / "theirs/model.safetensors")
    after = load_file(tmp_path / "ours/model.safetensors")
    tied = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert before.keys() - tied == after.keys()
    for name, array in after.items():
        assert array.dtype == np.float32
        assert array.tobytes() == before[name].tobytes(), name


@pytest.mark.parametrize("family", ["Roberta", "XLMRoberta"])
def test_pairs_and_questions_are_asked_as_of_the_source(tmp_path, family):
    """Two separators stand between their texts."""
    import torch
    import transformers

    import bert_jax

    save_family(tmp_path / "pairs", family, "ForSequenceClassification", num_labels=3)
    import_model(tmp_path / "pairs", tmp_path / "ours", tolerance=TOLERANCE)
    theirs = transformers.pipeline("text-classification", str(tmp_path / "pairs"), device="cpu")
    (answer,) = bert_jax.load(tmp_path / "ours").classify(["the dog"], ["sleeps."])
    found = theirs({"text": "the dog", "text_pair": "sleeps."}, top_k=None)
    expected = {each["label"]: each["score"] for each in found}
    assert answer["probabilities"] == pytest.approx(expected, abs=TOLERANCE)

    model = save_family(tmp_path / "spans", family, "ForQuestionAnswering").eval()
    import_model(tmp_path / "spans", tmp_path / "asked", tolerance=TOLERANCE)
    asked, context = "the fox?", "The lazy dog sleeps; the jugs are heavy."
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "spans")
    batch = tokenizer(asked, context, return_tensors="pt")
    with torch.inference_mode():
        out = model(**batch)
    inside = [n for n, part in enumerate(batch.sequence_ids(0)) if part == 1]
    sums = np.add.outer(out.start_logits[0, inside].numpy(), out.end_logits[0, inside].numpy())
    sums[~np.triu(np.ones_like(sums, bool))] = -np.inf
    first, last = np.unravel_index(sums.argmax(), sums.shape)
    spans = [batch.token_to_chars(inside[n]) for n in (first, last)]
    (answer,) = bert_jax.load(tmp_path / "asked").answer([asked], context)
    assert answer["answer"] == context[spans[0].start : spans[1].end].strip()


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("Roberta", "RobertaTokenizer"),
        ("Roberta", "PreTrainedTokenizerFast"),  # with RobertaProcessing in tokenizer.json
        ("Bert", "XLMRobertaTokenizer"),  # Multilingual-MiniLM has this tokenizer
        ("Bert", "TokenizersBackend"),
        ("Bert", "DistilBertTokenizer"),
    ],
)
def test_second_texts_have_the_token_type_that_the_tokenizer_gives(
    tmp_path, monkeypatch, family, kind
):
    """Type 0, in tokenizers of these classes, also where the model has two types."""
    import transformers

    import bert_jax

    if kind == "XLMRobertaTokenizer":
        monkeypatch.setitem(family_models.TOKENIZERS, family, family_models.unigram)
    save_family(tmp_path / "theirs", family, "ForSequenceClassification", type_vocab_size=2)
    path = tmp_path / "theirs" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": kind}))
    theirs = transformers.pipeline("text-classification", str(tmp_path / "theirs"), device="cpu")
    found = theirs({"text": "the dog", "text_pair": "sleeps."}, top_k=None)
    expected = {each["label"]: each["score"] for each in found}
    report = import_model(tmp_path / "theirs", tmp_path / "ours", tolerance=TOLERANCE)
    for name in ("ours", "theirs")[: 1 + (family == "Bert")]:
        (answer,) = bert_jax.load(tmp_path / name).classify(["the dog"], ["sleeps."])
        assert answer["probabilities"] == pytest.approx(expected, abs=TOLERANCE)
    assert any("does not mark the second text" in note for note in report["notes"])


def test_rows_of_our_proof_hold_pairs(tmp_path):
    save_family(tmp_path / "theirs", "XLMRoberta", "Model")
    saved = read_source(tmp_path / "theirs").saved
    rows = proof_rows(saved)
    assert any(row.count(saved.tokenizer.special_ids.sep) == 3 for row in rows)


@pytest.mark.parametrize(
    ("family", "takes_blank"),
    [("Bert", False), ("Roberta", False), ("Roberta", True), ("Camembert", True)],
)
def test_masks_are_filled_as_in_the_source(tmp_path, family, takes_blank):
    """The mask of the published RoBERTa takes the blank before it."""
    import transformers

    import bert_jax

    save_family(tmp_path / "theirs", family, "ForMaskedLM")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    mask = transformers.AddedToken(tokenizer.mask_token, lstrip=takes_blank, special=True)
    tokenizer.add_special_tokens({"mask_token": mask})
    tokenizer.save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours", tolerance=TOLERANCE)
    theirs = transformers.pipeline("fill-mask", model=str(tmp_path / "theirs"), device="cpu")
    mask, size = theirs.tokenizer.mask_token, len(theirs.tokenizer)
    for text in (f"the cat {mask} on the mat .", f"{mask} brown fox", f"the dog {mask}"):
        (answer,) = bert_jax.load(tmp_path / "ours").fill_mask(text, top=5)
        expected = {each["token"]: each["score"] for each in theirs(text, top_k=size)}
        for candidate in answer["masks"][0]:
            wanted = expected[candidate["id"]]
            assert candidate["probability"] == pytest.approx(wanted, abs=2e-5)
