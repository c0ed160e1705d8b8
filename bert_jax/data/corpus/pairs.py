"""Sources of text pairs (source and target): two files aligned line by line, or a table."""

import hashlib
import reprlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

from bert_jax.data.corpus.documents import NO_FIELDS, ReadOptions, Row, Source
from bert_jax.data.corpus.kinds.text import FileSource
from bert_jax.data.corpus.sources import DELIMITED, match_files, resolve_sources
from bert_jax.errors import UserError
from bert_jax.files.checks import digest_of
from bert_jax.files.untrusted.compressed import plain_suffix
from bert_jax.files.urls import is_url
from bert_jax.tasks.tables import TableFormat, read_rows
from bert_jax.tokenization.tokenizer import replace_surrogates


class Pair(NamedTuple):
    """A source text and its target text, stripped; either may be empty."""

    number: int
    """Line number, or row number in a table, counted from 1."""
    source: str
    target: str


class PairSource(Source):
    """A source of pairs; `documents` yields one document per pair, with the texts of both sides."""

    swap = False
    """Whether the first file or column holds the targets, and the second the sources."""

    @abstractmethod
    def _pairs(self) -> Iterator[Pair]:
        """Yield the pairs from the beginning, with their sides in the order of the files."""

    def pairs(self) -> Iterator[Pair]:
        """Yield the pairs from the beginning; if `swap` is set, exchange their sides.

        Raise a UserError if the source cannot be read, or its files differ in the number of lines.
        """
        for number, first, second in self._pairs():
            yield Pair(number, second, first) if self.swap else Pair(number, first, second)

    @override
    def _rows(self) -> Iterator[Row]:
        for pair in self._pairs():
            yield "\n".join(filter(None, pair[1:])), NO_FIELDS

    def records(self) -> list[dict[str, Any]]:
        """Return the record of each file; the file of the source texts comes first."""
        return [self.record()]


class PairFiles(PairSource):
    """Two text files; line n of the second is the translation of line n of the first."""

    def __init__(self, names: Sequence[str]) -> None:
        self._files = [_text_file(name) for name in names]
        first, second = self._files
        super().__init__(f"{first.name} and {second.name}", first.size + second.size)

    @override
    def _pairs(self) -> Iterator[Pair]:
        sides = [file.lines() for file in self._files]
        for number, lines in enumerate(zip_longest(*sides), 1):
            if None in lines:
                counts = [number + sum(1 for _ in side) for side in sides]
                counts[lines.index(None)] = number - 1
                both = zip(self._files, counts, strict=True)
                told = " and ".join(f"{file.name} has {count:,} lines" for file, count in both)
                raise UserError(
                    f"{told}; line n of one must be the translation of line n of the other. Look "
                    "for a missing or an extra line end."
                )
            yield Pair(number, *(line.strip() for line in lines))
            self.bytes_read = sum(file.bytes_read for file in self._files)

    @override
    def records(self) -> list[dict[str, Any]]:
        records = [file.record() for file in self._files]
        return records[::-1] if self.swap else records


class PairTable(PairSource):
    """Two columns of a table: CSV, TSV, JSON lines, parquet, or a prepared TFDS data set."""

    def __init__(self, name: str, columns: Sequence[str]) -> None:
        self._is_tfds, size = name.startswith("tfds:"), 0
        if self._is_tfds:
            self.unit = "examples"
            name += ":train" * (name.count(":") == 1)
        else:
            name = _one_file(name)
            if is_url(name):
                raise UserError(f"{name}: a table of pairs must be local; copy it to this machine.")
            size = Path(name).stat().st_size
        super().__init__(name, size)
        self._columns = tuple(columns)
        self._details = {"columns": list(columns)}

    @override
    def _pairs(self) -> Iterator[Pair]:
        is_delimited = plain_suffix(self.name) in DELIMITED  # such files may lack a header
        numbered = is_delimited and all(column.isdigit() for column in self._columns)
        table = TableFormat(header=False if numbered else None)
        digest, rows = hashlib.sha256(), 0
        for row in read_rows(self.name, self._columns, table):
            if row.problem:
                raise UserError(row.problem)
            named = zip(row.values, self._columns, strict=True)
            texts = [_text(value, column, f"{row.origin}") for value, column in named]
            if self._is_tfds:
                digest.update("\0".join([*texts, ""]).encode())
                rows += 1
            yield Pair(row.origin.line, *texts)
        if self._is_tfds:
            self.size, self._sha256 = rows, digest.hexdigest()
        else:
            self.bytes_read = self.size
            self._sha256 = digest_of(Path(self.name))


def _text(value: Any, column: str, where: str) -> str:
    """Return a field's text on one line, "" for None; raise a UserError for other types."""
    if value is not None and not isinstance(value, str):
        said = f"the column {column!r} holds {reprlib.repr(value):.40}, not text."
        raise UserError(f"{where}: {said}")
    text = replace_surrogates((value or "").replace("\0", " "))
    return text.replace("\r\n", "\n").replace("\n", " ").strip()


def _one_file(name: str) -> str:
    """Return the only file that `name`, a path or a glob, matches."""
    names = [*match_files(name)]
    if len(names) > 1:
        raise UserError(
            f"{name!r} matches {len(names)} files, such as {names[0]} and {names[1]}; each side of "
            "the pairs must be one file. To read more files, repeat --pairs."
        )
    return names[0]


def _text_file(name: str) -> FileSource:
    (source,) = resolve_sources([_one_file(name)], ReadOptions(newline_only=True))
    if not isinstance(source, FileSource) or not source.is_prose:
        how = "To read columns of a table, give --pairs FILE --columns source=COLUMN,target=COLUMN."
        raise UserError(f"{name} is not a text file with one text per line. {how}")
    return source


def open_pairs(
    names: Sequence[str], columns: Sequence[str] | None = None, *, swap: bool = False
) -> PairSource:
    """Open a source of pairs: two text files, or two named columns of a table.

    A table is a CSV, TSV, JSON lines or parquet file, or `tfds:NAME[:SPLIT]`. Without a header in
    CSV or TSV, `columns` are numbers, from 1. With `swap`, the first file or column holds the
    targets. Raise a UserError without two files or columns, or if one is missing or unsupported.
    """
    source: PairSource
    if len(names) == 2:
        source = PairFiles(names)
    elif len(names) == 1 and columns is not None:
        source = PairTable(names[0], columns)
    else:
        raise UserError(
            "pairs are read from two files of lines, or from one table with --columns "
            f"source=COLUMN,target=COLUMN; got {len(names)} file(s)"
            f"{'' if columns else ' without --columns'}: {' '.join(names)}"
        )
    source.swap = swap
    return source
