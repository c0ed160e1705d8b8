"""Every verb against Transformers' own, on random models that it wrote."""

import json

import numpy as np
import pytest

import bert_jax
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.infer.forward import on_device
from bert_jax.infer.minimal_pairs import pair_scores, read_pairs

pytestmark = pytest.mark.parity

WORDS = ["the", "cat", "sat", "on", "##s", "mat", "d", "##og", "met", "kim", "in", "rome", "."]
TEXTS = ["the cats sat on the mat .", "dog", "kim met the cat in rome . " * 3, ""]


def written(directory, model_class, **fields):
    """A random model and its tokenizer, in the directory."""
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=5 + len(WORDS), hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64, initializer_range=0.3, **fields,
    )  # fmt: skip
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = transformers.BertTokenizer(vocab={token: n for n, token in enumerate(vocab)})
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model, tokenizer


def pipeline(name, theirs, **options):
    import transformers

    model, tokenizer = theirs
    return transformers.pipeline(name, model=model, tokenizer=tokenizer, device="cpu", **options)


def test_fill_mask(tmp_path):
    theirs = pipeline("fill-mask", written(tmp_path, "BertForMaskedLM"))
    text = "the [MASK] sat ."
    (answer,) = bert_jax.load(tmp_path).fill_mask(text, top=5)
    expected = {each["token_str"]: each["score"] for each in theirs(text, top_k=18)}
    assert len(answer["masks"][0]) == 5
    for candidate in answer["masks"][0]:
        assert candidate["probability"] == pytest.approx(expected[candidate["token"]], abs=2e-5)


@pytest.mark.parametrize("family", ["Roberta", "XLMRoberta"])
@pytest.mark.parametrize("text", ["The quick {} fox jumps.", "{} dog", "Pack my{} box."])
def test_fill_mask_of_other_tokenizers(tmp_path, family, text):
    import transformers
    from family_models import save_family

    from bert_jax.artefacts.exchange.importing import import_model

    model = save_family(tmp_path / "source", family, "ForMaskedLM")
    import_model(str(tmp_path / "source"), tmp_path / "ours")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "source")
    theirs = pipeline("fill-mask", (model, tokenizer))
    found = theirs(text.format("<mask>"), top_k=len(tokenizer))
    expected = {each["token"]: each for each in found}
    (answer,) = bert_jax.load(tmp_path / "ours").fill_mask(text.format("[MASK]"), top=400)
    compared = 0
    for candidate in answer["masks"][0]:
        same = expected[candidate["id"]]
        assert candidate["probability"] == pytest.approx(same["score"], abs=2e-5)
        shown = same["token_str"].strip()
        if shown and shown.isprintable() and "\ufffd" not in shown:  # what theirs can show
            compared += 1
            assert candidate["token"] == shown
            assert candidate["sequence"].split() == same["sequence"].split()
    assert compared > 20


def test_pseudo_log_likelihoods(tmp_path):
    """Every masked copy by itself, with the words that their tokenizer knows."""
    import torch

    model, tokenizer = written(tmp_path, "BertForMaskedLM")
    texts = ["The dogs sat on the mats.", "dogsogs met", "kim met the cat in rome", "cats s .",
             "the cat " * 15, "rome"]  # fmt: skip
    expected = []
    for text in texts:
        batch = tokenizer(text, return_tensors="pt")
        (ids,), words = batch["input_ids"], batch.word_ids()
        sums = [0.0, 0.0]
        for n, word in enumerate(words):
            if word is None:
                continue
            later = [m for m, other in enumerate(words) if other == word and m >= n]
            for score, hidden in enumerate((later, [n])):
                copy = ids.clone()
                copy[hidden] = tokenizer.mask_token_id
                with torch.inference_mode():
                    logits = model(**{**batch, "input_ids": copy[None]}).logits[0, n]
                sums[score] += float(logits.double().log_softmax(-1)[ids[n]])
        expected.append(sums)
    pairs = [{"sentence_good": texts[n], "sentence_bad": texts[n + 1]} for n in range(0, 6, 2)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    records = read_pairs(f"{tmp_path / 'pairs.jsonl'}")
    found = pair_scores(on_device(read_model(tmp_path)), records).reshape(len(texts), 2)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)
    differ = [abs(a - b) > 1e-3 for a, b in expected]
    assert differ == [True, True, False, True, False, False]  # words of one token


