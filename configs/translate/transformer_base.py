"""The Transformer of Vaswani et al. 2017, table 3, base: 6 + 6 layers, 512 wide.

The learning rate is d^-0.5 w^-0.5 at the end of the warm-up of w = 4,000 steps, then falls with the
root of the step; 100,000 steps of about 32,000 source and as many target tokens.

    bert-jax pretrain --config=configs/translate/transformer_base.py --workdir=work/base \
        --config.data.corpus=work/en-de

The vocabulary size comes from the corpus; the paper has 37,000 tokens of both languages. The step
for a slice of TPUs, before there is one:

    bert-jax plan --config=configs/translate/transformer_base.py --topology=v5e:4x4 \
        --config.model.vocab_size=37000

Predicted for these 16 chips: 19.3 ms a step of 128 rows, 1.7 of 16 GiB a chip, MFU 0.22, at 8
rows a chip. Nothing was run on a TPU.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the recipe; any field of `PretrainConfig` may be set."""
    return ConfigDict(
        {
            "objective": {"name": "translation", "tying": "all", "label_smoothing": 0.1},
            "model": {
                "num_layers": 6,
                "hidden_dim": 512,
                "num_heads": 8,
                "mlp_dim": 2048,
                "num_positions": 256,
                "num_types": 0,
                "positions": "sinusoidal",
                "scale_embeddings": True,
                "embedding_norm": False,
                "activation": "relu",
                "norm_eps": 1e-5,
                "init_std": 0.04,
                "head_transform": False,
                "pooler": False,
                "hidden_dropout_rate": 0.1,
                "attention_dropout_rate": 0.0,  # a decoder's kernels have no dropout
            },
            "data": {"pairing": "translation"},
            "training": {
                "num_steps": 100_000,
                "phases": ({"length": 256, "batch_size": 128},),
            },
            "optimizer": {
                "learning_rate": 512**-0.5 * 4000**-0.5,
                "schedule": "inverse_sqrt",
                "warmup_steps": 4000,
                "b2": 0.98,
                "eps": 1e-9,
                "weight_decay": 0.0,
                "clip_norm": None,
            },
            "checkpoint": {"save_every_steps": 1000, "keep": 5},
        }
    )
