"""The work directory of a run: what is in it, and whether it belongs to this run.

config.json  metrics.jsonl  tensorboard/  checkpoints/  tokenizer/  loss.png
"""

import json
from pathlib import Path
from typing import Any

import bert_jax
from bert_jax.checkpoint.agreement import by_first
from bert_jax.config.mapping import build, to_dict
from bert_jax.data.store import TokenStore
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir
from bert_jax.files.staging import replace_file
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.training.config import PretrainConfig, binding_diff
from bert_jax.untrusted.json_file import read_json_object

MAX_CONFIG_BYTES = 1 << 20


def read_config(workdir: Path) -> PretrainConfig:
    """Return the configuration of the run in a work directory.

    Raises:
        UserError: No run there, or its configuration cannot be read.
    """
    return build(PretrainConfig, read_record(workdir)["config"], where=str(workdir / "config.json"))


def check_workdir(place: WorkDir, config: PretrainConfig, store: TokenStore) -> None:
    """Refuses a work directory that belongs to another run; changes nothing.

    Raises:
        UserError: Lists the fields that differ, with the run's value and the one given.
    """
    record = by_first(lambda: _record_there(place, store))
    if record is None:
        return
    began = build(PretrainConfig, record["config"], where=str(place.local / "config.json"))
    rows = [
        f"{name}: {_show(old)} there, {_show(new)} given"
        for name, old, new in binding_diff(began, config)
    ]
    there = record.get("corpus")
    if there != store.fingerprint:
        rows.append(
            f"the training corpus: fingerprint {str(there)[:12]} there, "
            f"{store.fingerprint[:12]} given"
        )
    refuse_other_run(place, rows)


def _record_there(place: WorkDir, store: TokenStore) -> dict[str, Any] | None:
    if holds_run(place):
        return read_record(place.local)
    _check_tokenizer(place.local, store)
    return None


def holds_run(place: WorkDir) -> bool:
    """Whether a run was begun in a work directory.

    Raises:
        UserError: The directory holds checkpoints of which nothing says what they are.
    """
    if (place.local / "config.json").exists():
        return True
    if place.checkpoints.exists():
        raise UserError(
            f"{place.name} has checkpoints and no config.json, so that it cannot be said what "
            "they are of. Choose another work directory, or put config.json back"
        )
    return False


def refuse_other_run(place: WorkDir, differences: list[str]) -> None:
    """End a run that is not the one in its work directory.

    Raises:
        UserError: There are differences.
    """
    if differences:
        raise UserError(
            f"{place.name} belongs to a run of another configuration ({'; '.join(differences)}). "
            "To continue that run, give its configuration; to start another, choose another work "
            "directory"
        )


def _check_tokenizer(workdir: Path, store: TokenStore) -> None:
    """Refuses a tokenizer that cannot be copied, or one that would be taken for the copy."""
    if store.path is None:
        return
    if not (store.path / "tokenizer").is_dir():
        raise UserError(
            f"the token store {store.path} is damaged: its tokenizer is missing. Build the corpus "
            "again"
        )
    if not (workdir / "tokenizer").exists():
        return
    there = load_tokenizer(workdir / "tokenizer").fingerprint
    if there != store.tokenizer_fingerprint:
        raise UserError(
            f"{workdir / 'tokenizer'} is another tokenizer ({there[:12]}) than that of the corpus "
            f"({store.tokenizer_fingerprint[:12]}), and a run keeps its own there. Choose another "
            "work directory"
        )


def prepare_workdir(workdir: Path, config: PretrainConfig, store: TokenStore) -> None:
    """Write config.json and copy the tokenizer; each appears complete or not at all."""
    record = {
        "bert_jax": bert_jax.__version__,
        "config": to_dict(config),
        "corpus": store.fingerprint,
        "tokenizer": store.tokenizer_fingerprint,
    }
    begin_workdir(workdir, record, None if store.path is None else store.path / "tokenizer")


def begin_workdir(workdir: Path, record: dict[str, Any], tokenizer_files: Path | None) -> None:
    """Write config.json and the files of the tokenizer alone, in process 0.

    Raises:
        UserError: The work directory cannot be written.
        ElsewhereError: The same, in the other processes.
    """

    def write() -> None:
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            for leftover in workdir.glob("loss.png.tmp-*"):  # of a run killed while drawing
                leftover.unlink(missing_ok=True)
            if tokenizer_files is not None and not (workdir / "tokenizer").exists():
                load_tokenizer(tokenizer_files).save(workdir / "tokenizer")
            content = json.dumps(record, indent=2) + "\n"
            replace_file(workdir / "config.json", content.encode())
        except OSError as error:
            raise UserError(f"cannot write to the work directory {workdir}: {error}") from error

    by_first(write)


def read_record(workdir: Path) -> dict[str, Any]:
    """`config.json` as JSON values: bert_jax (the version), config, corpus, tokenizer.

    Raises:
        UserError: There is none, or it is not such a file.
    """
    path = workdir / "config.json"
    if not path.is_file():
        raise UserError(
            f"{workdir} holds no run: it has no config.json. Give the work directory of a "
            "`bert-jax pretrain` run"
        )
    try:
        record = read_json_object(path, max_bytes=MAX_CONFIG_BYTES)
        if not isinstance(record.get("config"), dict):
            raise UserError("it has no field config")
    except UserError as error:
        raise UserError(f"{path} is not the configuration of a run: {error}") from error
    if record.get("kind"):
        raise UserError(
            f"{workdir} holds a run of fine-tuning; give the work directory of a `bert-jax "
            "pretrain` run"
        )
    return record


def _show(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)
