"""Named entities, or other tags of words.

    bert-jax finetune --config=configs/finetune/ner.py --config.init=work/base \
        --config.task.train=eng.train --config.task.dev=eng.testa \
        --workdir=work/conll

Files have a word a line, the word in the first column and the tag in the last; CoNLL-U is known by
its columns. `ner.py:wikiann` reads WikiANN's, `ner.py:rows` JSON lines or parquet with lists of
tokens and tags.
"""

from ml_collections import ConfigDict


def get_config(data_format: str = "columns") -> ConfigDict:
    """Return the recipe; any field of `FinetuneConfig` may be set."""
    return ConfigDict(
        {
            "task": {"kind": "tagging", "format": data_format},
            "training": {"num_epochs": 5.0, "batch_size": 32},
        }
    )
