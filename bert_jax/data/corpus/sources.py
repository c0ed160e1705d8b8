"""Where text comes from: files and URLs, data sets, documentation of installed packages."""

import glob
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from bert_jax.data.corpus.documents import ReadOptions, Source
from bert_jax.data.corpus.kinds.archives import WarcSource, WikipediaSource
from bert_jax.data.corpus.kinds.hub import match_hub
from bert_jax.data.corpus.kinds.pydocs import PythonDocs
from bert_jax.data.corpus.kinds.tables import DelimitedSource, ParquetSource, TfdsSource
from bert_jax.data.corpus.kinds.text import FileSource
from bert_jax.errors import UserError, nearest
from bert_jax.files.untrusted.compressed import plain_suffix
from bert_jax.files.urls import is_url, match_urls

PYTHON_DOCS = "python-docs"
_TEXT_SUFFIXES = (".txt", ".text", ".md", "")
_LANGUAGE_SUFFIX = re.compile(r"\.[a-z]{2}([-_][a-z]{2,4})?")
"""Suffix of a text in one of several languages: train.en, train.zh_tw, test.en-de."""
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_DELIMITED_SUFFIXES = (".csv", ".tsv", ".tab")
_WARC_SUFFIXES = (".warc", ".wet")
_SUPPORTED = (
    ".txt, .en (a language's code), .jsonl, .csv and .tsv (each also with .gz, .xz, .zst or "
    ".bz2), .parquet, .warc.gz and .wet.gz, a dump of Wikipedia (.xml.bz2), hf:OWNER/NAME, "
    "tfds:NAME[:SPLIT], python-docs"
)


def resolve_sources(
    specs: Sequence[str | Source], options: ReadOptions | None = None
) -> list[Source]:
    """Return the sources that names stand for, in a fixed order.

    Names are paths, URLs (gs://BUCKET/FILE) or globs of them (`**` goes into directories),
    `hf:OWNER/NAME[:CONFIG[:SPLIT]]`, `tfds:NAME[:SPLIT]`, `python-docs`. The files of a glob come
    sorted by name; a file named twice is read once. Sources stay as they are.

    Raises:
        UserError: nothing named, nothing matched, a directory, or an unknown kind of file.
    """
    options = options or ReadOptions()
    if not specs:
        raise UserError(f"no input given. Sources are {_SUPPORTED}.")
    sources: list[Source] = []
    seen: set[str] = set()
    for spec in specs:
        if not isinstance(spec, str):
            sources.append(spec)
            continue
        if spec == PYTHON_DOCS or spec.startswith("tfds:"):
            names = [spec]
        else:
            is_hub = spec.startswith("hf:") and not is_url(spec)
            names = match_hub(spec) if is_hub else match_files(spec)
        for name in names:
            key = name if name == spec or is_url(name) else str(Path(name).resolve())
            if key not in seen:
                seen.add(key)
                sources.append(_open(name, options))
    return sources


def match_files(spec: str) -> list[str]:
    """Return the files that a path, a URL or a glob names, sorted.

    Raises:
        UserError: no such file, nothing matched, or a directory.
    """
    path = Path(spec)
    if not spec:
        raise UserError(f"the name of an input is empty. Sources are {_SUPPORTED}.")
    if is_url(spec):
        names = match_urls(spec)
        if not names:
            raise UserError(f"there is no file {spec}, or none that these credentials can see.")
        return names
    if path.is_file():
        return [spec]
    if path.is_dir():
        some = itertools.islice(path.rglob("*"), 1000)  # it may be the root of everything
        kinds = sorted({"".join(p.suffixes[-2:]) for p in some if p.is_file()} - {""})
        example = f"{spec.rstrip('/')}/**/*{kinds[0] if kinds else '.txt'}"
        raise UserError(f"{spec} is a directory; name the files in it, for example '{example}'.")
    names = sorted(n for n in glob.glob(spec, recursive=True) if Path(n).is_file())
    if names:
        return names
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


def _open(name: str, options: ReadOptions) -> Source:
    if name == PYTHON_DOCS:
        return PythonDocs()
    if name.startswith("tfds:"):
        return TfdsSource(name, options)
    kind = plain_suffix(name)
    if kind in _WARC_SUFFIXES:
        return WarcSource(name, options)
    if kind == ".xml":
        return WikipediaSource(name, options)
    if kind in _DELIMITED_SUFFIXES:
        return DelimitedSource(name, options)
    if kind in _JSON_SUFFIXES:
        return FileSource(name, options, is_json=True)
    if kind == ".parquet" == Path(name).suffix.lower():
        return ParquetSource(name, options)
    is_text = kind in _TEXT_SUFFIXES or kind[1:].isdigit()  # log.1, part.00017
    if is_text or _LANGUAGE_SUFFIX.fullmatch(kind):
        return FileSource(name, options)
    raise UserError(f"{name}: files named *{kind} are not read. Sources are {_SUPPORTED}.")
