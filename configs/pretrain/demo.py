"""The recipe of `bert-jax demo`: 2 layers, 128 wide, about three minutes on two CPU cores.

Rotary positions, norms before the blocks and a gated feed-forward network as in ModernBERT (Warner
et al. 2024, section 2), trained with Muon; 30% of the tokens are masked, 15% in evaluations.
`demo_bert.py` has BERT's recipe for the same text. What was tried is in docs/experiments.md.
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
                "mlp_dim": 352,
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
            "masking": {"rate": 0.3},
            "training": {
                "num_steps": 1680,
                "phases": ({"length": 64, "batch_size": 32, "share": 1.0},),
                "log_every_steps": 40,
                "eval_every_steps": 240,
                "eval_rows": 1024,
            },
            "optimizer": {
                "name": "muon",
                "learning_rate": 3e-3,
                "schedule": "wsd",
                "decay_share": 0.4,
                "warmup_steps": 100,
            },
            "checkpoint": {"save_every_steps": 480},
        }
    )
