"""Dependency parsing.

    bert-jax finetune --config=configs/finetune/parsing.py --config.init=work/base \
        --config.task.train=en_ewt-ud-train.conllu \
        --config.task.dev=en_ewt-ud-dev.conllu --workdir=work/parser

Files are CoNLL-U, as the treebanks of Universal Dependencies have it. `bert-jax predict` writes it.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the recipe; any field of `FinetuneConfig` may be set."""
    return ConfigDict(
        {
            "task": {"kind": "parsing"},
            "training": {"num_epochs": 10.0, "batch_size": 32},
        }
    )
