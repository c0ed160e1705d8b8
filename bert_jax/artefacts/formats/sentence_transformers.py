"""The layout of sentence-transformers: JSON files that define how hidden states become vectors.

The file `modules.json` lists modules and their folders: an encoder in Hugging Face's format, a
pooling and, if vectors have length 1, a normalisation. This package writes names and fields that
sentence-transformers 2 to 6 read. It also reads the newer names that version 6 writes.

A `SparseEncoder` has a masked-LM model and SpladePooling. If no encoder reads queries, these read
the documents of a Router, whose queries have a SparseStaticEmbedding.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_jax.artefacts.formats.huggingface_files import (
    MAX_CONFIG_BYTES,
    model_max_length,
    row_length,
)
from bert_jax.errors import UserError
from bert_jax.files.untrusted.json_file import read_json, read_json_object, short
from bert_jax.model.config import ModelConfig
from bert_jax.model.embedding import EmbeddingConfig, TokenPooling

MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
ROUTES, QUERIES = "router_config.json", "query_0_SparseStaticEmbedding"
_SPLADE = {"pooling_strategy": "max", "activation_function": "relu"}
_SPARSE = (["MLMTransformer", "SpladePooling"], ["Transformer", "SpladePooling"])
DIMENSIONS = "matryoshka_dimensions"
"""Our own field of `config_sentence_transformers.json`, with the sizes of shorter vectors."""
POOLINGS: Mapping[str, TokenPooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
"""Our poolings by mode of the module `Pooling`."""
_FLAGS = {
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max", "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean", "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
_DOCUMENTS = ("document", "passage", "corpus")
"""Possible names of the prompt for documents; the first name that a file has is used."""
_FOLDER = re.compile(r"(\w[\w.-]*)?", re.ASCII)
_PACKAGE = "sentence_transformers."


@dataclass(frozen=True)
class SentenceForm:
    """Content of a directory in the layout of sentence-transformers, without the weights."""

    embedding: EmbeddingConfig
    model: Path
    """Directory of the encoder in Hugging Face's format."""
    width: int | None
    """Width of the states that are pooled; None for sparse vectors."""
    max_length: int | None
    """Largest number of tokens in a text. None means the encoder's number of positions."""
    notes: tuple[str, ...] = ()
    """Notes for the user about settings that are not kept."""
    queries: Path | None = None
    """Folder with the weights of static queries; None if an encoder reads queries."""

    def limit(self, config: ModelConfig) -> int:
        """Return the largest number of tokens in a text; raise UserError for a wrong width."""
        if self.width not in (None, config.hidden_dim):
            raise UserError(
                f"{self.model}: the pooling has width {self.width}, but the encoder has "
                f"{config.hidden_dim}"
            )
        self.embedding.check_width(config.hidden_dim)
        return min(self.max_length or config.num_positions, config.num_positions)


def is_sentence_model(directory: Path) -> bool:
    """Return true if a directory has this layout and is not a cross-encoder."""
    if not (directory / MODULES).is_file():
        return False
    return _settings(directory).get("model_type") != "CrossEncoder"


def can_be_written(embedding: EmbeddingConfig) -> bool:
    """Return true if a module of sentence-transformers computes the pooling."""
    return embedding.is_sparse or embedding.pooling in POOLINGS.values()


