"""Work directories of runs: of which kind a run is, and its newest intact checkpoint."""

import logging
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bert_jax.checkpoint import Restored, load_newest
from bert_jax.errors import UserError
from bert_jax.files.remote import open_workdir
from bert_jax.formats.huggingface_files import MAX_CONFIG_BYTES
from bert_jax.untrusted.json_file import read_json_object

_log = logging.getLogger("bert_jax")

Kind = Literal["pretrain", "finetune"]
"""Kind of a run, by its verb; `kind` in the config.json of fine-tuning, not in pretraining's."""

STATISTICS = "statistics.json"
"""Written when all members have ended: then a run is finished."""


NO_MODEL = (
    "no run gave a finite score, so there is no model to save: all have diverged. Lower "
    "optimizer.learning_rate or sweep.learning_rates, or look at the data, and choose another work "
    "directory"
)


class FinetunedState(NamedTuple):
    """Content of a checkpoint of the best model."""

    params: Any
    """Parameters, as from `init_task_params`."""


def is_finetuning(workdir: Path) -> bool:
    """Say whether the run in a (local) work directory is one of fine-tuning."""
    path = workdir / "config.json"
    if not path.is_file():
        return False
    return read_json_object(path, max_bytes=MAX_CONFIG_BYTES).get("kind") == "finetune"


def read_record(workdir: Path, kind: Kind) -> dict[str, Any]:
    """Return `config.json` as JSON values: bert_jax (the version), config, and those of the kind.

    Raises:
        UserError: There is none, it is not such a file, or it is of another kind of run.
    """
    path = workdir / "config.json"
    remedy = f"give the work directory of a `bert-jax {kind}` run"
    if not path.is_file():
        raise UserError(f"{workdir} holds no run, for want of a config.json; {remedy}")
    try:
        record = read_json_object(path, max_bytes=MAX_CONFIG_BYTES)
        if not isinstance(record.get("config"), dict):
            raise UserError("it has no field config")
    except UserError as error:
        raise UserError(f"{path} is not the configuration of a run: {error}; {remedy}") from error
    found = record.get("kind") or "pretrain"
    if found != kind:
        names = {"pretrain": "pretraining", "finetune": "fine-tuning"}
        other = f"a run of {names.get(found, found)}, not one of {names[kind]}"
        raise UserError(f"{workdir} holds {other}; {remedy}")
    return record


def pretrained_checkpoint(workdir: Path | str) -> Restored:
    """Read the newest intact checkpoint of a pretraining run; change nothing on disk.

    Raises:
        UserError: `workdir` holds no checkpoint.
        DamagedCheckpointError: It holds some and none is intact.
    """
    restored = load_newest(open_workdir(workdir).checkpoints)
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
    return _warned(restored)


def finetuned_checkpoint(workdir: Path | str) -> Restored:
    """Read the best model of a fine-tuning run; change nothing on disk.

    Raises:
        UserError: No such run there, or it has saved nothing yet.
        DamagedCheckpointError: It holds checkpoints and none is intact.
    """
    place = open_workdir(workdir)
    read_record(place.local, "finetune")
    restored = load_newest(place.checkpoints)
    if restored is None and (place.local / STATISTICS).exists():
        raise UserError(f"{workdir} has no model: {NO_MODEL}")
    if restored is None:
        raise UserError(
            f"{workdir} holds no checkpoint yet: the run has not come to its first save. Give the "
            "`bert-jax finetune` command again to continue it"
        )
    return _warned(restored)


def _warned(restored: Restored) -> Restored:
    if restored.damaged:
        _log.warning("%s", restored.warning())
    return restored
