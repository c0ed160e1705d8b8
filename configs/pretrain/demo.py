"""The recipes of `bert-jax demo`: 2 layers, 128 wide, about three minutes on two CPU cores.

`demo`: rotary positions, norms before the blocks and a gated feed-forward network as in ModernBERT
(Warner et al. 2024, section 2), trained with Muon. The feed-forward network is narrow: in a few
minutes, more pairs of sentences teach more than wider layers. `demo_bert`: BERT's architecture with
AdamW and a cosine (Devlin et al. 2018), which takes almost twice the time. Both mask 15% of the
tokens. What was tried is in docs/experiments.md.
"""

from typing import Any

from ml_collections import ConfigDict


def get_config(recipe: str = "modern") -> ConfigDict:
    """Return a recipe; any field of `PretrainConfig` may be set."""
    recipes = {"modern": _modern, "bert": _bert}
    if recipe not in recipes:
        raise ValueError(f"the recipe is {recipe!r}; expected one of {', '.join(recipes)}")
    return ConfigDict(recipes[recipe]())


def _modern() -> dict[str, Any]:
    return {
        "model": {
            "num_layers": 2,
            "hidden_dim": 128,
            "num_heads": 4,
            "mlp_dim": 128,
            "num_positions": 64,
            "num_types": 0,
            "norm_order": "pre",
            "norm_eps": 1e-5,
            "norm_bias": False,
            "first_norm": False,
            "positions": "rope",
            "gated": True,
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_dropout_rate": 0.0,
            "attention_dropout_rate": 0.0,
            "init_std": 0.05,  # 0.02 is made for 768 wide
        },
        "data": {"num_passes": 4},
        "training": {
            "num_steps": 1300,
            "phases": ({"length": 64, "batch_size": 64, "share": 1.0},),
            "log_every_steps": 40,
            "eval_every_steps": 200,
            "eval_rows": 1024,
        },
        "optimizer": {
            "name": "muon",
            "learning_rate": 3e-3,
            "schedule": "wsd",
            "decay_share": 0.4,
            "warmup_steps": 100,
        },
        "checkpoint": {"save_every_steps": 400},
    }


def _bert() -> dict[str, Any]:
    return {
        "model": {
            "num_layers": 2,
            "hidden_dim": 128,
            "num_heads": 4,
            "mlp_dim": 512,
            "num_positions": 64,
            "hidden_dropout_rate": 0.0,
            "attention_dropout_rate": 0.0,
            "init_std": 0.05,  # 0.02 is made for 768 wide; narrow models start faster with more
        },
        "data": {"num_passes": 4},
        "training": {
            "num_steps": 2200,
            "phases": ({"length": 64, "batch_size": 64, "share": 1.0},),
            "log_every_steps": 20,
            "eval_every_steps": 250,
            "eval_rows": 1024,
        },
        "optimizer": {
            "learning_rate": 1.5e-3,
            "schedule": "cosine",
            "warmup_steps": 100,
        },
        "checkpoint": {"save_every_steps": 500},
    }