@pytest.mark.parametrize(
    ("problem", "labels"),
    [
        ("single_label_classification", 3), ("multi_label_classification", 3),
        ("multi_label_classification", 1), ("regression", 1),
    ],
)  # fmt: skip
def test_classify(tmp_path, problem, labels):
    theirs = pipeline(
        "text-classification",
        written(tmp_path, "BertForSequenceClassification", problem_type=problem, num_labels=labels),
    )
    model = bert_jax.load(tmp_path)
    for pair in (None, "the dog sat ."):
        inputs = [{"text": text, "text_pair": pair} if pair else text for text in TEXTS]
        answers = model.classify(TEXTS, None if pair is None else [pair] * len(TEXTS))
        for given, answer in zip(inputs, answers, strict=True):
            found = theirs(given, top_k=None)
            expected = {each["label"]: each["score"] for each in found}
            if problem == "regression":
                assert answer["score"] == pytest.approx(expected["LABEL_0"], abs=2e-5)
            else:
                assert answer["probabilities"] == pytest.approx(expected, abs=2e-5)


def test_tag(tmp_path):
    names = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    theirs = pipeline(
        "token-classification",
        written(tmp_path, "BertForTokenClassification", id2label=dict(enumerate(names)),
                label2id={name: n for n, name in enumerate(names)}),
        aggregation_strategy="first",
    )  # fmt: skip
    texts = TEXTS[:3]
    for text, answer in zip(texts, bert_jax.load(tmp_path).tag(texts), strict=True):
        expected = [
            (each["entity_group"], each["start"], each["end"]) for each in theirs(text)
            if each["entity_group"] != "O"
        ]  # fmt: skip
        assert [(e["type"], e["start"], e["end"]) for e in answer["entities"]] == expected


def test_answer(tmp_path):
    import torch

    model, tokenizer = written(tmp_path, "BertForQuestionAnswering")
    context = "Kim met the cat in Rome . The dogs sat on the mat ."
    (answer,) = bert_jax.load(tmp_path).answer("kim met ?", context, top=5)
    batch = tokenizer("kim met ?", context, return_tensors="pt", return_offsets_mapping=True)
    offsets = batch.pop("offset_mapping")[0].tolist()
    with torch.inference_mode():
        out = model(**batch)
    inside = [n for n, kind in enumerate(batch["token_type_ids"][0].tolist()) if kind == 1][:-1]
    scores = {
        (first, last): float(out.start_logits[0, first] + out.end_logits[0, last])
        for first in inside for last in inside if first <= last < first + 30
    }  # fmt: skip
    best = sorted(scores, key=scores.__getitem__, reverse=True)
    expected = [context[offsets[first][0] : offsets[last][1]] for first, last in best]
    listed = list(dict.fromkeys(expected))[:5]
    assert [each["answer"] for each in answer["candidates"]] == listed
    assert answer["answer"] == context[answer["start"] : answer["end"]]


def test_embed(tmp_path):
    theirs = pipeline("feature-extraction", written(tmp_path, "BertModel"))
    model = bert_jax.load(tmp_path)
    states = [np.array(theirs(text)[0]) for text in TEXTS]
    for pooling, pool in (("mean", lambda s: s.mean(0)), ("cls", lambda s: s[0]),
                          ("max", lambda s: s.max(0))):  # fmt: skip
        np.testing.assert_allclose(
            model.embed(TEXTS, pooling=pooling), np.stack([pool(s) for s in states]), atol=2e-5
        )
