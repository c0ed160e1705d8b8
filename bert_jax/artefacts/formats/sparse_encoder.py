"""The modules of sentence-transformers' `SparseEncoder`, which make sparse vectors.

A masked-LM model and `SpladePooling` read a text. If no encoder reads queries, these two modules
are the route of documents in a `Router`, and queries have a `SparseStaticEmbedding`.
"""

from pathlib import Path
from typing import Any

from bert_jax.artefacts.formats.huggingface_files import MAX_CONFIG_BYTES
from bert_jax.errors import UserError
from bert_jax.files.untrusted.json_file import read_json_object, short

QUERIES = "query_0_SparseStaticEmbedding"
"""Folder of the weights and the tokenizer of queries that no encoder reads."""
_ROUTES, _DOCUMENTS = "router_config.json", "document_1_SpladePooling"
_SPLADE = {"pooling_strategy": "max", "activation_function": "relu"}
_KINDS = ("Transformer", "MLMTransformer")


def sparse_files(package: str, static: bool) -> tuple[list[str], dict[str, Any]]:
    """Return the kinds of the modules, and the content of their JSON files by path.

    `package` is the package of the modules; `static` says that no encoder reads queries.
    """
    if not static:
        return ["MLMTransformer", "SpladePooling"], {"1_SpladePooling/config.json": _SPLADE}
    kinds = {QUERIES: "SparseStaticEmbedding", ".": "MLMTransformer", _DOCUMENTS: "SpladePooling"}
    routes = {
        "types": {folder: f"{package}.{kind}" for folder, kind in kinds.items()},
        "structure": {"query": [QUERIES], "document": [".", _DOCUMENTS]},
        "parameters": {"default_route": "document", "allow_empty_key": True},
    }
    frozen = {f"{QUERIES}/config.json": {"frozen": True}}
    return ["Router"], {_ROUTES: routes, f"{_DOCUMENTS}/config.json": _SPLADE, **frozen}


def routed(directory: Path) -> list[dict[str, str]]:
    """Return the module of a router's queries and those of its documents, as in `modules.json`.

    Raises:
        UserError: The routes are others than those that `sparse_files` writes.
    """
    where = directory / _ROUTES
    found = read_json_object(where, max_bytes=MAX_CONFIG_BYTES)
    types, routes = found.get("types"), found.get("structure")
    try:
        (query,), document = routes["query"], routes["document"]
        if not types[query].endswith(".SparseStaticEmbedding") or len(routes) != 2:
            raise LookupError
        return [{"type": types[id], "path": id.removeprefix(".")} for id in (query, *document)]
    except (LookupError, TypeError, ValueError, AttributeError):
        raise UserError(
            f"{where}: the routes are {short(routes)}; the route of queries must have the module "
            "SparseStaticEmbedding, and that of documents a Transformer and SpladePooling"
        ) from None


def is_sparse(kinds: list[str]) -> bool:
    """Return true if modules of these kinds make sparse vectors."""
    return len(kinds) == 2 and kinds[0] in _KINDS and kinds[1] == "SpladePooling"


def check_splade(folder: Path) -> None:
    """Raise a UserError if a SpladePooling has other settings than this package computes."""
    fields = read_json_object(folder / "config.json", max_bytes=MAX_CONFIG_BYTES)
    for name, only in _SPLADE.items():
        if (value := fields.get(name, only)) != only:
            raise UserError(f"{folder}/config.json: {name} is {short(value)}; it must be {only}")
