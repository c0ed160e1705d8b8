"""Reading of a model from a directory that bert_jax or other software wrote."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.artefacts.formats import peft, sentence_transformers
from bert_jax.artefacts.formats.families import FAMILIES, is_read, unread
from bert_jax.artefacts.formats.form import Form, form_of
from bert_jax.artefacts.formats.huggingface_files import (
    MAX_CONFIG_BYTES,
    PRETRAINING_HEADS,
    UNTRAINED,
    WEIGHTS,
    Reading,
    TaskOutputs,
    marks_second,
    model_class,
    model_max_length,
    read_weights,
)
from bert_jax.artefacts.formats.model_config import config_from_huggingface
from bert_jax.artefacts.formats.translators import FAMILIES as TRANSLATORS
from bert_jax.artefacts.saved.model import Origin, SavedModel, merged_params
from bert_jax.config.mapping import build
from bert_jax.errors import UserError
from bert_jax.files.checks import checked
from bert_jax.files.remote import WorkDir, open_workdir
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.files.urls import scheme
from bert_jax.model.config import ModelConfig
from bert_jax.model.embedding import EmbeddingConfig
from bert_jax.model.lora import LoraConfig
from bert_jax.model.task_heads import TaskHeadConfig
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.tokenizer import Tokenizer

_log = logging.getLogger("bert_jax")

_KINDS = (
    "the work directory of a `bert-jax pretrain` or `bert-jax finetune` run, or a directory in "
    f"Hugging Face's format (config.json, {WEIGHTS} and the tokenizer's files)"
)


def read_model(path: str | Path, *, encoder_only: bool = False, part: str = "") -> SavedModel:
    """Read the model in a directory, with its tokenizer; change and download nothing.

    Raise a UserError if there is no model, or a malformed one; the message lists all faults. Raise
    a DamagedCheckpointError if a work directory has checkpoints, but no intact one.

    Args:
        path: A work directory of `bert-jax pretrain` (newest intact checkpoint) or
            `bert-jax finetune` (best model), local or in a bucket. Or a local directory: an output
            of Transformers' `save_pretrained`, an encoder in the layout of sentence-transformers,
            or a PEFT adapter whose base is local too. Classes of Transformers that can be read are
            BERT, ELECTRA and the modern families of `formats.families` (with any head or none),
            DistilBERT classifiers, and the translation classes of `formats.translators`. Heads are
            ignored unless they are for pretraining, classification, tagging or span QA.
        encoder_only: Whether to ignore the heads in Hugging Face's format, even damaged ones. The
            transform that all heads of a modern family share is still read.
        part: Model of a pretraining run with several, such as the generator; by default the first.
    """
    saved = None if scheme(path) is not None else _from_files(Path(path), encoder_only)
    if saved is None:
        from bert_jax.artefacts.saved.runs import is_finetuning  # importing Orbax takes 0.5 s

        place = open_workdir(path)
        if not is_finetuning(place.local):
            return _from_pretrained(place, part)
        saved = in_units(read_finetuned(path))
    if part:
        raise UserError(f"{path} has no part {part!r}; it holds a single model")
    return saved


def _from_files(directory: Path, encoder_only: bool) -> SavedModel | None:
    """Read a model in a local directory; return None if it is a run's work directory."""
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise UserError(
            f"{directory} {what}; give {_KINDS}. Nothing is downloaded: a model of the Hugging "
            "Face Hub is fetched with `hf download NAME --local-dir DIR`"
        )
    with checked(directory):
        if sentence_transformers.is_sentence_model(directory):
            form = sentence_transformers.read_sentence_files(directory)
            for note in form.notes:
                _log.warning("%s: %s", directory, note)
            found = read_json_object(form.model / "config.json", max_bytes=MAX_CONFIG_BYTES)
            return with_vectors(_from_huggingface(form.model, found, encoder_only), form)
        if (directory / "config.json").is_file():
            found = read_json_object(directory / "config.json", max_bytes=MAX_CONFIG_BYTES)
            if "bert_jax" not in found:  # the field with our version, which only our runs write
                return _from_huggingface(directory, found, encoder_only)
        elif (directory / peft.CONFIG).is_file():
            return read_adapted(peft.read_adapter(directory), encoder_only=encoder_only)
        elif not (directory / "checkpoints").is_dir():
            raise UserError(f"{directory} has no config.json; give {_KINDS}")
    return None


