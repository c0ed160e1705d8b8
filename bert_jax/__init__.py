"""bert_jax: from raw text to a pretrained BERT-style encoder, in JAX."""

import glob
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bert_jax.infer.loaded import LoadedModel

__version__ = "0.1.0"


def _quiet_libtpu() -> None:
    """Tell libtpu (of the extra `plan`) that there is no pod to look for where there is no TPU.

    Where there is a device that libtpu could open, nothing is set and every message is shown.
    """
    if not any(glob.glob(pattern) for pattern in ("/dev/accel*", "/dev/vfio/*")):
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_PROCESS_BOUNDS", "1,1,1")


_quiet_libtpu()  # JAX loads libtpu with its first array


def load(directory: "str | Path", **limits: Any) -> "LoadedModel":
    """Load a model to fill masks, classify, tag, answer, embed or translate (docs/inference.md).

    `directory` is the work directory of `bert-jax pretrain` or `bert-jax finetune`, or a directory
    in the format of Hugging Face or sentence-transformers; without a sound model there it is
    refused. `limits` are `device`, `max_length` and `batch_tokens` of `LoadedModel`.
    """
    from bert_jax.artefacts.saved.reading import read_model  # jax is imported when it is used
    from bert_jax.infer.loaded import LoadedModel

    return LoadedModel(read_model(os.path.expanduser(directory)), **limits)
