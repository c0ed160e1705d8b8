"""BERT's recipe for the text of `bert-jax demo`: `bert-jax demo --recipe=bert`, about six minutes.

2 layers, 128 wide; AdamW, a cosine, 15% of the tokens masked (Devlin et al. 2018). `demo.py` has
the recipe that learns more in about half the time. What was tried is in docs/experiments.md.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the recipe; any field of `bert_jax.training.config.PretrainConfig` may be set."""
    return ConfigDict(
        {
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
    )
