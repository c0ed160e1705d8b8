"""The layout of sentence-transformers: JSON files that define how hidden states become vectors.

The file `modules.json` lists modules and their folders: an encoder in Hugging Face's format, a
pooling, linear maps and, if vectors have length 1, a normalisation. This package writes names and
fields that sentence-transformers 2 to 6 read. It also reads the newer names that version 6 writes.
A cross-encoder is a classifier in Hugging Face's format, with a function of its logits.

A `SparseEncoder` has a masked-LM model and SpladePooling. If they read only documents, a Router
sends documents to them, and queries to a SparseStaticEmbedding.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.artefacts.formats.entries import as_float32
from bert_jax.artefacts.formats.huggingface_files import (
    MAX_CONFIG_BYTES,
    SCORING,
    WEIGHTS,
    model_max_length,
    row_length,
    torch_class,
)
from bert_jax.config.mapping import build
from bert_jax.errors import UserError
from bert_jax.files.untrusted.json_file import read_json, read_json_object, short
from bert_jax.files.untrusted.safetensors_file import read_safetensors
from bert_jax.model.embedding import EmbeddingConfig, TokenPooling

MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
DIMENSIONS = "matryoshka_dimensions"
"""Our own field of `config_sentence_transformers.json`, with the sizes of shorter vectors."""
POOLINGS: Mapping[str, TokenPooling] = {
    "cls": "cls", "max": "max", "mean": "mean", "mean_sqrt_len_tokens": "mean_sqrt_len",
    "lasttoken": "last",
}  # fmt: skip
"""Names of `embedding.pooling`, by the mode of the sentence-transformers module `Pooling`."""
_ACTIVATIONS = {"Identity": "", "GELU": "gelu", "ReLU": "relu", "SiLU": "silu", "Tanh": "tanh"}
"""Our activations of linear maps by class of torch."""
_FLAGS = {
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max", "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean", "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
_DOCUMENTS = ("document", "passage", "corpus")
"""Possible names of the prompt for documents; the first name that a file has is used."""
_FOLDER = re.compile(r"(\w[\w.-]*)?", re.ASCII)
_PACKAGE = "sentence_transformers."
ROUTES, QUERIES = "router_config.json", "query_0_SparseStaticEmbedding"
_SPLADE = {"pooling_strategy": "max", "activation_function": "relu"}
_DENSE = "Transformer Pooling( Dense)*( Normalize)?"
_SPARSE = "(MLM)?Transformer SpladePooling"
_READ = (
    "Transformer, Pooling, any number of Dense and, optionally, Normalize, in this order, or "
    "Transformer and SpladePooling, for queries perhaps a single SparseStaticEmbedding"
)
_TENSORS = {"kernel": "linear.weight", "bias": "linear.bias"}


@dataclass(frozen=True)
class SentenceForm:
    """Content of a directory in the layout of sentence-transformers, without the encoder."""

    embedding: EmbeddingConfig
    model: Path
    """Directory of the encoder in Hugging Face's format."""
    width: int | None
    """Width of the states that are pooled; None if no field has it, and for sparse vectors."""
    max_length: int | None
    """Largest number of tokens in a text. None means the encoder's number of positions."""
    notes: tuple[str, ...]
    """Notes for the user about settings that are not kept."""
    maps: dict[str, dict[str, np.ndarray]]
    """Kernel and bias of each linear map after the pooling; see `model.embedding.mapped`."""
    queries: Path | None = None
    """Folder with the weights of static queries; None if an encoder reads queries."""


def is_sentence_model(directory: Path) -> bool:
    """Return true if a directory has this layout and is not a cross-encoder."""
    there = (directory / MODULES).is_file()
    return there and _read(directory / SETTINGS, {}).get("model_type") != "CrossEncoder"


def can_be_written(embedding: EmbeddingConfig) -> bool:
    """Return true if a module of sentence-transformers computes the pooling."""
    return embedding.is_sparse or embedding.pooling in POOLINGS.values()


