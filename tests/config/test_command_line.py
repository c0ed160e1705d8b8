"""Configuration files and `--config.a.b=value`: what is taken, and what is refused and how."""

import importlib
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from bert_jax.cli.main import main
from bert_jax.config.command_line import config_from, fields_help, load_config
from bert_jax.errors import UserError
from bert_jax.objectives.config import OBJECTIVES
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.pretrain.config import PretrainConfig


def write(path: Path, body: str) -> str:
    path.write_text(body)
    return str(path)


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    return write(
        tmp_path / "mine.py",
        "def get_config():\n"
        "    return {'model': {'hidden_dim': 32, 'num_heads': 2}, 'training': {'phases': [\n"
        "        {'length': 32, 'batch_size': 8, 'share': 1.0}]}}\n",
    )


def load(spec: str, *overrides: str) -> PretrainConfig:
    return load_config(PretrainConfig, spec, overrides)


def test_file_over_defaults_and_command_line_over_file(config_file):
    config = load(
        config_file,
        "--config.model.num_heads=4",
        "--config.training.phases[0].length=16",
        "--config.optimizer.warmup_steps=7",  # None by default
        "--config.data.pairing=sop",
    )
    assert (config.model.hidden_dim, config.model.num_heads) == (32, 4)
    assert config.training.phases[0].length == 16
    assert config.training.phases[0].batch_size == 8
    assert config.optimizer.warmup_steps == 7
    assert config.data.pairing == "sop"
    assert config.model.num_layers == PretrainConfig().model.num_layers


def test_shipped_configuration_by_short_name():
    assert load("pretrain/bert_tiny") == load("configs/pretrain/bert_tiny.py")
    assert load("pretrain/bert_tiny").model.num_layers == 2


def test_a_configuration_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.json").write_text('{"seed": 7}')
    assert load_config(PretrainConfig, "~/mine.json").seed == 7


def test_argument_of_a_configuration(tmp_path):
    path = write(tmp_path / "a.py", "def get_config(n):\n    return {'seed': int(n)}\n")
    assert load(f"{path}:12").seed == 12


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--config.model.hiden_dim=3", r"unknown field model\.hiden_dim; did you mean model\.hid"),
        ("--config.modell.hidden_dim=3", r"unknown field modell; did you mean model\?"),
        ("--config.training.freeze=2", "only `bert-jax finetune` freezes parts; pretraining "),
        ("--config.sweep.seeds=3", "unknown field sweep; only `bert-jax finetune` has sweeps"),
        ("--config.training.phases[1].length=3", r"no training\.phases\[1\]; .*counted from 0"),
        ("--config.training.phases[0].lenght=3", r"phases\[0\]\.lenght; did you mean .*length"),
        ("--config.model.hidden_dim.x=3", r"unknown field model\.hidden_dim\.x"),
        ("--config.model.hidden_dim=abc", "hidden_dim is 'abc'.*must be a whole number"),
        ("--config.model.hidden_dim=1.5", "hidden_dim is '1.5'"),
        ("--config.model=3", "model is a group of fields; set one of vocab_size, "),
        ("--config.optimizer.bias_correction=maybe", "bias_correction is 'maybe'.*True or False"),
        ("--config.model.hidden_dim", "missing value for --config.model.hidden_dim"),
        ("--config.optimizer.learning_rate=nan", "learning_rate is nan"),
        ("--steps=3", "unknown argument '--steps=3'"),
        ("extra", "unexpected argument 'extra'"),
    ],
)
def test_wrong_override_is_named(config_file, override, message):
    with pytest.raises(UserError, match=message):
        load(config_file, override)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x = 1\ndef get_config(:\n", r"c\.py, line 2: SyntaxError"),
        ("import os\nimport no_such_package\n", r"c\.py, line 2: ModuleNotFoundError.*no_such_p"),
        ("def get_config():\n    return 1 / 0\n", r"c\.py, line 2: ZeroDivisionError"),
        ("raise SystemExit(3)\n", r"c\.py, line 1: SystemExit: 3"),
        ("x = 1\n", "no function get_config"),
        ("get_config = 3\n", "no function get_config"),
        ("def get_config(a):\n    return {}\n", "missing a required argument: 'a'"),
        ("def get_config():\n    return None\n", "configuration is None; it must"),
        ("def get_config():\n    return {'seeed': 1}\n", "unknown field seeed; did you mean seed"),
        ("def get_config():\n    return {'seed': 'x'}\n", "seed is 'x'"),
    ],
)
def test_wrong_file_is_named_with_its_line(tmp_path, body, message):
    with pytest.raises(UserError, match=message):
        load(write(tmp_path / "c.py", body))


