"""The README.md of an export: its YAML, what it says, and what it keeps to itself."""

import dataclasses
import re

import pytest
import yaml
from export_models import model_of
from small_saved import FAMILIES, small_saved

from bert_jax.artefacts.exchange.huggingface import loading
from bert_jax.artefacts.exchange.model_card import model_card
from bert_jax.artefacts.saved.model import Origin
from bert_jax.tasks.long_texts import LongTexts

PARITY = {
    "format": "huggingface", "class": "BertForSequenceClassification",
    "differences": {"head": 2e-6},
    "texts": 42, "tokens": 1765, "tolerance": 1e-4, "untrained_parts": [],
    "left_out": [],
    "proofs": {"bert_jax": {"ran": True}, "transformers": {"ran": False, "why": "not there"}},
}  # fmt: skip
RUN = Origin(
    "finetune", 460,
    {
        "task": {"kind": "table", "train": "/home/ada/secret/reviews.csv", "dev": ""},
        "init": "/home/ada/base", "training": {"num_epochs": 5.0, "batch_size": 32},
        "optimizer": {"name": "adamw", "learning_rate": 2e-5, "schedule": "linear"},
        "sweep": {"learning_rates": [0.001, 0.002]},
    },
    {"accuracy": 0.71813, "rows": 24.0},
)  # fmt: skip


def card(kind="class", license="unknown", **changes):
    saved = dataclasses.replace(model_of(kind), origin=RUN)
    text = model_card(
        saved, {**PARITY, **changes}, license=license, name="A model", loading=loading(saved)
    )
    return re.sub("(?<=[^ \n]) +", " ", text)  # without the alignment of tables


def front_matter(text):
    _, head, _ = text.split("---\n", 2)
    return yaml.safe_load(head)


def test_the_hub_can_read_it():
    assert front_matter(card(license="apache-2.0")) == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["bert", "jax", "bert_jax"],
    }
    assert "library_name" not in front_matter(card(format="orbax"))


def test_it_says_that_transformers_has_no_class_of_the_family():
    saved = dataclasses.replace(small_saved("mlm", **FAMILIES["neobert"]), origin=RUN)
    text = model_card(
        saved,
        {**PARITY, "class": "NeoBERTLMHead"},
        license="mit",
        name="A model",
        loading=loading(saved),
    )
    assert "Transformers has no class of NeoBERT, and `config.json` names no code" in text
    assert "copy `auto_map`" in text
    assert "from transformers import" not in text
    assert 'bert_jax.load("DIR")' in text
    assert "from transformers import AutoModelForSequenceClassification" in card()


def test_it_says_which_evaluation_texts_were_seen():
    assert "## Contamination" not in card()
    counts = {"examples": 3277, "short": 2, "seen": 1200, "half": 7, "whole": 5, "share": 0.1}
    report = {"evaluation": "glue:RTE", "corpus": "web", "ngram": 13, **counts}
    text = card(contamination=[report])
    row = "| glue:RTE in web | 1,200 of 3,277 seen, 5 in full, 2 too short to be judged |"
    assert row in text.split("## Contamination")[1]


def test_it_says_what_the_run_was():
    text = card()
    for said in (
        "460 updates", "`reviews.csv`", "starting from `base`", "| accuracy | 0.7181 | |",
        "| rows | 24 | |", "| head | 2.0e-06 |", "0.001, 0.002", "transformers did not run",
        "AutoModelForSequenceClassification", "bert_jax.load", "Unknown: no licence was stated",
    ):  # fmt: skip
        assert said in text, said
    assert "/home" not in text
    assert "secret" not in text
    assert "2e-05" not in text  # another rate was chosen


@pytest.mark.parametrize(
    ("phases", "mixture", "said"),
    [
        ([{}], [], "the corpus `web`"),
        ([{}], ["/a/books", "/b/code"], "the corpora `books`, `code`"),
        ([{}, {"corpus": "/c/news"}], [], "the corpora `web`, `news`"),
        ([{"mixture": [{"corpus": "one"}]}, {}], ["books"], "the corpora `one`, `books`"),
    ],
)
def test_it_names_the_corpora_of_all_phases(phases, mixture, said):
    own = {"batch_size": 2, "length": 8, "share": 0.5}
    config = {
        "data": {"corpus": "/home/web", "mixture": [{"corpus": each} for each in mixture]},
        "training": {"phases": [own | phase for phase in phases]},
    }
    saved = dataclasses.replace(model_of("mlm"), origin=Origin("pretrain", 7, config))
    text = model_card(saved, PARITY, license="unknown", name="A model")
    assert f"## Data\n\nPretrained on {said}.\n" in text


def test_a_discriminator_fills_no_masks():
    """Its class for this has another head, whose values would be random."""
    saved = small_saved("rtd")
    assert "rtd" in saved.params
    text = model_card(
        saved, {**PARITY, "class": "ElectraForPreTraining"}, license="mit", name="A model",
        loading=loading(saved),
    )  # fmt: skip
    assert front_matter(text)["pipeline_tag"] == "feature-extraction"
    assert "fill-mask" not in text


