"""BERT-tiny: 2 layers, 128 wide, 2 heads (Turc et al. 2019, Well-Read Students Learn Better).

Batch 256 at length 128, then 512 for the last tenth, as published for this family.

    bert-jax pretrain --config=configs/pretrain/bert_tiny.py --workdir=work/tiny \
        --config.data.corpus=work/corpus

The vocabulary size comes from the corpus. Small enough to try on one CPU with fewer steps:
`--config.training.num_steps=20000`.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the recipe; any field of `PretrainConfig` may be set."""
    return ConfigDict(
        {
            "model": {
                "num_layers": 2,
                "hidden_dim": 128,
                "num_heads": 2,
                "mlp_dim": 512,
            },
            "training": {
                "num_steps": 1_000_000,
                "phases": (
                    {"length": 128, "batch_size": 256, "share": 0.9},
                    {"length": 512, "batch_size": 256, "share": 0.1},
                ),
            },
            "optimizer": {
                "name": "adamw",
                "learning_rate": 1e-4,
                "warmup_steps": 10_000,
                "weight_decay": 0.01,
            },
        }
    )
