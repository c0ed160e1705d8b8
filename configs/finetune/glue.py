"""A task of GLUE: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli.

    bert-jax finetune --config=configs/finetune/glue.py:mrpc --config.init=work/base \
        --config.task.data=glue --workdir=work/mrpc

`task.data` is the directory of the TSV files, or tfds. Tasks of less than 10,000 examples take
20 passes, without which runs fail (Mosbach et al. 2021, On the Stability of Fine-tuning BERT);
the others 3, as published.
"""

from ml_collections import ConfigDict

_SMALL = ("cola", "mrpc", "rte", "stsb", "wnli")


def get_config(name: str) -> ConfigDict:
    """Return the recipe; any field of `FinetuneConfig` may be set."""
    return ConfigDict(
        {
            "task": {"kind": "glue", "name": name},
            "training": {"num_epochs": 20.0 if name in _SMALL else 3.0, "batch_size": 32},
        }
    )