def test_the_line_may_be_in_a_module_beside_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = write(tmp_path / "c.py", "import beside_c\n\nget_config = beside_c.get_config\n")
    module = tmp_path / "beside_c.py"
    module.write_text("x = 1\n\ny = (\n")
    with pytest.raises(UserError, match=r"[/\\]beside_c\.py, line 3: SyntaxError"):
        load(path)
    module.write_text("def get_config(size):\n    return {'seed': int(size)}\n")
    monkeypatch.setitem(sys.modules, "beside_c", None)
    del sys.modules["beside_c"]
    importlib.invalidate_caches()
    advice = r"Correct the argument 'big' or the Python code of this file and try again"
    with pytest.raises(UserError, match=rf"beside_c\.py, line 2: ValueError: .*{advice}"):
        load(f"{path}:big")


OWN = '''
from __future__ import annotations
from dataclasses import dataclass
from bert_jax.objectives.config import OBJECTIVES, MaskedLMConfig

@dataclass(frozen=True)
class Own(MaskedLMConfig):
    strength: float = 1.0
    """Strength of my own loss."""

OBJECTIVES["own"] = Own

def get_config():
    return {"objective": {"name": "own"}}
'''


def test_fields_of_a_class_in_the_file_itself(tmp_path, monkeypatch):
    monkeypatch.delitem(OBJECTIVES, "own", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = load(write(tmp_path / "mine.py", OWN), "--config.objective.strength=2")
    said = fields_help(config)
    del OBJECTIVES["own"]
    assert "--config.objective.strength=2.0\n      Strength of my own loss." in said


def test_argument_that_is_not_taken(config_file):
    with pytest.raises(UserError, match="too many positional arguments"):
        load(f"{config_file}:big")


@pytest.mark.parametrize("spec", ["", "no/such.py", "."])
def test_missing_file_lists_the_shipped_ones(spec):
    with pytest.raises(UserError, match=r"there is no file .*pretrain/bert_tiny"):
        load(spec)


def test_file_that_is_not_python(tmp_path):
    with pytest.raises(UserError, match=r"must end in \.py"):
        load(write(tmp_path / "c.txt", "x"))


def test_every_field_is_listed_with_its_default():
    text = fields_help(PretrainConfig())
    assert "--config.model.hidden_dim=768" in text
    assert "one of nsp, sop, none" in text


def test_a_field_of_several_values_says_how_they_are_written():
    said = "      several values are separated by commas: 2e-5,3e-5"
    lines = fields_help(FinetuneConfig()).splitlines()
    where = lines.index(next(line for line in lines if "--config.sweep.learning_rates" in line))
    assert said in lines[where : where + 6]


@pytest.mark.parametrize("cls", [PretrainConfig, FinetuneConfig])
def test_what_is_listed_can_be_pasted(tmp_path, cls):
    """Each line sets its default: None, several values and the entries of phases included."""
    empty = write(tmp_path / "c.py", "def get_config():\n    return {}\n")
    lines = [line for line in fields_help(cls()).splitlines() if line.lstrip("'").startswith("--")]
    assert len(lines) > 40
    for line in lines:
        (argument,) = shlex.split(line)
        assert load_config(cls, empty, [argument]) == cls(), line


def test_values_with_commas_can_be_pasted():
    given = ['--config.task.labels=["it\'s so, or not", "ähm"]']
    config = load_config(FinetuneConfig, "finetune/table", given)
    (line,) = [each for each in fields_help(config).splitlines() if "task.labels=" in each]
    assert load_config(FinetuneConfig, "finetune/table", shlex.split(line)) == config
    assert config.task.labels == ("it's so, or not", "ähm")


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        (["--config.sweep.learning_rates=2e-5,3e-5"], "sweep.learning_rates", (2e-5, 3e-5)),
        (["--config.sweep.learning_rates", "2e-5"], "sweep.learning_rates", (2e-5,)),
        (["--config.sweep.learning_rates=(1,2e-5)"], "sweep.learning_rates", (1.0, 2e-5)),
        (["--config.task.labels=no, O'Neill"], "task.labels", ("no", "O'Neill")),
        (["--config.task.labels=1,2"], "task.labels", ("1", "2")),
        (["--config.task.labels='a,b','c'"], "task.labels", ("a,b", "c")),
        (["--config.task.header=None"], "task.header", None),
        (["--config.task.header=false"], "task.header", False),
        (["--config.training.dropout_rate=None"], "training.dropout_rate", None),
        (["--config.reinitialise"], "reinitialise", True),
    ],
)
def test_values_that_are_not_one_number(given, field, value):
    found = load_config(FinetuneConfig, "finetune/table", given)
    for name in field.split("."):
        found = getattr(found, name)
    assert found == value


