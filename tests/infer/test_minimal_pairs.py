"""Minimal pairs: words, ties, accuracies by UID, and what is refused."""

import json

import numpy as np
import pytest
from scipy.stats import binomtest
from small_saved import small_saved

from bert_jax.errors import UserError
from bert_jax.infer import minimal_pairs
from bert_jax.infer.forward import on_device
from bert_jax.infer.minimal_pairs import evaluate_pairs, pair_scores, read_pairs


@pytest.fixture(scope="module")
def model():
    return on_device(small_saved("mlm"))


def put_pairs(path, *rows):
    """A file of (good, bad) or (good, bad, UID)."""
    names = ("sentence_good", "sentence_bad", "UID")
    rows = [dict(zip(names, row, strict=False)) for row in rows]
    path.write_text("\n".join(json.dumps({**row, "field": "syntax"}) for row in rows))
    return str(path)


def test_accuracies_of_all_and_of_each_uid(model, tmp_path, monkeypatch):
    """A tie, of sentences of the same tokens, is wrong whichever sentence is the good one."""
    texts = ["the cats sat", "a dog ran on hill", "the mats", "under a mat ."]
    rows = [(a, b, f"of {a.split()[0]}") for a in texts for b in texts if a != b]
    ties = [("The CAT", "the cat", "tie"), ("the cat", "The CAT", "tie"), ("a mat", "A mat")]
    pairs = read_pairs(put_pairs(tmp_path / "pairs.jsonl", *rows, *ties))
    monkeypatch.setattr(minimal_pairs, "_PART", 4)
    found = evaluate_pairs(pairs, model)
    assert list(found) == ["word_l2r", "token"]
    for n, own in enumerate(found.values()):
        right = sum(np.subtract(*pair_scores(model, [pair])[0, :, n]) > 1e-4 for pair in pairs)
        assert right == 6  # each pair of texts is there both ways
        assert (own["pairs"], own["ties"], own["accuracy"]) == (15, 3, pytest.approx(6 / 15))
        expected = binomtest(6, 15).proportion_ci(method="wilson")
        assert own["interval"] == pytest.approx([expected.low, expected.high])
        assert list(own["UID"]) == ["of the", "of a", "of under", "tie"]
        assert own["UID"]["tie"] | {"interval": 0} == {
            "accuracy": 0.0, "interval": 0, "pairs": 2, "ties": 2,
        }  # fmt: skip


def test_a_long_sentence_changes_no_score_beside_it(model, tmp_path):
    short, long = ("the cats", "a dogs"), ("the " * 22, "mats " * 11)
    (alone,), (beside, _) = (
        pair_scores(model, read_pairs(put_pairs(tmp_path / "pairs.jsonl", *rows)))
        for rows in ([short], [short, long])
    )
    np.testing.assert_allclose(alone, beside, atol=1e-5)
    assert np.all(np.abs(alone[:, 0] - alone[:, 1]) > 1e-4)  # words of two tokens


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"sentence_good": "a cat"}', "pairs.jsonl, line 2: no field 'sentence_bad'; the fields"),
        ('{"sentence_good": 1, "sentence_bad": "b"}', "line 2: the field 'sentence_good' is 1; it"),
        ('{"sentence_good": "a", "sentence_bad": "b", "UID": 3}', "line 2: the field 'UID' is 3"),
        ('{"sentence_good": "a", ', "pairs.jsonl, line 2"),
        ('["a", "b"]', "line 2: ['a', 'b'] is not an object"),
        ('{"sentence_good": "", "sentence_bad": "a"}',
         "line 2: the field 'sentence_good' has 0 tokens"),
        (json.dumps({"sentence_good": "a", "sentence_bad": "cat " * 23}),
         "line 2: the field 'sentence_bad' has 23 tokens"),
    ],
)  # fmt: skip
def test_wrong_lines_are_named(model, tmp_path, line, said):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"sentence_good": "a cat", "sentence_bad": "a cats"}\n' + line)
    with pytest.raises(UserError) as error:
        pair_scores(model, read_pairs(str(path)))
    assert said in f"{error.value}"


def test_files_and_models_that_do_not_fit(tmp_path):
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"none\.jsonl has no pairs; expected lines with"):
        read_pairs(f"{tmp_path / 'none.jsonl'}")
    pairs = read_pairs(put_pairs(tmp_path / "pairs.jsonl", ("a cat", "a cats")))
    with pytest.raises(UserError, match="has no masked-LM head"):
        pair_scores(on_device(small_saved("classification")), pairs)
