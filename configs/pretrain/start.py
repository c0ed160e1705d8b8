"""The recipe of `bert-jax start` in any size, such as start:4x256 (4 layers, 256 wide).

    bert-jax pretrain --config=start:4x256 --workdir=work/mine \
        --config.data.corpus=work/corpus --config.training.num_steps=4000

The shape of the recipe of `bert-jax demo`, without sentence pairs: rotary positions, norms before
the blocks, a gated feed-forward network as wide as the layers, Muon with a decay over the last 40%
of the steps. 30% of the tokens are masked. Small batches: in minutes or hours, more steps teach
more than larger batches; Muon costs a step of wide layers more, so these have more rows.
"""

import math

from ml_collections import ConfigDict


def get_config(size: str = "2x128") -> ConfigDict:
    """Return the recipe; any field of `PretrainConfig` may be set."""
    layers, width = map(int, size.split("x"))
    return ConfigDict(
        {
            "model": {
                "num_layers": layers,
                "hidden_dim": width,
                "num_heads": width // (32 if width <= 256 else 64),
                "mlp_dim": width,
                "num_positions": 128,
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
                "init_std": round(0.02 * math.sqrt(768 / width), 3),
            },
            "data": {"pairing": "none"},
            "masking": {"rate": 0.3},
            "training": {
                "num_steps": 2000,
                "phases": ({"length": 128, "batch_size": 16 if width <= 256 else 32},),
                "eval_rows": 1024,
            },
            "optimizer": {
                "name": "muon",
                "learning_rate": float(f"{6e-3 * math.sqrt(128 / width):.2g}"),
                "schedule": "wsd",
                "decay_share": 0.4,
                "warmup_rate": 0.05,
            },
        }
    )
