"""A model and its export give the same answers: lengths, thresholds, windows, limits, prefixes."""

import dataclasses
import json
import warnings
from importlib import import_module

import numpy as np
import pytest
from asked_models import HEADS, WORDS, random_model

from bert_jax.artefacts.exchange.export import FORMATS, refusals
from bert_jax.artefacts.formats.huggingface_files import Reading, TaskOutputs, model_max_length
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.errors import UserError
from bert_jax.infer.loaded import LoadedModel
from bert_jax.model.embedding import EmbeddingConfig
from bert_jax.model.task_heads import TaskHeadConfig
from bert_jax.tasks.long_texts import LongTexts

LENGTH = 20
"""Tokens of a row; the models have 48 positions."""
WINDOWS = LongTexts(how="windows", stride=7)
CHANGES = {
    "class": {"long": LongTexts(how="head_tail")},
    "classes": {"thresholds": (0.2, 0.5, 0.8), "long": WINDOWS},
    "score": {"long": WINDOWS},
    "tags": {"reading": Reading(5)},
    "span": {"reading": Reading(4, 9, 3, -0.5)},
    "choice": {},
    "vectors": {},
}


def model_with(kind):
    """A model with more positions than it was trained with, and all that is asked beside logits."""
    if kind == "vectors":
        saved = random_model("pretrained")
        encoder = {n: part for n, part in saved.params["encoder"].items() if n != "pooler"}
        vectors = EmbeddingConfig("mean", True, "who ? ", "the ")
        saved = dataclasses.replace(saved, params={"encoder": encoder}, embedding=vectors)
    elif kind == "choice":
        saved = random_model("score")
        outputs = TaskOutputs(TaskHeadConfig("classification", 1), "choice")
        saved = dataclasses.replace(saved, outputs=outputs)
    else:
        saved = random_model(kind)
        outputs = dataclasses.replace(HEADS[kind], **CHANGES[kind])
        saved = dataclasses.replace(saved, outputs=outputs)
    return dataclasses.replace(saved, max_length=LENGTH)


def texts_of(count):
    random = np.random.default_rng(0)
    lengths = random.integers(1, 70, count)
    return [" ".join(random.choice(WORDS, n).tolist()) for n in lengths]


def answers_of(saved, kind, texts):
    """What the verb of a kind says, to five digits; of choices the logits."""
    model = LoadedModel(saved, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of texts that are cut
        if kind == "vectors":
            return [model.embed(texts, kind=side) for side in ("query", "document")]
        if kind == "tags":
            return model.tag(texts)
        if kind == "span":
            questions = [text[: 5 + n % 30] for n, text in enumerate(reversed(texts))]
            return model.answer(questions, texts)
        if kind == "choice":
            outputs = dataclasses.replace(HEADS["score"], head=saved.outputs.head)
            return LoadedModel(dataclasses.replace(saved, outputs=outputs)).classify(texts)
        return model.classify(texts)


def assert_same(found, expected):
    """Numbers to 1e-5, all else equal."""
    if isinstance(expected, np.ndarray | float):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", CHANGES)
def test_an_export_answers_as_its_source(tmp_path, kind, count):
    saved, texts = model_with(kind), texts_of(count)
    expected = answers_of(saved, kind, texts)
    formats = ["huggingface", "stablehlo"][: 1 + (count > 100)]
    if kind == "vectors":
        formats.append("sentence-transformers")
    for name in formats:
        (tmp_path / name).mkdir()
        import_module(f"bert_jax.artefacts.exchange.{FORMATS[name][0]}").write(
            saved, tmp_path / name
        )
        back = read_model(tmp_path / name)
        assert (back.max_length, back.outputs) == (LENGTH, saved.outputs)
        assert_same(answers_of(back, kind, texts), expected)


@pytest.mark.parametrize("labels", [("no", "yes"), ()])  # a planned model has none
@pytest.mark.parametrize("pooling", ["mean", "max", "first_last"])
def test_one_logit_for_two_classes_is_refused_where_long_texts_would_differ(labels, pooling):
    """The maximum of differences is not the difference of maxima."""
    head = TaskHeadConfig("classification", 2)
    outputs = TaskOutputs(head, "single_label", labels, long=LongTexts("windows", pooling))
    found = refusals(dataclasses.replace(random_model("class"), outputs=outputs))
    assert ("window_pooling is max" in found.get("cross-encoder", "")) == (pooling == "max")
    assert "huggingface" not in found


def test_lengths_of_files_are_checked(tmp_path):
    path = tmp_path / "tokenizer_config.json"
    assert model_max_length(tmp_path) is None
    for length, found in ((128, 128), (1e30, None), (None, None)):
        path.write_text(json.dumps({"model_max_length": length}))
        assert model_max_length(tmp_path) == found
    for wrong in (3, -1, 12.5, "128", True):
        path.write_text(json.dumps({"model_max_length": wrong}))
        with pytest.raises(UserError, match=r"tokenizer_config\.json: model_max_length is .* 8"):
            model_max_length(tmp_path)


def test_limits_of_answers_are_checked():
    with pytest.raises(UserError, match="stride is 0; it must be at least 1"):
        Reading(0)
