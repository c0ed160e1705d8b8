"""What a task's configuration refuses, and that the recipes build."""

import dataclasses
from pathlib import Path

import pytest

from bert_jax.config.command_line import fields_help, load_config
from bert_jax.config.mapping import build, to_dict
from bert_jax.errors import UserError
from bert_jax.tasks.config import GlueConfig, SquadConfig, TableConfig, TaggingConfig, TaskConfig
from bert_jax.training.finetune.config import FinetuneConfig

RECIPES = Path(__file__).parents[2] / "configs" / "finetune"


@pytest.mark.parametrize(
    ("recipe", "kind", "length"),
    [
        ("glue.py:mrpc", "glue", 128),
        ("glue.py:sst2", "glue", 128),
        ("table.py", "table", 128),
        ("choice.py", "choice", 128),
        ("parsing.py", "parsing", 128),
        ("ner.py", "tagging", 128),
        ("ner.py:wikiann", "tagging", 128),
        ("squad.py", "squad", 384),
    ],
)
def test_recipe_builds(recipe, kind, length):
    task = load_config(FinetuneConfig, f"{RECIPES}/{recipe}").task
    assert (task.kind, task.length) == (kind, length)
    assert build(TaskConfig, to_dict(task)) == task


def test_small_tasks_of_glue_take_more_passes():
    epochs = [
        load_config(FinetuneConfig, f"{RECIPES}/glue.py:{name}").training.num_epochs
        for name in ("rte", "qqp")
    ]
    assert epochs == [20, 3]


@pytest.mark.parametrize("recipe", sorted(path.name for path in RECIPES.glob("*.py")))
def test_rows_can_be_shortened(recipe):
    spec = f"{RECIPES}/{recipe}" + (":cola" if recipe == "glue.py" else "")
    half = load_config(FinetuneConfig, spec).task.length // 2
    shortened = load_config(FinetuneConfig, spec, [f"--config.task.max_length={half}"]).task
    assert shortened.length == half


@pytest.mark.parametrize("kind", TaskConfig.VARIANTS)
def test_fields_are_explained(kind):
    """Those of the kind, and no others."""
    config = TaskConfig.VARIANTS[kind]()
    lines = fields_help(config, "--config.task").splitlines()
    fields = [number for number, line in enumerate(lines) if line.startswith("--config")]
    assert len(fields) == len(dataclasses.fields(config))
    for number in fields:
        assert lines[number + 1].startswith("      "), lines[number]
    assert f"--config.task.kind={kind}" in lines
    assert any("--fields --config.task.kind=NAME lists" in line for line in lines)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: build(TaskConfig, {"name": "cola"}),
            "unknown field name; kind=glue has this field; set that value first",
        ),
        (lambda: GlueConfig(name="ax"), "no training data; fine-tune on mnli"),
        (lambda: GlueConfig(name="sst"), "'sst' is not a GLUE task"),
        (lambda: TableConfig(max_length=7), "max_length is 7; it must be at least 8"),
        (lambda: SquadConfig(max_length=96), "task: max_length 96 leaves 28"),
        (
            lambda: TaggingConfig(max_length=32, stride=31),
            "task.stride is 31; it must be from 1 to 30",
        ),
        (lambda: TableConfig(dev_rate=1.0), r"dev_rate is 1.0; it must be in \(0, 1\)"),
        (
            lambda: TableConfig(metric="pearson"),
            "metric is 'pearson'; the metrics of this task are accuracy, f1",
        ),
        (
            lambda: TableConfig(problem_type="regression", labels=("a", "b")),
            "labels is .*a regression has no labels",
        ),
        (lambda: TableConfig(labels=("a",)), "expected at least 2 labels"),
        (
            lambda: TableConfig(problem_type="multi_label", labels=("a",), label_columns=("a",)),
            "label_columns names the labels",
        ),
        (
            lambda: TableConfig(label_columns=("a",)),
            "label_columns is .*, which works only with",
        ),
        (
            lambda: TableConfig(problem_type="multi_label", separator=" "),
            "expected a mark",
        ),
        (lambda: TaggingConfig(lenient=True, scheme="plain"), "lenient is for entity tags"),
        (lambda: SquadConfig(num_best=0), "task.num_best is 0"),
        (lambda: TableConfig().source("train"), "task.train is empty; set it to a file"),
        (lambda: GlueConfig().source("name"), "task.name is empty; set it to one of cola"),
        (lambda: SquadConfig().source("dev"), "task.dev is empty; set it to a second file"),
    ],
)
def test_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