def test_a_field_is_no_value_of_the_field_before():
    given = ["--config.task.kind=embedding", "--config.task.query_prefix", "--config.seed=3"]
    with pytest.raises(UserError, match=r"missing value for --config\.task\.query_prefix; write"):
        load_config(FinetuneConfig, "finetune/table", given)


def test_values_of_numpy_are_those_of_python():
    task = {"kind": "table", "labels": np.unique(["b", "a"])}
    fields = {
        "task": task,
        "sweep": {"learning_rates": np.array([1e-5, 1e-4])},
        "seed": np.int64(3),
    }
    found = config_from(FinetuneConfig, {}, fields)
    assert found.task.labels == ("a", "b")
    assert (found.sweep.learning_rates, found.seed) == ((1e-5, 1e-4), 3)
    named = config_from(FinetuneConfig, {}, {"task": {**task, "labels": [*map(np.str_, "xy")]}})
    assert named.task.labels == ("x", "y")


@pytest.mark.parametrize("fields", [{"init": None}, {"task": {"kind": "table", "train": None}}])
def test_none_is_no_text(fields):
    with pytest.raises(UserError, match=r"(init|train) is None \(NoneType\); it must be text"):
        config_from(FinetuneConfig, {}, fields)


def test_only_paths_lead_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    task = {"kind": "table", "train": "~/train.csv", "separator": "~"}
    found = config_from(FinetuneConfig, {}, {"task": task}).task
    assert (found.train, found.separator) == ("/home/ada/train.csv", "~")


def test_several_phases_on_the_command_line(config_file):
    phases = '[{"length": 32, "share": 0.9}, {"length": 64, "share": 0.1}]'
    found = load(config_file, f"--config.training.phases={phases}").training.phases
    assert [(phase.length, phase.share) for phase in found] == [(32, 0.9), (64, 0.1)]
    for nothing in ("null", "None"):
        phases = f'[{{"length": 32, "learning_rate": {nothing}}}]'
        (found,) = load(config_file, f"--config.training.phases={phases}").training.phases
        assert (found.length, found.learning_rate) == (32, None)


@pytest.mark.parametrize(
    "phases",
    [
        '[{"length": 32, "share": 0.9}, {"length": 64, "share": 0.1}]',
        "({'length': 32, 'share': 0.9}, {'length': 64, 'share': 0.1})",
    ],
)
def test_a_phase_of_the_command_line_takes_further_fields(config_file, phases):
    more = [f"--config.training.phases[{n}].{field}=4" for n, field in (
        (0, "accumulation"), (0, "batch_size"), (1, "batch_warmup_steps"),
    )]  # fmt: skip
    first, second = load(config_file, f"--config.training.phases={phases}", *more).training.phases
    assert (first.length, first.batch_size, first.accumulation) == (32, 4, 4)
    assert (second.length, second.batch_size, second.batch_warmup_steps) == (64, 256, 4)


