"""What fine-tuning starts from: an encoder and its tokenizer, from one of three kinds of directory.

initial = load_initial("work/base")       # of `bert-jax pretrain` or `bert-jax finetune`
initial = load_initial("bert-base-cased")  # downloaded, with model.safetensors
params = init_task_params(initial.config, head, key, encoder=initial.encoder)
"""

import dataclasses
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.convert.huggingface_config import model_config_from_huggingface
from bert_jax.convert.huggingface_names import encoder_from_huggingface
from bert_jax.data.tokenizer import Tokenizer, load_tokenizer
from bert_jax.errors import UserError
from bert_jax.finetune.workdir import is_finetuning, load_finetuned
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import Params
from bert_jax.training.pretrained import load_params
from bert_jax.training.remote import WorkDir, open_workdir, scheme
from bert_jax.untrusted.json_file import read_json_object
from bert_jax.untrusted.safetensors_file import open_safetensors

_MAX_CONFIG_BYTES = 1 << 20
_MAX_INDEX_BYTES = 1 << 24
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHER_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_KINDS = (
    "the work directory of a `bert-jax pretrain` or `bert-jax finetune` run, or a directory in "
    f"Hugging Face's format (config.json, {_WEIGHTS} and the tokenizer's files)"
)

_log = logging.getLogger("bert_jax")


@dataclass(frozen=True, eq=False)
class InitialModel:
    """A pretrained encoder."""

    config: ModelConfig
    """As the source says. `attention_impl` is auto: it belonged to the machine of the training."""
    encoder: Params
    """For `init_task_params`; without the entry `pooler` where the source has none."""
    tokenizer: Tokenizer
    tokenizer_files: Path
    """What `load_tokenizer` reads. A directory of Hugging Face's holds other files beside it."""
    name: str
    """For messages: the directory, and the step or the class."""
    has_pooler: bool


def load_initial(path: str | Path) -> InitialModel:
    """The encoder in a directory, and its tokenizer. Changes nothing on disk, downloads no model.

    Args:
        path: A work directory of `bert-jax pretrain` (the newest intact checkpoint) or of
            `bert-jax finetune` (the best model), here or in a bucket; or a local directory as
            Transformers' `save_pretrained` writes it, of a BERT with any head or none.

    Raises:
        UserError: None of these is there, or it is not sound: says all that does not fit.
        DamagedCheckpointError: A work directory that holds checkpoints, of which none is intact.
    """
    if scheme(path) is None:
        directory = Path(path)
        if not directory.is_dir():
            what = "is a file" if directory.exists() else "does not exist"
            raise UserError(
                f"{path} {what}; give {_KINDS}. Nothing is downloaded: a model of the Hugging Face "
                f"Hub is fetched with `hf download NAME --local-dir DIR`"
            )
        config = directory / "config.json"
        if config.is_file():
            found = read_json_object(config, max_bytes=_MAX_CONFIG_BYTES)
            if "bert_jax" not in found:  # the version of what wrote it
                return _from_huggingface(directory, found)
        elif not (directory / "checkpoints").is_dir():
            raise UserError(f"{path} has no config.json; give {_KINDS}")
    place = open_workdir(path)
    return _from_finetuned(place) if is_finetuning(place.local) else _from_pretrained(place)


def _from_pretrained(place: WorkDir) -> InitialModel:
    loaded = load_params(place.name)
    model = loaded.config.model
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(ModelConfig)}
    return InitialModel(
        config=ModelConfig(**{**fields, "attention_impl": "auto"}),
        encoder=loaded.params["encoder"],
        tokenizer=_tokenizer(loaded.tokenizer, model.vocab_size),
        tokenizer_files=loaded.tokenizer,
        name=f"{place.name}, step {loaded.step}",
        has_pooler=True,
    )


