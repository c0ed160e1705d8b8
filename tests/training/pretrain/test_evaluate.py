"""Evaluation: every row once, the same masks each time, padding and filler rows not counted."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_run import small_config, write_store
from steps import masked_lm_step

from bert_jax.data.pipeline import EvalBatches
from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import init_params
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.objectives.objective import Forward
from bert_jax.tokenization.special_ids import SpecialIds
from bert_jax.training.pretrain import evaluate as module
from bert_jax.training.pretrain.corpus import Corpus
from bert_jax.training.pretrain.evaluate import EVAL_SEED, evaluate, heldout_rows
from bert_jax.training.pretrain.train import train
from bert_jax.training.steps.optim import OptimizerConfig
from bert_jax.training.steps.step import make_eval_step

CONFIG = masked_lm_step(
    model=ModelConfig(
        vocab_size=250, num_positions=16, hidden_dim=16, num_layers=1, num_heads=8, mlp_dim=32
    ),
    masking=MaskingConfig(max_predictions=4),
    optimizer=OptimizerConfig(),
    num_steps=10,
    special_ids=SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4),
)
LENGTH = 16
SUMS = ("loss", "correct", "count")


def make_rows(count, seed=0):
    rng = np.random.default_rng(seed)
    segment_ids = (np.arange(LENGTH) < rng.integers(6, LENGTH + 1, count)[:, None]).astype(np.uint8)
    return {
        "tokens": rng.integers(5, 250, (count, LENGTH)).astype(np.uint16) * segment_ids,
        "type_ids": np.zeros((count, LENGTH), np.uint8),
        "segment_ids": segment_ids,
        "pair_labels": rng.integers(-1, 2, count).astype(np.int32),
        "row_index": np.arange(count, dtype=np.uint32),
    }


def batches_of(rows, batch_size):
    """Batches in order; the last is filled up as `EvalBatches` does it."""
    count = len(rows["tokens"])
    for start in range(0, count, batch_size):
        batch = {name: value[start : start + batch_size] for name, value in rows.items()}
        missing = batch_size - len(batch["tokens"])
        filler = {name: np.zeros((missing, *value.shape[1:]), value.dtype)
                  for name, value in rows.items()}  # fmt: skip
        filler["pair_labels"] -= 1
        yield {name: np.concatenate([batch[name], filler[name]]) for name in rows}


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: init_params(CONFIG.objective.model, key))(jax.random.key(0))


@pytest.fixture(scope="module")
def single():
    """Mesh of one device and its eval step."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    return make_eval_step(CONFIG, mesh, EVAL_SEED), mesh


def run(setup, params, rows, batch_size):
    step, mesh = setup
    return evaluate(CONFIG.objective, step, params, batches_of(rows, batch_size), mesh)


@pytest.fixture(scope="module")
def by_row(single, params):
    """The expected result: each of nine rows evaluated alone, added by hand."""
    step, _ = single
    rows = make_rows(9)
    sums = [
        step(params, {name: jnp.asarray(value[n : n + 1]) for name, value in rows.items()}).sums
        for n in range(9)
    ]
    return {name: sum(float(each[name]) for each in sums) for name in sums[0]}


def test_a_last_batch_of_one_row_counts_that_row_and_no_filler(single, params, by_row):
    result = run(single, params, make_rows(9), batch_size=8)
    assert set(result) == {
        "eval/mlm_loss", "eval/mlm_accuracy", "eval/nsp_loss", "eval/nsp_accuracy",
        "eval/nsp_majority", "eval/num_masked",
    }  # fmt: skip
    mlm_loss, mlm_correct, mlm_count = (by_row[f"mlm_{name}"] for name in SUMS)
    nsp_loss, nsp_correct, nsp_count = (by_row[f"nsp_{name}"] for name in SUMS)
    assert 0 < nsp_count < 9
    assert result["eval/num_masked"] == mlm_count
    np.testing.assert_allclose(result["eval/mlm_loss"], mlm_loss / mlm_count, rtol=1e-5)
    np.testing.assert_allclose(result["eval/nsp_loss"], nsp_loss / nsp_count, rtol=1e-5)
    assert result["eval/mlm_accuracy"] == mlm_correct / mlm_count
    assert result["eval/nsp_accuracy"] == nsp_correct / nsp_count


