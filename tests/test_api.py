"""The functions of `bert_jax` itself: the examples in their docstrings, fields, lazy imports."""

import dataclasses
import doctest
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small_finetuning
import small_run
from made_plans import made_plan

import bert_jax
from bert_jax.config.command_line import config_from
from bert_jax.config.mapping import to_dict
from bert_jax.errors import UserError
from bert_jax.planning import planner
from bert_jax.planning.command import startable
from bert_jax.planning.topology import parse_topology
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.run_plan import Result

FUNCTIONS = (bert_jax.pretrain, bert_jax.finetune, bert_jax.load, bert_jax.export, bert_jax.plan)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    """The names that the examples bind, run one after another where their files lie.

    Recipes in the working directory come before the recipes of the package, and make the runs tiny.
    """
    home = tmp_path_factory.mktemp("api")
    tiny = small_run.small_config(
        training__num_steps=2, training__phases=[{"length": 32, "batch_size": 16}],
        training__accumulation=1, training__eval_every_steps=0,
    )  # fmt: skip
    small_finetuning.write_config(home / "bert_tiny.py", tiny)
    table = {"task": {"kind": "table"}, "training": {"num_epochs": 1.0, "batch_size": 8}}
    (home / "table.py").write_text(f"def get_config():\n    return {table}\n")
    small_run.write_corpus(home / "work" / "corpus")
    small_finetuning.write_table(home / "reviews.csv", 44, 0)
    names: dict[str, Any] = {"bert_jax": bert_jax, "home": home}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr(planner, "compile_step", made_plan)
        for function in FUNCTIONS:
            examples = doctest.DocTestParser().get_examples(function.__doc__)
            assert examples, function
            for example in examples:
                exec(example.source, names)  # noqa: S102
                if function is bert_jax.pretrain:
                    names["pretrained"] = names["run"]
    return names


def test_a_run_gives_its_result(found):
    for name, workdir in (("pretrained", "work/tiny"), ("run", "work/reviews")):
        result = found[name]
        assert isinstance(result, Result)
        assert (result.workdir, result.finished) == (workdir, True)
        assert (found["home"] / workdir / "metrics.jsonl").exists()
    assert found["pretrained"].step == 2
    assert "eval/accuracy" in found["run"].eval_metrics


def test_the_model_answers_and_is_exported(found):
    assert [answer["label"] in ("cat", "dog") for answer in found["answers"]] == [True, True]
    written = json.loads((found["home"] / "out" / "reviews" / "parity.json").read_text())
    assert found["parity"] == written


def test_a_plan_for_each_phase(found, monkeypatch, capsys):
    assert found["fits"] is True
    monkeypatch.setattr(planner, "compile_step", made_plan)
    base = "pretrain/bert_base"
    plans = bert_jax.plan(base, "v5e:4x4", training={"accumulation": 2}, model={"vocab_size": 99})
    assert [(plan.phase, plan.length, plan.accumulation) for plan in plans] == [
        (0, 128, 2), (1, 512, 2),
    ]  # fmt: skip
    assert plans[0].config.model.vocab_size == 99
    # Unlike the verb, it looks for no other settings.
    phases = [{"length": 128, "batch_size": 2**16}]
    (large,) = bert_jax.plan(base, "v5e:1x1", training={"phases": phases})
    assert (large.fits, large.rows, large.accumulation) == (False, 2**16, 1)
    # The sizes of an initial model replace the sizes of the recipe.
    phases = [{"length": 32, "batch_size": 16}]
    place = found["home"] / "work" / "tiny"
    (small,) = bert_jax.plan(base, "v5e:1x1", init=place, training={"phases": phases})
    assert (small.config.model.hidden_dim, small.config.model.vocab_size) == (32, 64)
    assert capsys.readouterr().out == ""