def sentence_files(embedding: EmbeddingConfig, width: int, max_length: int) -> dict[str, Any]:
    """Return the content of the JSON files that accompany an encoder, by path."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if embedding.normalize else [])]
    package, sparse = f"{_PACKAGE}models", embedding.is_sparse
    if sparse:
        package = f"{_PACKAGE}sparse_encoder.models"
        kinds = ["Router"] if embedding.static_queries else _SPARSE[0]
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
    if embedding.static_queries:  # the folder of the encoder is that of the model
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
    return {**files, "1_Pooling/config.json": of_pooling}


def read_sentence_files(directory: Path) -> SentenceForm:
    """Read the JSON files that accompany an encoder.

    Raises:
        UserError: If the files are malformed, or ask for something that is not supported here.
    """
    where = directory / MODULES
    modules, queries = _modules(directory, read_json(where, max_bytes=MAX_CONFIG_BYTES)), None
    if [kind for kind, _ in modules] == ["Router"]:
        (_, queries), *modules = _modules(directory, _routed(directory / ROUTES))
    kinds = [kind for kind, _ in modules]
    if kinds in _SPARSE:
        fields = read_json_object(modules[1][1] / "config.json", max_bytes=MAX_CONFIG_BYTES)
        for name, only in _SPLADE.items():
            if (value := fields.get(name, only)) != only:
                raise UserError(f"{modules[1][1]}: {name} is {short(value)}; it must be {only}")
        prompts, notes = _prompts(_settings(directory), directory / SETTINGS, "dot")
        made = EmbeddingConfig("splade", False, *prompts, static_queries=queries is not None)
        (_, model), length = modules[0], _max_length(modules[0][1], "fill-mask")
        return SentenceForm(made, model, None, length, notes, queries)
    if queries or kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise UserError(
            f"{where}: the modules are {', '.join(kinds) or 'none'}; they must be Transformer, "
            "Pooling and, optionally, Normalize, or Transformer and SpladePooling. To read only "
            f"the encoder, copy {directory} without {MODULES}"
        )
    (_, model), (_, pooling) = modules[:2]
    fields = read_json_object(pooling / "config.json", max_bytes=MAX_CONFIG_BYTES)
    settings = _settings(directory)
    prompts, notes = _prompts(settings, directory / SETTINGS)
    dimensions = settings.get(DIMENSIONS, [])
    if not isinstance(dimensions, list) or not all(type(each) is int for each in dimensions):
        raise UserError(
            f"{directory / SETTINGS}: {DIMENSIONS} is {short(dimensions)}; it must be a list of "
            "integers, the sizes of shorter vectors"
        )
    flags = [mode for flag, mode in _FLAGS.items() if fields.get(flag) is True]
    given = fields.get("pooling_mode", flags or "mean")
    modes = given if isinstance(given, list) else [given]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise UserError(
            f"{pooling / 'config.json'}: the pooling is {short(given)}; it must be one of "
            f"{', '.join(POOLINGS)}"
        )
    if fields.get("include_prompt", True) is not True and any(prompts):
        raise UserError(
            f"{pooling / 'config.json'}: include_prompt is {short(fields['include_prompt'])}; only "
            "true is supported, because the tokens of a prompt are always pooled here"
        )
    if (cut := settings.get("truncate_dim")) is not None:
        raise UserError(
            f"{directory / SETTINGS}: truncate_dim is {short(cut)}; the field is not supported. "
            "Remove it, and ask for shorter vectors with embed(texts, dimensions=N), or with "
            "--dimensions N"
        )
    width = fields.get("embedding_dimension", fields.get("word_embedding_dimension"))
    if type(width) is not int:
        raise UserError(
            f"{pooling / 'config.json'}: word_embedding_dimension is {short(width)}; expected the "
            "encoder's width"
        )
    return SentenceForm(
        EmbeddingConfig(POOLINGS[modes[0]], len(kinds) > 2, *prompts, tuple(dimensions)),
        model, width, _max_length(model), notes,
    )  # fmt: skip


def _routed(where: Path) -> list[dict[str, str]]:
    """Return the module of a router's queries and those of its documents, as in `modules.json`."""
    found = read_json_object(where, max_bytes=MAX_CONFIG_BYTES)
    try:
        types, routes = found["types"], found["structure"]
        (query,), documents = routes["query"], routes["document"]
        if not types[query].endswith(".SparseStaticEmbedding"):
            raise LookupError
        folders = (query, *documents)
        return [{"type": types[each], "path": each.removeprefix(".")} for each in folders]
    except (LookupError, TypeError, ValueError, AttributeError):
        raise UserError(
            f"{where}: the modules are {short(found.get('types'))}; queries must have a single "
            "SparseStaticEmbedding, and documents a Transformer and SpladePooling"
        ) from None


def _modules(directory: Path, found: Any) -> list[tuple[str, Path]]:
    """Return the kind (last part of the field `type`) and the folder of each module in `found`."""
    where, modules = directory / MODULES, []
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
    return modules


def _prompts(
    settings: Mapping[str, Any], where: Path, only: str = "cosine"
) -> tuple[tuple[str, str], tuple[str, ...]]:
    """Return the prefixes of queries and documents, and notes on prompts that are not kept."""
    prompts = settings.get("prompts") or {}
    texts = isinstance(prompts, dict) and all(
        isinstance(text, str | None) for text in prompts.values()
    )
    if not texts:
        raise UserError(f"{where}: prompts is {short(prompts)}; expected an object of texts")
    if (name := settings.get("default_prompt_name")) is not None:
        raise UserError(
            f"{where}: default_prompt_name is {short(name)}; the field is not supported. Remove "
            "it, and choose the prompt with embed(texts, kind='query') or kind='document'"
        )
    document = next((name for name in _DOCUMENTS if prompts.get(name) is not None), "document")
    others = sorted(prompts.keys() - {"query", document})
    notes = []
    if others := [name for name in others if prompts[name]]:
        notes.append(f"the prompts {', '.join(map(short, others))} are not kept")
    similarity = settings.get("similarity_fn_name") or only
    if similarity != only:
        notes.append(f"the similarity {short(similarity)} is not kept; {only} is used")
    if most := settings.get("max_active_dims"):
        notes.append(f"max_active_dims {short(most)} is not kept; vectors have all tokens")
    return (prompts.get("query") or "", prompts.get(document) or ""), tuple(notes)


def _max_length(model: Path, task: str = "feature-extraction") -> int | None:
    """Return the token limit of the encoder's module or else the tokenizer; None means no limit."""
    named = sorted(model.glob("sentence_*_config.json"))
    fields = read_json_object(named[0], max_bytes=MAX_CONFIG_BYTES) if named else {}
    for name, expected in (("do_lower_case", False), ("transformer_task", task)):
        if (value := fields.get(name, expected)) != expected:
            raise UserError(
                f"{named[0]}: {name} is {short(value)}; only {short(expected)} is supported"
            )
    if fields.get("max_seq_length") is None:
        return model_max_length(model)
    return row_length(fields, "max_seq_length", model)


def _settings(directory: Path) -> dict[str, Any]:
    path = directory / SETTINGS
    return read_json_object(path, max_bytes=MAX_CONFIG_BYTES) if path.is_file() else {}
