"""BERT-large: 24 layers, 1024 wide, 16 heads (Devlin et al. 2018).

Batch 256, one million steps, 90% of them at length 128: the paper's appendix A.2.

    bert-jax pretrain --config=configs/pretrain/bert_large.py --workdir=work/large \
        --config.data.corpus=work/corpus

The vocabulary size comes from the corpus. When memory is short: `--config.model.remat=dots`,
`--config.training.accumulation=4`, `--config.mesh.fsdp=8`.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the recipe; any field of `PretrainConfig` may be set."""
    return ConfigDict(
        {
            "model": {
                "num_layers": 24,
                "hidden_dim": 1024,
                "num_heads": 16,
                "mlp_dim": 4096,
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
