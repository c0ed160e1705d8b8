"""Sources of text: files, URLs, Hub data sets, and the docstrings of Python packages."""

import glob
import itertools
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from bert_jax.data.corpus.documents import ReadOptions, Source
from bert_jax.data.corpus.kinds.archives import WarcSource, WikipediaSource
from bert_jax.data.corpus.kinds.pydocs import PythonDocs
from bert_jax.data.corpus.kinds.tables import DelimitedSource, ParquetSource, TfdsSource
from bert_jax.data.corpus.kinds.text import FileSource
from bert_jax.errors import UserError, first_few, nearest, needs_package, suggestion
from bert_jax.files.untrusted.compressed import plain_suffix
from bert_jax.files.urls import FileState, is_url, list_states, match_urls

_NAME = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<config>[^:]*))?(:(?P<split>[^:]+))?",
    re.ASCII,
)
_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".ndjson")
_SPLITS = {"train": "train|training", "validation": "validation|valid|val|dev", "test": "test|eval"}
"""For each split: regular expression of the words in file paths that stand for the split."""
_SECONDS = 30


def match_hub(spec: str) -> list[str]:
    """Return the sorted URLs of the parquet and JSON lines files of a Hugging Face Hub data set.

    `spec` is `hf:OWNER/NAME[@REVISION][:CONFIG[:SPLIT]]`; the split is `train` by default. The data
    set's card lists the files of each configuration and split. If the card lists none, files are
    chosen by path: a directory in the path has the configuration's name, and a word in the path
    stands for the split. The URLs contain the commit, so that their content never changes. Raise a
    UserError if the data set, configuration or split is missing, or has no readable file.
    """
    if (match := _NAME.fullmatch(spec)) is None:
        how = "write hf:OWNER/NAME, hf:OWNER/NAME:CONFIG or hf:OWNER/NAME:CONFIG:SPLIT."
        raise UserError(f"{spec!r} names no data set of the Hugging Face Hub; {how}")
    repo, config, split = match["repo"], match["config"] or "", match["split"] or "train"
    info = _info(spec, repo, match["revision"])
    present = sorted(file.rfilename for file in info.siblings or [])
    readable = [name for name in present if name.endswith(_SUFFIXES)]
    if not readable:
        raise UserError(
            f"{spec}: the data set has no file in a supported format ({', '.join(_SUFFIXES)}). Its "
            f"files are: {first_few(present) or 'none'}."
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
        said = f"the request to {constants.ENDPOINT} failed: {type(error).__name__}: {reason}"
        if isinstance(error, errors.GatedRepoError):  # subclass of the next class
            place = f"{constants.ENDPOINT}/datasets/{repo}, then log in with `hf auth login`"
            said = f"access needs the owner's permission: ask for it at {place}"
        elif isinstance(error, errors.RepositoryNotFoundError):
            said = f"the Hub has no data set {repo}, or it is private: log in with `hf auth login`"
        elif isinstance(error, errors.RevisionNotFoundError):
            said = f"the Hub has the data set {repo}, but not this branch, tag or commit"
        raise UserError(f"{spec}: {said}") from error


def _by_card(
    spec: str, configs: Sequence[Mapping[str, Any]], config: str, split: str, present: Sequence[str]
) -> list[str] | None:
    """Return the files that the card lists for a configuration and split; None if it lists none."""
    lists = [each for each in configs if each.keys() & {"data_files", "data_dir"}]
    by_name = {str(each.get("config_name")): each for each in lists}
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
    folder = str(entry.get("data_dir") or "").removeprefix("./").strip("/")
    base = f"{folder}/" if folder else ""
    if (files := entry.get("data_files")) is None:
        return _by_name(spec, "", split, [name for name in present if name.startswith(base)])
    splits: dict[str, list[str]] = defaultdict(list)
    for each in files if isinstance(files, list) else [files]:
        if isinstance(each, str):
            each = {"split": "train", "path": each}
        paths = each.get("path", [])
        paths = [paths] if isinstance(paths, str) else paths
        splits[str(each.get("split"))] += [f"{base}{path}" for path in paths]
    if split not in splits:
        raise UserError(_unknown(spec, "split", split, sorted(splits)))
    found = [name for name in present if any(_covers(path, name) for path in splits[split])]
    if not found:
        raise UserError(
            f"{spec}: the card names {first_few(splits[split])}, and none of these is a "
            f"file in a supported format ({', '.join(_SUFFIXES)})."
        )
    return found


def _covers(path: str, name: str) -> bool:
    """Return true if a card's path covers a file: `*` stays in a directory, `**/` may be empty."""
    if "**" in path:
        return fnmatch(name, path) or fnmatch(name, path.replace("**/", ""))
    return fnmatch(name, path) and name.count("/") == path.count("/")


def _by_name(spec: str, config: str, split: str, present: Sequence[str]) -> list[str]:
    folders = sorted({part for name in present for part in name.split("/")[:-1]})
    if config and config not in folders:
        raise UserError(_unknown(spec, "configuration", config, folders))
    found = [name for name in present if not config or config in name.split("/")[:-1]]
    splits = {name: _split_of(name) for name in found}
    if not any(splits.values()):  # if no file names a split, all belong to `train`
        splits = dict.fromkeys(found, "train")
    if not (chosen := [name for name in found if splits[name] == split]):
        there = sorted({each for each in splits.values() if each})
        raise UserError(_unknown(spec, "split", split, there))
    return chosen


def _split_of(name: str) -> str:
    """Return the split that a word in a file's path stands for; "" if no word does."""
    for split, words in _SPLITS.items():
        if re.search(rf"(^|[^a-z])({words})([^a-z]|$)", name.lower()):
            return split
    return ""


def _unknown(spec: str, what: str, name: str, present: Sequence[str]) -> str:
    hint = suggestion(name, present)
    return f"{spec}: no {what} {name!r}; there are {', '.join(present[:20]) or 'none'}.{hint}"


PYTHON_DOCS = "python-docs"
_TEXT_SUFFIXES = (".txt", ".text", ".md", "")
_LANGUAGE_SUFFIX = re.compile(r"\.[a-z]{2}([-_][a-z]{2,4})?")  # train.en, train.zh_tw, test.en-de
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
DELIMITED = (".csv", ".tsv", ".tab")
_WARC_SUFFIXES = (".warc", ".wet")
_SUPPORTED = (
    ".txt, .en (a language's code), .jsonl, .csv and .tsv (each also with .gz, .xz, .zst or "
    ".bz2), .parquet, .warc.gz and .wet.gz, a dump of Wikipedia (.xml.bz2), hf:OWNER/NAME, "
    "tfds:NAME[:SPLIT], python-docs"
)


def resolve_sources(
    specs: Sequence[str | Source], options: ReadOptions | None = None
) -> list[Source]:
    """Return the sources that `specs` name, in the order of `specs`.

    Each item is a `Source`, a path, a URL such as gs://BUCKET/FILE or s3://BUCKET/FILE, a glob of
    paths or URLs (`**` matches any depth of directories), a data set `hf:OWNER/NAME` (see
    `match_hub`) or `tfds:NAME[:SPLIT]`, or `python-docs`. A file that is named twice is read once.
    Raise a UserError if `specs` is empty, or an item matches no file or is unsupported.
    """
    options = options or ReadOptions()
    if not specs:
        raise UserError(f"no input given. Name at least one source: {_SUPPORTED}.")
    sources: list[Source] = []
    seen: set[str] = set()
    for spec in specs:
        if not isinstance(spec, str):
            sources.append(spec)
            continue
        if spec == PYTHON_DOCS or spec.startswith("tfds:"):
            found: Mapping[str, FileState | None] = {spec: None}
        else:
            is_hub = spec.startswith("hf:") and not is_url(spec)
            found = list_states(match_hub(spec)) if is_hub else match_files(spec)
        for name, state in found.items():
            key = name if is_url(name) else str(Path(name).resolve())
            if key not in seen:
                seen.add(key)
                sources.append(_open(name, options, state))
    return sources


def match_files(spec: str) -> Mapping[str, FileState | None]:
    """Return the files that a path, a URL or a glob names, sorted; remote files with their states.

    Raise a UserError if `spec` is a directory, or matches no file.
    """
    path = Path(spec)
    if not spec:
        raise UserError(f"the name of an input is empty. Sources are {_SUPPORTED}.")
    if is_url(spec):
        if not (found := match_urls(spec)):
            raise UserError(f"there is no file {spec}, or your credentials do not give access.")
        return found
    if path.is_file():
        return {spec: None}
    if path.is_dir():
        some = itertools.islice(path.rglob("*"), 1000)  # the directory may hold millions of files
        kinds = sorted({"".join(p.suffixes[-2:]) for p in some if p.is_file()} - {""})
        example = f"{spec.rstrip('/')}/**/*{kinds[0] if kinds else '.txt'}"
        raise UserError(f"{spec} is a directory; name the files in it, for example '{example}'.")
    if names := sorted(n for n in glob.glob(spec, recursive=True) if Path(n).is_file()):
        return dict.fromkeys(names)
    if glob.has_magic(spec):
        path = Path(os.path.dirname(re.split(r"[*?[]", spec)[0])) / "*"
    folder = path.parent
    present = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    if glob.has_magic(spec):
        there = "which is empty" if folder.is_dir() else "which does not exist"
        if present:
            there = f"which holds {', '.join(present[:5])}{', ...' if len(present) > 5 else ''}"
        raise UserError(f"no file matches {spec!r} (looked in {folder.resolve()}, {there}).")
    near = nearest(path.name, present)
    hint = f" Did you mean {folder / near}?" if near else ""
    raise UserError(f"there is no file {spec}.{hint}")


def _open(name: str, options: ReadOptions, state: FileState | None) -> Source:
    if name == PYTHON_DOCS:
        return PythonDocs()
    if name.startswith("tfds:"):
        return TfdsSource(name, options)
    kind = plain_suffix(name)
    if kind in _WARC_SUFFIXES:
        return WarcSource(name, options, state)
    if kind.startswith(".xml"):  # parts of large dumps end in .xml-p1p41242.bz2
        return WikipediaSource(name, options, state)
    if kind in DELIMITED:
        return DelimitedSource(name, options, state)
    if kind in _JSON_SUFFIXES:
        return FileSource(name, options, state, is_json=True)
    if kind == ".parquet" == Path(name).suffix.lower():
        return ParquetSource(name, options, state)
    is_text = kind in _TEXT_SUFFIXES or kind[1:].isdigit()  # numbered, such as part.00017
    if is_text or _LANGUAGE_SUFFIX.fullmatch(kind):
        return FileSource(name, options, state)
    suffix = Path(name).suffix
    kind += "" if suffix.lower() == kind else suffix  # compressed
    raise UserError(f"{name}: {kind} files are not supported. Sources are {_SUPPORTED}.")
