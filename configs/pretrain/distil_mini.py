"""A student of 4 layers, 256 wide, that learns from any masked LM (Hinton et al. 2015).

Labels and the teacher's predictions weigh the same, at a temperature of 2, as in DistilBERT (Sanh
et al. 2019) without its cosine; sizes and phases are those of bert_mini.py.

    bert-jax pretrain --config=configs/pretrain/distil_mini.py --workdir=work/student \
        --config.distil.teacher=work/base --config.data.corpus=work/corpus

The corpus must have been built with the teacher's tokenizer (`bert-jax corpus --tokenizer`).
`--config.distil.hidden_weight=0.1` adds hidden states, `attention_weight` the last attention.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the recipe; any field of `PretrainConfig` may be set."""
    return ConfigDict(
        {
            "distil": {
                "teacher": "",
                "temperature": 2.0,
                "hard_weight": 0.5,
                "hidden_weight": 0.0,
                "attention_weight": 0.0,
                "from_teacher": False,
            },
            "model": {
                "num_layers": 4,
                "hidden_dim": 256,
                "num_heads": 4,
                "mlp_dim": 1024,
                "pooler": False,
            },
            "data": {"pairing": "none"},
            "training": {
                "num_steps": 250_000,
                "phases": ({"length": 128, "batch_size": 256, "share": 1.0},),
            },
            "optimizer": {
                "name": "adamw",
                "learning_rate": 5e-4,
                "warmup_steps": 5_000,
                "weight_decay": 0.01,
            },
        }
    )
