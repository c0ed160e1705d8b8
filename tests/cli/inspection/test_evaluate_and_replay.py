"""A run looked at again from its work directory gives what it gave while it ran."""

import json

import pytest
from small_run import (
    small_config,
    write_corpus,
    write_store,
)

from bert_jax.cli.inspection.by_position import measure
from bert_jax.cli.inspection.evaluate import evaluate_run, open_heldout
from bert_jax.cli.inspection.replay import replay_batch
from bert_jax.cli.main import main
from bert_jax.errors import UserError
from bert_jax.objectives.masked_lm import position_buckets
from bert_jax.training.pretrain.train import train
from bert_jax.training.run_plan import Result


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> Result:
    """One step on pairs of swapped sentences."""
    directory = tmp_path_factory.mktemp("run")
    write_corpus(directory / "corpus")
    config = small_config(
        training__num_steps=1,
        training__phases=[{"length": 32, "batch_size": 16}],
        training__accumulation=1,
        optimizer__warmup_steps=1,
        data={"corpus": str(directory / "corpus"), "pairing": "sop"},
    )
    return train(config, directory / "work", echo=lambda _: None)


def test_evaluation_is_that_of_the_run(result):
    # On the 8 devices of the run, though the parameters are read onto one.
    again = evaluate_run(result.workdir)
    assert again["step"] == 1
    assert again["unigram_entropy"] == result.baseline
    assert {name for name in again if name.startswith("eval/")} == set(result.eval_metrics)
    for name, value in result.eval_metrics.items():
        assert again[name] == pytest.approx(value, rel=1e-5), name
    few = evaluate_run(result.workdir, max_rows=8)
    assert 0 < few["eval/num_masked"] < again["eval/num_masked"]


def test_losses_by_position_add_up_to_those_of_the_run(result, caplog):
    # Twice as long as the rows of training.
    again = evaluate_run(result.workdir, length=64)
    run = open_heldout(result.workdir, length=64)
    found = measure(run, position_buckets(run.length), (0.15,))
    assert "rows have 64 tokens, but training had at most 32" in caplog.text
    assert (found.step, found.length, found.trained_length) == (1, 64, 32)
    assert found.unigram_entropy == result.baseline
    assert found.count.sum() == again["eval/num_masked"]
    assert found.loss.sum() / found.count.sum() == pytest.approx(again["eval/mlm_loss"], rel=1e-5)
    accuracy = found.correct.sum() / found.count.sum()
    assert accuracy == pytest.approx(again["eval/mlm_accuracy"], rel=1e-6)


def test_a_corpus_that_cannot_be_evaluated_is_refused(result, tmp_path):
    alone = write_store(tmp_path / "alone", 5, seed=3)
    with pytest.raises(UserError, match="has no held-out text"):
        evaluate_run(result.workdir, corpus=str(alone.path))


def test_minimal_pairs_of_a_run(result, tmp_path, capsys):
    rows = [("5 6 7", "7 7 8", "x"), ("9 8", "10 11", "y")]
    names = ("sentence_good", "sentence_bad", "UID")
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    verb = ["evaluate", str(result.workdir), "--minimal-pairs", str(path)]
    assert main(verb) == 0
    title, *lines, last = capsys.readouterr().out.splitlines()
    assert title.split() == ["accuracy", "pairs", "word_l2r", "95%", "token", "95%"]
    assert [line.split()[:2] for line in lines] == [["all", "2"], ["x", "1"], ["y", "1"]]
    assert last == "Chance is 0.5. Equal scores (ties) count as wrong."
    assert main([*verb, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token"]["pairs"] == 2
    assert main([*verb, "--rows=3"]) == 2
    assert "--rows cannot be used with --minimal-pairs" in capsys.readouterr().err


def test_replay_shows_the_batch_with_the_labels_of_its_objective(result):
    text = replay_batch(result.workdir, 0)
    assert text.startswith("16 rows of 32: ")
    assert "A and B swapped" in text
    assert "A and B in order" in text
    assert "B is next" not in text
    some = replay_batch(result.workdir, 0, max_rows=3)
    # The same batch, of which 3 rows are shown.
    assert some.splitlines()[0] == text.splitlines()[0]
    assert some.endswith("(13 more rows)")
    assert some.split("\n\n")[1:4] == text.split("\n\n")[1:4]
    with pytest.raises(UserError, match="--step is 1; the run has batches 0 to 0"):
        replay_batch(result.workdir, 1)