def sentence_files(
    embedding: EmbeddingConfig, width: int, max_length: int, maps: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of the files that accompany an encoder, by path: JSON, and tensors.

    `width` is the width of the encoder's states, `maps` as in `SentenceForm`.
    """
    package, sparse = f"{_PACKAGE}models", embedding.is_sparse
    kinds = ["Transformer", "Pooling", *["Dense"] * len(maps)]
    kinds += ["Normalize"] * embedding.normalize
    if sparse:
        package = f"{_PACKAGE}sparse_encoder.models"
        kinds = ["Router"] if embedding.static_queries else ["MLMTransformer", "SpladePooling"]
    folders = ["", *(f"{n}_{kind}" for n, kind in enumerate(kinds) if n)]
    modules = [
        {"idx": n, "name": f"{n}", "path": folder, "type": f"{package}.{kind}"}
        for n, (kind, folder) in enumerate(zip(kinds, folders, strict=True))
    ]
    settings: dict[str, Any] = {
        "model_type": "SparseEncoder" if sparse else "SentenceTransformer",
        "prompts": {"query": embedding.query_prefix, "document": embedding.document_prefix},
        "default_prompt_name": None,
        "similarity_fn_name": "dot" if sparse else "cosine",
    }
    if embedding.dimensions:
        settings[DIMENSIONS] = list(embedding.dimensions)
    files: dict[str, Any] = {
        MODULES: modules,
        SETTINGS: settings,
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
    }
    if embedding.static_queries:  # the encoder is in the model's own folder
        pooling = "document_1_SpladePooling"
        types = {QUERIES: "SparseStaticEmbedding", ".": "MLMTransformer", pooling: "SpladePooling"}
        files[ROUTES] = {
            "types": {folder: f"{package}.{kind}" for folder, kind in types.items()},
            "structure": {"query": [QUERIES], "document": [".", pooling]},
            "parameters": {"default_route": "document", "allow_empty_key": True},
        }
        files[f"{QUERIES}/config.json"] = {"frozen": True}
        return {**files, f"{pooling}/config.json": _SPLADE}
    if sparse:
        return {**files, "1_SpladePooling/config.json": _SPLADE}
    flags = {flag: POOLINGS.get(mode) == embedding.pooling for flag, mode in _FLAGS.items()}
    of_pooling = {"word_embedding_dimension": width, **flags, "include_prompt": True}
    files["1_Pooling/config.json"] = of_pooling
    names = {ours: f"torch.nn.{theirs}" for theirs, ours in _ACTIVATIONS.items()}
    for n, (name, each) in enumerate(sorted(maps.items()), 2):
        files[f"{n}_Dense/config.json"] = {
            **dict(zip(("in_features", "out_features"), each["kernel"].shape, strict=True)),
            "bias": "bias" in each, "activation_function": names[name.partition("_")[2]],
        }  # fmt: skip
        files[f"{n}_Dense/{WEIGHTS}"] = {
            _TENSORS[part]: np.ascontiguousarray(array.T) for part, array in each.items()
        }
    return files


def read_sentence_files(directory: Path) -> SentenceForm:
    """Read the files that accompany an encoder.

    Raise a UserError if the files are malformed, or ask for something that is not supported here.
    """
    modules, queries = _modules(directory, f"{_DENSE}|{_SPARSE}|Router", _READ), None
    if modules[0][0] == "Router":
        routed = f"SparseStaticEmbedding {_SPARSE}"
        (_, queries), *modules = _modules(directory, routed, _READ, _routed(directory / ROUTES))
    (_, model), (kind, pooling), *after = modules
    hint = ". Remove it, and call embed with dimensions=N or kind='query'"
    lacks = dict.fromkeys(["truncate_dim", "default_prompt_name"])
    settings = _read(directory / SETTINGS, lacks, hint)
    sparse = kind == "SpladePooling"
    prompts, notes = _prompts(settings, directory / SETTINGS, "dot" if sparse else "cosine")
    if sparse:
        _read(pooling / "config.json", _SPLADE)
        made = EmbeddingConfig("splade", False, *prompts, static_queries=queries is not None)
        return SentenceForm(made, model, None, _max_length(model, "fill-mask"), notes, {}, queries)
    where = pooling / "config.json"
    fields = _read(where, {"include_prompt": True} if any(prompts) else {})
    flags = [mode for flag, mode in _FLAGS.items() if fields.get(flag) is True]
    given = fields.get("pooling_mode", flags or "mean")
    modes = given if isinstance(given, list) else [given]
    if len(modes) != 1 or f"{modes[0]}" not in POOLINGS:
        raise UserError(
            f"{where}: the pooling is {' and '.join(map(short, modes))}; it must be one of "
            f"{', '.join(POOLINGS)}"
        )
    inputs = width = fields.get("embedding_dimension", fields.get("word_embedding_dimension"))
    maps: dict[str, dict[str, np.ndarray]] = {}
    for n, (kind, folder) in enumerate(after):
        same = dict.fromkeys(["module_input_name", "module_output_name"], "sentence_embedding")
        fields = _read(folder / "config.json", {**same, "use_residual": False})
        if kind == "Dense":
            activation, dense = _dense(folder, fields, inputs)
            maps[f"{n}_{activation}"], inputs = dense, dense["kernel"].shape[1]
    vectors = {
        "pooling": POOLINGS[modes[0]], "query_prefix": prompts[0], "document_prefix": prompts[1],
        "normalize": len(after) > len(maps), "dimensions": settings.get(DIMENSIONS, []),
    }  # fmt: skip
    embedding = build(EmbeddingConfig, vectors, f"{directory / SETTINGS}")
    return SentenceForm(embedding, model, width, _max_length(model), notes, maps)


def _dense(
    folder: Path, fields: Mapping[str, Any], inputs: int | None
) -> tuple[str, dict[str, np.ndarray]]:
    """Read a module `Dense` for vectors of width `inputs`; return activation, kernel and bias."""
    given, where = fields.get("activation_function", "torch.nn.Tanh"), folder / "config.json"
    activation = _ACTIVATIONS[torch_class(given, _ACTIVATIONS, f"{where}: activation_function")]
    width = fields.get("out_features")
    shapes: dict[str, Any] = {"linear.weight": (width, inputs), "linear.bias": (width,)}
    if fields.get("bias") is False:
        del shapes["linear.bias"]
    tensors, found = read_safetensors(folder / WEIGHTS), {}
    for name in sorted(tensors.keys() | shapes.keys()):
        found[name], wrong = as_float32(tensors.get(name, ()), shapes.get(name, ()))
        if wrong:
            raise UserError(f"{folder / WEIGHTS}: {name} {wrong}")
    return activation, {ours: found[name].T for ours, name in _TENSORS.items() if name in found}


def scoring_fields(directory: Path) -> dict[str, Any]:
    """Return a cross-encoder's settings as fields of `config.json`, {} if there are none.

    Raise a UserError if the files are malformed, or ask for something that is not supported here.
    """
    if is_sentence_model(directory) or not (directory / MODULES).is_file():
        return {}
    ((_, model),) = _modules(directory, "Transformer", "a single Transformer")
    length = _max_length(model, "sequence-classification")
    settings = _read(directory / SETTINGS, {"default_prompt_name": None})
    return {SCORING: settings, "max_seq_length": length}


def _routed(where: Path) -> list[dict[str, Any]]:
    """Return the modules of a router's queries, then of its documents, as in `modules.json`."""
    found = read_json_object(where, max_bytes=MAX_CONFIG_BYTES)
    try:
        types, routes = found["types"], found["structure"]
        folders = (*routes["query"], *routes["document"])
        return [{"type": types[each], "path": each.removeprefix(".")} for each in folders]
    except (LookupError, TypeError, AttributeError):
        raise UserError(f"{where}: the modules are {short(found)}; they must be {_READ}") from None


def _modules(
    directory: Path, pattern: str, supported: str, found: Any = None
) -> list[tuple[str, Path]]:
    """Return the kind (last part of the field `type`) and the folder of each module.

    The kinds, joined by spaces, must fit the pattern, which `supported` describes in words. The
    modules come from `found` or, if `found` is None, from `modules.json`.
    """
    where, modules = directory / MODULES, []
    found = found or read_json(where, max_bytes=MAX_CONFIG_BYTES)
    for each in found if isinstance(found, list) else [None]:
        kind, folder = (each.get("type"), each.get("path")) if isinstance(each, dict) else ("", "")
        if not (isinstance(kind, str) and isinstance(folder, str) and _FOLDER.fullmatch(folder)):
            raise UserError(
                f"{where} has {short(each)}; expected a list of modules, each with a `type` and "
                "the `path` of its folder"
            )
        if not kind.startswith(_PACKAGE):
            raise UserError(
                f"{where}: the module {short(kind)} is the model's own code, which is not run"
            )
        modules.append((kind.rpartition(".")[2], directory / folder))
    kinds = [kind for kind, _ in modules]
    if not re.fullmatch(pattern, " ".join(kinds)):
        raise UserError(
            f"{where}: the modules are {', '.join(kinds) or 'none'}; they must be {supported}. To "
            f"read only the encoder, copy {directory} without {MODULES}"
        )
    return modules


def _prompts(
    settings: Mapping[str, Any], where: Path, only: str
) -> tuple[tuple[str, str], tuple[str, ...]]:
    """Return the prefixes of queries and documents, and notes on prompts that are not kept."""
    prompts = settings.get("prompts") or {}
    texts = isinstance(prompts, dict) and all(
        isinstance(text, str | None) for text in prompts.values()
    )
    if not texts:
        raise UserError(f"{where}: prompts is {short(prompts)}; expected an object of texts")
    document = next((name for name in _DOCUMENTS if prompts.get(name) is not None), "document")
    others = sorted(name for name in prompts.keys() - {"query", document} if prompts[name])
    notes = [f"the prompts {', '.join(map(short, others))} are not kept"] if others else []
    similarity = settings.get("similarity_fn_name") or only
    if similarity != only:
        notes.append(f"the similarity {short(similarity)} is not kept; {only} is used")
    if most := settings.get("max_active_dims"):
        notes.append(f"max_active_dims {short(most)} is not kept; vectors have all tokens")
    return (prompts.get("query") or "", prompts.get(document) or ""), tuple(notes)


def _max_length(model: Path, task: str = "feature-extraction") -> int | None:
    """Return the token limit of the encoder's module or else the tokenizer; None means no limit."""
    named = [*sorted(model.glob("sentence_*_config.json")), model / "sentence_bert_config.json"]
    lacks = ["processing_kwargs", "query_length", "document_length", "query_expansion",
             "config_kwargs", "config_args", "processor_kwargs", "tokenizer_args"]  # fmt: skip
    only = {"do_lower_case": False, "transformer_task": task, **dict.fromkeys(lacks)}
    fields = _read(named[0], only)
    output = "last_hidden_state" if task == "feature-extraction" else "logits"
    reads = {"text": {"method": "forward", "method_output_name": output}}
    if (given := fields.get("modality_config", reads)) != reads:
        raise UserError(f"{named[0]}: modality_config is {given!r:.200}; it must be {reads}")
    if fields.get("max_seq_length") is None:
        return model_max_length(model)
    return row_length(fields, "max_seq_length", model)


def _read(path: Path, only: Mapping[str, Any], hint: str = "") -> dict[str, Any]:
    """Read a JSON object ({} without a file); refuse fields whose values differ from `only`."""
    fields = read_json_object(path, max_bytes=MAX_CONFIG_BYTES) if path.is_file() else {}
    for name, value in only.items():
        if (found := fields.get(name, value)) != value:
            said = f"{name} is {short(found)}; only {short(value)} is supported{hint}"
            raise UserError(f"{path}: {said}")
    return fields