@pytest.mark.parametrize("verb", ["pretrain", "finetune", "plan"])
def test_fields_are_listed_by_the_arguments_that_are_given(verb, monkeypatch, capsys):
    """The program's own arguments belong to whatever program calls `main`."""
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert main([verb, "--fields"]) == 0
    assert "--config.seed=0" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["pytest", "--fields"])
    assert main([verb]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pretrain", "--config=bert_tny"], "did you mean bert_tiny? "),
        (["pretrain", "--config=bert_tny"], "translate/transformer_base"),
        (["pretrain", "--config=glue:mrpc"], "glue:mrpc is a recipe for `bert-jax finetune`"),
        (["finetune", "--config=bert_tiny"], "bert_tiny is a recipe for `bert-jax pretrain`"),
        (
            ["pretrain", "--config=bert_tiny", "--config.learning_rate=1"],
            "did you mean optimizer.learning_rate? ",
        ),
        (["finetune", "--config=table", "--config.sed=1"], "did you mean seed?"),
    ],
)
def test_a_wrong_name_leads_to_the_right_one(tmp_path, capsys, arguments, said):
    assert main([*arguments, f"--workdir={tmp_path / 'w'}"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "w").exists()


def test_another_kind_has_fields_of_its_own():
    """What is set stays where both kinds have it; defaults are those of the new kind."""
    given = ["--config.task.train=a.conllu", "--config.task.label=x", "--config.task.max_length=64"]
    found = load_config(
        FinetuneConfig, "finetune/table", [*given, "--config.task.kind=tagging"]
    ).task
    assert (found.kind, found.train, found.max_length) == ("tagging", "a.conllu", 64)
    assert (found.format, hasattr(found, "label")) == ("columns", False)
    found = load_config(FinetuneConfig, "finetune/ner", ["--config.task.kind=choice"]).task
    assert (found.kind, found.text, found.format) == ("choice", "sent1", "auto")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("tags=x", r"unknown field task\.tags; task\.kind=tagging has this field; set that"),
        ("query=x", r"unknown field task\.query; task\.kind=embedding or rerank has this field"),
        ("stride=3", r"unknown field task\.stride; task\.kind=tagging or squad has this field"),
        (
            "table.kind=score",
            r"fields of task\.kind=table are written task\.FIELD, kind as task\.problem_type\.",
        ),
        ("squad.train=x", r"fields of task\.kind=squad are written task\.FIELD\. Known here"),
        (
            "problem_type=classes",
            r"problem_type is 'classes' \(str\); it must be one of 'single_lab",
        ),
        ("kind=tabel", r"task\.kind is 'tabel' \(did you mean 'table'\?\); it must be one of glue"),
        ("labl=x", r"unknown field task\.labl; did you mean task\.label\?"),
    ],
)
def test_a_field_that_the_kind_does_not_have_is_refused(field, message):
    with pytest.raises(UserError, match=message):
        load_config(FinetuneConfig, "finetune/table", [f"--config.task.{field}"])


def test_an_old_name_is_refused_with_the_new_one(config_file):
    with pytest.raises(UserError, match=r"field data\.objective; its new name is data\.pairing"):
        load(config_file, "--config.data.objective=sop")


def test_fields_of_another_kind_are_listed(capsys):
    def fields(*arguments):
        assert main(["finetune", "--fields", *arguments]) == 0
        lines = capsys.readouterr().out.splitlines()
        return [line.partition("=")[0] for line in lines if line.lstrip("'").startswith("--config")]

    table = fields()
    assert len(table) <= 101
    assert "--config.task.label" in table
    tagging = fields("--config.task.kind=tagging")
    assert ("--config.task.tags" in tagging, "--config.task.label" in tagging) == (True, False)
    assert fields("--config=finetune/ner") == tagging
