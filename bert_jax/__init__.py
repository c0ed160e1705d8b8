"""bert_jax: from raw text to a pretrained BERT-style encoder, in JAX."""

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bert_jax.infer.loaded import LoadedModel
    from bert_jax.planning.compile import Plan
    from bert_jax.training.finetune.config import FinetuneConfig
    from bert_jax.training.pretrain.config import PretrainConfig
    from bert_jax.training.run_plan import Result

    Recipe = str | Path | Mapping[str, Any]

__version__ = "0.2.0"


def _quiet_libtpu() -> None:
    """Set variables that keep libtpu from looking for a TPU pod on a machine without TPUs.

    The extra `plan` installs libtpu. If the machine has a device that libtpu could open, this
    function sets no variables: libtpu can then find its TPUs and show all of its messages.
    """
    if not any(glob.glob(pattern) for pattern in ("/dev/accel*", "/dev/vfio/*")):
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_PROCESS_BOUNDS", "1,1,1")


_quiet_libtpu()  # must run before JAX makes its first array, because that loads libtpu


def pretrain(config: "Recipe | PretrainConfig", workdir: "str | Path", **fields: Any) -> "Result":
    """Pretrain an encoder or train a translator, or continue the run (docs/pretraining.md).

    >>> run = bert_jax.pretrain("bert_tiny", "work/tiny", data={"corpus": "work/corpus"})

    Args:
        config: Name or file of a recipe, nested dict of fields, or configuration.
        workdir: Directory of the run, local or `gs://BUCKET/DIR`.
        fields: Fields to set: a dict for a section, or `**{"training.num_steps": 20_000}`.

    Raises:
        UserError: The input is wrong. `bert_jax.training.pretrain.train` lists other errors.
    """
    from bert_jax.config.command_line import config_from
    from bert_jax.training.pretrain.config import PretrainConfig
    from bert_jax.training.pretrain.train import train

    return train(config_from(PretrainConfig, config, fields), os.path.expanduser(workdir))


def finetune(config: "Recipe | FinetuneConfig", workdir: "str | Path", **fields: Any) -> "Result":
    """Fine-tune on labelled text, or continue the run (docs/finetuning.md).

    >>> table = {"train": "reviews.csv"}
    >>> run = bert_jax.finetune("table", "work/reviews", init="work/tiny", task=table)

    For arguments and errors, see `pretrain`. If the model learned nothing, `run.unlearned` says so.
    """
    from bert_jax.config.command_line import config_from
    from bert_jax.training.finetune.config import FinetuneConfig
    from bert_jax.training.finetune.folds import finetune_folds

    return finetune_folds(config_from(FinetuneConfig, config, fields), os.path.expanduser(workdir))


def load(directory: "str | Path", **limits: Any) -> "LoadedModel":
    """Load a model to fill masks, classify, tag, answer, embed or translate (docs/inference.md).

    >>> answers = bert_jax.load("work/reviews").classify(["What a film.", "What a waste."])

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


def export(model: "str | Path", to: str, out: "str | Path", **options: Any) -> dict[str, Any]:
    """Export a model, and return the comparison with its source (docs/export.md).

    >>> parity = bert_jax.export("work/reviews", "huggingface", "out/reviews")

    Function `export` of `bert_jax.artefacts.exchange.export` lists options and errors.
    """
    from bert_jax.artefacts.exchange.export import export as write

    return write(os.path.expanduser(model), to, os.path.expanduser(out), **options)


def plan(config: "Recipe | PretrainConfig", topology: str, **fields: Any) -> "list[Plan]":
    """Predict memory and time of each phase of training on a TPU slice (docs/planning.md).

    >>> fits = all(phase.fits for phase in bert_jax.plan("bert_base", "v5e:4x4"))

    For `config`, `fields` and errors, see `pretrain`. Only the configured settings are tried.
    JAX then uses only the CPU in this process, so train in another process.
    """
    from bert_jax.config.command_line import config_from
    from bert_jax.planning.command import plans
    from bert_jax.planning.topology import parse_topology
    from bert_jax.training.pretrain.config import PretrainConfig

    return plans(config_from(PretrainConfig, config, fields), parse_topology(topology))
