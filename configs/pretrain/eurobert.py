"""EuroBERT of 210M parameters: a bidirectional Llama block (Boizard et al. 2025).

    bert-jax pretrain --config=configs/pretrain/eurobert_210m.py --workdir=work/eurobert \
        --config.data.corpus=work/corpus
    bert-jax plan --config=configs/pretrain/eurobert_210m.py --topology=v5e:16x16 \
        --config.model.vocab_size=128256 --phase=all

Published: 5,000 billion tokens, rows of 2,048, half of the tokens predicted and all of them as
[MASK]; an annealing phase with a tenth predicted, slower rotations and up to 8,192 tokens; AdamW
at 1e-4 with betas 0.9 and 0.95 and a decay of 0.1.

Chosen here, where no source was read: 2,048 rows of 2,048 tokens a step, 4% of the tokens in the
annealing phase, its 512 rows of 8,192, a linear decay to zero.

Predicted here by `bert-jax plan` on v5e:16x16 with mesh.data=1, mesh.fsdp=256,
training.gather=step and training.accumulation=2: 2,048 rows of 2,048 take 191 ms, 5.0 of 16 GiB,
MFU 0.52, 15,700 chip-hours; 512 rows of 8,192 take 272 ms, MFU 0.50, 930 chip-hours.

The vocabulary size comes from the corpus; the published one has 128,256 tokens (Llama 3's).
"""

from ml_collections import ConfigDict


def get_config(size: str = "210m") -> ConfigDict:
    """Return the recipe; any field of `PretrainConfig` may be set."""
    if size != "210m":
        raise ValueError(f"the size is {size!r}; expected 210m")
    return ConfigDict(
        {
            "model": {
                "num_layers": 12,
                "hidden_dim": 768,
                "num_heads": 12,
                "mlp_dim": 3072,
                "num_positions": 8192,
                "num_types": 0,
                "norm": "rms",
                "norm_order": "pre",
                "norm_eps": 1e-5,
                "embedding_norm": False,
                "positions": "rope",
                "gated": True,
                "activation": "silu",
                "attention_bias": False,
                "mlp_bias": False,
                "pooler": False,
                "head_transform": False,
                "decoder_bias": False,
                "tied": False,
                "hidden_dropout_rate": 0.0,
                "attention_dropout_rate": 0.0,
            },
            "data": {"pairing": "none"},
            "masking": {"rate": 0.5, "mask_rate": 1.0, "random_rate": 0.0},
            "training": {
                "num_steps": 1_200_000,
                "phases": (
                    {"length": 2048, "batch_size": 2048, "share": 0.96},
                    {
                        "length": 8192,
                        "batch_size": 512,
                        "share": 0.04,
                        "masking_rate": 0.1,
                        "rope_theta": 250_000.0,
                        "decay": "linear",
                    },
                ),
            },
            "optimizer": {
                "name": "adamw",
                "learning_rate": 1e-4,
                "schedule": "constant",
                "warmup_steps": 2000,
                "b2": 0.95,
                "eps": 1e-5,
                "weight_decay": 0.1,
            },
        }
    )
