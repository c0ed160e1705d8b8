"""ModernBERT, base or large: 8,192 tokens in three phases (Warner et al. 2024).

    bert-jax pretrain --config=configs/pretrain/modernbert_base.py --workdir=work/modernbert \
        --config.data.corpus=work/corpus
"""

from ml_collections import ConfigDict

# 1e-5 a step apart from the learning rate, as published, is 1e-5 / peak times the rate here.
_SIZES = {
    "base": {
        "model": {"num_layers": 22, "hidden_dim": 768, "num_heads": 12, "mlp_dim": 1152},
        "rates": (8e-4, 3e-4),
        "rows": (4608, 512),
        "warmup": (3e9, 50e9),
    },
    "large": {
        "model": {"num_layers": 28, "hidden_dim": 1024, "num_heads": 16, "mlp_dim": 2624},
        "rates": (5e-4, 5e-5),
        "rows": (4608, 640),
        "warmup": (2e9, 10e9),
    },
}


def get_config(size: str = "base") -> ConfigDict:
    """Return the recipe; any field of `bert_jax.training.config.PretrainConfig` may be set."""
    if size not in _SIZES:
        raise ValueError(f"got size {size!r}; expected {' or '.join(_SIZES)}")
    recipe = _SIZES[size]
    (peak, late), (rows, long_rows) = recipe["rates"], recipe["rows"]
    rate_warmup, batch_warmup = recipe["warmup"]
    # The batch warm-up has an eighth, a quarter and half of the rows, for as many steps each.
    growing = round(batch_warmup / (rows * 1024 * 7 / 24))
    steps = (
        growing + round((1.719e12 - batch_warmup) / (rows * 1024)),
        round(250e9 / (long_rows * 8192)),
        round(50e9 / (long_rows * 8192)),
    )
    longer = {
        "length": 8192,
        "batch_size": long_rows,
        "learning_rate": late,
        "rope_theta": 160_000.0,
    }
    phases = (
        {"length": 1024, "batch_size": rows, "batch_warmup_steps": growing},
        {**longer, "decay": "constant"},
        {**longer, "decay": "one_minus_sqrt", "end_rate": 0.001 * late},
    )
    return ConfigDict(
        {
            "model": {
                **recipe["model"],
                "num_positions": 8192,
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
                "hidden_dropout_rate": 0.1,
                "attention_dropout_rate": 0.0,
                "embedding_dropout_rate": 0.0,
                "mlp_dropout_rate": 0.0,
            },
            "data": {"pairing": "none"},
            "masking": {"rate": 0.3},
            "training": {
                "num_steps": sum(steps),
                "phases": tuple(
                    {**phase, "share": count / sum(steps)}
                    for phase, count in zip(phases, steps, strict=True)
                ),
            },
            "optimizer": {
                "name": "stable_adamw",
                "learning_rate": peak,
                "schedule": "constant",
                "warmup_steps": round(rate_warmup / (rows * 1024 / 8)),
                "b2": 0.98,
                "weight_decay": 1e-5 / peak,
                "clip_norm": None,
            },
        }
    )
