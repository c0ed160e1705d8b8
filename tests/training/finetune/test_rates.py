"""Learning rates that the configuration leaves to the model's width and the number of rows."""

import json
from dataclasses import replace

import pytest
from small_finetuning import compile_once, small_config, write_config, write_files

from bert_jax.cli.main import main
from bert_jax.config.mapping import build
from bert_jax.errors import UserError
from bert_jax.training.finetune import folds
from bert_jax.training.finetune.config import FinetuneConfig, FinetuneOptimizerConfig
from bert_jax.training.finetune.setup import set_up, with_rates
from bert_jax.training.finetune.train import finetune
from bert_jax.training.run.session import StopRequest

MANY = 3000
AUTO = {"optimizer": {}}
RATE = 3e-5 * (768 / 16) ** 2


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture
def one_program(monkeypatch):
    compile_once(monkeypatch)


@pytest.mark.parametrize(
    ("width", "rate", "head"),
    [(768, 3e-5, None), (1024, 1.7e-5, None), (384, 1.2e-4, 1e-3), (64, 4.3e-3, 4.3e-3)],
)
def test_narrower_models_get_larger_rates_by_the_square(width, rate, head):
    config = with_rates(FinetuneConfig(), width, MANY)
    assert config.optimizer.learning_rate == FinetuneOptimizerConfig.rate_of(width) == rate
    assert config.optimizer.head_learning_rate == head
    assert config.learning_rates == (rate,)
    assert rate == pytest.approx(3e-5 * (768 / width) ** 2, rel=0.05)


def test_few_rows_make_a_sweep_around_the_rate():
    few = with_rates(FinetuneConfig(), 768, MANY - 1)
    assert few.learning_rates == (1e-5, 3e-5, 9e-5)
    assert few.num_trials == 3
    assert few.optimizer.learning_rate == 3e-5
    assert with_rates(few, 768, MANY - 1) == few
    assert with_rates(few, 64, MANY) == few


@pytest.mark.parametrize(
    "given",
    [
        {"optimizer": {"learning_rate": 1e-3}},
        {"optimizer": {"learning_rate": 1e-3}, "sweep": {"learning_rates": (1e-4, 2e-4)}},
        {"optimizer": {"learning_rate": 1e-3, "head_learning_rate": 1e-2}},
    ],
)
def test_a_rate_that_is_given_stays(given):
    config = build(FinetuneConfig, given)
    for width, rows in ((64, 10), (768, MANY)):
        assert with_rates(config, width, rows) == config


def test_what_is_given_beside_the_rate_stays():
    sweep = build(FinetuneConfig, {"sweep": {"learning_rates": (1e-4,), "seeds": 4}})
    assert with_rates(sweep, 64, 10).sweep == sweep.sweep
    seeds = build(FinetuneConfig, {"sweep": {"seeds": 4}})
    assert with_rates(seeds, 64, 10).num_trials == 12
    head = build(FinetuneConfig, {"optimizer": {"head_learning_rate": 7e-3}})
    assert with_rates(head, 64, 10).optimizer.head_learning_rate == 7e-3


def test_a_negative_rate_is_refused():
    with pytest.raises(UserError, match=r"optimizer\.learning_rate is -0\.1"):
        build(FinetuneConfig, {"optimizer": {"learning_rate": -0.1}})


def test_a_run_is_set_up_with_its_rates(files):
    setup = set_up(small_config(files, **AUTO))
    rates = [trial.learning_rate for trial in setup.schedule.waves[0]]
    assert rates == list(setup.config.sweep.learning_rates)
    assert rates == pytest.approx([RATE / 3, RATE, 3 * RATE], rel=0.03)
    given = small_config(files)
    assert set_up(given).config == given


def test_a_stopped_run_continues_with_the_same_rates(
    files, tmp_path, monkeypatch, capsys, one_program
):
    """And config.json, a dry run and the model's record name them."""
    config = small_config(files, **AUTO, training__num_epochs=1.0)
    file, work = write_config(tmp_path / "auto.py", config), tmp_path / "work"
    argv = ["finetune", f"--config={file}", f"--workdir={work}"]
    assert main([*argv, "--dry-run"]) == 0
    assert '"learning_rates": [' in capsys.readouterr().out
    assert not work.exists()
    with monkeypatch.context() as patch:
        answers = iter([False, False, True])
        patch.setattr(StopRequest, "due", lambda request: next(answers))
        result = finetune(config, work)
    assert (result.finished, result.step) == (False, 2)
    record = json.loads((work / "config.json").read_text())["config"]
    expected = set_up(config).config
    assert record["sweep"]["learning_rates"] == list(expected.sweep.learning_rates)
    assert record["optimizer"]["learning_rate"] == expected.optimizer.learning_rate
    assert main([*argv, "--dry-run"]) == 0
    lines: list[str] = []
    result = finetune(config, work, echo=lines.append)
    assert result.finished
    assert len(result.outcomes) == 3
    steps = [line.split()[1] for line in lines if line.startswith("step ")]
    assert steps == ["3/6", "4/6", "5/6", "6/6"]
    other = replace(config, optimizer=replace(config.optimizer, learning_rate=1e-4))
    with pytest.raises(UserError, match=r"optimizer\.learning_rate: 0\.069 there, 0\.0001 given"):
        finetune(other, work)


def test_folds_have_one_rate_each(files, tmp_path, monkeypatch):
    config = small_config(files, **AUTO)
    config = replace(config, task=replace(config.task, dev="", folds=3))
    trained = []

    def finetuned(config, workdir, **_):
        trained.append(set_up(config))
        raise KeyboardInterrupt

    monkeypatch.setattr(folds, "finetune", finetuned)
    with pytest.raises(KeyboardInterrupt):
        folds.finetune_folds(config, tmp_path / "work")
    (setup,) = trained
    assert setup.schedule.num_trials == 1
    assert setup.config.learning_rates == (setup.config.optimizer.learning_rate,)
    assert setup.config.optimizer.learning_rate == pytest.approx(RATE, rel=0.03)