def _from_pretrained(place: WorkDir, part: str) -> SavedModel:
    from bert_jax.artefacts.saved.runs import pretrained_checkpoint
    from bert_jax.objectives.config import ObjectiveConfig

    restored = pretrained_checkpoint(place.name)
    record = restored.record
    where = f"checkpoint {restored.step}"
    config = build(ModelConfig, record.config["model"], f"{where}: model")
    objective = build(ObjectiveConfig, record.config.get("objective", {}), f"{where}: objective")
    models = objective.models(config, restored.state)
    part = part or next(iter(models))
    if part not in models:
        there = " and ".join(models) if len(models) > 1 else "a single model"
        raise UserError(f"{place.name} has no part {part!r}; it holds {there}")
    config, params = models[part]
    config = dataclasses.replace(config, attention_impl="auto")
    tokenizer, files = _run_tokenizer(place)
    _check_vocabulary(tokenizer, config.vocab_size, files)
    name = f"{place.name}, {f'{part}, ' if len(models) > 1 else ''}step {restored.step}"
    return SavedModel(
        config, params, None, tokenizer, files, config.num_positions, name,
        Origin("pretrain", restored.step, record.config, record.metrics),
        network=objective.network(config),
    )  # fmt: skip


def _run_tokenizer(place: WorkDir) -> tuple[Tokenizer, Path]:
    """Read a run's tokenizer, and return it with its directory; raise UserError if it changed."""
    files, config = place.local / "tokenizer", place.local / "config.json"
    tokenizer = load_tokenizer(files)
    run = read_json_object(config, max_bytes=MAX_CONFIG_BYTES) if config.is_file() else {}
    if run.get("tokenizer", tokenizer.fingerprint) != tokenizer.fingerprint:
        raise UserError(
            f"{place.name}/tokenizer differs from its fingerprint in config.json: it is damaged or "
            "was changed. Copy this directory from the corpus or from another copy of the run"
        )
    return tokenizer, files


def read_finetuned(workdir: str | Path) -> SavedModel:
    """Read the best model of a fine-tuning run, before its outputs are converted by `in_units`."""
    from bert_jax.artefacts.saved.runs import finetuned_checkpoint, read_reports
    from bert_jax.tasks.config import TaskConfig
    from bert_jax.tasks.opening import restore_task

    restored = finetuned_checkpoint(workdir)
    place = open_workdir(workdir)
    extra, config = restored.record.extra, restored.record.config
    where = f"{workdir}: checkpoint {restored.step}"
    model = build(ModelConfig, extra["model"], where)
    tokenizer, files = _run_tokenizer(place)
    task = restore_task(extra["task"], tokenizer)
    params, adapter, outputs, embedding = restored.state, None, None, None
    if lora := extra.get("lora"):
        params, adapter = merged_params(params, build(LoraConfig, lora, where))
    if task.objective == "embedding":
        embedding = build(EmbeddingConfig, extra["head"], where)
    else:
        head, reading = build(TaskHeadConfig, extra["head"], where), None
        if task.objective == "tags":
            reading = Reading(task.config.tag_stride)
        elif task.objective == "span":
            limits = task.config.max_question, task.config.max_answer_tokens
            threshold = extra["scores"].get("null_threshold")
            reading = Reading(task.config.windows.stride, *limits, threshold)
        labels = tuple(task.describe()["learned"]["labels"])
        thresholds, long = task.thresholds(extra["scores"]), task.config.long_texts
        outputs = TaskOutputs(head, task.predicts, labels, thresholds, long, reading)
    length = build(TaskConfig, config["task"], f"{where}: task").length
    reports = read_reports(place.local, extra["member"])
    return SavedModel(
        dataclasses.replace(model, attention_impl="auto"), params, outputs, tokenizer, files,
        min(length, model.num_positions), f"{place.name}, fine-tuned, step {restored.step}",
        Origin("finetune", restored.step, config, extra["scores"], task, reports),
        embedding=embedding, adapter=adapter,
    )  # fmt: skip


