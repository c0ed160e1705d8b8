"""Phases with values of their own: what each step, evaluation and checkpoint takes from them."""

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_shard import StoreWriter
from small_run import (
    small_config,
    write_corpus,
    write_store,
)

from bert_jax.cli.inspection.replay import replay_batch
from bert_jax.config.command_line import load_config
from bert_jax.config.mapping import build, to_dict
from bert_jax.data.phases import PhaseConfig, described, stages_from
from bert_jax.data.pipeline import ExampleStream
from bert_jax.distributed.parallel.sharding import make_mesh
from bert_jax.errors import UserError
from bert_jax.files.remote import open_workdir
from bert_jax.objectives.objective import num_params
from bert_jax.planning.compile import row_flops
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS
from bert_jax.tokenization.wordpiece import WordPieceTokenizer
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus, phase_stores
from bert_jax.training.pretrain.saves import check_workdir, prepare_workdir, read_config
from bert_jax.training.pretrain.settings import (
    check_stages,
    objective_of,
    step_config,
    warmup_lines,
    with_batch_unit,
)
from bert_jax.training.pretrain.train import train
from bert_jax.training.pretrain.voice import summary
from bert_jax.training.run.telemetry import read_metrics
from bert_jax.training.start import Start
from bert_jax.training.steps.optim import PhaseRate
from bert_jax.training.workdir import look_into


