"""The configuration files: each builds, and has the size in its name."""

from pathlib import Path

import pytest

from bert_jax.config.command_line import load_config
from bert_jax.model.config import SIZES
from bert_jax.training.config import PretrainConfig

PRETRAIN = Path(__file__).parent.parent / "configs" / "pretrain"


@pytest.mark.parametrize("path", sorted(PRETRAIN.glob("*.py")), ids=lambda path: path.stem)
def test_configuration_builds(path: Path) -> None:
    load_config(PretrainConfig, str(path))


@pytest.mark.parametrize("size", SIZES)
def test_size_is_the_published_one(size: str) -> None:
    config = load_config(PretrainConfig, f"configs/pretrain/bert_{size}.py").model
    shape = ("hidden_dim", "num_layers", "num_heads", "mlp_dim", "num_positions", "norm_eps")
    for field in (*shape, "hidden_dropout_rate", "attention_dropout_rate", "activation"):
        assert getattr(config, field) == getattr(SIZES[size], field), field
