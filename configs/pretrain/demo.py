"""The configuration of `bert-jax demo`: 2 layers, 128 wide, about four minutes on two CPU cores."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The recipe; any field of `bert_jax.training.config.PretrainConfig` may be set."""
    return ConfigDict(
        {
            "model": {
                "num_layers": 2,
                "hidden_dim": 128,
                "num_heads": 2,
                "mlp_dim": 512,
                "num_positions": 128,
                "hidden_dropout_rate": 0.0,
                "attention_dropout_rate": 0.0,
                "init_std": 0.05,
            },
            "data": {"num_passes": 4},
            "training": {
                "num_steps": 1600,
                "phases": ({"length": 128, "batch_size": 32, "share": 1.0},),
                "log_every_steps": 20,
                "eval_every_steps": 200,
                "eval_rows": 512,
            },
            "optimizer": {
                "learning_rate": 2e-3,
                "schedule": "cosine",
                "warmup_steps": 100,
            },
            "checkpoint": {"save_every_steps": 400},
        }
    )