def in_units(saved: SavedModel) -> SavedModel:
    """Fold the scaling of scores and the temperature into the head's weights.

    A head is trained to predict (score - mean) / deviation, or logits before the division by a
    temperature. The new head predicts the scores themselves, or the divided logits.
    """
    task = saved.origin.task
    if task is None:
        return saved
    mean, deviation = map(np.float32, task.units(saved.origin.metrics))
    if (mean, deviation) == (0, 1):
        return saved
    kernel, bias = (np.asarray(saved.params["head"][name]) for name in ("kernel", "bias"))
    head = {"kernel": kernel * deviation, "bias": bias * deviation + mean}
    return dataclasses.replace(saved, params={**saved.params, "head": head})


def read_adapted(adapter: peft.Adapter, *, encoder_only: bool = False) -> SavedModel:
    """Read the base of an adapter and apply the adapter to it; see `read_model`."""
    with checked(adapter.base):
        saved = _from_huggingface(adapter.base, adapter.config, encoder_only, adapter)
    config, length = saved.config, model_max_length(adapter.directory) or saved.max_length
    # Rotary positions have no table, so training on longer rows raises their number. PEFT writes
    # the tokenizer of the base again, whose length may be larger than the base's positions.
    if config.positions == "rope" and length != model_max_length(adapter.base):
        config = dataclasses.replace(config, num_positions=max(length, config.num_positions))
    saved = dataclasses.replace(saved, config=config, max_length=min(length, config.num_positions))
    return saved if saved.outputs is None else saved.without(PRETRAINING_HEADS)


def _from_huggingface(
    directory: Path, found: dict[str, Any], encoder_only: bool, adapter: peft.Adapter | None = None
) -> SavedModel:
    where, made_by = f"{directory / 'config.json'}", model_class(found)
    if adapter is None:
        peft.refuse_beside(directory)
    if found.get("model_type") in TRANSLATORS:
        return read_translator(directory, found, made_by, where)
    if not is_read(found):
        raise unread(found, where=where)
    config_from_huggingface(found, where=where)  # report a wrong config before a missing file
    tokenizer = load_tokenizer(directory)
    arrays = read_weights(directory, made_by)
    arrays = arrays if adapter is None else adapter.applied(arrays)
    form = form_of(found, arrays, where=where, marked=marks_second(directory, found))
    name = f"{directory if adapter is None else adapter.directory}, {made_by}"
    adapted = adapter is not None
    return saved_from(
        form, tokenizer, directory, name=name, encoder_only=encoder_only, adapted=adapted
    )


def with_vectors(saved: SavedModel, form: sentence_transformers.SentenceForm) -> SavedModel:
    """Add a definition of text vectors to an encoder; raise UserError if the sizes do not fit."""
    config = saved.config
    if form.width != config.hidden_dim and not form.embedding.is_sparse:
        given = f"{form.width!r:.40}, but the encoder has {config.hidden_dim}"
        raise UserError(f"{form.model}: the pooling has width {given}")
    params = saved.params | ({"pooling": {"maps": form.maps}} if form.maps else {})
    if form.queries is not None:
        weight = read_weights(form.queries, "SparseStaticEmbedding").get("weight")
        if weight is None or weight.shape != (config.vocab_size,):
            raise UserError(
                f"{form.queries / WEIGHTS} needs the tensor `weight` with a number for each of the "
                f"{config.vocab_size:,} tokens"
            )
        params["queries"] = weight.astype(np.float32)
        ids = saved.tokenizer.special_ids
        params["queries"][[ids.cls, ids.sep]] = 0  # such queries are read without these tokens
    length = min(form.max_length or config.num_positions, config.num_positions)
    saved = dataclasses.replace(saved, params=params, embedding=form.embedding, max_length=length)
    form.embedding.check_width(saved.vector_width())
    return saved


