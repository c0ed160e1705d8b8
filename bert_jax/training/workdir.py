"""The work directory of a run: what is in it, and whether it belongs to this run.

config.json  metrics.jsonl  events.jsonl  goodput.json  tensorboard/  checkpoints/  tokenizer/
loss.png, of pretraining alone
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import bert_jax
from bert_jax.checkpoint.agreement import by_first
from bert_jax.config.mapping import build, diff, to_dict
from bert_jax.data.mixture import Mixture
from bert_jax.data.store import TokenStore
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir
from bert_jax.files.staging import replace_file
from bert_jax.formats.huggingface_files import MAX_CONFIG_BYTES
from bert_jax.objectives.config import DistilledMaskedLMConfig
from bert_jax.saved.ancestors import RECORD, corpus_entry
from bert_jax.saved.lineage import ancestor_entry
from bert_jax.saved.runs import Kind, read_record
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.training.config import FREE_FIELDS, PretrainConfig
from bert_jax.untrusted.json_file import read_json_object


def read_config(workdir: Path) -> PretrainConfig:
    """Return the configuration of the pretraining run in a work directory.

    Raises:
        UserError: No run there, or its configuration cannot be read.
    """
    record = read_record(workdir, "pretrain")
    return build(PretrainConfig, record["config"], where=str(workdir / "config.json"))


def check_workdir(
    work: WorkDir,
    config: PretrainConfig,
    store: TokenStore,
    stores: Mapping[int, TokenStore | Mixture] | None = None,
    teacher: str = "",
) -> None:
    """Refuse a work directory of another run, or with another tokenizer; change nothing.

    Args:
        work: Work directory.
        config: Configuration of this start.
        store: Training corpus.
        stores: Corpora of phases that have their own, by the number of the phase.
        teacher: Digest of the teacher's parameters; empty without a teacher.

    Raises:
        UserError: Lists the fields that differ, with the run's value and the one given.
    """

    def look() -> dict[str, Any] | None:
        record = record_there(work, "pretrain")
        if record is not None and "average" in record:
            raise UserError(
                f"{work.name} holds an average of checkpoints, which is no run that can go on. To "
                f"train it on, choose another work directory and --config.init={work.name}"
            )
        if record is None:
            _check_tokenizer(work.local, store)
        return record

    if record := by_first(look):
        corpora = {"the training corpus": (record.get("corpus"), store.fingerprint)}
        if teacher:
            corpora["the teacher"] = record.get("teacher"), teacher
        # They may move.
        places = [f"data.mixture[{n}].corpus" for n in range(len(config.data.mixture))]
        for number in range(len(config.training.phases)):
            name = f"training.phases[{number}].corpus"
            places.append(name)
            mixture = config.training.phases[number].mixture
            places += [f"{name[:-7]}.mixture[{n}].corpus" for n in range(len(mixture))]
            there = recorded_corpus(record, number)
            given = (stores or {}).get(number, store).fingerprint
            if (there, given) != (record.get("corpus"), store.fingerprint):
                corpora[name] = there, given
        refuse_other_run(work, record, config, (*FREE_FIELDS, *places), corpora)


def recorded_corpus(record: Mapping[str, Any], phase: int) -> Any:
    """Return the fingerprint of the training text of a phase, from a run's record."""
    return record.get("phase_corpora", {}).get(str(phase), record.get("corpus"))


def record_there(work: WorkDir, kind: Kind) -> dict[str, Any] | None:
    """Return the record of the run that was begun in a work directory, if any.

    Raises:
        UserError: A run of another kind, or checkpoints without a record.
    """
    if (work.local / "config.json").exists():
        return read_record(work.local, kind)
    if work.checkpoints.exists():
        raise UserError(
            f"{work.name} has checkpoints and no config.json that says which run they belong to. "
            "Choose another work directory, or put config.json back"
        )
    return None


def refuse_other_run(
    work: WorkDir,
    record: Mapping[str, Any],
    config: Any,
    free: Sequence[str],
    fingerprints: Mapping[str, tuple[Any, str]],
) -> None:
    """Refuse to continue the run of `record` with another configuration or other data.

    A restart may change the fields `free`. Fingerprints, by name of what they belong to, are those
    in the record and of this start.

    Raises:
        UserError: There are differences.
    """
    began = build(type(config), record["config"], where=str(work.local / "config.json"))
    rows = [
        f"{name}: {show(old)} there, {show(new)} given"
        for name, old, new in diff(began, config, free)
    ] + [
        f"{name}: fingerprint {str(there)[:12]} there, {given[:12]} given"
        for name, (there, given) in fingerprints.items()
        if there != given
    ]
    if rows:
        raise UserError(
            f"{work.name} belongs to a run of another configuration ({'; '.join(rows)}). "
            "To continue that run, give its configuration; to start another, choose another work "
            "directory"
        )


