from pathlib import Path

import pytest

from bert_jax.cli import main as cli
from bert_jax.cli.demo import masked_words as demo
from bert_jax.cli.main import verb_class
from bert_jax.cli.verbs.options import read
from bert_jax.config.command_line import load_config
from bert_jax.errors import UserError
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.run_plan import Result
from bert_jax.training.workdir import begin_workdir

WORKDIR = Path("my work/demo")
RECIPE = demo.Recipe("a/file.py", least_gain=0.5, least_pair_accuracy=0.65)


def result(**metrics: float) -> Result:
    return Result(
        workdir=WORKDIR / "run", step=10, finished=True, baseline=7.0, train_metrics={},
        eval_metrics={f"eval/{name}": value for name, value in metrics.items()}, seconds=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mlm_loss", "accuracy", "majority", "code"),
    [
        (6.4, 0.70, 0.60, 0),
        (6.6, 0.70, 0.60, 1),  # 0.4 nats below the baseline
        (6.4, 0.64, 0.60, 1),
        (6.4, 0.70, 0.70, 1),  # what always giving one answer reaches
        (6.4, 0.70, 0.72, 1),
    ],
)
def test_verdict_wants_context_and_pairs_to_be_learned(capsys, mlm_loss, accuracy, majority, code):
    values = {"mlm_loss": mlm_loss, "nats_below_unigram": 7.0 - mlm_loss}
    values |= {"nsp_accuracy": accuracy, "nsp_majority": majority}
    assert demo._verdict(result(**values), WORKDIR / "corpus", RECIPE) == code
    said = capsys.readouterr().out
    assert f"{7.0 - mlm_loss:.2f} nats below" in said
    assert f"{majority:.2f} of always giving the more frequent answer" in said
    assert ("FAILED" in said) == (code == 1)
    assert ("Next, to try" in said) == (code == 0)


def test_a_run_without_its_evaluation_is_explained():
    with pytest.raises(UserError, match=r"metrics\.jsonl has lost the run's last evaluation"):
        demo._verdict(result(), WORKDIR / "corpus", RECIPE)


def test_recipes_are_the_architecture_and_optimizer_that_they_name():
    modern, bert = (
        load_config(PretrainConfig, demo.RECIPES[name].config) for name in ("modern", "bert")
    )
    assert (modern.model.positions, modern.optimizer.name) == ("rope", "muon")
    assert (bert.model.positions, bert.optimizer.name) == ("learned", "adamw")
    for shared in ("data", "objective"):
        assert getattr(modern, shared) == getattr(bert, shared)
    assert modern.masking.eval_rate == bert.masking.eval_rate
    assert demo.RECIPES["modern"].least_gain > demo.RECIPES["bert"].least_gain


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        ([], "configs/pretrain/demo.py"),
        (["--recipe=bert"], "configs/pretrain/demo_bert.py"),
        (["--config=my/file.py"], "my/file.py"),
    ],
)
def test_the_command_line_names_a_recipe_or_a_file(monkeypatch, arguments, config):
    asked = []
    monkeypatch.setattr(demo, "run_demo", lambda *given: asked.append(given) or 0)
    assert cli.main(["demo", "--workdir=w", *arguments]) == 0
    ((recipe, workdir),) = asked
    assert (recipe.config, workdir) == (config, Path("w"))


@pytest.mark.parametrize(("first", "second"), [("bert", "modern"), ("modern", "bert")])
def test_a_directory_of_the_other_recipe_is_refused(tmp_path, capsys, first, second):
    config = load_config(PretrainConfig, demo.RECIPES[first].config)
    begin_workdir(tmp_path / "run", config.with_vocabulary(demo.VOCAB_SIZE), None)
    assert cli.main(["demo", f"--workdir={tmp_path}", f"--recipe={second}"]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'run'} holds a run of the recipe '{first}'" in said
    assert f"--recipe={first}" in said
    assert not (tmp_path / "text.txt").exists()
    demo._refuse_other_recipe(config, tmp_path / "run")  # its own is continued


def test_a_recipe_without_pairs_is_refused_before_the_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "make_once", lambda *_: pytest.fail("the demo began"))
    file = tmp_path / "none.py"
    file.write_text('def get_config():\n    return {"data": {"pairing": "none"}}\n')
    assert cli.main(["demo", f"--workdir={tmp_path / 'demo'}", f"--config={file}"]) == 2
    said = capsys.readouterr().err
    assert f"{file}: data.pairing is 'none'" in said
    assert "set data.pairing to 'nsp' or 'sop'" in said.replace("\n", " ")
    assert not (tmp_path / "demo").exists()


def test_next_commands_are_ones_that_the_command_line_takes():
    verbs = []
    for words in demo._next_commands(WORKDIR / "run", WORKDIR / "corpus", RECIPE):
        verbs.append(words[0])
        asked = read(verb_class(words[0]), words[0], words[1:])
        place = asked.model if words[0] == "fill-mask" else asked.workdir
        assert Path(place) in (WORKDIR / "run", WORKDIR / "longer")
        assert all(field.startswith("--config.") for field in asked.overrides)
    assert verbs == ["fill-mask", "replay", "pretrain"]
    assert f"--config={RECIPE.config}" in words
