"""Checks of a demo's directory, which may hold the run of another demo."""

from pathlib import Path

from bert_jax.errors import UserError
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.saves import read_config


def config_there(config: PretrainConfig, run: Path) -> PretrainConfig | None:
    """Return the configuration of the run that a directory holds; None where there is no run.

    Raises:
        UserError: the run has another objective than `config`.
    """
    if not (run / "config.json").exists():
        return None
    there = read_config(run)
    if there.objective.name != config.objective.name:
        raise UserError(
            f"{run} holds a run with objective.name {there.objective.name!r}, and this demo has "
            f"{config.objective.name!r}; give another --workdir"
        )
    return there
