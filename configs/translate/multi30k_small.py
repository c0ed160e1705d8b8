"""Multi30k on two CPU cores: 3 + 3 layers, 256 wide, 8,000 joint tokens.

The Transformer of the paper (Vaswani et al. 2017: sinusoids, scaled embeddings, norms after the
sums) with one table for source, target and output. 29,000 pairs are about 3,850 packed rows of
128 + 128 places; 12 epochs of 32 rows a step are 1,440 steps.

    bert-jax pretrain --config=configs/translate/multi30k_small.py --workdir=work/ende \
        --config.data.corpus=work/en-de

Measured on raw, cased text with beam 5, sacreBLEU 13a, one run: en-de 37.6 on test 2016 (95%: 36.1
to 39.3) and 28.4 on test 2017; 1.74 nats a token on the validation set. It took 46
minutes of processor time.

The vocabulary size comes from the corpus, which `bert-jax corpus --pairs` makes.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the recipe; any field of `PretrainConfig` may be set."""
    return ConfigDict(
        {
            "objective": {"name": "translation", "tying": "all", "label_smoothing": 0.1},
            "model": {
                "num_layers": 3,
                "hidden_dim": 256,
                "num_heads": 4,
                "mlp_dim": 512,
                "num_positions": 256,
                "num_types": 0,
                "positions": "sinusoidal",
                "scale_embeddings": True,
                "embedding_norm": False,
                "activation": "relu",
                "norm_eps": 1e-5,
                "init_std": 0.06,
                "head_transform": False,
                "pooler": False,
                "hidden_dropout_rate": 0.2,
                "attention_dropout_rate": 0.0,
            },
            "data": {"pairing": "translation"},
            "training": {
                "num_steps": 1440,
                "phases": ({"length": 128, "batch_size": 32},),
                "eval_every_steps": 120,
                "log_every_steps": 50,
            },
            "optimizer": {
                "learning_rate": 1.5e-3,
                "schedule": "linear",
                "warmup_steps": 150,
                "b2": 0.98,
                "eps": 1e-9,
                "weight_decay": 0.0001,
            },
            "checkpoint": {"save_every_steps": 120, "keep": 5},
        }
    )