def phases(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Phases of one shape and equally many steps."""
    share = 1 / len(changes)
    return [{"length": 32, "batch_size": 16, "share": share, **each} for each in changes]


def config_of(*changes: dict[str, Any], **others: Any) -> PretrainConfig:
    return small_config(
        **{"training__num_steps": 4 * len(changes), "training__phases": phases(*changes), **others}
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"length": 4}, r"training\.phases\[1\]\.length is 4; it must be at least 8"),
        ({"masking_rate": 0.0}, r"phases\[1\]\.masking_rate is 0.0; it must be in \(0, 1\], or N"),
        (
            {"learning_rate": 0.0},
            r"phases\[1\]\.learning_rate is 0.0; it must be above 0, or None",
        ),
        ({"decay": "wsd"}, r"training\.phases\[1\]\.decay is 'wsd' \(str\); it must be one of"),
        ({"end_rate": 1e-4}, r"phases\[1\]\.end_rate is 0.0001, but the phase's decay is '', wh"),
        ({"rope_theta": 0.0}, r"training\.phases\[1\]\.rope_theta is 0.0; it must be above 0"),
        (
            {"rope_theta": 1e4},
            r"phases\[1\]\.rope_theta is 10000, but model.positions is 'learned'",
        ),
        (
            {"batch_warmup_steps": -1},
            r"phases\[1\]\.batch_warmup_steps is -1; it must be at least 0",
        ),
        (
            {"decay": "linear", "end_rate": 0.1},
            r"phases\[1\]\.end_rate is 0.1; it must be at most the phase's peak .*, 0.001",
        ),
        ({"accumulation": 0}, r"phases\[1\]\.accumulation is 0; it must be at least 1, or None"),
        ({"steps": 4}, r"phases\[1\] has 4 steps and a share, 0.5; set only one"),
        (
            {"steps": 4, "share": 1.0},
            r"phases\[0\]\.steps is not set, but other phases have steps; give steps in all",
        ),
    ],
)
def test_an_error_names_the_phase_and_the_field(second, message):
    with pytest.raises(UserError, match=message):
        config_of({}, second)


def test_phases_in_steps_and_micro_batches_of_their_own(corpus, tmp_path):
    """Steps in place of shares are the same run; a mesh must take the parts of each phase."""
    given = {"training__num_steps": 4, "training__accumulation": 1, "training__eval_every_steps": 0,
             "training__log_every_steps": 1}  # fmt: skip
    shape = {"length": 32, "batch_size": 16}
    shares = small_config(
        **given, training__phases=[{**shape, "share": 0.75}, {**shape, "share": 0.25}]
    )
    in_steps = [{**shape, "steps": 3}, {**shape, "steps": 1, "accumulation": 2}]
    config = small_config(**given, training__phases=in_steps)
    assert config.phases == shares.phases
    assert [step_config(config, corpus, n).accumulation for n in (0, 1)] == [1, 2]
    check_stages(config, 8)
    with pytest.raises(UserError, match=r"phases\[1\]\.batch_size is 16; it must be a multiple of"):
        check_stages(config, 16)
    with pytest.raises(UserError, match="the steps sum to 4; "):
        small_config(**{**given, "training__num_steps": 5}, training__phases=in_steps)
    runs = [tmp_path / "shares", tmp_path / "steps"]
    for each, work in zip((shares, config), runs, strict=True):
        assert train(each, work, corpus=corpus, echo=lambda _: None).finished
    losses, other = ([row["train/loss"] for row in read_metrics(work / "metrics.jsonl")
                      if "train/loss" in row] for work in runs)  # fmt: skip
    assert losses[:3] == other[:3]
    assert losses[3] == pytest.approx(other[3], rel=1e-5)
    parts = [{**shape, "steps": 3}, {**shape, "steps": 1}]  # a restart may compute it otherwise
    again = small_config(**given, training__phases=parts)
    assert train(again, runs[1], corpus=corpus, echo=lambda _: None).finished
    rows = [row for row in read_metrics(runs[0] / "metrics.jsonl") if "data/rows" in row]
    assert [row["data/rows"] for row in rows] == [16, 32, 48, 64]
    passes = [row["data/tokens"] / corpus.train.num_tokens for row in rows]
    stream = ExampleStream(corpus.train, config.data, config.phases, config.seed)
    assert passes[3] == pytest.approx(stream.progress(4)[0].epochs, rel=1e-3)


def test_a_corpus_that_is_missing_or_of_another_tokenizer_is_refused(corpus, tmp_path):
    config = config_of({}, {"corpus": str(tmp_path / "none")})
    with pytest.raises(UserError, match=r"training\.phases\[1\]\.corpus: the corpus .*none does n"):
        train(config, tmp_path / "work", corpus=corpus, echo=lambda _: None)
    store = write_store(tmp_path / "other", 5, seed=3)
    config = config_of({}, {"corpus": str(store.path)})
    other = dataclasses.replace(corpus.train, tokenizer_fingerprint="0" * 64)
    with pytest.raises(UserError, match=r"phases\[1\]\.corpus: .*other has the tokenizer"):
        phase_stores(config, other)
    assert {n: each.path for n, each in phase_stores(config, corpus.train).items()} == {
        1: store.path
    }
    assert not (tmp_path / "work").exists()


def test_a_batch_warm_up_is_rounded_to_what_the_mesh_takes_and_stays_so():
    """The flagship's batches on 256 chips, and the run that goes on elsewhere."""
    flagship = {"batch_size": 4608, "batch_warmup_steps": 3}
    config = config_of(flagship, {"batch_size": 512}, training__accumulation=1,
                       optimizer={"warmup_steps": 0})  # fmt: skip
    sizes = [rows for _, rows in stages_from(config.phases, 0)]
    assert sizes == [576, 1152, 2304, 4608, 512]
    rounded = with_batch_unit(config, 256)
    check_stages(rounded, 256)
    assert [rows for _, rows in stages_from(rounded.phases, 0)] == [512, 1024, 2304, 4608, 512]
    (line,) = warmup_lines(rounded)
    assert "phase 0: steps of 512, 1,024, 2,304 rows instead of 576, 1,152, 2,304" in line
    assert build(PretrainConfig, to_dict(rounded)) == rounded  # so the run's record keeps it
    # On any other mesh the run has the batches with which it began, whatever they are.
    for first in (rounded, config):
        kept = first.training.batch_unit
        assert with_batch_unit(config, 64, kept).phases == first.phases
    # A mesh that takes the batches as they are changes none, and no line says so.
    assert with_batch_unit(config, 64) == config
    assert warmup_lines(config) == []
    asked = config_of(
        flagship, {"batch_size": 512}, training__accumulation=1, training__batch_unit=96
    )
    assert with_batch_unit(asked, 256).training.batch_unit == 768
    assert with_batch_unit(asked, 64, 256) == asked  # another run: the work directory says so


def test_accumulation_of_a_phase_without_warm_up_coarsens_no_batch_warm_up():
    config = config_of({"batch_size": 128, "batch_warmup_steps": 3},
                       {"batch_size": 192, "accumulation": 3}, training__accumulation=1,
                       optimizer={"warmup_steps": 0})  # fmt: skip
    assert [rows for _, rows in stages_from(config.phases, 0)] == [16, 32, 64, 128, 192]
    rounded = with_batch_unit(config, 64)
    assert [rows for _, rows in stages_from(rounded.phases, 0)] == [64, 64, 64, 128, 192]
    uneven = config_of({"batch_size": 96}, {"batch_size": 192, "batch_warmup_steps": 3},
                       training__accumulation=1)  # fmt: skip
    assert with_batch_unit(uneven, 64).training.batch_unit == 64


def test_only_the_batches_to_come_must_divide_over_the_mesh():
    config = config_of({"batch_size": 4608, "batch_warmup_steps": 3}, {"batch_size": 1024},
                       training__accumulation=1)  # fmt: skip
    message = r"phases\[0\]\.batch_size 4608 in the batch warm-up is 1152; .* a multiple of 256 "
    for step, refused in enumerate([True, True, False, False]):
        if refused:
            with pytest.raises(UserError, match=message if step else "warm-up is 576"):
                check_stages(config, 256, step)
        else:
            check_stages(config, 256, step)
    with pytest.raises(UserError, match=r"phases\[0\]\.batch_size is 4608; it must be a multiple"):
        check_stages(config, 1024, 3)
    check_stages(config, 1024, 4)


@pytest.mark.usefixtures("reused_steps")
def test_a_run_says_its_rounded_batches_and_goes_on_with_them(corpus, tmp_path):
    """8 shards of two micro-batches take 16 rows. The first start gets a signal before its step."""
    given = {"training__eval_every_steps": 0, "checkpoint__save_every_steps": 2}
    config = config_of({"batch_warmup_steps": 3}, **given)
    said: list[str] = []

    def stop(line: str) -> None:
        said.append(line)
        if line.startswith("devices"):
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = train(config, tmp_path / "work", corpus=corpus, echo=stop)
    assert (stopped.step, stopped.finished, stopped.stopped_by) == (0, False, "SIGTERM")
    assert any("phase 0: steps of 16, 16, 16 rows instead of 2, 4, 8" in line for line in said)
    work = open_workdir(tmp_path / "work")
    there = look_into(work, "pretrain")
    assert (there.config(PretrainConfig).training.batch_unit, there.steps) == (16, [0])
    training = read_config(work.local).training
    assert training == dataclasses.replace(config.training, batch_unit=16)
    assert train(config, work.name, corpus=corpus, echo=said.append).finished
    there = look_into(work, "pretrain")
    assert (there.config(PretrainConfig).training.batch_unit, max(there.steps)) == (16, 4)
    stream = ExampleStream(corpus.train, config.data, read_config(work.local).phases, config.seed)
    assert replay_batch(work.name, 1, corpus=str(corpus.train.path.parent)).startswith("16 rows")
    assert stream.first_row(3) == 48


def test_warm_ups_longer_than_the_run_are_scaled_with_it_and_said():
    config = config_of({"batch_warmup_steps": 5}, {"batch_warmup_steps": 4},
                       optimizer={"warmup_steps": 1000})  # fmt: skip
    assert config.warmup_steps == 1
    assert [phase.batch_warmup_steps for phase in config.phases] == [1, 4]
    longer, shorter = warmup_lines(config)
    assert "optimizer.warmup_steps is 1,000, longer than the 8 steps: scaled to 1" in longer
    assert "phases[0].batch_warmup_steps is 5, longer than the 4 steps: scaled to 1" in shorter
    short = load_config(PretrainConfig, "modernbert_base", ["--config.training.num_steps=1000"])
    assert short.warmup_steps == 100  # of 5,086
    assert not any("Warning" in line for line in warmup_lines(short))


@pytest.mark.parametrize(("given", "warned"), [
    ({"warmup_rate": 0.25}, False), ({"warmup_rate": 0.3}, True), ({"warmup_steps": 7}, True),
    ({"warmup_steps": 5}, False), ({"warmup_steps": 40}, False),
])  # fmt: skip
def test_a_warning_of_a_warm_up_above_a_quarter_of_the_run(given, warned):
    lines = warmup_lines(config_of({}, {}, training__num_steps=20, optimizer=given))
    steps = {"warmup_rate": 6}.get(*given, 7)
    assert any(f"rises for {steps} of 20 steps" in line for line in lines) == warned


@pytest.mark.parametrize("group", ["pretrain", "translate"])
def test_no_shipped_recipe_warns_of_its_warm_up(group):
    files = sorted((Path(__file__).parents[3] / "configs" / group).glob("*.py"))
    assert len(files) > 5
    for file in files:
        lines = warmup_lines(load_config(PretrainConfig, f"{group}/{file.stem}"))
        assert not any("Warning" in line for line in lines), file


@pytest.mark.parametrize(("steps", "warned"), [(8, False), (2000, True)])
def test_a_warning_above_forty_epochs(corpus, steps, warned):
    config = config_of({}, {}, training__num_steps=steps, data={"pairing": "none"})
    config = config.with_vocabulary(64)
    stream = ExampleStream(corpus.train, config.data, config.phases, config.seed)
    objective = objective_of(config)
    lines = summary(config, "work", corpus, stream, make_mesh(config.mesh), objective)
    found = [line for line in lines if " epochs of " in line and line.startswith("Warning: ")]
    assert bool(found) == warned
    if warned:  # both phases read one text
        epochs = sum(p.num_rows for p in config.phases) / stream.corpora(0)[0].order.num_rows
        assert found[0].startswith(
            f"Warning: {epochs:,.0f} epochs of {corpus.train.path}; above 40"
        )


def test_the_corpus_of_a_phase_may_move_and_not_change(corpus, tmp_path):
    stores = [
        write_store(tmp_path / name, 5, seed) for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    work = open_workdir(tmp_path / "work")
    first, moved, other = (config_of({}, {"corpus": str(store.path)}) for store in stores)
    prepare_workdir(work.local, first, corpus.train, Start(), {1: stores[0]})
    check_workdir(work, look_into(work, "pretrain"), moved, corpus.train, {1: stores[1]})
    message = r"training\.phases\[1\]\.corpus: fingerprint \w+ there, \w+ given"
    with pytest.raises(UserError, match=message):
        check_workdir(work, look_into(work, "pretrain"), other, corpus.train, {1: stores[2]})
    with pytest.raises(UserError, match=message):
        check_workdir(work, look_into(work, "pretrain"), config_of({}, {}), corpus.train, {})


def test_a_local_theta_needs_local_layers():
    message = r"phases\[0\]\.local_rope_theta is 5, but model.attention_pattern 'G' has no local"
    with pytest.raises(UserError, match=message):
        config_of({"local_rope_theta": 5.0}, model__positions="rope")


def test_a_record_has_the_thetas_of_its_phase_and_the_same_phases():
    config = config_of({"rope_theta": 50.0}, {}, model__positions="rope", model__rope_theta=9.0)
    assert [config.model_of(number).rope_theta for number in (0, 1)] == [50, 9]
    for number in (0, 1):
        record = build(PretrainConfig, to_dict(config.with_thetas_of(number)))
        assert record.model == config.model_of(number)
        assert [record.model_of(each) for each in (0, 1)] == [
            config.model_of(each) for each in (0, 1)
        ]
    assert config_of({}, {}).with_thetas_of(1) == config_of({}, {})


def test_evaluations_mask_their_own_share():
    with pytest.raises(UserError, match=r"masking\.eval_rate is 1.5; it must be in \(0, 1\]"):
        build(PretrainConfig, {"masking": {"eval_rate": 1.5}})
    config = config_of({"masking_rate": 0.5}, {}, masking={"rate": 0.3, "eval_rate": 0.2})
    config = config.with_vocabulary(64)
    assert [config.masking_of(number).rate for number in (0, 1)] == [0.5, 0.3]
    for evaluates, rates in ((False, [0.5, 0.3]), (True, [0.2, 0.2])):
        steps = [step_config(config, None, number, evaluates=evaluates) for number in (0, 1)]
        assert [step.objective.masking.rate for step in steps] == rates
    # The head's work at half of the positions and at three in ten.
    assert row_flops(config, 0) > row_flops(config, 1)


def test_a_limit_of_predictions_is_for_training_alone():
    config = config_of({}, masking={"max_predictions": 8}).with_vocabulary(64)
    steps = [step_config(config, None, evaluates=evaluates) for evaluates in (False, True)]
    assert [step.objective.masking.num_predictions(128) for step in steps] == [8, 20]


def test_whole_words_are_the_words_of_the_corpus(tmp_path):
    tokenizer = WordPieceTokenizer([*SPECIAL_TOKENS, "a", "##b"])
    with StoreWriter(tmp_path / "store", tokenizer) as writer:
        writer.append(np.array([5, 6, 6]), np.array([3]), np.array([1]))
        store = writer.store()
    config = config_of({}, masking={"whole_word": True}).with_vocabulary(store.vocab_size)
    step = step_config(config, Corpus(store, None))
    assert step.objective.continues_word.tolist() == [False] * 6 + [True]


def test_the_shipped_recipe_has_three_phases():
    config = load_config(PretrainConfig, "pretrain/modern_tiny", []).with_vocabulary(30522)
    assert num_params(objective_of(config)) == 11_255_866  # README.md
    assert [phase.num_steps for phase in config.phases] == [16_000, 2_000, 2_000]
    assert [config.model_of(n).rope_theta for n in range(3)] == [1e4, 16e4, 16e4]
    assert [config.model_of(n).local_rope_theta for n in range(3)] == [1e4] * 3
    assert step_config(config, None, evaluates=True).objective.masking.rate == 0.15
    rates = [config.phase_rate(number) for number in range(3)]
    assert rates == [
        None,
        PhaseRate(3e-4, "constant", 0.0, start=16_000, num_steps=2_000),
        PhaseRate(3e-4, "one_minus_sqrt", 3e-7, start=18_000, num_steps=2_000),
    ]


def test_a_rate_that_falls_in_the_first_phase_falls_from_the_first_update():
    phases = ({"share": 0.25, "decay": "linear"}, {"share": 0.75})
    config = build(PretrainConfig, {"training": {"num_steps": 8, "phases": phases}})
    assert config.phase_rate(0) == PhaseRate(
        config.optimizer.learning_rate, "linear", 0.0, start=0, num_steps=2
    )


def test_phases_that_differ_in_nothing_share_a_step(corpus):
    config = config_of({}, {"masking_rate": 0.15}, {"masking_rate": 0.3}).with_vocabulary(64)
    first, second, third = (step_config(config, corpus, number) for number in range(3))
    assert first == second != third
    first, third = (step_config(config, corpus, number, evaluates=True) for number in (0, 2))
    assert first == third


def test_what_a_phase_sets_is_said_in_words():
    assert described(dataclasses.asdict(PhaseConfig(length=512, batch_size=8))) == ""
    phase = PhaseConfig(masking_rate=0.3, decay="linear", end_rate=0.0, rope_theta=160_000.0)
    said = "masking rate 0.3, decay linear, end rate 0, rope theta 160000"
    assert described(dataclasses.asdict(phase)) == said
    assert described({"length": 128, "share": 1.0}) == ""  # of an older version
