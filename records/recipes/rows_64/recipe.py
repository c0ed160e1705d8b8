"""No sentence pairs: 32 rows of 64 tokens, 30% of them masked; Muon at half of `start`'s rate.

The network is the network of `demo`, without the pooler that sentence pairs need.
"""

from ml_collections import ConfigDict

from bert_jax.config.command_line import load_config
from bert_jax.config.mapping import to_dict
from bert_jax.training.pretrain.config import PretrainConfig


def get_config() -> ConfigDict:
    """Return the recipe."""
    recipe = ConfigDict(to_dict(load_config(PretrainConfig, "start:2x128")))
    recipe.training.phases = ({"length": 64, "batch_size": 32},)
    recipe.optimizer.learning_rate = 3e-3
    return recipe
