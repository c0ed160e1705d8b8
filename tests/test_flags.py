"""Configuration files and `--config.a.b=value`: what is taken, and what is refused and how."""

from pathlib import Path

import pytest

from bert_jax.errors import UserError
from bert_jax.flags import fields_help, load_config
from bert_jax.training.config import PretrainConfig


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
        "--config.data.objective=sop",
    )
    assert (config.model.hidden_dim, config.model.num_heads) == (32, 4)
    assert config.training.phases[0].length == 16
    assert config.training.phases[0].batch_size == 8
    assert config.optimizer.warmup_steps == 7
    assert config.data.objective == "sop"
    assert config.model.num_layers == PretrainConfig().model.num_layers


def test_shipped_configuration_by_short_name():
    assert load("pretrain/bert_tiny") == load("configs/pretrain/bert_tiny.py")
    assert load("pretrain/bert_tiny").model.num_layers == 2


def test_argument_of_a_configuration(tmp_path):
    path = write(tmp_path / "a.py", "def get_config(n):\n    return {'seed': int(n)}\n")
    assert load(f"{path}:12").seed == 12


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--config.model.hiden_dim=3", r"unknown field model\.hiden_dim; did you mean model\.hid"),
        ("--config.modell.hidden_dim=3", r"unknown field modell; did you mean model\?"),
        ("--config.training.phases[1].length=3", r"no training\.phases\[1\]; .*\[0\] to \[0\]"),
        ("--config.training.phases[0].lenght=3", r"phases\[0\]\.lenght; did you mean .*length"),
        ("--config.model.hidden_dim.x=3", r"unknown field model\.hidden_dim\.x"),
        ("--config.model.hidden_dim=abc", "hidden_dim=abc"),
        ("--config.model.hidden_dim", "Missing value for flag --config.model.hidden_dim"),
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
        ("def get_config():\n    return None\n", "get_config gave None; it must"),
        ("def get_config():\n    return {'seeed': 1}\n", "unknown field seeed; did you mean seed"),
        ("def get_config():\n    return {'seed': 'x'}\n", "seed is 'x'"),
    ],
)
def test_wrong_file_is_named_with_its_line(tmp_path, body, message):
    with pytest.raises(UserError, match=message):
        load(write(tmp_path / "c.py", body))


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
    text = fields_help(PretrainConfig)
    assert "--config.model.hidden_dim=768" in text
    assert "one of nsp, sop, none" in text
