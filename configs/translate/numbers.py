"""French number words to digits: recipes of `bert-jax demo --recipe translation`, a minute each.

`numbers`: a Transformer of one layer a side, 64 wide, with norms before the blocks, rotary
positions and Muon. `numbers:recurrent`: a bidirectional GRU with additive attention, 128 wide, with
AdamW (Bahdanau et al. 2014). 20,000 pairs are about 3,650 packed rows of 64 + 40 places. What was
tried is in docs/experiments.md.
"""

from typing import Any

from ml_collections import ConfigDict


def get_config(network: str = "transformer") -> ConfigDict:
    """Return a recipe; any field of `PretrainConfig` may be set."""
    networks = {"transformer": _transformer, "recurrent": _recurrent}
    if network not in networks:
        raise ValueError(f"the network is {network!r}; expected one of {', '.join(networks)}")
    return ConfigDict(
        {
            "data": {"pairing": "translation", "target_length": 40},
            "training": {
                "num_steps": 800,
                "phases": ({"length": 64, "batch_size": 32},),
                "log_every_steps": 50,
                "eval_every_steps": 200,
                "eval_rows": None,
            },
            "checkpoint": {"save_every_steps": 400},
            **networks[network](),
        }
    )


def _transformer() -> dict[str, Any]:
    return {
        "objective": {"name": "translation", "label_smoothing": 0.0},
        "model": {
            "num_layers": 1,
            "hidden_dim": 64,
            "num_heads": 4,
            "mlp_dim": 176,
            "num_positions": 64,
            "num_types": 0,
            "norm_order": "pre",
            "norm_eps": 1e-5,
            "norm_bias": False,
            "embedding_norm": False,
            "positions": "rope",
            "gated": True,
            "attention_bias": False,
            "mlp_bias": False,
            "pooler": False,
            "hidden_dropout_rate": 0.0,
            "attention_dropout_rate": 0.0,
            "init_std": 0.05,  # 0.02 is made for 768 wide
        },
        "optimizer": {
            "name": "muon",
            "learning_rate": 3e-3,
            "schedule": "wsd",
            "decay_share": 0.4,
            "warmup_steps": 100,
        },
    }


def _recurrent() -> dict[str, Any]:
    return {
        "objective": {
            "name": "recurrent_translation",
            "cell": "gru",
            "attention": "additive",
            "wiring": "before",
            "label_smoothing": 0.0,
        },
        "model": {
            "num_layers": 1,
            "hidden_dim": 128,
            "num_heads": 1,
            "num_positions": 64,
            "num_types": 0,
            "pooler": False,
            "hidden_dropout_rate": 0.0,
            "init_std": 0.05,
        },
        "optimizer": {
            "name": "adamw",
            "learning_rate": 3e-3,
            "schedule": "wsd",
            "decay_share": 0.4,
            "warmup_steps": 100,
        },
    }
