"""Every verb against Transformers' own, on random models that it wrote."""

import numpy as np
import pytest

import bert_jax

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
