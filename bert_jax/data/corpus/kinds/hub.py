"""Data sets of the Hugging Face Hub: names of their files, which are read where they lie."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from bert_jax.errors import UserError, first_few, nearest, needs_package

_NAME = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<config>[^:]*))?(:(?P<split>[^:]+))?",
    re.ASCII,
)
_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".ndjson")
_SPLITS = {"train": "train|training", "validation": "validation|valid|val|dev", "test": "test|eval"}
"""Words in file names that stand for a split."""
_SECONDS = 30


def match_hub(spec: str) -> list[str]:
    """Return URLs of the parquet and JSON lines files of a data set, sorted.

    The name is `hf:OWNER/NAME[@REVISION][:CONFIG[:SPLIT]]`; the split is `train` by default. The
    files of a configuration and a split are those that the data set's card names; without an entry
    there, those in a directory of the configuration's name and with the split in theirs. The URLs
    name the commit: what is pushed later changes nothing.

    Raises:
        UserError: no such data set, configuration or split, no access, or no file that is read.
    """
    match = _NAME.fullmatch(spec)
    if match is None:
        raise UserError(
            f"{spec!r} names no data set of the Hub; write hf:OWNER/NAME, hf:OWNER/NAME:CONFIG or "
            "hf:OWNER/NAME:CONFIG:SPLIT."
        )
    repo, config, split = match["repo"], match["config"] or "", match["split"] or "train"
    info = _info(spec, repo, match["revision"])
    present = sorted(file.rfilename for file in info.siblings or [])
    readable = [name for name in present if name.endswith(_SUFFIXES)]
    if not readable:
        raise UserError(
            f"{spec}: the data set has no file that is read ({', '.join(_SUFFIXES)}); the files "
            f"are {first_few(present) or 'none'}."
        )
    card = info.card_data.to_dict() if info.card_data else {}
    found = _by_card(spec, card.get("configs") or [], config, split, readable)
    if found is None:
        found = _by_name(spec, config, split, readable)
    return [f"hf://datasets/{repo}@{info.sha}/{name}" for name in found]


def _info(spec: str, repo: str, revision: str | None) -> Any:
    with needs_package(
        f"{spec}: reading from the Hugging Face Hub needs a package: pip install 'bert_jax[hub]'"
    ):
        import huggingface_hub
    from huggingface_hub import constants, errors

    try:
        return huggingface_hub.HfApi().dataset_info(repo, revision=revision, timeout=_SECONDS)
    except (*errors.HfHubHTTPError.__bases__, errors.HFValidationError) as error:
        reason = (f"{error}".splitlines() or [""])[0][:200]
        said = f"{constants.ENDPOINT} cannot be asked: {type(error).__name__}: {reason}"
        if isinstance(error, errors.GatedRepoError):  # one of those that are not found
            place = f"{constants.ENDPOINT}/datasets/{repo}, then `hf auth login`"
            said = f"the owner grants access by request: ask for it at {place}"
        elif isinstance(error, errors.RepositoryNotFoundError):
            said = f"the Hub has no data set {repo}, or it is private (`hf auth login`)"
        elif isinstance(error, errors.RevisionNotFoundError):
            said = f"the Hub has {repo}, but no such branch, tag or commit of it"
        raise UserError(f"{spec}: {said}") from error


def _by_card(
    spec: str, configs: Sequence[Mapping[str, Any]], config: str, split: str, present: Sequence[str]
) -> list[str] | None:
    """Return the files that the card names for a configuration and a split; None: no entry."""
    by_name = {str(each.get("config_name")): each for each in configs if "data_files" in each}
    if not by_name:
        return None
    entry = by_name.get(config)
    if not config:
        marked = [each for each in by_name.values() if each.get("default")]
        entry = by_name.get("default") or (marked or list(by_name.values()))[0]
        if len(by_name) > 1 and not marked and "default" not in by_name:
            raise UserError(
                f"{spec}: the data set has several configurations; name one of "
                f"{', '.join(sorted(by_name)[:20])}."
            )
    if entry is None:
        raise UserError(_unknown(spec, "configuration", config, sorted(by_name)))
    files = entry["data_files"]
    splits: dict[str, list[str]] = defaultdict(list)
    for each in files if isinstance(files, list) else [files]:
        if isinstance(each, str):
            each = {"split": "train", "path": each}
        paths = each.get("path", [])
        splits[str(each.get("split"))] += [paths] if isinstance(paths, str) else paths
    if split not in splits:
        raise UserError(_unknown(spec, "split", split, sorted(splits)))
    found = [name for name in present if any(fnmatch(name, path) for path in splits[split])]
    if not found:
        raise UserError(
            f"{spec}: the card names {first_few(splits[split])}, of which the data set has no "
            f"file that is read ({', '.join(_SUFFIXES)})."
        )
    return found


def _by_name(spec: str, config: str, split: str, present: Sequence[str]) -> list[str]:
    folders = sorted({part for name in present for part in name.split("/")[:-1]})
    if config and config not in folders:
        raise UserError(_unknown(spec, "configuration", config, folders))
    found = [name for name in present if not config or config in name.split("/")[:-1]]
    splits = {name: _split_of(name) for name in found}
    if not any(splits.values()):  # files that name no split are all of `train`
        splits = dict.fromkeys(found, "train")
    chosen = [name for name in found if splits[name] == split]
    if not chosen:
        there = sorted({each for each in splits.values() if each})
        raise UserError(_unknown(spec, "split", split, there))
    return chosen


def _split_of(name: str) -> str:
    """Return the split that a file's name or folder says; empty where none does."""
    for split, words in _SPLITS.items():
        if re.search(rf"(^|[^a-z])({words})([^a-z]|$)", name.lower()):
            return split
    return ""


def _unknown(spec: str, what: str, name: str, present: Sequence[str]) -> str:
    near = nearest(name, present)
    hint = f" Did you mean {near!r}?" if near else ""
    return f"{spec}: no {what} {name!r}; there are {', '.join(present[:20]) or 'none'}.{hint}"
