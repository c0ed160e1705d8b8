"""Files of a directory in Hugging Face's format: configuration and weights, never pickled."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.errors import UserError
from bert_jax.files.untrusted.json_file import read_json_object, short
from bert_jax.files.untrusted.safetensors_file import read_safetensors

MAX_CONFIG_BYTES = 1 << 20
_MAX_INDEX_BYTES = 1 << 24
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHER_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def model_class(found: Mapping[str, Any]) -> str:
    """Return the class that wrote a `config.json`; "AutoModel" if the file does not say.

    Only a plain name is accepted, because messages use the class in a command.
    """
    classes = found.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    plain = isinstance(name, str) and re.fullmatch(r"[A-Z]\w{1,60}", name)
    return str(name) if plain else "AutoModel"


def model_max_length(directory: Path) -> int | None:
    """Return the largest row length that a tokenizer's files allow; None if there is no limit."""
    path = directory / "tokenizer_config.json"
    fields = read_json_object(path, max_bytes=_MAX_INDEX_BYTES) if path.is_file() else {}
    return row_length(fields, "model_max_length", path)


def row_length(fields: Mapping[str, Any], name: str, where: Path) -> int | None:
    """Return a field with a row length; None if it is missing or beyond any limit."""
    length = fields.get(name)
    if length is None or (isinstance(length, int | float) and length > 1 << 24):
        return None  # Transformers writes 1e30 for no limit
    if type(length) is not int or length < 8:
        raise UserError(f"{where}: {name} is {short(length)}; it must be at least 8")
    return length


def read_weights(directory: Path, made_by: str) -> dict[str, np.ndarray]:
    """Map every tensor by name, from one file or an index's shards, without copying.

    The class `made_by` appears in the advice on converting weights in another format.

    Raises:
        UserError: There are no such weights, two sets of them, or malformed files.
    """
    single, index = directory / WEIGHTS, directory / INDEX
    if single.is_file() and index.is_file():
        raise UserError(f"{directory} has both {WEIGHTS} and {INDEX}; remove the wrong one")
    if single.is_file():
        return read_safetensors(single)
    if index.is_file():
        return _read_shards(directory, index)
    for name in _OTHER_WEIGHTS:
        if (directory / name).exists():
            raise UserError(
                f"{directory} has only the weights {name}, which are not read: {WEIGHTS} is "
                "needed. If you trust the file, convert it with Transformers, "
                f"{made_by}.from_pretrained({str(directory)!r}).save_pretrained(NEW), and copy "
                "the tokenizer's files to NEW"
            )
    raise UserError(f"{directory} has no weights: neither {WEIGHTS} nor {INDEX} exists")


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
        tensors = read_safetensors(directory / file)
        wrong += [f"{name[:80]!r} is not in {file}" for name in sorted(names - tensors.keys())]
        wrong += [f"{name[:80]!r} is in {file}, but not according to the index"
                  for name in sorted(tensors.keys() - names)]  # fmt: skip
        found |= tensors
    if wrong:
        raise UserError(f"{index} does not describe its files: {'; '.join(wrong[:20])}")
    return found
