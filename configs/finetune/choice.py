"""Multiple choice, SWAG's columns: sent1, sent2, ending0 to ending3, label.

    bert-jax finetune --config=configs/finetune/choice.py --config.init=work/base \
        --config.task.train=swag/train.csv --config.task.dev=swag/val.csv \
        --workdir=work/swag

Other columns, such as a question with answers:

    --config.task.text=question --config.task.beginning= \
    --config.task.choices=a,b,c --config.task.labels=A,B,C
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the recipe; any field of `FinetuneConfig` may be set."""
    return ConfigDict(
        {
            "task": {"kind": "choice"},
            "training": {"num_epochs": 3.0, "batch_size": 16},
        }
    )
