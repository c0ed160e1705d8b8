"""Where text comes from: files, TFDS data sets, and the documentation of installed packages."""

import glob
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from bert_jax.corpus.documents import ReadOptions, Source, _json_type, field_text, paragraphs
from bert_jax.corpus.lines import HashedFile, read_lines
from bert_jax.errors import UserError, nearest
from bert_jax.untrusted.compressed import plain_suffix

PYTHON_DOCS = "python-docs"
_TEXT_SUFFIXES = (".txt", ".text", ".md", "")
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_PARQUET_SUFFIXES = (".parquet",)
_SUPPORTED = (
    ".txt and .jsonl (each also with .gz, .xz or .zst), .parquet, tfds:NAME[:SPLIT], python-docs"
)


def resolve_sources(
    specs: Sequence[str | Source], options: ReadOptions | None = None
) -> list[Source]:
    """Return the sources that a list of names, paths and globs stands for, in a fixed order.

    Args:
        specs: paths or globs (`**` goes into directories), `tfds:NAME[:SPLIT]`, `python-docs`. The
            files of a glob come sorted by name; a file named twice is read once. What is a source
            already is kept as it is.
        options: how to read.

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
        is_file = spec != PYTHON_DOCS and not spec.startswith("tfds:")
        for name in _match(spec) if is_file else [spec]:
            key = str(Path(name).resolve()) if is_file else name
            if key not in seen:
                seen.add(key)
                sources.append(_open(name, options))
    return sources


def _match(spec: str) -> list[str]:
    path = Path(spec)
    if not spec:
        raise UserError(f"the name of an input is empty. Sources are {_SUPPORTED}.")
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
        parent = Path(os.path.dirname(re.split(r"[*?[]", spec)[0]))
        there = "which does not exist" if not parent.is_dir() else _listing(parent)
        raise UserError(f"no file matches {spec!r} (looked in {parent.resolve()}, {there}).")
    near = nearest(path.name, _names(path.parent))
    hint = f" Did you mean {path.parent / near}?" if near else ""
    raise UserError(f"there is no file {spec}.{hint}")


def _names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir()) if directory.is_dir() else []


def _listing(directory: Path) -> str:
    names = _names(directory)
    if not names:
        return "which is empty"
    return "which holds " + ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _open(name: str, options: ReadOptions) -> Source:
    if name == PYTHON_DOCS:
        from bert_jax.corpus.pydocs import PythonDocs

        return PythonDocs()
    if name.startswith("tfds:"):
        from bert_jax.corpus.datasets import TfdsSource

        return TfdsSource(name, options)
    path = Path(name)
    kind = plain_suffix(name)
    if kind in _JSON_SUFFIXES:
        return FileSource(name, "jsonl", options)
    if kind in _PARQUET_SUFFIXES and kind == path.suffix.lower():
        from bert_jax.corpus.datasets import ParquetSource

        return ParquetSource(name, options)
    if kind in _TEXT_SUFFIXES or kind[1:].isdigit():  # log.1, part.00017
        return FileSource(name, "text", options)
    raise UserError(f"{name}: files named *{kind} are not read. Sources are {_SUPPORTED}.")


class FileSource:
    """A text or JSON lines file, possibly compressed."""

    def __init__(self, name: str, kind: Literal["text", "jsonl"], options: ReadOptions) -> None:
        self.name = name
        self.kind = kind
        self.size = Path(name).stat().st_size
        self.bytes_read = 0
        self._options = options
        self._sha256 = ""

    def documents(self) -> Iterator[str]:
        """Return the file's documents.

        Raises:
            UserError: see `lines.read_lines`; also an empty file, a line that is not a JSON object
                with the field, or a document that is too long.
        """
        file = HashedFile(Path(self.name))
        found = False
        try:
            blocks = self._blocks(file)
            for document in self._text(blocks) if self.kind == "text" else self._json(blocks):
                if document:
                    found = True
                    yield document
            self._sha256 = file.sha256()
        finally:
            file.close()
        if not found:
            what = "is empty" if not self.size else "holds no text"
            raise UserError(f"{self.name} {what}. Take it out of the input, or fetch it again.")

    def _blocks(self, file: HashedFile) -> Iterator[tuple[int, list[str]]]:
        for block in read_lines(file, max_line_bytes=self._options.max_line_bytes):
            self.bytes_read = file.bytes_read
            yield block

    def _text(self, blocks: Iterable[tuple[int, list[str]]]) -> Iterator[str]:
        if self._options.line_documents:
            for _, lines in blocks:
                yield from (line.strip() for line in lines)
            return
        document: list[str] = []
        size = 0
        begin = 1
        for number, lines in blocks:
            for position, line in enumerate(lines):
                stripped = line.strip()
                if stripped:
                    if not document:
                        begin = number + position
                    document.append(stripped)
                    size += len(stripped)
                    if size > self._options.max_document_chars:
                        self._refuse_document(begin)
                elif document:
                    yield "\n".join(document)
                    document = []
                    size = 0
        yield "\n".join(document)

    def _refuse_document(self, line: int) -> None:
        raise UserError(
            f"{self.name}, line {line}: the document that begins here is longer than "
            f"{self._options.max_document_chars:,} characters. Documents are divided by blank "
            "lines; put some in, or read each line as a document (line_documents)."
        )

    def _json(self, blocks: Iterable[tuple[int, list[str]]]) -> Iterator[str]:
        for number, lines in blocks:
            for position, line in enumerate(lines):
                if line and not line.isspace():
                    yield self._json_line(line, number + position)

    def _json_line(self, line: str, number: int) -> str:
        where = f"{self.name}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            detail = str(error) if isinstance(error, ValueError) else "nested too deeply"
            raise UserError(
                f"{where}: not JSON: {detail}. Each line of a .jsonl file is one JSON object; it "
                f"starts {line[:40]!r}."
            ) from error
        if not isinstance(value, dict):
            raise UserError(
                f"{where}: a JSON {_json_type(value)}, not an object with a field "
                f"{self._options.field!r}."
            )
        return paragraphs(field_text(value, self._options.field, where))

    def record(self) -> dict[str, Any]:
        """Name, bytes and sha256 of the file as it lies on disk."""
        return {"name": self.name, "bytes": self.size, "sha256": self._sha256}