def test_a_plan_is_refused_where_a_run_is(monkeypatch):
    monkeypatch.setattr(planner, "compile_step", made_plan)
    with pytest.raises(UserError, match="v5e:0x0"):
        bert_jax.plan("bert_base", "v5e:0x0")
    phases = [{"length": 128, "batch_size": 100}]
    with pytest.raises(UserError, match=r"training\.phases\[0\]\.batch_size"):
        bert_jax.plan("bert_base", "v5e:4x4", training={"phases": phases})


@pytest.mark.parametrize(
    ("topology", "mesh"),
    [("v5e:1x1", {"tensor": 2}), ("v5e:4x4", {"data": 4}), ("v5e:4x4", {"data": 32, "fsdp": -1})],
)
def test_a_mesh_that_does_not_fill_the_slice_is_refused(topology, mesh):
    config = config_from(PretrainConfig, "bert_base", {"mesh": mesh})
    with pytest.raises(UserError, match=r"do not fill \d+ devices"):
        startable(config, parse_topology(topology))


def test_fields_are_nested_or_dotted_and_have_the_values_of_python(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    phases = [{"length": 32, "batch_size": 8, "share": 0.25}] * 4
    fields = {
        "training": {"phases": phases}, "optimizer.learning_rate": 1e-5,
        "model.norm_bias": False, "seed": 3, "init": "~/model",
    }  # fmt: skip
    config = config_from(PretrainConfig, "bert_tiny", fields)
    assert [phase.length for phase in config.training.phases] == [32] * 4
    assert (config.optimizer.learning_rate, config.model.norm_bias) == (1e-5, False)
    assert (config.seed, config.init) == (3, str(tmp_path / "model"))
    assert config.model.num_layers == 2
    again = config_from(PretrainConfig, to_dict(config), {})
    assert again == config == config_from(PretrainConfig, config, {})
    assert config_from(PretrainConfig, config, {"seed": 4}) == dataclasses.replace(config, seed=4)
    task = {"kind": "tagging", "train": Path("a.conll"), "tag_column": -1}
    tagging = config_from(FinetuneConfig, {}, {"task": task, "lora": {"targets": ("query", "up")}})
    assert (tagging.task.kind, tagging.task.train) == ("tagging", "a.conll")


@pytest.mark.parametrize(
    ("given", "fields", "said"),
    [
        ("bert_tinny", {}, "did you mean"),
        ("bert_tiny", {"training": {"num_stepz": 3}}, "arguments: unknown field training.num_step"),
        ("bert_tiny", {"training.num_steps": "many"}, "in the arguments: training.num_steps is"),
        ("bert_tiny", {"training": {}}, "in the arguments: training is a group of fields"),
        ({"model": {"layers": 3}}, {}, "unknown field model.layers"),
        (FinetuneConfig(init="x"), {}, "must be a group of fields"),
        (3, {}, "must be a group of fields"),
    ],
)
def test_wrong_configurations_write_nothing(tmp_path, given, fields, said):
    with pytest.raises(UserError, match=said):
        bert_jax.pretrain(given, tmp_path / "run", **fields)
    assert not (tmp_path / "run").exists()


def test_arguments_hide_no_field():
    for function, cls in (
        (bert_jax.pretrain, PretrainConfig), (bert_jax.plan, PretrainConfig),
        (bert_jax.finetune, FinetuneConfig),
    ):  # fmt: skip
        known = {field.name for field in dataclasses.fields(cls)}
        assert not known & set(inspect.signature(function).parameters)


def test_the_package_imports_nothing_heavy():
    code = (
        "import sys, bert_jax; print(sorted({'jax', 'numpy', 'flax', 'bert_jax.planning'} "
        "& set(sys.modules)), callable(bert_jax.plan)); "
        "import bert_jax.planning.command; print(callable(bert_jax.plan))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[] True", "True"]


def test_functions_have_the_names_of_verbs_and_of_no_package():
    """An import of a package `bert_jax.plan` would replace the function."""
    for function in FUNCTIONS:
        assert not (Path(bert_jax.__file__).parent / function.__name__).exists()
