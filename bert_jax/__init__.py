"""bert_jax: from raw text to a pretrained BERT-style encoder, in JAX."""

import glob
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bert_jax.infer.loaded import LoadedModel

__version__ = "0.1.0"


def _quiet_libtpu() -> None:
    """Set variables that keep libtpu from looking for a TPU pod on a machine without TPUs.

    The extra `plan` installs libtpu. If the machine has a device that libtpu could open, this
    function sets no variables: libtpu can then find its TPUs and show all of its messages.
    """
    if not any(glob.glob(pattern) for pattern in ("/dev/accel*", "/dev/vfio/*")):
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_PROCESS_BOUNDS", "1,1,1")


_quiet_libtpu()  # must run before JAX makes its first array, because that loads libtpu


def load(directory: "str | Path", **limits: Any) -> "LoadedModel":
    """Load a model to fill masks, classify, tag, answer, embed or translate (docs/inference.md).

    Args:
        directory: Work directory of `bert-jax pretrain` or `bert-jax finetune`, or a directory in
            the format of Hugging Face or sentence-transformers.
        limits: Keyword arguments of `LoadedModel`: `device`, `max_length` and `batch_tokens`.

    Raises:
        UserError: If the directory has no intact model.
    """
    from bert_jax.artefacts.saved.reading import read_model  # imported here, because it imports jax
    from bert_jax.infer.loaded import LoadedModel

    return LoadedModel(read_model(os.path.expanduser(directory)), **limits)
