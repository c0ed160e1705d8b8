"""Corpora of a mixture in rows of metrics, and what people see of them."""

from typing import Any

import pytest

from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.training.pretrain.corpus import corpus_labels
from bert_jax.training.run.loss_curve import amount, corpus_curves, loss_figure

METRICS = MaskedLM.metrics_of(pairs=False)
LOSS = METRICS[0].name


def rows() -> list[dict[str, Any]]:
    return [
        {"step": 2, f"train/{LOSS}": 4.0, "data/de/tokens": 900, "data/de/epochs": 0.25},
        {"step": 4, f"eval/{LOSS}": 3.5, f"eval/{LOSS}/de": 3.0, f"eval/{LOSS}/en": 4.0},
        {
            "step": 6, f"train/{LOSS}": 3.0, "data/de/tokens": 1800, "data/de/epochs": 0.5,
            "data/en/tokens": 5_000_000, "data/en/epochs": 2.0,
        },
        {"step": 8, f"eval/{LOSS}": 3.1, f"eval/{LOSS}/de": 2.75, f"eval/{LOSS}/en": None},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["work/de", "work/en"], ("de", "en")),
        (["a/text", "b/text"], ("a/text", "b/text")),
        (["gs://x/text/de", "text/en"], ("de", "en")),
        (["one"], ("one",)),
        ([], ()),
    ],
)
def test_labels_are_the_shortest_that_differ(names: list[str], labels: tuple[str, ...]) -> None:
    assert corpus_labels(names) == labels


def test_rows_give_the_newest_amounts_and_all_losses() -> None:
    de, en = corpus_curves(rows(), METRICS[0])
    assert (de.label, de.tokens, de.epochs) == ("de", 1800, 0.5)
    assert de.heldout == [(4.0, 3.0), (8.0, 2.75)]
    assert en.heldout == [(4.0, 4.0)]
    assert de.describe() == "1.8 k tokens, 0.5 epochs, held-out 2.750"
    assert en.describe() == "5 M tokens, 2 epochs, held-out 4.000"


def test_a_run_of_one_corpus_has_none() -> None:
    plain = [{"step": 4, f"eval/{LOSS}": 3.5, "perf/steps_per_second": 2.0}]
    assert corpus_curves(plain, METRICS[0]) == []
    figure = loss_figure(plain, METRICS, None)
    assert len(figure.axes[0].get_lines()) == 1


def test_the_plot_has_a_curve_for_each_corpus() -> None:
    axis = loss_figure(rows(), METRICS, None).axes[0]
    labels = [line.get_label() for line in axis.get_lines()]
    assert labels[2:] == [
        "de: 1.8 k tokens, 0.5 epochs, held-out 2.750", "en: 5 M tokens, 2 epochs, held-out 4.000",
    ]  # fmt: skip
    low, high = axis.get_ylim()
    assert low < 2.75 < 4.0 < high


@pytest.mark.parametrize(
    ("number", "said"), [(950.0, "950"), (1234.0, "1.23 k"), (3.4e10, "34 B"), (2e13, "20 T")]
)
def test_amounts_for_people(number: float, said: str) -> None:
    assert amount(number) == said
