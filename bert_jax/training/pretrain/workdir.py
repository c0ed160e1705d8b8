"""The work directory of a pretraining run: its creation, and the check that it fits the run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_jax.artefacts.saved.ancestors import corpus_entry
from bert_jax.artefacts.saved.lineage import ancestor_entry
from bert_jax.artefacts.saved.runs import read_record
from bert_jax.config.mapping import build
from bert_jax.data.mixture import Mixture
from bert_jax.data.store import TokenStore
from bert_jax.distributed.checkpoint.agreement import by_first
from bert_jax.errors import UserError
from bert_jax.files.remote import WorkDir
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.training.pretrain.config import FREE_FIELDS, PretrainConfig
from bert_jax.training.workdir import begin_workdir, record_there, refuse_other_run


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
        UserError: The run differs; the message lists the fields with the run's value and the new
            one.
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
        # Corpora may move, and a batch may be computed in other parts.
        free = [
            *FREE_FIELDS,
            *(f"data.mixture[{n}].corpus" for n in range(len(config.data.mixture))),
        ]
        for number in range(len(config.training.phases)):
            name = f"training.phases[{number}].corpus"
            free += [name, f"training.phases[{number}].accumulation"]
            mixture = config.training.phases[number].mixture
            free += [f"{name[:-7]}.mixture[{n}].corpus" for n in range(len(mixture))]
            there = recorded_corpus(record, number)
            given = (stores or {}).get(number, store).fingerprint
            if (there, given) != (record.get("corpus"), store.fingerprint):
                corpora[name] = there, given
        refuse_other_run(work, record, config, free, corpora)


def recorded_corpus(record: Mapping[str, Any], phase: int) -> Any:
    """Return the fingerprint of the training text of a phase, from a run's record."""
    return record.get("phase_corpora", {}).get(str(phase), record.get("corpus"))


def _check_tokenizer(workdir: Path, store: TokenStore) -> None:
    """Refuse a tokenizer that cannot be copied, or another tokenizer in the copy's place."""
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
        config, store, stores, teacher: As in `check_workdir`. branch: Checkpoint that the run
        branches from. has_saved: Whether the run continues its own checkpoint; the recorded
        ancestors then stay. init_step: Updates of the initial model; 0: not a checkpoint.
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
        if config.distil.teacher:
            found.append(ancestor_entry("distil.teacher", config.distil.teacher))
        return found

    begin_workdir(workdir, config, files, None if has_saved else ancestors, **record)


def _texts(
    config: PretrainConfig, store: TokenStore, stores: Mapping[int, TokenStore | Mixture]
) -> dict[str, tuple[str, TokenStore]]:
    """Return name and store of each phase's training text, by the field that names it."""
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