def test_it_names_no_model_whose_parameters_were_not_used():
    config = {**RUN.config, "reinitialise": True}
    saved = dataclasses.replace(model_of("class"), origin=dataclasses.replace(RUN, config=config))
    text = model_card(saved, PARITY, license="mit", name="A model", loading=loading(saved))
    assert "starting from random weights" in text


def test_it_quotes_test_data_where_there_are_some():
    text = card()
    assert "On dev, the set that chose the epoch." in text
    assert "test" not in text.partition("## Metrics")[2].partition("##")[0]
    test = {
        "examples": 1210, "scores": {"accuracy": 0.69112, "f1": 0.5, "matthews": None},
        "intervals": {"accuracy": [0.66001, 0.72]}, "chose": False,
    }  # fmt: skip
    dev = {
        "examples": 24, "scores": {"accuracy": 0.71813}, "intervals": {"accuracy": [0.5, 0.9]},
        "chose": True,
    }  # fmt: skip
    saved = dataclasses.replace(
        model_of("class"), origin=dataclasses.replace(RUN, reports={"dev": dev, "test": test})
    )
    text = model_card(saved, PARITY, license="unknown", name="x").partition("## Metrics")[2]
    first, second = re.sub(" +", " ", text).split("On dev, ")
    assert "On test, 1,210 examples, not used for selection" in first
    assert "| accuracy | 0.6911 | 0.66 to 0.72 |" in first
    assert "| f1 | 0.5 | |" in first
    assert "matthews" not in text
    assert second.startswith("24 examples, the set that chose the epoch.")
    assert "| accuracy | 0.7181 | 0.5 to 0.9 |" in second


def test_it_says_where_the_model_comes_from_and_what_it_cost():
    text = card()
    assert not any(said in text for said in ("Lineage", "FLOPs", "hours", "check.py"))
    corpus = {"role": "data.corpus", "kind": "corpus", "name": "web", "note": "2,132 tokens"}
    base = {"role": "init", "kind": "pretraining", "name": "base", "step": 20000}
    base |= {"digest": "0123456789abcdef", "parents": [corpus]}
    source = {"role": "source", "kind": "fine-tuning", "name": "reviews", "parents": [base]}
    spent = {"hours": 3.456, "flops": 1.234e18, "devices": "8 x TPU v4"}
    text = card(lineage=[source], spent=spent, sha256={"conformance/check.py": ""})
    assert (
        "## Lineage\n\n- source: `reviews` (fine-tuning)\n"
        "  - init: `base` (pretraining, step 20,000, 0123456789ab)\n"
        "    - data.corpus: `web` (corpus, 2,132 tokens)\n"
    ) in text
    assert "| time, measured | 3.46 hours on 8 x TPU v4 |" in text
    assert "| operations, computed from the batches | 1.23e+18 FLOPs |" in text
    assert "`python DIR/conformance/check.py` compares" in text
    assert "FLOPs" not in card(spent={})  # of a run that began before they were recorded


def test_labels_stay_in_their_place():
    text = card()
    assert "`ähm`" in text
    assert "\n# y" not in text
    assert "<b>" not in text


def test_it_says_what_lies_between_logits_and_labels():
    saved = model_of("classes")
    assert not any(name in card("classes") for name in ("temperature", "threshold", "windows"))
    outputs = dataclasses.replace(
        saved.outputs, thresholds=(0.2, 0.6), long=LongTexts("windows", "first_last")
    )
    origin = dataclasses.replace(RUN, metrics={"f1": 0.5, "temperature": 1.25})
    saved = dataclasses.replace(saved, outputs=outputs, origin=origin)
    text = model_card(saved, PARITY, license="unknown", name="A model")
    for said in (
        "divided by 1.25, a temperature", "`label_thresholds` in `config.json`",
        "the answer is the first and last of their logits (`long_texts`", "the logits of one row",
    ):  # fmt: skip
        assert said in text, said


@pytest.mark.parametrize(
    ("kind", "made_by"),
    [("mlm", "BertForMaskedLM"), ("bare", "BertModel"), ("span", "BertForQuestionAnswering")],
)
def test_every_class_has_a_card(kind, made_by):
    untrained = ["pooler"] if kind == "bare" else []
    text = card(kind, **{"class": made_by, "untrained_parts": untrained})
    assert ("Do not use their outputs" in text) == (kind == "bare")
    assert ("pipeline(" in text) == (kind == "mlm")


def test_a_model_that_was_only_read_is_not_called_ours():
    saved = dataclasses.replace(model_of("class"), origin=Origin("huggingface"))
    text = model_card(saved, PARITY, license="unknown", name="x")
    assert "read from Hugging Face's format" in text
    assert "## Training" not in text
