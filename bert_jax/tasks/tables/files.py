"""Columns of tables: CSV, TSV, JSON lines, parquet, and prepared TensorFlow Datasets."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.errors import UserError, nearest
from bert_jax.files.tfds import open_tfds
from bert_jax.files.untrusted.compressed import SUFFIXES as COMPRESSED
from bert_jax.files.untrusted.compressed import plain_suffix, read_plain
from bert_jax.files.untrusted.json_file import parse_json
from bert_jax.files.untrusted.tables import open_parquet
from bert_jax.tasks.examples import Origin, listed
from bert_jax.tasks.problems import MissingColumn
from bert_jax.tasks.tables.delimited import MAX_BYTES, Row, TableFormat, read_delimited

_SUFFIXES = {
    ".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl",
    ".json": "jsonl", ".parquet": "parquet",
}  # fmt: skip


def read_rows(
    name: str, columns: Sequence[str], table: TableFormat, optional: Sequence[str] = ()
) -> Iterator[Row]:
    """Read columns of a table.

    Args:
        name: the file, also compressed (`compressed.SUFFIXES`), or `tfds:NAME:SPLIT`.
        columns: their names, or numbers from 1 in CSV and TSV.
        table: how the file is written.
        optional: columns that the file may lack.

    Yields:
        One row after another, values in the order of `columns`: text from CSV and TSV, else what
        the file has. A row with a problem, or that `ragged` lets pass, has no values.

    Raises:
        UserError: the file cannot be read, a column is not there, or the format contradicts it.
    """
    kind = _kind(name, table)
    if kind in ("csv", "tsv"):
        yield from read_delimited(name, columns, table, kind, optional)
        return
    for field in ("header", "quoting", "delimiter"):
        if getattr(table, field) not in (None, ""):
            raise UserError(f"{name}: {field} is set, but {kind} has none; leave it out")
    yield from {"jsonl": _json, "parquet": _parquet, "tfds": _tfds}[kind](name, columns, optional)


def _kind(name: str, table: TableFormat) -> str:
    if name.startswith("tfds:") != (table.kind == "tfds") and table.kind != "auto":
        raise UserError(f"{name}: the kind is {table.kind!r}; only tfds:NAME:SPLIT is 'tfds'")
    if table.kind != "auto":
        return table.kind
    if name.startswith("tfds:"):
        return "tfds"
    kind = _SUFFIXES.get(plain_suffix(name))
    if kind is None:
        raise UserError(
            f"{name}: tables are read from {', '.join(_SUFFIXES)}; give the kind (csv, tsv, jsonl "
            "or parquet) of a file with another name"
        )
    return kind


def _missing(column: str, present: Sequence[str]) -> str:
    near = nearest(column, present)
    hint = f" Did you mean {near!r}?" if near else ""
    return f"no column {column!r}; there are {listed(present) or 'none'}.{hint}"


class _Item(Origin):
    """Position in a JSON array."""

    unit = "object"


def _json(name: str, columns: Sequence[str], optional: Sequence[str]) -> Iterator[Row]:
    """Read JSON lines, or one array of objects."""
    raw = read_plain(Path(name), max_bytes=MAX_BYTES).removeprefix(b"\xef\xbb\xbf")
    values = _array(name, raw) if raw.lstrip()[:1] == b"[" else _json_lines(name, raw)
    rows = 0
    for origin, value, problem in values:
        if not problem and not isinstance(value, dict):
            problem = f"{origin}: a JSON {type(value).__name__}; an object is needed"
        if not problem:
            lacks = [name for name in columns if name not in value and name not in optional]
            rows += 1
            if lacks:
                if rows == 1:  # the first row stands for the file
                    raise MissingColumn(lacks[0], f"{origin}: {_missing(lacks[0], list(value))}")
                problem = f"{origin}: no column {lacks[0]!r}; there are {listed(list(value))}"
        values_of_row = () if problem else tuple([value.get(column) for column in columns])
        yield Row(origin, values_of_row, problem=problem)


def _array(name: str, raw: bytes) -> Iterator[tuple[Origin, Any, str]]:
    for number, value in enumerate(parse_json(raw, where=name), 1):
        yield _Item(name, number), value, ""


def _json_lines(name: str, raw: bytes) -> Iterator[tuple[Origin, Any, str]]:
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        origin = Origin(name, number)
        try:
            yield origin, parse_json(line, where=f"{origin}"), ""
        except UserError as error:  # it counts lines within what it was given
            yield origin, None, str(error).replace(f"{origin}, line 1", f"{origin}")


def _parquet(name: str, columns: Sequence[str], optional: Sequence[str]) -> Iterator[Row]:
    if Path(name).suffix.lower() in COMPRESSED:
        raise UserError(f"{name}: a parquet file is compressed inside; decompress this one first")
    with open_parquet(name) as file:
        present = file.schema_arrow.names
        for column in columns:
            if column not in present and column not in optional:
                raise MissingColumn(column, f"{name}: {_missing(column, present)}")
        number = 0
        read = [column for column in dict.fromkeys(columns) if column in present]
        for batch in file.iter_batches(1024, columns=read):
            values = [
                batch.column(column).to_pylist() if column in read else [None] * len(batch)
                for column in columns
            ]
            for number, row in enumerate(zip(*values, strict=True), number + 1):  # noqa: B020
                yield Row(Origin(name, number), row)


def _tfds(name: str, columns: Sequence[str], optional: Sequence[str]) -> Iterator[Row]:
    """Read a prepared data set; class numbers become names, -1 (no label) becomes None."""
    del optional  # only tables of files are read without knowing their columns
    _, dataset, *split = name.split(":", 2)
    if not dataset or not split:
        raise UserError(f"{name}: write tfds:NAME:SPLIT, for example tfds:glue/mrpc:train")
    features, examples, _ = open_tfds(name, dataset, split[0])
    for column in columns:
        if column not in features:
            raise MissingColumn(column, f"{name}: {_missing(column, list(features))}")
    classes = [getattr(features[column], "names", None) for column in columns]
    for number, example in enumerate(examples, 1):
        origin = Origin(name, number)
        try:
            values = [
                _tfds_value(example[column], names)
                for column, names in zip(columns, classes, strict=True)
            ]
        except UnicodeDecodeError as error:
            yield Row(origin, (), problem=f"{origin}: a text is not UTF-8: {error}")
            continue
        yield Row(origin, tuple(values))


def _tfds_value(value: Any, names: Sequence[str] | None) -> Any:
    if isinstance(value, np.ndarray | list):  # a sequence of numbers comes as either
        return [_tfds_value(item, names) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if names is not None and isinstance(value, int):
        return names[value] if value >= 0 else None
    return value.decode("utf-8") if isinstance(value, bytes) else value
