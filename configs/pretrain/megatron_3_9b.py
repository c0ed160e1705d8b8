"""The 3.9-billion-parameter BERT of Megatron-LM: 48 layers, 2560 wide, 40 heads.

Shoeybi et al. 2019, section 5.3: batch 1024, two million steps, sentence order instead
of next sentence, whole words masked. The paper also moves the norms into the residual branches;
here they are BERT's own (post-normalisation), which it found unstable at this depth.

    bert-jax pretrain --config=configs/pretrain/megatron_3_9b.py --workdir=work/megatron_3_9b \
        --config.data.corpus=work/corpus

The vocabulary size comes from the corpus. The mesh is for 128 chips of TPU v5p (v5p:4x4x8), 16 rows
of length 512 per pair of chips; on more chips `data` takes the rest. Look before you pay:
`bert-jax plan --config=configs/pretrain/megatron_3_9b.py --topology=v5p:4x4x8`.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the recipe; any field of `PretrainConfig` may be set."""
    return ConfigDict(
        {
            "model": {
                "num_layers": 48,
                "hidden_dim": 2560,
                "num_heads": 40,
                "mlp_dim": 10_240,
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
            "mesh": {"fsdp": 64, "tensor": 2},
        }
    )
