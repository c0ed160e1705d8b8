"""Sources of text in tables: parquet, CSV and TSV files, and TensorFlow Datasets (TFDS)."""

import hashlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from bert_jax.data.corpus.documents import ReadOptions, Row, Source, missing_field
from bert_jax.data.corpus.kinds.text import FileSource
from bert_jax.errors import BadRecord, UserError
from bert_jax.files.checks import digest_of
from bert_jax.files.tfds import open_tfds
from bert_jax.files.untrusted.compressed import plain_suffix
from bert_jax.files.untrusted.tables import csv_records, open_parquet
from bert_jax.files.urls import FileState, file_state, is_url

_MOST_LINES = 1_000_000


class ParquetSource(Source):
    """A text column of a parquet file, or of its row groups in the range `part`; needs pyarrow."""

    options: ReadOptions

    def __init__(self, name: str, options: ReadOptions, state: FileState | None = None) -> None:
        self.state = state or file_state(name)
        super().__init__(name, self.state.size, options.field)
        self.options = options

    @override
    def _rows(self) -> Iterator[Row]:
        if not is_url(self.name) and self.part is None:
            self._sha256 = digest_of(Path(self.name))
        with open_parquet(self.name) as file:
            columns = file.schema_arrow.names
            if self._field not in columns:
                raise BadRecord(f"{self.name}: {missing_field(self._field, columns)}", "no-text")
            names = {self._field, *self.options.kept_names(columns)}
            _check_once(f"{self.name}: the schema", columns, names)
            begin, end = self.part or (0, file.num_row_groups)
            sizes = [file.metadata.row_group(group).num_rows for group in range(end)]
            first, total = sum(sizes[:begin]) + 1, max(1, sum(sizes[begin:]))
            # Reading in batches keeps memory small even if the file is one large row group.
            groups, done = range(begin, end), 0
            for batch in file.iter_batches(256, row_groups=groups, columns=list(names)):
                self.bytes_read = self.size * (done + batch.num_rows) // total
                for row, example in enumerate(_examples(batch, self._field), first + done):
                    if example[self._field] is not None:
                        yield self._row(example, row)
                done += batch.num_rows

    @override
    def divided(self, size: int) -> Sequence[Source]:
        if self.size <= size:
            return [self]
        with open_parquet(self.name) as file:
            begin, end = self.part or (0, file.num_row_groups)
            counts = [file.metadata.row_group(group).num_rows for group in range(begin, end)]
        cuts, total = [begin], max(1, sum(counts))
        for group, rows in enumerate(itertools.accumulate(counts[:-1]), begin + 1):
            if self.size * rows >= total * size * len(cuts):
                cuts.append(group)
        parts = list(itertools.pairwise([*cuts, end]))
        share = self.size // len(parts)
        return [self._of(part, share) for part in parts] if len(parts) > 1 else [self]


class DelimitedSource(FileSource):
    """A text column of a CSV or TSV file with a header. In TSV files, quotes are text."""

    cut_suffixes = ()  # a line end may be inside a quoted field
    has_records = True

    @override
    def _rows(self) -> Iterator[Row]:
        quoting = plain_suffix(self.name) == ".csv"
        records = self._quoted() if quoting else iter(enumerate(map(_fields, self._items()), 1))
        _, header = next(records, (1, []))
        if isinstance(header, BadRecord):
            raise header
        if self.options.field not in header:
            told = f"{self.name}, line 1: {missing_field(self.options.field, header)}"
            raise BadRecord(told, "no-text")
        used = self.options.field, *self.options.kept_names(header)
        _check_once(f"{self.name}, line 1: the header", header, used)
        for line, row in records:
            if isinstance(row, BadRecord):
                yield row
            elif len(row) == len(header):
                yield self._row(dict(zip(header, row, strict=True)), line)
            elif row:
                rule = "comma must be in double quotes" if quoting else "tab counts as two fields"
                told = f"{len(row)} fields where the header has {len(header)}; a text with a {rule}"
                yield self._bad(line, told, "malformed", f"{row}")

    def _quoted(self) -> Iterator[tuple[int, list[str] | BadRecord]]:
        """Yield the first line's number and the fields of each row, or the error in the row.

        After a bad row, reading resumes at its second line: an unclosed quote then loses one row.
        """
        items, again = self._items(), deque[str | BadRecord]()
        first, row = 1, list[str | BadRecord]()
        spoiled: BadRecord | None = None

        def feed() -> Iterator[str]:
            nonlocal spoiled
            while (line := again.popleft() if again else next(items, None)) is not None:
                row.append(line)
                if isinstance(line, BadRecord):
                    if line.reason != "not-utf8":
                        raise line
                    spoiled = line
                    line = line.text()
                if len(row) > _MOST_LINES:
                    raise self._bad(first, "the row has over a million lines", "too-long", "")
                yield line

        while True:
            try:
                most = self.options.max_document_chars
                for _, fields in csv_records(self.name, feed(), most, first=first):
                    yield first, spoiled or fields
                    first, spoiled = first + len(row), None
                    row.clear()
                return
            except BadRecord as error:
                if len(row) > 1 and row[-1] is error:
                    error = self._bad(first, "the row has no end", "malformed", "")
                error.data = error.data or f"{row[0]}"
                yield first, error
                again.extendleft(reversed(row[1:]))
                first, spoiled = first + 1, None
                row.clear()


def _check_once(what: str, columns: Sequence[str], names: Iterable[str]) -> None:
    """Raise a BadRecord if one of `names` occurs several times in `columns`."""
    for name in names:
        if (count := columns.count(name)) > 1:
            raise BadRecord(f"{what} has {name!r} {count} times; rename all but one", "no-text")


def _fields(line: str | BadRecord) -> list[str] | BadRecord:
    """Return the fields of a line of a TSV file."""
    return line if isinstance(line, BadRecord) else line.split("\t") if line else []


def _examples(batch: Any, field: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet batch. Texts are bytes, since they may not be valid UTF-8."""
    import pyarrow as pa

    texts = batch.column(field)
    if pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type):
        texts = texts.cast(pa.binary() if pa.types.is_string(texts.type) else pa.large_binary())
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names if name != field}
    for values in zip(texts.to_pylist(), *columns.values(), strict=True):
        yield dict(zip([field, *columns], values, strict=True))


class TfdsSource(Source):
    """A prepared TensorFlow Datasets data set in array_record format; TensorFlow is not needed."""

    unit = "examples"
    options: ReadOptions

    def __init__(self, name: str, options: ReadOptions) -> None:
        super().__init__(name, field=options.field)  # the size is known once the data set is open
        self.options = options
        _, self._dataset, *split = name.split(":", 2)
        self._split = split[0] if split else "train"
        if not self._dataset:
            raise UserError(f"{name!r} names no data set; write tfds:NAME or tfds:NAME:SPLIT.")

    @override
    def _place(self, number: int) -> str:
        return f"example {number}"

    @override
    def _rows(self) -> Iterator[Row]:
        prepared, digest = open_tfds(self.name, self._dataset, self._split), hashlib.sha256()
        self.size = len(prepared.examples)
        self._details["version"] = prepared.version
        for row, example in enumerate(prepared.examples, 1):
            found = self._row(example, row)
            if not isinstance(found, BadRecord):
                digest.update(found[0].encode() + b"\0")
            self.bytes_read = row
            yield found
        self._sha256 = digest.hexdigest()
