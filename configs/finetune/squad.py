"""Answers to questions as spans of a text, from files in the JSON of SQuAD 1.1 or 2.0.

    bert-jax finetune --config=configs/finetune/squad.py --config.init=work/base \
        --config.task.train=train-v2.0.json --config.task.dev=dev-v2.0.json \
        --workdir=work/squad

Rows have 384 tokens. If the model has fewer positions, rows have as many tokens as positions.
`task.max_length` sets another length.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the recipe; any field of `FinetuneConfig` may be set."""
    return ConfigDict(
        {
            "task": {"kind": "squad"},
            "training": {"num_epochs": 3.0, "batch_size": 32},
        }
    )
