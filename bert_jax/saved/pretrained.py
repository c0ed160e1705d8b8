"""A pretrained model out of a run's work directory, as inference wants it."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_jax.checkpoint import load_newest
from bert_jax.config.mapping import build
from bert_jax.errors import UserError
from bert_jax.files.remote import open_workdir
from bert_jax.training.config import PretrainConfig

_log = logging.getLogger("bert_jax")


@dataclass(frozen=True)
class LoadedParams:
    """A pretrained model."""

    params: dict[str, Any]
    config: PretrainConfig
    tokenizer: Path
    """Directory for `load_tokenizer`."""
    step: int
    metrics: dict[str, float]
    """Of an evaluation of exactly these parameters; empty where there was none."""


def load_params(workdir: Path | str) -> LoadedParams:
    """Parameters of the newest intact checkpoint of a run, on one device. Changes nothing on disk.

    Raises:
        UserError: `workdir` holds no checkpoint.
        DamagedCheckpointError: It holds some and none is intact.
    """
    place = open_workdir(workdir)
    restored = load_newest(place.checkpoints)
    if restored is None:
        raise UserError(
            f"{workdir} holds no checkpoint; give the work directory of a `bert-jax pretrain` run "
            "that has saved at least once"
        )
    if "task" in restored.record.config:
        raise UserError(
            f"{workdir} holds a run of fine-tuning, whose model has no head for masked words; give "
            "the work directory of a `bert-jax pretrain` run"
        )
    if restored.damaged:
        _log.warning("%s", restored.warning())
    return LoadedParams(
        params=restored.state,
        config=build(PretrainConfig, restored.record.config, where=f"checkpoint {restored.step}"),
        tokenizer=place.local / "tokenizer",
        step=restored.step,
        metrics=restored.record.metrics,
    )
