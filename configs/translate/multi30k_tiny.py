"""Multi30k: 4 + 4 layers, 128 wide, heavily regularised, on one accelerator.

The recipe of Wu et al. 2021 (arXiv 2105.14462; 41.0 tokenised BLEU, en-de, test 2016): one table
for both languages and the output, dropout 0.3, label smoothing 0.1, 8,000 updates of 8,192 target
tokens, the mean of the last 10 checkpoints. Small and dropped beats large here.

    bert-jax pretrain --config=configs/translate/multi30k_tiny.py --workdir=work/ende \
        --config.data.corpus=work/en-de
    bert-jax average work/ende --last 10 --out work/ende_mean

The vocabulary size comes from the corpus; the paper has 10,000 tokens of both languages.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the recipe; any field of `PretrainConfig` may be set."""
    return ConfigDict(
        {
            "objective": {"name": "translation", "tying": "all", "label_smoothing": 0.1},
            "model": {
                "num_layers": 4,
                "hidden_dim": 128,
                "num_heads": 4,
                "mlp_dim": 256,
                "num_positions": 256,
                "num_types": 0,
                "positions": "sinusoidal",
                "scale_embeddings": True,
                "embedding_norm": False,
                "activation": "relu",
                "norm_eps": 1e-5,
                "init_std": 0.09,
                "head_transform": False,
                "pooler": False,
                "hidden_dropout_rate": 0.3,
                "attention_dropout_rate": 0.0,
            },
            "data": {"pairing": "translation"},
            "training": {
                "num_steps": 8000,
                "phases": ({"length": 128, "batch_size": 64},),
                "eval_every_steps": 200,
            },
            "optimizer": {
                "learning_rate": 5e-3,
                "schedule": "inverse_sqrt",
                "warmup_steps": 2000,
                "b2": 0.98,
                "eps": 1e-9,
                "weight_decay": 0.0,
            },
            "checkpoint": {"save_every_steps": 200, "keep": 10},
        }
    )
