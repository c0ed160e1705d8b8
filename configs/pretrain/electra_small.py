"""ELECTRA-small: 12 layers, 256 wide, 4 heads, tables 128 wide (Clark et al. 2020, table 6).

The generator has a quarter of the width, heads and feed-forward width. Rows of 128 tokens, 15% of
them masked, batch 128, as published for the model of one GPU.

    bert-jax pretrain --config=configs/pretrain/electra_small.py --workdir=work/electra \
        --config.data.corpus=work/corpus

The vocabulary size comes from the corpus. One accelerator is enough.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the recipe; any field of `PretrainConfig` may be set."""
    return ConfigDict(
        {
            "objective": {
                "name": "replaced_tokens",
                "generator_size": 0.25,
                "discriminator_weight": 50.0,
            },
            "model": {
                "num_layers": 12,
                "embedding_dim": 128,
                "hidden_dim": 256,
                "num_heads": 4,
                "mlp_dim": 1024,
                "pooler_activation": "gelu",
            },
            "data": {"pairing": "none"},
            "masking": {"rate": 0.15, "mask_rate": 0.85, "random_rate": 0.0},
            "training": {
                "num_steps": 1_000_000,
                "phases": ({"length": 128, "batch_size": 128},),
            },
            "optimizer": {
                "name": "adamw",
                "learning_rate": 5e-4,
                "warmup_steps": 10_000,
                "weight_decay": 0.01,
            },
        }
    )
