"""Sizes of the recipe `configs/pretrain/start.py`, and recipes as configurations and files."""

import pprint
from dataclasses import replace
from typing import NamedTuple

from bert_jax.config.command_line import load_config
from bert_jax.config.mapping import changed, to_dict
from bert_jax.training.pretrain.config import PretrainConfig

_EVALUATIONS, _LOGGED = 5, 50
_VOCABULARY, _MASKED = 8192, 0.3  # for comparing the costs of sizes


class Size(NamedTuple):
    """Number of layers and width of an encoder."""

    num_layers: int
    width: int

    def __str__(self) -> str:
        return f"{self.num_layers}x{self.width}"

    @property
    def parameters(self) -> int:
        """Number of parameters in layers: four matrices of attention, three of the gated MLP."""
        return 7 * self.num_layers * self.width**2

    def cost(self, tokens: int) -> float:
        """Count the operations in a step: layers, vocabulary, and Muon's iterations."""
        head = self.width * _VOCABULARY * _MASKED
        return 6 * tokens * (self.parameters + head) + 30 * self.width * self.parameters


SIZES = tuple(
    Size(*each)
    for each in ((2, 64), (2, 128), (4, 128), (4, 256), (6, 384), (8, 512), (12, 768), (24, 1024))
)


def recipe(size: Size, num_steps: int = 1000, corpus: str = "", chips: int = 1) -> PretrainConfig:
    """Return the configuration of a run; each chip gets the default number of rows."""
    config = load_config(PretrainConfig, f"configs/pretrain/start.py:{size}")
    (phase,) = config.training.phases
    every = max(1, -(-num_steps // _EVALUATIONS))
    training = replace(
        config.training,
        num_steps=num_steps,
        phases=(replace(phase, batch_size=chips * phase.batch_size),),
        log_every_steps=max(1, min(100, num_steps // _LOGGED)),
        eval_every_steps=every,
    )
    return replace(
        config,
        training=training,
        data=replace(config.data, corpus=corpus),
        checkpoint=replace(config.checkpoint, save_every_steps=every),
    )


def tokens_per_step(config: PretrainConfig) -> int:
    """Return the number of tokens in a step."""
    (phase,) = config.training.phases
    return phase.batch_size * phase.length


def as_file(config: PretrainConfig, title: str) -> str:
    """Return a Python file, with a docstring, for the fields that differ from the defaults."""
    fields = changed(to_dict(config), to_dict(PretrainConfig()))
    title = title.replace("\\", r"\\").replace('"', r"\"")
    body = pprint.pformat(fields, sort_dicts=False, width=90).replace("\n", "\n    ")
    return (
        f'"""{title}"""\n\n\ndef get_config():\n    """Return the recipe."""\n    return {body}\n'
    )
