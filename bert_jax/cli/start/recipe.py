"""The recipes of `bert-jax start`: one shape of network, whose size follows from the time given."""

import math
import pprint
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

LENGTH = 128
"""Number of tokens in a row."""
_MASKED = 0.3


class Size(NamedTuple):
    """Number of layers and width of an encoder. The feed-forward network is as wide as the rest."""

    num_layers: int
    width: int
    chips: int = 1
    """Number of chips of a TPU slice, each of which gets the rows of a step."""

    def __str__(self) -> str:
        return f"{self.num_layers} x {self.width}"

    @property
    def parameters(self) -> int:
        """Parameters of the layers: four maps of attention and three of the gated network."""
        return 7 * self.num_layers * self.width**2

    @property
    def rows(self) -> int:
        """Number of rows in a step; wide layers have more, because Muon costs a step the same."""
        return self.chips * (16 if self.width <= 256 else 32)

    @property
    def learning_rate(self) -> float:
        """Peak learning rate of Muon."""
        return float(f"{6e-3 * math.sqrt(128 / self.width):.2g}")

    @property
    def step_cost(self) -> float:
        """Operations of a step, for comparing sizes: layers, a vocabulary of 8,192, and Muon."""
        tokens = self.rows * LENGTH
        head = self.width * 8192 * _MASKED
        return 6 * tokens * (self.parameters + head) + 30 * self.width * self.parameters

    @property
    def model(self) -> dict[str, Any]:
        """Fields of section `model` in which this shape differs from BERT's."""
        return {
            "num_layers": self.num_layers,
            "hidden_dim": self.width,
            "num_heads": self.width // (32 if self.width <= 256 else 64),
            "mlp_dim": self.width,
            "num_positions": LENGTH,
            "num_types": 0,
            "norm_order": "pre",
            "norm_eps": 1e-5,
            "norm_bias": False,
            "first_norm": False,
            "positions": "rope",
            "gated": True,
            "attention_bias": False,
            "mlp_bias": False,
            "pooler": False,
            "hidden_dropout_rate": 0.0,
            "attention_dropout_rate": 0.0,
            "init_std": round(0.02 * math.sqrt(768 / self.width), 3),
        }


SIZES = (
    Size(2, 64), Size(2, 128), Size(4, 128), Size(4, 256), Size(6, 384), Size(8, 512),
    Size(12, 768), Size(24, 1024),
)  # fmt: skip


def recipe(size: Size, num_steps: int, corpus: str = "") -> dict[str, Any]:
    """Return the configuration of a run, as `get_config` of a file returns it."""
    every = max(1, math.ceil(num_steps / 5))
    return {
        "model": size.model,
        "data": {"corpus": corpus, "pairing": "none"},
        "masking": {"rate": _MASKED},
        "training": {
            "num_steps": num_steps,
            "phases": [{"length": LENGTH, "batch_size": size.rows}],
            "log_every_steps": max(1, min(100, num_steps // 50)),
            "eval_every_steps": every,
            "eval_rows": 1024,
        },
        "optimizer": {
            "name": "muon",
            "learning_rate": size.learning_rate,
            "schedule": "wsd",
            "decay_share": 0.4,
            "warmup_steps": warmup_steps(num_steps),
        },
        "checkpoint": {"save_every_steps": every},
    }


def warmup_steps(num_steps: int) -> int:
    """Return the number of warm-up steps: a twentieth of the run, and at most 500."""
    return min(500, max(1, num_steps // 20))


def as_file(values: Mapping[str, Any], title: str) -> str:
    """Write a configuration as a Python file with a docstring."""
    body = textwrap.indent(
        pprint.pformat(dict(values), sort_dicts=False, width=90), " " * 4
    ).strip()
    return (
        f'"""{title}"""\n\n\ndef get_config():\n    """Return the recipe."""\n    return {body}\n'
    )
