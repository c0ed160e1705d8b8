"""Tables from elsewhere: records of CSV and columns of parquet, with every fault named."""

import contextlib
import csv
from collections.abc import Iterable, Iterator
from typing import Any

from bert_jax.errors import UserError, needs_package
from bert_jax.files.urls import open_binary


def csv_records(
    name: str, lines: Iterable[str], max_field: int, *, delimiter: str = ",", hint: str = ""
) -> Iterator[tuple[int, list[str]]]:
    """Read records whose fields may stand in double quotes, each with its first line.

    `name` is the file in messages, and `hint` ends the one about a stray quote or line end. Lines
    come without their ends. `max_field` bounds the characters of a field for all readers of the
    process until this one is done, since the limit is the csv module's.
    """
    reader = csv.reader((line + "\n" for line in lines), delimiter=delimiter, strict=True)
    before, first = csv.field_size_limit(max_field), 1
    try:
        for fields in reader:
            yield first, fields
            first = reader.line_num + 1
    except csv.Error as error:
        more = ""
        if first < reader.line_num:
            more = f"; the row that begins here runs to line {reader.line_num}"
        raise UserError(
            f"{name}, line {first}: a stray quote or line end, or a field too long ({error}"
            f'{more}). A quote inside a quoted field is written twice (""){hint}'
        ) from error
    finally:
        csv.field_size_limit(before)


@contextlib.contextmanager
def open_parquet(name: str) -> Iterator[Any]:
    """Open a parquet file, here or in a store, as pyarrow's; refuse damage that the body finds."""
    with needs_package(f"{name}: reading parquet needs pyarrow: pip install 'bert_jax[data]'."):
        import pyarrow as pa
        import pyarrow.parquet as pq
    with open_binary(name) as content:
        try:
            with pq.ParquetFile(content) as parquet:
                yield parquet
        except (pa.ArrowException, OSError, ValueError, ArithmeticError) as error:
            # ValueError: text that is not UTF-8, a date that Python cannot hold.
            if isinstance(error, UserError) or getattr(error, "errno", None):  # of the disk
                raise
            raise UserError(f"{name} is not a sound parquet file: {error}") from error
