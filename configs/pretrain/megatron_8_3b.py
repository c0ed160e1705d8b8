"""A BERT of the size of Megatron-LM's largest model: 72 layers, 3072 wide, 24 heads.

8.3 billion parameters, heads of 128 (Shoeybi et al. 2019, table 2, where it is a left-to-right
model); everything else as `megatron_3_9b.py`.

    bert-jax pretrain --config=configs/pretrain/megatron_8_3b.py --workdir=work/megatron_8_3b \
        --config.data.corpus=work/corpus

The vocabulary size comes from the corpus. The mesh is for 1024 chips of TPU v5p, 4 rows
of length 512 per group of 4; on fewer chips `data` takes less. Look before you pay:
`bert-jax plan --config=configs/pretrain/megatron_8_3b.py --topology=v5p:8x8x16`.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the recipe; any field of `PretrainConfig` may be set."""
    return ConfigDict(
        {
            "model": {
                "num_layers": 72,
                "hidden_dim": 3072,
                "num_heads": 24,
                "mlp_dim": 12_288,
                "scan_unroll": 1,
                "remat": "full",
            },
            "data": {"pairing": "sop"},
            "masking": {"whole_word": True},
            "training": {
                "num_steps": 2_000_000,
                "phases": ({"length": 512, "batch_size": 1024},),
            },
            "optimizer": {
                "name": "adamw",
                "learning_rate": 1e-4,
                "warmup_steps": 10_000,
                "weight_decay": 0.01,
            },
            "mesh": {"fsdp": 64, "tensor": 4},
        }
    )
