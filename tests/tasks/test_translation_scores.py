"""Scores of translations: sacreBLEU's figures for known faults, floors, the table by length."""

import re

import numpy as np
import pytest

from bert_jax.tasks.reports.intervals import intervals
from bert_jax.tasks.translation import best_constant, by_length, quality

pytest.importorskip("sacrebleu")
WORDS = ["Ein", "Mann", "Hund", "rennt", "schnell", "auf", "einer", "Wiese", "und", "Kinder"]


def bleu(hypotheses, references):
    return quality(hypotheses, references).values["bleu"]


def sentences(count, seed=0):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(4, 25))) + "." for _ in range(count)]


def test_a_reference_as_its_own_translation_has_100():
    references = sentences(50)
    found = quality(references, references)
    assert found.values == pytest.approx({"bleu": 100, "chrf": 100})
    assert not intervals(found.grounds).found  # all are right: nothing is known of the others


def test_signatures_name_what_was_computed():
    signatures = quality(["Ein Hund."], ["Ein Hund."]).signatures
    assert "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp" in signatures["bleu"]
    assert "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no" in signatures["chrf"]


def test_the_scores_are_those_that_sacrebleu_computes_itself():
    import sacrebleu

    references, others = sentences(30), sentences(30, seed=1)
    found = quality(others, references).values
    assert found["bleu"] == sacrebleu.corpus_bleu(others, [references]).score
    assert found["chrf"] == sacrebleu.corpus_chrf(others, [references]).score


def test_an_interval_is_the_same_each_time_and_holds_the_score():
    references, others = sentences(60), sentences(60, seed=1)
    mixed = [a if n % 2 else b for n, (a, b) in enumerate(zip(references, others, strict=True))]
    first, again = (intervals(quality(mixed, references).grounds).found for _ in range(2))
    assert first == again
    for name, value in quality(mixed, references).values.items():
        assert first[name][0] < value < first[name][1]
    # Almost nothing is right: some samples have no match at all.
    poor = intervals(quality([references[0], *["x"] * 49], references[:50]).grounds).found
    assert poor["bleu"][0] == pytest.approx(0, abs=1e-6)


def test_known_faults_have_their_known_scores(real_data):
    """Figures on the 1,000 German sentences of Multi30k's test set of 2016."""
    from bert_jax.cli.inspection.translation import read_pairs

    where = real_data / "translation" / "multi30k" / "test_2016_flickr"
    sources, references = read_pairs(f"{where}.en.gz", f"{where}.de.gz")
    assert len(references) == 1000
    spaced = [re.sub(r"([.,;:!?])", r" \1", each) for each in references]
    assert bleu(spaced, references) == pytest.approx(100)  # 13a splits marks off itself
    lower = [each.lower() for each in references]
    assert bleu(lower, references) == pytest.approx(23.3, abs=0.05)
    shorter = [each.rpartition(" ")[0] for each in references]
    assert bleu(shorter, references) == pytest.approx(82.2, abs=0.05)
    assert bleu(sources, references) == pytest.approx(0.5, abs=0.05)


def test_the_best_constant_is_found_and_its_score_is_the_real_one():
    references = sentences(20)
    captions = [*sentences(30, seed=2), "Ein Mann auf einer Wiese und Kinder auf einer Wiese."]
    found = best_constant(references, captions)
    scores = {each: bleu([each] * len(references), references) for each in captions}
    assert found.bleu == pytest.approx(max(scores.values()))
    assert scores[found.text] == pytest.approx(found.bleu)
    assert best_constant(references, ["xyz"]).bleu == 0


def test_pairs_are_scored_by_the_words_of_their_sources():
    sources = ["w " * n for n in (3, 10, 11, 15, 16, 21, 40)]
    references = sentences(len(sources))
    wrong = [*references[:5], *sentences(2, seed=3)]
    rows = by_length(sources, wrong, references)
    assert [(row["words"], row["pairs"]) for row in rows] == [
        ("up to 10", 2), ("11 to 15", 2), ("16 to 20", 1), ("above 20", 2)
    ]  # fmt: skip
    assert [row["bleu"] for row in rows[:3]] == pytest.approx([100] * 3)
    assert rows[3]["bleu"] < 50
    assert [row["words"] for row in by_length(sources[:2], wrong[:2], references[:2])] == [
        "up to 10"
    ]
