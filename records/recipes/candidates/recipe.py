"""`rows_64` at a learning rate of 4e-3, with the changes that the argument names.

    bert-jax pretrain --config=records/recipes/candidates/recipe.py:qk_norm+gates ...

`benchmarks/candidates.py` compares all changes. `same` has none.
"""

from typing import Any

import candidate_objective  # noqa: F401, registers the objective
import candidate_optimizers  # noqa: F401, registers optimizers
from ml_collections import ConfigDict

from bert_jax.config.command_line import config_from
from bert_jax.config.mapping import to_dict
from bert_jax.errors import UserError
from bert_jax.training.pretrain.config import PretrainConfig


def phases(*given: tuple[int, int, float, float]) -> list[dict[str, Any]]:
    """Make phases of (length, rows, share of the steps, masking rate)."""
    names = "length", "batch_size", "share", "masking_rate"
    return [dict(zip(names, values, strict=True)) for values in given]


CANDIDATES: dict[str, dict[str, Any]] = {
    "same": {},
    # Objective
    "masking_20": {"masking.rate": 0.2},
    "masking_40": {"masking.rate": 0.4},
    "masking_30_15_5": {
        "training.phases": phases((64, 32, 0.6, 0.3), (64, 32, 0.2, 0.15), (64, 32, 0.2, 0.05)),
    },
    "masking_40_30": {"training.phases": phases((64, 32, 0.5, 0.4), (64, 32, 0.5, 0.3))},
    "all_mask": {"masking.mask_rate": 1.0, "masking.random_rate": 0.0},
    "whole_words": {"masking.whole_word": True},
    "spans": {"objective.spans": True},
    "rare": {"objective.rare": True},
    "diffusion": {"objective.diffusion": True, "masking.rate": 0.6},
    "shifted": {"objective.shifted": True},
    "causal_quarter": {"objective.shifted": True, "objective.causal_share": 0.25},
    "causal_half": {"objective.shifted": True, "objective.causal_share": 0.5},
    "causal_first": {  # the rate of a phase says whether its rows are causal
        "objective.shifted": True, "objective.causal_rate": 0.31,
        "training.phases": phases((64, 32, 0.5, 0.31), (64, 32, 0.5, 0.3)),
    },
    "causal_briefly": {
        "objective.shifted": True, "objective.causal_rate": 0.31,
        "training.phases": phases((64, 32, 0.2, 0.31), (64, 32, 0.8, 0.3)),
    },
    # Layers
    "zero_outputs": {"objective.zero": True},
    "qk_norm": {"objective.changes": ["qk_norm"]},
    "gates": {"objective.changes": ["gates"]},
    "value_residual": {"objective.changes": ["value_residual"]},
    "embedding_shortcut": {"objective.changes": ["embedding_shortcut"]},
    "squared_relu": {
        "objective.changes": ["squared_relu"], "model.gated": False, "model.mlp_dim": 192,
    },
    "narrow_deep": {
        "model.num_layers": 4, "model.hidden_dim": 96, "model.mlp_dim": 96, "model.num_heads": 3,
    },
    "three_layers": {"model.num_layers": 3},
    "one_layer": {"model.num_layers": 1},
    "mlp_256": {"model.mlp_dim": 256},
    "wide": {"model.hidden_dim": 192, "model.mlp_dim": 192, "model.num_heads": 6},
    "two_heads": {"model.num_heads": 2},
    "untied": {"model.tied": False},
    "no_transform": {"model.head_transform": False},
    "rms_norm": {"model.norm": "rms"},
    # Optimizer
    "polar_express": {"optimizer.name": "muon_polar"},
    "adaptive": {"optimizer.name": "muon_adaptive"},
    "cautious": {"optimizer.name": "muon_cautious"},
    "even_rows": {"optimizer.name": "muon_even_rows"},
    "adam_head": {"optimizer.name": "muon_adam_head"},
    "fast_adam": {"optimizer.name": "muon_fast_adam"},
    "slow_adam": {"optimizer.name": "muon_slow_adam"},
    "slow_table": {"optimizer.name": "muon_slow_table"},
    "rate_6e-3": {"optimizer.learning_rate": 6e-3},
    "rate_3e-3": {"optimizer.learning_rate": 3e-3},
    "b2_95": {"optimizer.b2": 0.95},
    "momentum_90": {"optimizer.momentum": 0.9},
    "no_decay": {"optimizer.weight_decay": 0.0},
    "decay_10": {"optimizer.weight_decay": 0.1},
    "linear": {"optimizer.schedule": "linear"},
    "cosine": {"optimizer.schedule": "cosine"},
    "one_minus_sqrt": {"optimizer.schedule": "one_minus_sqrt"},
    "wsd_60": {"optimizer.decay_share": 0.6},
    # Batches
    "rows_16": {"training.phases": phases((64, 16, 1.0, 0.3))},
    "rows_64": {"training.phases": phases((64, 64, 1.0, 0.3))},
    "batch_ramp": {
        "training.phases": [{"length": 64, "batch_size": 32, "batch_warmup_steps": 500}],
    },
    "length_ramp": {"training.phases": phases((32, 64, 0.5, 0.3), (64, 32, 0.5, 0.3))},
    "length_32": {"training.phases": phases((32, 64, 1.0, 0.3))},
}  # fmt: skip
"""Changes of fields, by the candidate's name."""


def get_config(names: str = "same") -> ConfigDict:
    """Return the recipe with the changes `names`, which are separated by +.

    Raise a UserError if there is no such change.
    """
    fields: dict[str, Any] = {
        "objective": {"name": "candidate"},
        "training.phases": [{"length": 64, "batch_size": 32}],
        "optimizer.learning_rate": 4e-3,
    }
    config = config_from(PretrainConfig, "start:2x128", fields)
    changes: list[str] = []
    for name in names.split("+"):
        if name not in CANDIDATES:
            raise UserError(f"no candidate is named {name!r}; known are {', '.join(CANDIDATES)}")
        changes += CANDIDATES[name].get("objective.changes", [])
        config = config_from(PretrainConfig, config, CANDIDATES[name])
    if changes:
        config = config_from(PretrainConfig, config, {"objective.changes": changes})
    return ConfigDict(to_dict(config))
