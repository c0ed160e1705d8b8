"""bert_jax: from raw text to a pretrained BERT-style encoder, in JAX."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bert_jax.infer.loaded import LoadedModel

__version__ = "0.1.0"


def load(directory: "str | Path") -> "LoadedModel":
    """A model to ask: fill_mask, classify, tag, answer, embed; see docs/inference.md.

    Args:
        directory: The work directory of `bert-jax pretrain` or `bert-jax finetune`, or a directory
            in Hugging Face's format.

    Raises:
        UserError: There is no sound model in it.
    """
    from bert_jax.finetune.saved_model import read_model  # jax is imported when it is used
    from bert_jax.infer.loaded import LoadedModel

    return LoadedModel(read_model(directory))
