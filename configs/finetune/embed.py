"""An embedding model: vectors for search, from texts that belong together.

    bert-jax finetune --config=configs/finetune/embed.py --config.init=work/base \
        --config.task.train=pairs.jsonl --workdir=work/vectors

The file is CSV, TSV, JSON lines or parquet, and the argument says what its rows are:
`embed.py:pairs` (the default; columns `query` and `document`, and hard negatives where
`--config.task.negatives=negatives` names columns of them), `embed.py:scores` (`query`,
`document`, `score`), `embed.py:classes` (`text`, `label`) or `embed.py:texts` (`text`, SimCSE).
Each row is told apart from the other rows of its batch: a larger batch teaches more, and
`--config.training.accumulation=8` trains one that memory does not hold.
"""

from ml_collections import ConfigDict


def get_config(kind: str = "pairs") -> ConfigDict:
    """Return the recipe; any field of `FinetuneConfig` may be set."""
    return ConfigDict(
        {
            "task": {"kind": "embedding", "rows": kind},
            "training": {"num_epochs": 1.0 if kind == "texts" else 3.0, "batch_size": 128},
        }
    )
