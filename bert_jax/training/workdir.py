"""The work directory of a run: its files, and the check that it belongs to this run.

config.json  metrics.jsonl  events.jsonl  goodput.json  tensorboard/  checkpoints/  tokenizer/
loss.png (only in pretraining)
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import bert_jax
from bert_jax.artefacts.formats.huggingface_files import MAX_CONFIG_BYTES
from bert_jax.artefacts.saved.ancestors import RECORD
from bert_jax.artefacts.saved.runs import RUN_FORMAT, Kind, read_record
from bert_jax.config.mapping import build, diff, to_dict
from bert_jax.distributed.checkpoint.agreement import by_first
from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir
from bert_jax.files.staging import replace_file
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.tokenization.load import load_tokenizer

Config = TypeVar("Config")

FILES = "config.json, tokenizer/, metrics.jsonl, events.jsonl, goodput.json, tensorboard/"
"""Files of every run, as text for messages."""


class There(NamedTuple):
    """Content of a work directory before the run starts or restarts."""

    record: dict[str, Any] | None
    """Content of the run's config.json; None if no run has begun in the directory."""
    steps: list[int]
    """Steps of the complete checkpoints, ascending."""
    file: Path

    def config(self, kind: type[Config]) -> Config | None:
        """Return the configuration of the run in the directory, or None if there is no run."""
        return build(kind, self.record["config"], where=str(self.file)) if self.record else None


EMPTY = There(None, [], Path("config.json"))
"""Content of a directory in which no run has begun."""


def look_into(work: WorkDir, kind: Kind) -> There:
    """Return the content of a work directory, as process 0 sees it.

    Raise a UserError if it has a run of another kind, or checkpoints without config.json.
    """

    def look() -> tuple[Any, list[int]]:
        if (work.local / "config.json").exists():
            return read_record(work.local, kind), saved_steps(work.checkpoints)
        if work.checkpoints.exists():
            raise UserError(
                f"{work.name} has checkpoints but no config.json that says which run they belong "
                "to. Choose another work directory, or put config.json back"
            )
        return None, []

    record, steps = by_first(look)
    return There(record, steps, work.local / "config.json")


def refuse_other_run(
    work: WorkDir,
    began: Any,
    config: Any,
    free: Sequence[str],
    fingerprints: Mapping[str, tuple[Any, Any]],
) -> None:
    """Raise an error if the run in `work` has another configuration or other data.

    `began` is the configuration of the run in `work`, `config` the configuration given now. The
    restart may change the fields `free`. `fingerprints` maps a description of the data, such as
    "the training corpus", to the fingerprint in the run's record and the fingerprint found now.
    Raise a UserError if there are differences, which the message lists.
    """
    rows = [
        f"{name}: {show(old)} there, {show(new)} given"
        for name, old, new in diff(began, config, free)
    ] + [
        f"{name}: fingerprint {str(there or 'none')[:12]} there, {str(given or 'none')[:12]} given"
        for name, (there, given) in fingerprints.items()
        if there != given
    ]
    if rows:
        raise UserError(
            f"{work.name} contains a run with another configuration or data ({'; '.join(rows)}). "
            "To continue that run, give its configuration and data; to start another run, choose "
            "another work directory"
        )


def show(value: Any) -> str:
    """Format a value of a configuration for messages."""
    return "nothing" if value is None else json.dumps(value)


def begin_workdir(
    workdir: Path,
    config: Any,
    tokenizer_files: Path | None,
    ancestors: Callable[[], list[dict[str, Any]]] | None = None,
    **record: Any,
) -> None:
    """Write config.json and the tokenizer, in process 0, and leave no incomplete file.

    `ancestors` returns records of the models and data that the run is made from. If it is None, the
    records in an existing config.json stay. Arguments in `record` become entries of config.json.
    The random entry `run_id` survives restarts and identifies the run for trackers. Raise
    a UserError if the work directory cannot be written, or the tokenizer does not match its corpus;
    processes other than 0 then raise an ElsewhereError.
    """
    version = {"bert_jax": bert_jax.__version__, "format": RUN_FORMAT}
    record = {**version, "config": to_dict(config), **record}

    def write() -> None:
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            file = workdir / "config.json"
            before = read_json_object(file, max_bytes=MAX_CONFIG_BYTES) if file.exists() else {}
            found = ancestors() if ancestors else before.get(RECORD)
            record["run_id"] = before.get("run_id") or secrets.token_hex(4)
            for leftover in workdir.glob("loss.png.tmp-*"):  # left by a run killed while drawing
                leftover.unlink(missing_ok=True)
            if tokenizer_files is not None:
                given = load_tokenizer(tokenizer_files)
                if record.setdefault("tokenizer", given.fingerprint) != given.fingerprint:
                    raise UserError(
                        f"{tokenizer_files} is not the tokenizer of its corpus: it is damaged or "
                        "was changed. Copy it again, or build the corpus again"
                    )
                if not (workdir / "tokenizer").exists():
                    given.save(workdir / "tokenizer")
            content = json.dumps(record | {RECORD: found} if found else record, indent=2) + "\n"
            replace_file(file, content.encode())
        except OSError as error:
            raise UserError(f"cannot write to the work directory {workdir}: {error}") from error

    by_first(write)
