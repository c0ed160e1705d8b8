"""Where answers go: JSON lines, lines for people, and of vectors .npy and .parquet."""

import io
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from bert_jax.errors import UserError
from bert_jax.files.staging import staged_file
from bert_jax.infer.asker import Asker
from bert_jax.infer.stream import Answered, Skipped

File: TypeAlias = Any
"""An open file: of text for lines, else of bytes. `TextIO` is no class that files are of."""
_LINES = (".jsonl", ".ndjson")
_VECTORS = (".npy", ".parquet")


@runtime_checkable
class Writer(Protocol):
    """Takes answers in their order."""

    def write(self, answered: Sequence[Answered]) -> None:
        """Answer a chunk of examples."""
        ...

    def close(self) -> None:
        """All have come."""
        ...


def check_out(path: Path | None, *, vectors: bool) -> None:
    """Refuse a file whose suffix promises something else than what would be written.

    Args:
        path: From `--out`.
        vectors: Whether answers are vectors.

    Raises:
        UserError: Names the suffixes that there are.
    """
    known = _LINES + (_VECTORS if vectors else ())
    if path is not None and path.suffix.lower() not in known:
        why = f"{path.suffix} is for vectors" if path.suffix.lower() in _VECTORS else "not known"
        raise UserError(
            f"--out {path}: {why}; name a file that ends in {' or '.join(known)}"
            f" ({_LINES[0]} is JSON lines)"
        )
    if path is not None and path.exists() and not path.is_file():
        what = "directory" if path.is_dir() else "device or a pipe"
        raise UserError(f"--out {path} is a {what}; name a file")


class JsonLines:
    """One object a record, with its `id` where it has one.

    A record that was skipped has {"error": ..., "line": ...}, so that lines stay aligned.
    """

    def __init__(self, file: File) -> None:
        self._file = file

    def write(self, answered: Sequence[Answered]) -> None:
        """See `Writer`."""
        for each in answered:
            id = each.record.fields.get("id")
            self._file.write("{" if id is None else f'{{"id": {_json(id)}, ')
            if isinstance(each.answer, Skipped):
                rest = {"error": each.answer.message, "line": each.answer.line}
                self._file.write(f"{_json(rest)[1:]}\n")
            elif isinstance(each.answer, np.ndarray):  # the shortest digits that make a float32
                self._file.write(f'"embedding": [{", ".join(map(str, each.answer))}]}}\n')
            else:
                self._file.write(f"{_json(each.answer)[1:]}\n")
        self._file.flush()

    def close(self) -> None:
        """See `Writer`."""
        self._file.flush()


class Lines:
    """For people: a text, and below it what is said."""

    def __init__(self, asker: Asker[Any], file: File) -> None:
        self._asker = asker
        self._file = file

    def write(self, answered: Sequence[Answered]) -> None:
        """See `Writer`."""
        for each in answered:
            fields = each.record.fields
            shown = [str(fields[name]) for name in self._asker.FIELDS if name in fields]
            self._file.write(f"{shown[0] if shown else each.record.origin}\n")
            if isinstance(each.answer, Skipped):
                lines = [f"skipped: {each.answer.message}"]
            else:
                lines = self._asker.lines(each.example, each.answer)
            self._file.writelines(f"    {line}\n" for line in lines)
        self._file.flush()

    def close(self) -> None:
        """See `Writer`."""
        self._file.flush()


class Npy:
    """A (N, D) float32 array; a row of NaN where a record was skipped."""

    def __init__(self, file: File, width: int) -> None:
        self._file = file
        self._width = width
        self._count = 0
        self._file.write(self._header())

    def write(self, answered: Sequence[Answered]) -> None:
        """See `Writer`."""
        block = np.full((len(answered), self._width), np.nan, np.float32)
        for row, each in zip(block, answered, strict=True):
            if not isinstance(each.answer, Skipped):
                row[:] = each.answer
        self._file.write(block.astype("<f4").tobytes())
        self._count += len(block)

    def close(self) -> None:
        """See `Writer`: the header says how many there are."""
        self._file.seek(0)
        self._file.write(self._header())

    def _header(self) -> bytes:
        """Return a header of one length for every number of rows: NumPy leaves room for growth."""
        buffer = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            buffer,
            {"descr": "<f4", "fortran_order": False, "shape": (self._count, self._width)},
        )
        return buffer.getvalue()


class Parquet:
    """Columns id, embedding (fixed-size lists of float32) and error, each null where there is none.

    Raises:
        UserError: pyarrow is not installed.
    """

    def __init__(self, file: File, width: int) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise UserError(
                "parquet needs pyarrow: pip install 'bert_jax[data]', or name a .npy or .jsonl file"
            ) from error
        self._arrow = pyarrow
        self._type = pyarrow.list_(pyarrow.float32(), width)
        fields = [("id", pyarrow.string()), ("embedding", self._type), ("error", pyarrow.string())]
        self._schema = pyarrow.schema(fields)
        self._writer = pyarrow.parquet.ParquetWriter(file, self._schema)

    def write(self, answered: Sequence[Answered]) -> None:
        """See `Writer`."""
        ids, vectors, errors = [], [], []
        for each in answered:
            id = each.record.fields.get("id")
            ids.append(id if id is None or isinstance(id, str) else _json(id))
            bad = isinstance(each.answer, Skipped)
            vectors.append(None if bad else each.answer)
            errors.append(each.answer.message if bad else None)
        columns = [
            self._arrow.array(ids, self._arrow.string()),
            self._arrow.array(vectors, self._type),
            self._arrow.array(errors, self._arrow.string()),
        ]
        self._writer.write_table(self._arrow.Table.from_arrays(columns, schema=self._schema))

    def close(self) -> None:
        """See `Writer`."""
        self._writer.close()


@contextmanager
def opened_writer(
    asker: Asker[Any], out: Path | None, *, as_json: bool, width: int | None = None
) -> Iterator[Writer]:
    """Where answers go; what is named by `out` appears whole or not at all.

    Args:
        asker: For lines that people read.
        out: A file; None: standard output.
        as_json: JSON lines, to standard output.
        width: Width of vectors, whose file may end in .npy or .parquet.

    Raises:
        UserError: It cannot be written, or its suffix is not known.
    """
    check_out(out, vectors=width is not None)
    if out is None:
        writer: Writer = JsonLines(sys.stdout) if as_json else Lines(asker, sys.stdout)
        yield writer
        writer.close()
        return
    suffix = out.suffix.lower()
    if suffix in _VECTORS:
        assert width is not None  # of `check_out`
        with staged_file(out) as file:
            writer = Npy(file, width) if suffix == ".npy" else Parquet(file, width)
            yield writer
            writer.close()
        return
    with staged_file(out) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", write_through=False)
        writer = JsonLines(text)
        yield writer
        writer.close()
        text.detach()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)  # a table's ids may be dates
