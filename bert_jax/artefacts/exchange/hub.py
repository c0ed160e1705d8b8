"""Download of models from the Hugging Face Hub: only weights without code, JSON and tokenizers.

Pickled weights and Python files are not fetched: loading them would run the uploader's code.
"""

import re
from pathlib import Path
from typing import Any

from bert_jax.artefacts.formats.flax_weights import FLAX_WEIGHTS
from bert_jax.errors import UserError, needs_package

FILES = (
    "config.json", "model.safetensors", "model.safetensors.index.json", "model-*.safetensors",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.txt", "vocab.json", "merges.txt", "*.model", "source.spm", "target.spm",
    "generation_config.json", "modules.json", "config_sentence_transformers.json",
    "sentence_*_config.json", "router_config.json", "[1-9]_*/config.json", "query_0_*/config.json",
    "document_1_*/config.json", "[1-9]_Dense/model.safetensors", "query_0_*/model.safetensors",
    "document_0_*/*.json", "document_0_*/vocab.txt", "document_0_*/merges.txt",
    "document_0_*/model*.safetensors", "adapter_config.json",
)  # fmt: skip
"""Files to fetch: the top directory's, and sentence-transformers' modules beside the encoder."""
_ELSEWHERE = ["model-*/*", "*/*.model", "*/*/*"]
_NAME = re.compile(r"(?P<repo>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>\w[\w./-]*))?", re.ASCII)
_SECONDS = 30
_PICKLED = re.compile(r"pytorch_model.*\.bin|model.*\.(pt|pth|ckpt)")


def is_hub_name(name: str) -> bool:
    """Return true if `fetch` accepts a name: [owner/]name, with or without `@revision`."""
    return _NAME.fullmatch(name) is not None


def fetch(name: str, cache: Path | None = None) -> Path:
    """Download a model, or find it in the cache.

    `name` is `owner/name` or `owner/name@revision` (branch, tag, commit or pull request refs/pr/1).
    The default `cache` is the cache of `huggingface_hub`, which other programs also fill. Raise a
    UserError if `huggingface_hub` is not installed; the model or revision does not exist, is not
    accessible or has no weights to fetch; or there is neither a network nor a cached copy.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise UserError(
            f"{name!r:.80} is not a model name; names on the Hub have the form owner/name or "
            "owner/name@revision"
        )
    with needs_package(
        f"{name} is not a directory, and fetching a model from the Hugging Face Hub needs a "
        "package: pip install 'bert_jax[hub]'"
    ):
        import huggingface_hub
    from huggingface_hub import errors

    repo, revision = match["repo"], match["revision"]
    # The base classes are OSError and the HTTP client's error, which depends on the version.
    failures: tuple[Any, ...] = (*errors.HfHubHTTPError.__bases__, errors.HFValidationError)
    offline, patterns = False, [*FILES, FLAX_WEIGHTS]
    try:
        try:
            found = huggingface_hub.HfApi().model_info(repo, revision=revision, timeout=_SECONDS)
            if _has_safetensors(name, [file.rfilename for file in found.siblings or []]):
                patterns.remove(FLAX_WEIGHTS)
        except failures as error:
            if isinstance(error, errors.HfHubHTTPError) and error.response.status_code < 500:
                raise
            offline = True
        fetched = huggingface_hub.snapshot_download(
            repo, revision=revision, cache_dir=cache, local_files_only=offline,
            allow_patterns=patterns, ignore_patterns=_ELSEWHERE,
        )  # fmt: skip
        return Path(fetched)
    except failures as error:
        raise UserError(f"{name} was not fetched: {_reason(error, repo)}") from error


def _has_safetensors(name: str, files: list[str]) -> bool:
    """Return true for safetensors, false for Flax's weights; raise UserError without either."""
    safe = any(re.fullmatch(r"(document_0_\w+/)?model(-.*)?\.safetensors", file) for file in files)
    if safe or FLAX_WEIGHTS in files:
        return safe
    pickled = next((file for file in files if _PICKLED.fullmatch(file)), None)
    if pickled is None:
        raise UserError(f"{name} has neither model.safetensors nor {FLAX_WEIGHTS} on the Hub")
    raise UserError(
        f"{name} has only the weights {pickled}, which are not fetched because they can run code. "
        "Many such models have a pull request that adds model.safetensors: give its number N as "
        f"{name.partition('@')[0]}@refs/pr/N. Or, if you trust the file, convert it with "
        "Transformers and import the directory"
    )


def _reason(error: Exception, repo: str) -> str:
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    reasons = {
        errors.GatedRepoError: f"its owner grants access by request: ask for it at {hub}/{repo}, "
        "then run `hf auth login`",
        errors.RepositoryNotFoundError: f"neither a directory here nor a model on the Hub is named "
        f"{repo}, or the model is private (run `hf auth login`)",
        errors.RevisionNotFoundError: f"the Hub has {repo}, but no such branch, tag or commit",
        errors.LocalEntryNotFoundError: f"{hub} cannot be reached (or HF_HUB_OFFLINE is set), and "
        "the cache does not have the model",
    }
    for kind, reason in reasons.items():  # GatedRepoError is also a RepositoryNotFoundError
        if isinstance(error, kind):
            return reason
    if isinstance(error, errors.HfHubHTTPError):
        return f"{hub} answers with status {error.response.status_code}"
    lines = f"{error}".splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