def _from_finetuned(place: WorkDir) -> InitialModel:
    loaded = load_finetuned(place.name)
    return InitialModel(
        config=dataclasses.replace(loaded.model, attention_impl="auto"),
        encoder=loaded.params["encoder"],
        tokenizer=loaded.tokenizer,
        tokenizer_files=loaded.tokenizer_files,
        name=f"{place.name}, fine-tuned, step {loaded.step}",
        has_pooler=True,
    )


def _from_huggingface(directory: Path, found: dict[str, Any]) -> InitialModel:
    config = model_config_from_huggingface(found, where=f"{directory / 'config.json'}")
    tokenizer = _tokenizer(directory, config.vocab_size)
    model_class = _model_class(found)
    arrays = _read_weights(directory, model_class)
    try:
        encoder, has_pooler = encoder_from_huggingface(arrays, config)
    except UserError as error:
        raise UserError(f"{directory}: {error}") from error
    if not has_pooler:
        _log.warning(
            "%s has no pooler, which classification and regression read: theirs begins at random. "
            "Tagging and span QA do not read it", directory,
        )  # fmt: skip
    return InitialModel(
        config=config,
        encoder=encoder,
        tokenizer=tokenizer,
        tokenizer_files=directory,
        name=f"{directory}, {model_class}",
        has_pooler=has_pooler,
    )


def _model_class(found: dict[str, Any]) -> str:
    """Their class that wrote it. It becomes part of a command: only a plain name is taken."""
    classes = found.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    return name if isinstance(name, str) and re.fullmatch(r"Bert\w{1,60}", name) else "AutoModel"


def _tokenizer(files: Path, vocab_size: int) -> Tokenizer:
    tokenizer = load_tokenizer(files)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{files}: the tokenizer has {tokenizer.vocab_size:,} tokens and the model has "
            f"embeddings for {vocab_size:,}; they are not of one model"
        )
    return tokenizer


def _read_weights(directory: Path, model_class: str) -> dict[str, np.ndarray]:
    """Every tensor by name; views of the mapped files."""
    single, index = directory / _WEIGHTS, directory / _INDEX
    if single.is_file() and index.is_file():
        raise UserError(
            f"{directory} has both {_WEIGHTS} and {_INDEX}, which may hold different weights; "
            "remove the one that is not meant"
        )
    if single.is_file():
        return {name: tensor.array for name, tensor in open_safetensors(single).items()}
    if index.is_file():
        return _read_shards(directory, index)
    for name in _OTHER_WEIGHTS:
        if (directory / name).exists():
            raise UserError(
                f"{directory} has its weights in {name} alone, which is not read: {_WEIGHTS} is "
                "needed. Where you trust that file, convert it with Transformers, "
                f"{model_class}.from_pretrained({str(directory)!r}).save_pretrained(NEW), and copy "
                "the tokenizer's files to NEW"
            )
    raise UserError(f"{directory} has no weights: neither {_WEIGHTS} nor {_INDEX} is there")


def _read_shards(directory: Path, index: Path) -> dict[str, np.ndarray]:
    files = read_json_object(index, max_bytes=_MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(files, Mapping) or not files:
        raise UserError(f"{index}: weight_map must be an object from tensor to file")
    found: dict[str, np.ndarray] = {}
    wrong: list[str] = []
    by_file: dict[str, set[str]] = {}
    for name, file in files.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", file):
            raise UserError(
                f"{index}: the tensor {name[:80]!r} is in {file!r:.80}; a .safetensors file of the "
                "same directory is needed"
            )
        by_file.setdefault(file, set()).add(name)
    for file, names in sorted(by_file.items()):
        tensors = open_safetensors(directory / file)
        wrong += [f"{name[:80]!r} is not in {file}" for name in sorted(names - tensors.keys())]
        wrong += [f"{name[:80]!r} is in {file} and not in the index as such"
                  for name in sorted(tensors.keys() - names)]  # fmt: skip
        found |= {name: tensors[name].array for name in names & tensors.keys()}
    if wrong:
        raise UserError(f"{index} does not describe its files: {'; '.join(wrong[:20])}")
    return found