def read_translator(directory: Path, found: dict[str, Any], made_by: str, where: str) -> SavedModel:
    """Read a model that translates, of the class `made_by`; raise a UserError for all faults.

    `found` is the content of `config.json`, which `where` names in messages.
    """
    tokenizer = load_tokenizer(directory)
    family, arrays = TRANSLATORS[found["model_type"]], read_weights(directory, made_by)
    network = family.network(found, arrays, where)
    _check_vocabulary(tokenizer, network.model.vocab_size, directory)
    special = tokenizer.special_ids
    for name, role, wanted in (
        ("decoder_start_token_id", "cls", special.cls), ("eos_token_id", "sep", special.sep)
    ):  # fmt: skip
        if found.get(name) != wanted:
            raise UserError(
                f"{where}: {name} is {found.get(name)!r:.80}; it must be {wanted}, the tokenizer's "
                f"{role} token, because targets begin with cls and end with sep"
            )
    search = directory / "generation_config.json"
    settings = read_json_object(search, max_bytes=MAX_CONFIG_BYTES) if search.is_file() else found
    if (forced := settings.get("forced_eos_token_id")) not in (None, special.sep):
        raise UserError(
            f"{search if settings is not found else where}: forced_eos_token_id is {forced!r:.80}; "
            f"it must be null, or {special.sep}, the tokenizer's sep token"
        )
    return SavedModel(
        network.model, family.params(network, arrays), None, tokenizer, directory,
        network.model.num_positions, f"{directory}, {made_by}", Origin("huggingface", config=found),
        network=dataclasses.replace(network, forces_end=forced is not None),
    )  # fmt: skip


def saved_from(
    form: Form, tokenizer: Tokenizer, files: Path, *, name: str, encoder_only: bool = False,
    adapted: bool = False,
) -> SavedModel:  # fmt: skip
    """Convert a `Form` to a `SavedModel`; a UserError lists everything that does not fit.

    If the model is `adapted`, settings for the head of the base in `files` are ignored.
    """
    config = form.model
    scoring = {} if encoder_only or adapted else sentence_transformers.scoring_fields(files)
    limit = scoring.pop("max_seq_length", None) or model_max_length(files) or config.num_positions
    form = dataclasses.replace(form, config=form.config | scoring)
    _check_vocabulary(tokenizer, config.vocab_size, files)
    pad, found = tokenizer.special_ids.pad, {**form.family.defaults, **form.config}
    if form.family.first_position is not None and (given := found["pad_token_id"]) != pad:
        raise UserError(f"{files}: pad_token_id is {given!r:.80}, but the tokenizer's pad is {pad}")
    try:
        outputs = None if encoder_only else form.outputs()
        head = None if outputs is None else outputs.head
        params = form.params(head, pretraining=not encoder_only)
    except UserError as error:
        family = "" if form.family is FAMILIES["bert"] else f" ({form.family.name})"
        raise UserError(f"{files}{family}: {error}") from error
    length = min(limit, config.num_positions)
    origin = Origin("huggingface", config=form.config)
    saved = SavedModel(config, params, outputs, tokenizer, files, length, name, origin)
    # Transformers keeps the field when it trains a new head; trust the field only without a head.
    untrained, bare = form.config.get(UNTRAINED), form.family.task_of(form.config) == "Model"
    marked = bare and isinstance(untrained, list) and "pooler" in untrained
    return saved.without({"pooler"}) if marked else saved


def _check_vocabulary(tokenizer: Tokenizer, vocab_size: int, files: Path) -> None:
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{files}: the tokenizer has {tokenizer.vocab_size:,} tokens, but the model has "
            f"embeddings for {vocab_size:,}; the two belong to different models"
        )
