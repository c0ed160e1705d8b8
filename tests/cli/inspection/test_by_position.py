"""Losses by position and masking rate, against a count over the logits of the same model."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from pretraining import apply_pretraining
from small_run import small_config
from steps import masked_lm_step
from synthetic_store import SPECIAL, make_store

from bert_jax.cli.inspection import by_position as module
from bert_jax.cli.inspection.by_position import PositionLosses, measure, position_lines
from bert_jax.cli.inspection.evaluate import HeldOutRun, _with_positions
from bert_jax.cli.inspection.pictures import position_figure
from bert_jax.data.pairings import DataConfig
from bert_jax.data.pipeline import EvalBatches
from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.objectives.masked_lm import position_buckets
from bert_jax.objectives.masking import MaskingConfig, mask_tokens
from bert_jax.objectives.replaced_tokens import ReplacedTokens
from bert_jax.training.pretrain.evaluate import EVAL_SEED
from bert_jax.training.steps.optim import OptimizerConfig
from bert_jax.training.steps.state import state_shardings

LENGTH, EDGES, RATES = 64, (0, 8, 16, 32, 64), (0.05, 0.3)
# A document longer than a row, and rows of one to many segments: 10 rows, the last batch is filled.
STORE = make_store([[150], *[[n] for n in (40, 33, 25, 20, 17, 60)], *[[9]] * 12, *[[2]] * 20])
MODEL = ModelConfig(
    vocab_size=STORE.vocab_size, num_positions=LENGTH, hidden_dim=16, num_layers=1, num_heads=2,
    mlp_dim=32, positions="rope",
)  # fmt: skip
STEP = masked_lm_step(
    model=MODEL, masking=MaskingConfig(max_predictions=4), optimizer=OptimizerConfig(), num_steps=9,
    special_ids=SPECIAL, pairs=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def params():
    params = jax.jit(STEP.objective.init)(jax.random.key(0))
    # Far from even probabilities, so that losses and right answers differ between tokens.
    return jax.tree.map(lambda x: 4 * np.asarray(x), params)


def heldout_run(params, sizes):
    mesh = make_mesh(MeshConfig(*sizes), jax.devices()[: sizes[0] * sizes[1] * sizes[2]])
    rows = EvalBatches(STORE, DataConfig(pairing="none"), LENGTH, 4)
    placed = jax.device_put(params, state_shardings(STEP, mesh).params)
    return HeldOutRun(3, LENGTH, LENGTH, STEP, placed, rows, mesh)


@pytest.fixture(scope="module")
def counted(params):
    """Loss, right answers and number of masked tokens (R, K), token by token in numpy."""
    logits = jax.jit(lambda *inputs: apply_pretraining(MODEL, *inputs).vocabulary)
    sums = {name: np.zeros((len(RATES), len(EDGES) - 1)) for name in ("loss", "correct", "count")}
    given = {"seed": EVAL_SEED, "vocab_size": MODEL.vocab_size, "special_ids": SPECIAL}
    for r, rate in enumerate(RATES):
        mask = jax.jit(partial(mask_tokens, **given, config=MaskingConfig(rate=rate)))
        for batch in heldout_run(params, (1, 1, 1)).rows:
            masked = mask(*(batch[name] for name in ("tokens", "segment_ids", "row_index")))
            inputs = masked.tokens, batch["type_ids"], batch["segment_ids"]
            scores = np.asarray(logits(params, *inputs))
            scores = scores[..., : MODEL.vocab_size].astype(np.float64)
            chosen = np.asarray(masked.positions), np.asarray(masked.weights)
            for row, (places, weights) in enumerate(zip(*chosen, strict=True)):
                for place in places[weights > 0]:
                    segment = batch["segment_ids"][row]
                    position = place - int(np.argmax(segment == segment[place]))
                    bucket = next(k for k, end in enumerate(EDGES[1:]) if position < end)
                    own, label = scores[row, place], batch["tokens"][row, place]
                    loss = np.log(np.exp(own - own.max()).sum()) + own.max() - own[label]
                    sums["loss"][r, bucket] += loss
                    sums["correct"][r, bucket] += own.argmax() == label
                    sums["count"][r, bucket] += 1
    return sums


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 2)])
def test_sums_are_those_of_a_count_over_the_logits_on_any_mesh(params, counted, sizes, monkeypatch):
    made = []
    make = module.make_eval_step
    monkeypatch.setattr(module, "make_eval_step", lambda *a: made.append(make(*a)) or made[-1])
    found = measure(heldout_run(params, sizes), EDGES, RATES)
    assert (counted["count"] > 0).all()
    np.testing.assert_array_equal(found.count, counted["count"])
    np.testing.assert_array_equal(found.correct, counted["correct"])
    np.testing.assert_allclose(found.loss, counted["loss"], rtol=1e-5)
    assert [step._cache_size() for step in made] == [1]  # one program for all rates
    for r, rate in enumerate(found.as_json()["masking_rates"]):
        count = counted["count"][r].sum()
        assert rate["num_masked"] == count == sum(b["num_masked"] for b in rate["positions"])
        assert rate["loss"] == pytest.approx(counted["loss"][r].sum() / count, rel=1e-5)
        assert rate["accuracy"] == counted["correct"][r].sum() / count
        ends = [(bucket["from"], bucket["to"]) for bucket in rate["positions"]]
        assert ends == [(0, 7), (8, 15), (16, 31), (32, 63)]
    batches = heldout_run(params, sizes).rows
    real = np.concatenate([(batch["segment_ids"] > 0).sum(axis=1) for batch in batches])
    for r, rate in enumerate(RATES):
        expected = np.maximum(np.round(np.float32(rate) * real), real > 0)  # at least one
        assert found.count[r].sum() == expected.sum()


def test_buckets_double_up_to_the_length():
    assert position_buckets(8192) == (0, 128, 256, 512, 1024, 2048, 4096, 8192)
    assert position_buckets(1000) == (0, 128, 256, 512, 1000)
    assert position_buckets(128) == (0, 128)
    assert position_buckets(64) == (0, 64)


def test_only_masked_words_have_a_loss_by_position(params):
    run = heldout_run(params, (1, 1, 1))
    other = replace(STEP, objective=ReplacedTokens(MODEL, MaskingConfig(), SPECIAL))
    with pytest.raises(UserError, match="objective is not masked_lm"):
        measure(run._replace(settings=other), EDGES, RATES)


def test_rotations_have_no_last_position_and_tables_have(caplog):
    learned = small_config()
    rope = replace(learned, model=replace(learned.model, positions="rope"))
    assert _with_positions(learned, 64, 64).model == learned.model
    assert not caplog.records
    with pytest.raises(UserError, match="--length is 65; the model has 64 learned positions"):
        _with_positions(learned, 65, 64)
    assert _with_positions(rope, 100, 64).model == replace(rope.model, num_positions=100)
    assert "rows have 100 tokens, but training had at most 64" in caplog.text
    with pytest.raises(UserError, match="--length is 7; it must be at least 8"):
        _with_positions(learned, 7, 64)


def test_table_and_picture_leave_out_a_bucket_without_tokens():
    count = np.array([[10.0, 4, 0], [20, 8, 2]])
    losses = PositionLosses(
        7, 300, 200, 5, 4.0, (0, 128, 256, 300), (0.05, 0.15), 2 * count, count / 2, count
    )
    lines = position_lines(losses)
    assert lines[0] == "step 7: 5 held-out rows of 300 tokens; unigram entropy 4.000 nats"
    assert lines[3].split() == ["5%", "masked", "15%", "masked"]
    table = [line.split() for line in lines[4:]]
    assert table[0] == ["0-127", "2.000", "50.0%", "10", "2.000", "50.0%", "20"]
    assert table[2] == ["256-299", "-", "-", "0", "2.000", "50.0%", "2"]
    assert table[3] == ["all", "2.000", "50.0%", "14", "2.000", "50.0%", "30"]
    assert losses.as_json()["masking_rates"][0]["positions"][2]["loss"] is None
    axis = position_figure(losses).axes[0]
    names = [label.get_text() for label in axis.get_xticklabels()]
    assert names == ["0\u2013127", "128\u2013255", "256\u2013299"]
    assert [line.get_xdata()[-1] for line in axis.lines[:2]] == [1, 2]
    # 200 of the bucket 128 to 255, whose middle is drawn at 1.
    assert axis.lines[2].get_xdata()[0] == 0.5 + (200 - 128) / 128
