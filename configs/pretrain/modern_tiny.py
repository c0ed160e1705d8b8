"""A tiny ModernBERT with the three phases of its recipe (Warner et al. 2024, section 2).

6 layers, 256 wide, 4 heads: rotary positions, every third layer global, gated feed-forward, norms
before the blocks, no biases but the decoder's. The phases: rows of 128 tokens with a batch warm-up;
rows of 512 with slower rotations in the global layers and a smaller rate; the same rows while the
rate falls as 1 - sqrt. 30% of the tokens are masked; evaluations mask 15%.

    bert-jax pretrain --config=configs/pretrain/modern_tiny.py --workdir=work/modern \
        --config.data.corpus=work/corpus

A phase with text of its own, such as longer documents, has a field `corpus`. The vocabulary size
comes from the corpus.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the recipe; any field of `PretrainConfig` may be set."""
    long_rows = {"length": 512, "batch_size": 64, "rope_theta": 160_000.0, "learning_rate": 3e-4}
    return ConfigDict(
        {
            "model": {
                "num_layers": 6,
                "hidden_dim": 256,
                "num_heads": 4,
                "mlp_dim": 384,
                "num_types": 0,
                "norm_order": "pre",
                "norm_eps": 1e-5,
                "norm_bias": False,
                "first_norm": False,
                "positions": "rope",
                "attention_pattern": "GLL",
                "local_window": 64,
                "gated": True,
                "attention_bias": False,
                "mlp_bias": False,
                "pooler": False,
                "head_bias": False,
                "init": "scaled",
                "attention_dropout_rate": 0.0,
                "embedding_dropout_rate": 0.0,
                "mlp_dropout_rate": 0.0,
            },
            "data": {"pairing": "none"},
            "masking": {"rate": 0.3},
            "training": {
                "num_steps": 20_000,
                "phases": (
                    {"length": 128, "batch_size": 256, "share": 0.8, "batch_warmup_steps": 600},
                    {**long_rows, "share": 0.1, "decay": "constant"},
                    {**long_rows, "share": 0.1, "decay": "one_minus_sqrt", "end_rate": 3e-7},
                ),
            },
            "optimizer": {
                "name": "stable_adamw",
                "learning_rate": 8e-4,
                "schedule": "constant",
                "warmup_steps": 300,
                "b2": 0.98,
                "weight_decay": 0.0125,
                "clip_norm": None,
            },
        }
    )
