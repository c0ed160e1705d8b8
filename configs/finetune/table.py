"""A table of your own: CSV, TSV, JSON lines or parquet with the columns `text` and `label`.

    bert-jax finetune --config=configs/finetune/table.py --config.init=work/base \
        --config.task.train=reviews.csv --workdir=work/reviews

A tenth of the texts is held out to choose the best checkpoint by, unless `task.dev` names a
file. Other columns: `--config.task.text=body --config.task.label=stars`; pairs:
`text_pair`; several labels a row: `problem_type=multi_label`; numbers: `problem_type=regression`.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the recipe; any field of `FinetuneConfig` may be set."""
    return ConfigDict(
        {
            "task": {"kind": "table"},
            "training": {"num_epochs": 5.0, "batch_size": 32},
        }
    )
