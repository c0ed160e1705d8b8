"""Readers of untrusted CSV and parquet files. A UserError says where a file is damaged."""

import contextlib
import csv
from collections.abc import Iterable, Iterator
from typing import Any

from bert_jax.errors import BadRecord, UserError, needs_package
from bert_jax.files.urls import open_binary


def csv_records(
    name: str, lines: Iterable[str], max_field: int, *, delimiter: str = ",", hint: str = "",
    first: int = 1,
) -> Iterator[tuple[int, list[str]]]:  # fmt: skip
    """Yield (number of the first line, fields) of each CSV record. Fields may be double-quoted.

    Lines, without line ends, are numbered from `first`. `hint` ends the message about a stray
    quote. The limit `max_field`, in characters, is global in the csv module, so it applies to all
    CSV readers of the process until the generator ends.
    """
    reader = csv.reader((line + "\n" for line in lines), delimiter=delimiter, strict=True)
    before, above = csv.field_size_limit(max_field), first
    try:
        for fields in reader:
            yield first, fields
            first = above + reader.line_num
    except csv.Error as error:
        more = ""
        if first < (last := above + reader.line_num - 1):
            more = f"; the row that begins here runs to line {last}"
        raise BadRecord(
            f"{name}, line {first}: a stray quote or line end, or a field too long ({error}"
            f'{more}). A quote inside a quoted field is written twice (""){hint}'
        ) from error
    finally:
        csv.field_size_limit(before)


@contextlib.contextmanager
def open_parquet(name: str) -> Iterator[Any]:
    """Open a local or remote parquet file with pyarrow.

    Raise a UserError if the file is missing; a BadRecord, perhaps only at a read, if it is damaged.
    """
    with needs_package(f"{name}: reading parquet needs pyarrow: pip install 'bert_jax[data]'."):
        import pyarrow as pa
        import pyarrow.parquet as pq
    with open_binary(name) as content:
        try:
            with pq.ParquetFile(content) as parquet:
                yield parquet
        except (pa.ArrowException, OSError, ValueError, ArithmeticError) as error:
            # ValueError: text that is not UTF-8, or a date that Python cannot represent.
            away = isinstance(error, UserError | ConnectionError | TimeoutError)
            if away or getattr(error, "errno", None):  # the disk or the network failed
                raise
            raise BadRecord(f"{name} is not a sound parquet file: {error}", "damaged") from error
