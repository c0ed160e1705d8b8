"""bert_jax: from raw text to a pretrained BERT-style encoder, in JAX."""

import glob
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bert_jax.infer.loaded import LoadedModel

__version__ = "0.1.0"


def _quiet_libtpu() -> None:
    """Keep libtpu (from the extra `plan`) from looking for a TPU pod on a machine without TPUs.

    If there is a device that libtpu could open, set nothing and let libtpu show every message.
    """
    if not any(glob.glob(pattern) for pattern in ("/dev/accel*", "/dev/vfio/*")):
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_PROCESS_BOUNDS", "1,1,1")


_quiet_libtpu()  # before JAX makes its first array, which loads libtpu


def load(directory: "str | Path", **limits: Any) -> "LoadedModel":
    """Load a model to fill masks, classify, tag, answer, embed or translate (docs/inference.md).

    `directory` is the work directory of `bert-jax pretrain` or `bert-jax finetune`, or a directory
    in the format of Hugging Face or sentence-transformers; a directory without an intact model
    raises a UserError. `limits` are `device`, `max_length` and `batch_tokens` of `LoadedModel`.
    """
    from bert_jax.artefacts.saved.reading import read_model  # jax is imported when it is used
    from bert_jax.infer.loaded import LoadedModel

    return LoadedModel(read_model(os.path.expanduser(directory)), **limits)
