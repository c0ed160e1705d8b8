"""Fine-tuned models in work directories, read."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.checkpoint import load_newest
from bert_jax.config.mapping import build
from bert_jax.errors import UserError
from bert_jax.files.remote import open_workdir
from bert_jax.model.config import ModelConfig
from bert_jax.model.task_heads import TaskHeadConfig
from bert_jax.tasks.config import TaskConfig
from bert_jax.tasks.opening import restore_task
from bert_jax.tasks.task import Task
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.training.workdir import MAX_CONFIG_BYTES
from bert_jax.untrusted.json_file import read_json_object

_log = logging.getLogger("bert_jax")

KIND = "finetune"
"""What `config.json` says a run is; a pretraining run says nothing."""


STATISTICS = "statistics.json"
"""Written when all members have ended: then a run is finished."""


NO_MODEL = (
    "no run gave a finite score, so there is no model to save: all have diverged. Lower "
    "optimizer.learning_rate or sweep.learning_rates, or look at the data, and choose another work "
    "directory"
)


class FinetunedState(NamedTuple):
    """What a checkpoint holds."""

    params: Any
    """As from `init_task_params`."""


@dataclass(frozen=True)
class Finetuned:
    """A fine-tuned model, with all that it needs."""

    model: ModelConfig
    head: TaskHeadConfig
    params: Any
    """As from `init_task_params`, on one device."""
    task: Task
    tokenizer: Tokenizer
    tokenizer_files: Path
    scores: dict[str, float]
    """On the dev data, of exactly these parameters."""
    task_config: TaskConfig
    config: dict[str, Any]
    """Configuration of the run, as recorded."""
    step: int
    """Updates made."""


def is_finetuning(workdir: Path) -> bool:
    """Whether the run in a (local) work directory is one of fine-tuning."""
    path = workdir / "config.json"
    if not path.is_file():
        return False
    return read_json_object(path, max_bytes=MAX_CONFIG_BYTES).get("kind") == KIND


def read_finetune_record(workdir: Path) -> dict[str, Any]:
    """`config.json` as JSON values: kind, bert_jax (the version), config, fingerprints.

    Raises:
        UserError: There is none, or it is of another kind of run.
    """
    path = workdir / "config.json"
    if not path.is_file():
        raise UserError(
            f"{workdir} holds no run: it has no config.json. Give the work directory of a "
            "`bert-jax finetune` run"
        )
    record = read_json_object(path, max_bytes=MAX_CONFIG_BYTES)
    if record.get("kind") != KIND:
        raise UserError(
            f"{workdir} holds a run that is not one of fine-tuning; give the work directory of a "
            "`bert-jax finetune` run"
        )
    return record


def load_finetuned(workdir: Path | str) -> Finetuned:
    """The best model of a fine-tuning run. Changes nothing on disk.

    Raises:
        UserError: No such run there, or it has saved nothing yet.
        DamagedCheckpointError: It holds checkpoints and none is intact.
    """
    place = open_workdir(workdir)
    read_finetune_record(place.local)
    restored = load_newest(place.checkpoints)
    if restored is None and (place.local / STATISTICS).exists():
        raise UserError(f"{workdir} has no model: {NO_MODEL}")
    if restored is None:
        raise UserError(
            f"{workdir} holds no checkpoint yet: the run has not come to its first save. Give the "
            "`bert-jax finetune` command again to continue it"
        )
    if restored.damaged:
        _log.warning("%s", restored.warning())
    extra, where = restored.record.extra, f"{workdir}: checkpoint {restored.step}"
    files = place.local / "tokenizer"
    tokenizer = load_tokenizer(files)
    return Finetuned(
        model=build(ModelConfig, extra["model"], where),
        head=build(TaskHeadConfig, extra["head"], where),
        params=restored.state,
        task=restore_task(extra["task"], tokenizer),
        tokenizer=tokenizer,
        tokenizer_files=files,
        scores=extra["scores"],
        task_config=build(TaskConfig, restored.record.config["task"], f"{where}: task"),
        config=restored.record.config,
        step=restored.step,
    )
