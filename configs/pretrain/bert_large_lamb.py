"""BERT-large with LAMB in large batches (You et al. 2019, table 1 and section 4.1).

15,625 steps of 32,768 rows see as many rows as one million of 512. The learning rate grows with the
square root of the batch and the share of warm-up with the batch; halve the batch and take the
learning rate times 0.71, warm-up rate times 0.5, twice the steps.

    bert-jax pretrain --config=configs/pretrain/bert_large_lamb.py --workdir=work/large_lamb \
        --config.data.corpus=work/corpus

The vocabulary size comes from the corpus. `accumulation` splits each step into micro-batches;
set it to the rows per step over the rows that fit the mesh.
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
                "num_steps": 15_625,
                "phases": (
                    {"length": 128, "batch_size": 32_768, "share": 0.9},
                    {"length": 512, "batch_size": 32_768, "share": 0.1},
                ),
            },
            "optimizer": {
                "name": "lamb",
                "learning_rate": 5e-3,
                "warmup_rate": 0.2,
                "weight_decay": 0.01,
            },
        }
    )
