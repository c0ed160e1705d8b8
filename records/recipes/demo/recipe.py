"""The recipe of `bert-jax demo`: 2 layers, 128 wide, pairs of sentences, Muon."""

from bert_jax.config.command_line import load_config
from bert_jax.config.mapping import to_dict
from bert_jax.training.pretrain.config import PretrainConfig


def get_config():
    """Return the recipe."""
    return to_dict(load_config(PretrainConfig, "demo"))
