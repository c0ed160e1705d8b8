"""DeBERTaV3: disentangled attention and replaced tokens (He et al. 2023), and a tiny one.

    bert-jax pretrain --config=configs/pretrain/deberta_v3_base.py --workdir=work/deberta \
        --config.data.corpus=work/corpus

Sizes: tiny (ours, for a CPU), xsmall, small, base, large. Published: 500,000 steps of 8,192 rows of
512 tokens, a warm-up of 10,000 steps, then a linear decay; the discriminator's loss weighs 50. The
token tables are shared without a gradient from the discriminator (`objective.disentangled`).

Different here: the generator is as deep as the discriminator and half as wide; the published one is
half as deep and as wide.

The vocabulary size comes from the corpus; the published one has 128,100 tokens.
"""

from ml_collections import ConfigDict

# layers, width, heads, feed-forward; rows, steps, peak rate
_SIZES = {
    "tiny": (2, 128, 2, 512, 64, 20_000, 1e-3),
    "xsmall": (12, 384, 6, 1536, 8192, 500_000, 6e-4),
    "small": (6, 768, 12, 3072, 8192, 500_000, 6e-4),
    "base": (12, 768, 12, 3072, 8192, 500_000, 6e-4),
    "large": (24, 1024, 16, 4096, 8192, 500_000, 3e-4),
}


def get_config(size: str = "base") -> ConfigDict:
    """Return the recipe; any field of `PretrainConfig` may be set."""
    if size not in _SIZES:
        raise ValueError(f"the size is {size!r}; expected one of {', '.join(_SIZES)}")
    layers, width, heads, mlp, rows, steps, peak = _SIZES[size]
    return ConfigDict(
        {
            "objective": {
                "name": "replaced_tokens",
                "generator_size": 0.5,
                "discriminator_weight": 50.0,
                "disentangled": True,
            },
            "model": {
                "num_layers": layers,
                "hidden_dim": width,
                "num_heads": heads,
                "mlp_dim": mlp,
                "num_types": 0,
                "norm_eps": 1e-7,
                "positions": "relative",
                "pooler_activation": "gelu",
            },
            "data": {"pairing": "none"},
            "masking": {"rate": 0.15, "mask_rate": 0.85, "random_rate": 0.0},
            "training": {
                "num_steps": steps,
                "phases": ({"length": 128 if size == "tiny" else 512, "batch_size": rows},),
            },
            "optimizer": {
                "name": "adamw",
                "learning_rate": peak,
                "warmup_steps": steps // 50,
                "b2": 0.98,
                "eps": 1e-6,
                "weight_decay": 0.01,
            },
        }
    )
