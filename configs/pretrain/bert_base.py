"""BERT-base: 12 layers, 768 wide, 12 heads (Devlin et al. 2018).

Batch 256, one million steps, 90% of them at length 128: the paper's appendix A.2.

    bert-jax pretrain --config=configs/pretrain/bert_base.py --workdir=work/base \
        --config.data.corpus=work/corpus

The vocabulary size comes from the corpus. On a mesh: `--config.mesh.fsdp=8` shards parameters and
optimizer; the default is plain data parallelism.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the recipe; any field of `PretrainConfig` may be set."""
    return ConfigDict(
        {
            "model": {
                "num_layers": 12,
                "hidden_dim": 768,
                "num_heads": 12,
                "mlp_dim": 3072,
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
