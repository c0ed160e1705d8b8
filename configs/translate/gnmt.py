"""GNMT in small: 4 + 4 layers of LSTM cells, 256 wide, on Multi30k.

The shape of Wu et al. 2016, section 3: the first layer of the encoder reads both ways, residuals
from the third layer on, additive attention by the previous state of the decoder's first layer, the
context in every layer. The published model has 8 + 8 layers, 1024 wide, each direction with the
whole width.

    bert-jax pretrain --config=configs/translate/gnmt.py --workdir=work/gnmt \
        --config.data.corpus=work/pairs

The vocabulary size comes from the corpus, which `bert-jax corpus --pairs` makes.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the recipe; any field of `PretrainConfig` may be set."""
    return ConfigDict(
        {
            "objective": {
                "name": "recurrent_translation",
                "cell": "lstm",
                "attention": "additive",
                "wiring": "before",
                "residual_from": 3,
                "tying": "all",
                "label_smoothing": 0.1,
            },
            "model": {
                "num_layers": 4,
                "hidden_dim": 256,
                "num_heads": 1,
                "num_positions": 256,
                "init_std": 0.06,  # the published weights are uniform in [-0.1, 0.1]
                "hidden_dropout_rate": 0.2,
                "attention_dropout_rate": 0.0,
            },
            "data": {"pairing": "translation"},
            "training": {
                "num_steps": 1400,
                "phases": ({"length": 64, "batch_size": 64},),
                "eval_every_steps": 117,
                "log_every_steps": 50,
            },
            "optimizer": {
                "learning_rate": 2e-3,
                "schedule": "inverse_sqrt",
                "warmup_steps": 200,
                "b2": 0.98,
                "eps": 1e-9,
                "weight_decay": 0.0001,
            },
            "checkpoint": {"save_every_steps": 117, "keep": 5},
        }
    )
