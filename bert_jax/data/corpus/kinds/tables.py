"""Sources of text in tables: parquet, CSV and TSV files, and TensorFlow Datasets (TFDS)."""

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from bert_jax.data.corpus.documents import (
    NO_FIELDS,
    ReadOptions,
    Source,
    field_text,
    missing_field,
    paragraphs,
)
from bert_jax.data.corpus.kinds.text import FileSource
from bert_jax.errors import UserError
from bert_jax.files.checks import digest_of
from bert_jax.files.tfds import open_tfds
from bert_jax.files.untrusted.compressed import plain_suffix
from bert_jax.files.untrusted.tables import csv_records, open_parquet
from bert_jax.files.urls import file_state, is_url


class ParquetSource(Source):
    """A text column of a parquet file, or of its row groups in the range `part`; needs pyarrow."""

    options: ReadOptions

    def __init__(self, name: str, options: ReadOptions) -> None:
        self.state = file_state(name)
        super().__init__(name, self.state.size, options.field)
        self.options = options

    @override
    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        if not is_url(self.name) and self.part is None:
            self._sha256 = digest_of(Path(self.name))
        with open_parquet(self.name) as file:
            columns = file.schema_arrow.names
            if self._field not in columns:
                raise UserError(f"{self.name}: {missing_field(self._field, columns)}")
            begin, end = self.part or (0, file.num_row_groups)
            sizes = [file.metadata.row_group(group).num_rows for group in range(end)]
            done, total = 0, max(1, sum(sizes[begin:]))
            kept = self.options.kept_names(columns)
            # Reading in batches keeps memory small even if the file is one large row group.
            batches = file.iter_batches(
                256, row_groups=range(begin, end), columns=list({self._field, *kept})
            )
            for batch in batches:
                texts = batch.column(self._field).to_pylist()
                others = [batch.column(name).to_pylist() for name in kept]
                self.bytes_read = self.size * (done + batch.num_rows) // total
                for row, value in enumerate(texts):
                    if value is None:
                        continue
                    try:
                        text = field_text({self._field: value}, self._field)
                    except UserError as error:
                        number = sum(sizes[:begin]) + done + row + 1
                        raise UserError(f"{self.name}, row {number}: {error}") from error
                    fields = {name: column[row] for name, column in zip(kept, others, strict=True)}
                    yield paragraphs(text), fields or NO_FIELDS
                done += batch.num_rows

    @override
    def head(self, size: int) -> Source:
        return self.divided(size)[0]

    @override
    def divided(self, size: int) -> Sequence[Source]:
        if self.size <= size:
            return [self]
        cuts, rows = [0], 0
        with open_parquet(self.name) as file:
            total = max(1, file.metadata.num_rows)
            for group in range(1, file.num_row_groups):
                rows += file.metadata.row_group(group - 1).num_rows
                if self.size * rows >= total * size * len(cuts):
                    cuts.append(group)
            parts = list(itertools.pairwise([*cuts, file.num_row_groups]))
        share = self.size // len(parts)
        return [self._of(part, share) for part in parts] if len(parts) > 1 else [self]


class DelimitedSource(FileSource):
    """A text column of a CSV or TSV file whose first line names the columns.

    In CSV files a field may be enclosed in double quotes. In TSV files quotes are part of the text.
    """

    has_cuts = False  # a line end may be inside a quoted field
    has_records = True

    @override
    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        quoting, lines = plain_suffix(self.name) == ".csv", self.lines()
        records: Iterator[tuple[int, list[str]]]
        records = ((n, line.split("\t") if line else []) for n, line in enumerate(lines, 1))
        if quoting:
            records = csv_records(self.name, lines, self.options.max_document_chars)
        _, header = next(records, (1, []))
        if self.options.field not in header:
            raise UserError(f"{self.name}, line 1: {missing_field(self.options.field, header)}")
        for line, row in records:
            if len(row) == len(header):
                found = dict(zip(header, row, strict=True))
                text = field_text(found, self.options.field)
                yield paragraphs(text), self.options.kept(found)
            elif row:
                raise UserError(
                    f"{self.name}, line {line}: {len(row)} fields where the header has "
                    f"{len(header)}; a text with a {'comma' if quoting else 'tab'} "
                    f"{'must be in double quotes' if quoting else 'counts as two fields'}"
                )


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
    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        prepared, digest = open_tfds(self.name, self._dataset, self._split), hashlib.sha256()
        self.size = len(prepared.examples)
        self._details["version"] = prepared.version
        for row, example in enumerate(prepared.examples, 1):
            try:
                text = paragraphs(field_text(example, self._field))
            except UserError as error:
                raise UserError(f"{self.name}, example {row}: {error}") from error
            digest.update(text.encode() + b"\0")
            self.bytes_read = row
            yield text, self.options.kept(example)
        self._sha256 = digest.hexdigest()
