"""A reranker: a score of a query and a document that are read together.

    bert-jax mine work/vectors pairs.jsonl --out mined.jsonl --margin=-2 --ranks 1-30 --negatives 7
    bert-jax finetune --config=configs/finetune/rerank.py --config.init=work/base \
        --config.task.train=mined.jsonl --config.task.scores=scores --workdir=work/reranker

The rows are pairs with their nearest other documents, as `bert-jax mine` writes them with the
model that searches first. Mine with pairs on which this model was not trained: else its own pairs
are nearer than any that it will find, and the reranker learns of no mistake that it should mend.
The scores of the dev rows are those of the first stage, which the reranker must beat.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the recipe; any field of `FinetuneConfig` may be set."""
    return ConfigDict(
        {
            "task": {"kind": "rerank", "negatives": ("negatives",)},
            "training": {"num_epochs": 3.0, "batch_size": 16},
        }
    )
