"""Phases with values of their own: what each step, evaluation and checkpoint takes from them."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_run import (
    compiled_directory,
    share_compilations,
    small_config,
    write_corpus,
    write_store,
)

from bert_jax.config.mapping import build, to_dict
from bert_jax.errors import UserError
from bert_jax.files.remote import open_workdir
from bert_jax.inspection.evaluate import evaluate_run
from bert_jax.inspection.replay import replay_batch
from bert_jax.plan.compile import row_flops
from bert_jax.training.config import PretrainConfig
from bert_jax.training.corpus import Corpus, evaluation_config, phase_stores, step_config
from bert_jax.training.summary import TrainResult
from bert_jax.training.train import train
from bert_jax.training.workdir import check_workdir, prepare_workdir


def phases(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Phases of one shape and equally many steps."""
    share = 1 / len(changes)
    return [{"length": 32, "batch_size": 16, "share": share, **each} for each in changes]


def config_of(*changes: dict[str, Any], **others: Any) -> PretrainConfig:
    return small_config(
        **{"training__num_steps": 4 * len(changes), "training__phases": phases(*changes), **others}
    )


@pytest.fixture(scope="module", autouse=True)
def _compile_once(tmp_path_factory) -> Iterator[None]:
    with share_compilations(compiled_directory(tmp_path_factory)):
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"length": 4}, r"training\.phases\[1\]\.length is 4; it must be at least 8"),
        ({"masking_rate": 0.0}, r"phases\[1\]\.masking_rate is 0.0; it must be above 0 and at mo"),
        (
            {"learning_rate": 0.0},
            r"phases\[1\]\.learning_rate is 0.0; it must be positive, or None",
        ),
        ({"decay": "wsd"}, r"training\.phases\[1\]\.decay is 'wsd' \(str\); it must be one of"),
        ({"end_rate": 1e-4}, r"phases\[1\]\.end_rate is 0.0001, but the phase's decay is '', wh"),
        ({"rope_theta": 0.0}, r"training\.phases\[1\]\.rope_theta is 0.0; it must be above 0"),
        (
            {"rope_theta": 1e4},
            r"phases\[1\]\.rope_theta is 10000, but model.positions is 'learned'",
        ),
        (
            {"decay": "linear", "end_rate": 0.1},
            r"phases\[1\]\.end_rate is 0.1; it must be at most the peak of the phase, 0.001",
        ),
    ],
)
def test_an_error_names_the_phase_and_the_field(second, message):
    with pytest.raises(UserError, match=message):
        config_of({}, second)


def test_a_corpus_that_is_missing_or_of_another_tokenizer_is_refused(corpus, tmp_path):
    config = config_of({}, {"corpus": str(tmp_path / "none")})
    with pytest.raises(UserError, match=r"training\.phases\[1\]\.corpus: the corpus .*none does n"):
        train(config, tmp_path / "work", corpus=corpus, echo=lambda _: None)
    store = write_store(tmp_path / "other", 5, seed=3)
    config = config_of({}, {"corpus": str(store.path)})
    other = dataclasses.replace(corpus.train, tokenizer_fingerprint="0" * 64)
    with pytest.raises(UserError, match=r"phases\[1\]\.corpus: .*other was made with the tokeniz"):
        phase_stores(config, other)
    assert {n: each.path for n, each in phase_stores(config, corpus.train).items()} == {
        1: store.path
    }
    assert not (tmp_path / "work").exists()


def test_the_corpus_of_a_phase_may_move_and_not_change(corpus, tmp_path):
    stores = [
        write_store(tmp_path / name, 5, seed) for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    work = open_workdir(tmp_path / "work")
    first, moved, other = (config_of({}, {"corpus": str(store.path)}) for store in stores)
    prepare_workdir(work.local, first, corpus.train, {1: stores[0]})
    check_workdir(work, moved, corpus.train, {1: stores[1]})
    message = r"training\.phases\[1\]\.corpus: fingerprint \w+ there, \w+ given"
    with pytest.raises(UserError, match=message):
        check_workdir(work, other, corpus.train, {1: stores[2]})
    with pytest.raises(UserError, match=message):
        check_workdir(work, config_of({}, {}), corpus.train)


def test_a_local_theta_needs_local_layers():
    message = r"phases\[0\]\.local_rope_theta is 5, but model.attention_pattern 'G' has no local"
    with pytest.raises(UserError, match=message):
        config_of({"local_rope_theta": 5.0}, model__positions="rope")


def test_a_record_has_the_thetas_of_its_phase_and_the_same_phases():
    config = config_of({"rope_theta": 50.0}, {}, model__positions="rope", model__rope_theta=9.0)
    assert [config.of_phase(number).model.rope_theta for number in (0, 1)] == [50, 9]
    for number in (0, 1):
        record = build(PretrainConfig, to_dict(config.with_thetas_of(number)))
        assert record.model.rope_theta == record.for_evaluation().of_phase(0).model.rope_theta
        assert record.model == config.of_phase(number).model
        assert [record.of_phase(each) for each in (0, 1)] == [
            config.of_phase(each) for each in (0, 1)
        ]
    assert config_of({}, {}).with_thetas_of(1) == config_of({}, {})


def test_evaluations_mask_their_own_share():
    with pytest.raises(UserError, match=r"masking\.eval_rate is 1.5; it must be above 0"):
        build(PretrainConfig, {"masking": {"eval_rate": 1.5}})
    config = config_of({"masking_rate": 0.5}, {}, masking={"rate": 0.3})
    assert [config.of_phase(number).masking.rate for number in (0, 1)] == [0.5, 0.3]
    assert [config.of_phase(n).for_evaluation().masking.rate for n in (0, 1)] == [0.15, 0.15]
    # The head's work at half of the positions and at three in ten.
    assert row_flops(config.with_vocabulary(64), 0) > row_flops(config.with_vocabulary(64), 1)


def test_phases_that_differ_in_nothing_share_a_step(corpus):
    config = config_of({}, {"masking_rate": 0.15}, {"masking_rate": 0.3}).with_vocabulary(64)
    first, second, third = (step_config(config, corpus, number) for number in range(3))
    assert first == second != third
    assert evaluation_config(config, corpus, 0) == evaluation_config(config, corpus, 2)


@pytest.fixture(scope="module")
def masked(tmp_path_factory) -> TrainResult:
    """A run of two phases of two steps that mask half of the tokens, then an eighth."""
    directory = tmp_path_factory.mktemp("masked")
    write_corpus(directory / "corpus")
    config = config_of(
        {"masking_rate": 0.5},
        {"masking_rate": 0.125},
        training__num_steps=4,
        training__accumulation=1,
        data={"corpus": str(directory / "corpus")},
    )
    return train(config, directory / "work", echo=lambda _: None)


def predicted_share(workdir: Path | str, step: int) -> float:
    text = replay_batch(workdir, step)
    rows = re.findall(r"(\d+) tokens, .*?(\d+) to predict", text)
    return sum(int(n) for _, n in rows) / sum(int(n) for n, _ in rows)


def test_each_step_masks_the_share_of_its_phase_and_evaluations_theirs(masked):
    shares = [predicted_share(masked.workdir, step) for step in range(4)]
    assert shares[:2] == pytest.approx([0.5, 0.5], abs=0.03)
    assert shares[2:] == pytest.approx([0.125, 0.125], abs=0.02)
    again = evaluate_run(masked.workdir, max_rows=40)
    assert again["eval/num_masked"] == masked.eval_metrics["eval/num_masked"]
    assert 40 * 32 * 0.08 < again["eval/num_masked"] < 40 * 32 * 0.16