def show(value: Any) -> str:
    """Return a value of a configuration as messages have it."""
    return "nothing" if value is None else json.dumps(value)


def _check_tokenizer(workdir: Path, store: TokenStore) -> None:
    """Refuse a tokenizer that cannot be copied, or one that would be taken for the copy."""
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


def prepare_workdir(
    workdir: Path,
    config: PretrainConfig,
    store: TokenStore,
    stores: Mapping[int, TokenStore | Mixture] | None = None,
    branch: Mapping[str, Any] | None = None,
    teacher: str = "",
    *,
    has_saved: bool = False,
    init_step: int = 0,
) -> None:
    """Begin a pretraining run in its work directory.

    Args:
        workdir: Local work directory.
        config, store, stores, teacher: Those of `check_workdir`.
        branch: Checkpoint that the run branches from.
        has_saved: Whether the run goes on from a checkpoint of its own; its ancestors stay.
        init_step: Updates of the initial model; 0: not a checkpoint.
    """
    files = None if store.path is None else store.path / "tokenizer"
    record: dict[str, Any] = {"corpus": store.fingerprint, "tokenizer": store.tokenizer_fingerprint}
    if stores:
        record["phase_corpora"] = {str(n): each.fingerprint for n, each in stores.items()}
    if branch:
        record["branch"] = branch
    if teacher:
        record["teacher"] = teacher

    def ancestors() -> list[dict[str, Any]]:
        texts = _texts(config, store, stores or {})
        found = [corpus_entry(role, *text) for role, text in texts.items() if text[0]]
        if branch:
            found.append(ancestor_entry("branch", branch["workdir"], branch["step"]))
        elif config.init:
            found.append(ancestor_entry("init", config.init, init_step))
        if isinstance(config.objective, DistilledMaskedLMConfig):
            found.append(ancestor_entry("objective.teacher", config.objective.teacher))
        return found

    begin_workdir(workdir, config, files, None if has_saved else ancestors, **record)


def _texts(
    config: PretrainConfig, store: TokenStore, stores: Mapping[int, TokenStore | Mixture]
) -> dict[str, tuple[str, TokenStore]]:
    """Return name and store of the training text of all phases, by the field that names it."""
    texts = {"data.corpus": (config.data.corpus, store)}
    for number, text in stores.items():
        phase, where = config.training.phases[number], f"training.phases[{number}]"
        if isinstance(text, Mixture):
            where = f"{where}.mixture" if phase.mixture else "data.mixture"
            parts = enumerate(zip(text.names, text.stores, strict=True))
            texts |= {f"{where}[{n}].corpus": part for n, part in parts}
        else:
            texts[f"{where}.corpus"] = phase.corpus, text
    return texts


def begin_workdir(
    workdir: Path,
    config: Any,
    tokenizer_files: Path | None,
    ancestors: Callable[[], list[dict[str, Any]]] | None = None,
    **record: Any,
) -> None:
    """Write config.json and the files of the tokenizer alone, in process 0.

    Each appears complete or not at all. Without `ancestors`, which makes their records, those that
    config.json has stay.

    Raises:
        UserError: The work directory cannot be written.
        ElsewhereError: The same, in the other processes.
    """
    record = {"bert_jax": bert_jax.__version__, "config": to_dict(config), **record}

    def write() -> None:
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            file = workdir / "config.json"
            found = ancestors() if ancestors else _recorded_ancestors(file)
            for leftover in workdir.glob("loss.png.tmp-*"):  # of a run killed while drawing
                leftover.unlink(missing_ok=True)
            if tokenizer_files is not None:
                given = load_tokenizer(tokenizer_files)
                if record.setdefault("tokenizer", given.fingerprint) != given.fingerprint:
                    raise UserError(
                        f"{tokenizer_files} is not the tokenizer of its corpus: damaged or "
                        "changed. Copy it again, or build the corpus again"
                    )
                if not (workdir / "tokenizer").exists():
                    given.save(workdir / "tokenizer")
            content = json.dumps(record | {RECORD: found} if found else record, indent=2) + "\n"
            replace_file(file, content.encode())
        except OSError as error:
            raise UserError(f"cannot write to the work directory {workdir}: {error}") from error

    by_first(write)


def _recorded_ancestors(file: Path) -> Any:
    if not file.exists():
        return None
    return read_json_object(file, max_bytes=MAX_CONFIG_BYTES).get(RECORD)
