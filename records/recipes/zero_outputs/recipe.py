"""`rows_64`, with output projections that begin at 0, and a learning rate of 4e-3."""

import zero_outputs_objective  # noqa: F401, registers the objective
from ml_collections import ConfigDict

from bert_jax.config.command_line import load_config
from bert_jax.config.mapping import to_dict
from bert_jax.training.pretrain.config import PretrainConfig


def get_config() -> ConfigDict:
    """Return the recipe."""
    recipe = ConfigDict(to_dict(load_config(PretrainConfig, "start:2x128")))
    recipe.objective = {"name": "zero_outputs"}
    recipe.training.phases = ({"length": 64, "batch_size": 32},)
    recipe.optimizer.learning_rate = 4e-3
    return recipe
