"""A recurrent network with attention on Multi30k: two cores, 256 wide, 8,000 joint tokens.

The argument is the attention: `recurrent_none` (one vector of the source, Cho et al. 2014),
`recurrent_dot` and `recurrent_multiplicative` (Luong et al. 2015: the current state attends, the
result is fed to the next place), `recurrent_additive` (Bahdanau et al. 2014: the previous state
attends). A bidirectional GRU reads, a GRU writes, one table serves source, target and output.
All four see the batches of `multi30k_small`, in rows half as long and twice as many: a recurrent
network goes along a row place by place.

    bert-jax pretrain --config=configs/translate/recurrent_additive --workdir=work/additive \
        --config.data.corpus=work/pairs

The vocabulary size comes from the corpus, which `bert-jax corpus --pairs` makes.
"""

from ml_collections import ConfigDict

WIRINGS = {"none": "before", "dot": "after", "multiplicative": "after", "additive": "before"}


def get_config(attention: str = "additive") -> ConfigDict:
    """Return a recipe; any field of `PretrainConfig` may be set."""
    if attention not in WIRINGS:
        raise ValueError(f"the attention is {attention!r}; expected one of {', '.join(WIRINGS)}")
    return ConfigDict(
        {
            "objective": {
                "name": "recurrent_translation",
                "cell": "gru",
                "attention": attention,
                "wiring": WIRINGS[attention],
                "tying": "all",
                "label_smoothing": 0.1,
            },
            "model": {
                "num_layers": 1,
                "hidden_dim": 256,
                "num_heads": 1,
                "num_positions": 256,
                "init_std": 0.06,
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
