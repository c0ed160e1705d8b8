"""Columns of tables: CSV, TSV, JSON lines, parquet, and prepared TensorFlow Datasets."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from bert_jax.data.tfds import open_tfds
from bert_jax.errors import UserError, nearest
from bert_jax.tasks.delimited import (
    MAX_BYTES,
    Column,
    Kind,
    Row,
    TableFormat,
    read_delimited,
    shown,
)
from bert_jax.tasks.examples import Origin
from bert_jax.tasks.problems import MissingColumn, Problems
from bert_jax.untrusted.json_file import parse_json
from bert_jax.untrusted.whole_file import read_bytes

_SUFFIXES: dict[str, Kind] = {
    ".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl",
    ".json": "jsonl", ".parquet": "parquet",
}  # fmt: skip


def read_rows(
    name: str, columns: Sequence[Column], table: TableFormat, problems: Problems
) -> Iterator[Row]:
    """Columns of a table.

    Args:
        name: the file, or `tfds:NAME:SPLIT`.
        columns: their names, or numbers from 1 in CSV and TSV.
        table: how the file is written.
        problems: gathers what is wrong with single rows, which are left out.

    Yields:
        One row after another, values in the order of `columns`: text from CSV and TSV, else what
        the file has. A row that `ragged` lets pass comes with `missing` set and no values.

    Raises:
        UserError: the file cannot be read, a column is not there, or the format contradicts it.
    """
    kind = _kind(name, table)
    if kind in ("csv", "tsv"):
        yield from read_delimited(name, columns, table, kind, problems)
        return
    for field in ("header", "quoting", "delimiter"):
        if getattr(table, field) not in (None, ""):
            raise UserError(f"{name}: {field} is set, but {kind} has none; leave it out")
    for column in columns:
        if not isinstance(column, str):
            raise UserError(f"{name}: columns of {kind} have names; {column!r} is a number")
    names = cast(Sequence[str], columns)
    yield from {"jsonl": _json_lines, "parquet": _parquet, "tfds": _tfds}[kind](
        name, names, problems
    )


def _kind(name: str, table: TableFormat) -> Kind:
    if name.startswith("tfds:") != (table.kind == "tfds") and table.kind != "auto":
        raise UserError(f"{name}: the kind is {table.kind!r}; only tfds:NAME:SPLIT is 'tfds'")
    if table.kind != "auto":
        return table.kind
    if name.startswith("tfds:"):
        return "tfds"
    kind = _SUFFIXES.get(Path(name).suffix.lower())
    if kind is None:
        raise UserError(
            f"{name}: tables are read from {', '.join(_SUFFIXES)}; give the kind (csv, tsv, jsonl "
            "or parquet) of a file with another name, and decompress it first"
        )
    return kind


def _missing(column: str, present: Sequence[str]) -> str:
    near = nearest(column, present)
    hint = f" Did you mean {near!r}?" if near else ""
    return f"no column {column!r}; there are {shown(present) or 'none'}.{hint}"


def _json_lines(name: str, columns: Sequence[str], problems: Problems) -> Iterator[Row]:
    raw = read_bytes(Path(name), max_bytes=MAX_BYTES)
    if raw.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
        raise UserError(f"{name} is a JSON array; write one object on each line (JSON lines)")
    rows = 0
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        origin = Origin(name, number)
        try:
            value = parse_json(line, where=f"{origin}")
        except UserError as error:  # it counts lines within what it was given
            problems.add(str(error).replace(f"{origin}, line 1", f"{origin}"))
            continue
        if not isinstance(value, dict):
            problems.add(f"{origin}: a JSON {type(value).__name__}; an object is needed")
            continue
        lacks = [column for column in columns if column not in value]
        rows += 1
        if lacks:
            if rows == 1:  # the first row stands for the file
                raise MissingColumn(lacks[0], f"{origin}: {_missing(lacks[0], list(value))}")
            problems.add(f"{origin}: no column {lacks[0]!r}; there are {shown(list(value))}")
            continue
        yield Row(origin, tuple([value[column] for column in columns]))


def _parquet(name: str, columns: Sequence[str], problems: Problems) -> Iterator[Row]:
    del problems  # its rows all have the same columns
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(f"{name}: reading parquet needs pyarrow: pip install 'bert_jax[data]'.") \
            from error  # fmt: skip
    if not Path(name).is_file():
        raise UserError(f"there is no file {name}")
    try:
        with pq.ParquetFile(name) as file:
            present = file.schema_arrow.names
            for column in columns:
                if column not in present:
                    raise MissingColumn(column, f"{name}: {_missing(column, present)}")
            number = 0
            for batch in file.iter_batches(1024, columns=list(dict.fromkeys(columns))):
                values = [batch.column(column).to_pylist() for column in columns]
                for number, row in enumerate(zip(*values, strict=True), number + 1):  # noqa: B020
                    yield Row(Origin(name, number), row)
    except UserError:
        raise
    except (pa.ArrowException, OSError, ValueError, ArithmeticError) as error:
        # ValueError: text that is not UTF-8, a date that Python cannot hold.
        raise UserError(f"{name} is not a sound parquet file: {error}") from error


def _tfds(name: str, columns: Sequence[str], problems: Problems) -> Iterator[Row]:
    """Numbers of classes come as their names, -1 (a test set without labels) as None."""
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
            problems.add(f"{origin}: a text is not UTF-8: {error}")
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