@pytest.mark.parametrize("frequent", [0, 1])
def test_majority_is_the_share_of_the_more_frequent_label_over_all_batches(
    single, params, frequent
):
    rows = make_rows(11)
    other = 1 - frequent
    # The majority of the first batch is the minority of all rows.
    first_batch = [other, other, other, frequent, frequent, other, frequent, other]
    rows["pair_labels"][:] = [*first_batch, frequent, frequent, frequent]
    result = run(single, params, rows, batch_size=8)
    assert result["eval/nsp_majority"] == 6 / 11
    rows["pair_labels"][5:] = -1
    assert run(single, params, rows, batch_size=8)["eval/nsp_majority"] == 3 / 5


def test_the_result_does_not_depend_on_the_mesh(single, params):
    expected = run(single, params, make_rows(9), batch_size=8)
    mesh = make_mesh(MeshConfig(2, 2, 2))
    result = run(
        (make_eval_step(CONFIG, mesh, EVAL_SEED), mesh), params, make_rows(9), batch_size=8
    )
    for name, value in expected.items():
        np.testing.assert_allclose(result[name], value, rtol=1e-5, err_msg=name)


def test_evaluation_is_deterministic_and_independent_of_the_run_seed(single, params):
    first = run(single, params, make_rows(9), batch_size=8)
    assert run(single, params, make_rows(9), batch_size=8) == first
    assert run(single, params, make_rows(9, seed=1), batch_size=8) != first
    other = make_eval_step(replace(CONFIG, seed=99), single[1], EVAL_SEED)
    rows = make_rows(8)
    assert other.lower(params, rows).as_text() == single[0].lower(params, rows).as_text()


def test_nothing_to_evaluate_gives_zeros(single, params):
    rows = make_rows(8)
    rows["segment_ids"][:], rows["tokens"][:], rows["pair_labels"][:] = 0, 0, -1
    assert set(run(single, params, rows, batch_size=8).values()) == {0.0}
    assert set(evaluate(CONFIG.objective, single[0], params, iter(()), single[1]).values()) == {0.0}


def test_counts_go_on_where_float32_ends(single):
    names = ("mlm_loss", "mlm_correct", "mlm_count")
    names += ("nsp_loss", "nsp_correct", "nsp_count", "nsp_ones")
    sums = iter(Forward({name: jnp.float32(count) for name in names}) for count in (2**24, 1))
    result = evaluate(CONFIG.objective, lambda *_: next(sums), None, [make_rows(8)] * 2, single[1])
    assert result["eval/num_masked"] == 2**24 + 1


def test_held_out_rows_are_as_many_as_asked_for_in_micro_batches(tmp_path, single, monkeypatch):
    made = []

    def planned(*arguments, **options):
        made.append(EvalBatches(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(module, "EvalBatches", planned)
    config = small_config(training__eval_rows=10)
    heldout_rows(config, write_store(tmp_path / "heldout", 9, 1), single[1])
    assert [batches.num_rows for batches in made] == [10, 10]
    shapes = [[batch["tokens"].shape for batch in batches] for batches in made]
    assert shapes == [[(8, 32)] * 2, [(8, 64)] * 2]


def test_a_batch_that_does_not_divide_is_refused(params):
    mesh = make_mesh(MeshConfig(8))
    step = make_eval_step(CONFIG, mesh, EVAL_SEED)
    with pytest.raises(UserError, match="the batch is 4; it must be a multiple of 8"):
        evaluate(CONFIG.objective, step, params, [make_rows(4)], mesh)


def test_fields_that_need_evaluations_need_held_out_text(tmp_path):
    """They were ignored, or `patience` counted the scores of probes and ended the run."""
    corpus = Corpus(write_store(tmp_path / "train", 20, 0), None)
    for given, said in (
        ({"training__patience": 2}, "training.patience is 2, but the corpus has no held-out text"),
        ({"checkpoint__keep_best": 1, "checkpoint__save_every_steps": 4}, "checkpoint.keep_best"),
        ({"training__eval_translations": 3}, "training.eval_translations is 3"),
    ):
        with pytest.raises(UserError, match=said):
            train(small_config(**given), tmp_path / "work", corpus=corpus, echo=lambda _: None)
    assert not list((tmp_path / "work").glob("*.json*"))
