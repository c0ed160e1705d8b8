"""Writing of answers: JSON lines, plain or readable text, and .npy or .parquet for vectors."""

import io
import json
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from bert_jax.errors import UserError, needs_package
from bert_jax.files.staging import check_local, staged_file
from bert_jax.infer.predictor import Predictor
from bert_jax.infer.records import PAUSE, Record

File: TypeAlias = Any
"""An open binary file."""
Chunks: TypeAlias = Iterable[list[Record]]
JSON_LINES = (".jsonl", ".ndjson")
Form = Literal["people", "json", "plain"]
"""Form of answers. people: lines below each text. json: a line of JSON. plain: a line of text."""


class KeptLines:
    """Output file whose lines are also saved in OUT.partial, so that a command can be continued.

    Each saved line begins with a CRC of record, model and command, and is reused if these match.
    """

    def __init__(self, out: Path, made_by: str) -> None:
        """Read the lines of an earlier, interrupted run. `made_by` names the model and command."""
        self._out, self._path, self._made_by = out, Path(f"{out}.partial"), made_by
        old = self._path.read_bytes() if self._path.is_file() else b""
        self._old = deque(old.split(b"\n")[:-1])

    def found(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield all records. The first records get their saved `line`, until a CRC differs."""
        for record in records:
            if self._old and record is not PAUSE:
                if self._old[0].startswith(self._crc(record)):
                    record.line = self._old.popleft()[8:] + b"\n"
                else:
                    self._old.clear()
            yield record

    def write(self, chunks: Iterable[list[Record]], line_of: Callable[[Record], str]) -> None:
        """Write a line for each record. A UserError from `chunks` gets the advice to rerun."""
        reruns = stale = bool(self._old)  # a rerun keeps the lines that it has not reached
        count, ended, mode = 0, False, "r+b" if reruns else "wb"
        try:
            with staged_file(self._out) as file, open(self._path, mode) as kept:
                for chunk in chunks:
                    for record in chunk:
                        line = record.line or line_of(record).encode()
                        file.write(line)
                        if stale and not record.line:  # the first new line: later ones are stale
                            kept.truncate()
                            stale = False
                        kept.write(self._crc(record) + line)
                    kept.flush()
                    count += len(chunk)
            ended = True
        except UserError as error:
            more = f". {count:,} answers are kept in {self._path}; rerun the command to continue"
            raise UserError(f"{error}{more if count else ''}") from error
        finally:
            if ended or not (reruns or count):
                self._path.unlink(missing_ok=True)

    def _crc(self, record: Record) -> bytes:
        told = f"{self._made_by} {record.origin.line} {record.fields}"  # a name may not be UTF-8
        return f"{zlib.crc32(told.encode(errors='surrogateescape')):08x}".encode()


def write_answers(
    predictor: Predictor[Any], chunks: Chunks, out: Path | KeptLines | None, *, form: Form
) -> None:
    """Write answers to standard output or to a file, which appears only when it is complete.

    `out` is a path that `check_out` accepts, a `KeptLines`, or None for standard output. `form`
    does not apply to .npy and .parquet files.
    """
    write_line = partial(_LINES[form], predictor)
    if out is None:
        for chunk in chunks:
            sys.stdout.writelines(map(write_line, chunk))
            sys.stdout.flush()
        return
    if isinstance(out, KeptLines):
        out.write(chunks, write_line)
        return
    write = VECTORS.get(out.suffix.lower())
    with staged_file(out) as file:
        if write is not None:
            assert predictor.width is not None  # `check_out` checks it
            write(file, chunks, predictor.width)
            return
        for chunk in chunks:
            file.writelines(write_line(record).encode() for record in chunk)


def check_out(
    path: Path | None, *, vectors: bool, plain: bool = False, sources: Sequence[str] = ()
) -> None:
    """Check that an output file can hold the answers.

    `vectors` means that answers are vectors. `plain` means that answers are lines of text, for
    which every suffix is allowed except .npy and .parquet. Raise a UserError if the suffix does not
    fit, or the path is one of `sources`, is in a bucket, or is a directory, a device or a pipe.
    """
    if path is None:
        return
    known, suffix = (*JSON_LINES, *(VECTORS if vectors else ())), path.suffix.lower()
    if suffix not in known and (suffix in VECTORS or not plain):
        why = f"{path.suffix} is for vectors" if suffix in VECTORS else "unknown suffix"
        raise UserError(
            f"--out {path}: {why}; name a file that ends in {' or '.join(known)}"
            f" ({JSON_LINES[0]} is JSON lines)"
        )
    check_local(path, "file", "--out ")
    if path.exists() and any(Path(each).exists() and path.samefile(each) for each in sources):
        raise UserError(f"--out {path} is also an input; name another file")


def json_line(predictor: Predictor[Any], record: Record) -> str:
    """Format an answer, or a skipped record's error, as one JSON object with the record's `id`."""
    id = record.fields.get("id")
    begin = "{" if id is None else f'{{"id": {_json(id)}, '
    if record.problem is not None:
        return f"{begin}{_json({'error': record.problem, 'line': record.origin.line})[1:]}\n"
    fields = predictor.fields(record.answer)
    if isinstance(vector := fields.get("embedding"), np.ndarray):  # `str` gives the fewest digits
        return f'{begin}"embedding": [{", ".join(map(str, vector))}]}}\n'
    return f"{begin}{_json(fields)[1:]}\n"


def lines(predictor: Predictor[Any], record: Record) -> str:
    """Format a record for people: the text, followed by lines with the answer."""
    given = [str(record.fields[name]) for name in predictor.FIELDS if name in record.fields]
    if record.problem is not None:
        answer = [f"skipped: {record.problem}"]
    else:
        answer = predictor.lines(record.example, record.answer)
    head = given[0] if given else f"{record.origin}"
    return "\n    ".join([head, *answer]) + "\n"


def plain(predictor: Predictor[Any], record: Record) -> str:
    """Format an answer as one line, which is empty for a skipped record."""
    return "\n" if record.problem is not None else f"{predictor.line(record.answer)}\n"


_LINES: dict[Form, Callable[[Predictor[Any], Record], str]] = {
    "people": lines, "json": json_line, "plain": plain,
}  # fmt: skip


def _write_npy(file: File, chunks: Chunks, width: int) -> None:
    """Write an (N, D) float32 array. The row of a skipped record has NaN in every column."""
    file.write(_npy_header(0, width))
    count = 0
    for chunk in chunks:
        block = np.full((len(chunk), width), np.nan, "<f4")
        for row, record in zip(block, chunk, strict=True):
            if record.problem is None:
                row[:] = record.answer
        file.write(block.tobytes())
        count += len(block)
    file.seek(0)
    file.write(_npy_header(count, width))


def _npy_header(count: int, width: int) -> bytes:
    """Return a .npy header. NumPy pads headers, so the length is the same for every `count`."""
    buffer = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue()


def _write_parquet(file: File, chunks: Chunks, width: int) -> None:
    """Write the columns id, embedding (fixed-size lists of float32) and error; each may be null."""
    with needs_package(
        "parquet needs pyarrow: pip install 'bert_jax[data]', or name a .npy or .jsonl file"
    ):
        import pyarrow
        import pyarrow.parquet
    vector = pyarrow.list_(pyarrow.float32(), width)
    fields = [("id", pyarrow.string()), ("embedding", vector), ("error", pyarrow.string())]
    schema = pyarrow.schema(fields)
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for chunk in chunks:
            ids = [record.fields.get("id") for record in chunk]
            texts = [id if id is None or isinstance(id, str) else _json(id) for id in ids]
            columns = texts, [r.answer for r in chunk], [r.problem for r in chunk]
            arrays = map(pyarrow.array, columns, schema.types)
            writer.write_table(pyarrow.Table.from_arrays([*arrays], schema=schema))


VECTORS: dict[str, Callable[[File, Chunks, int], None]] = {
    ".npy": _write_npy, ".parquet": _write_parquet
}  # fmt: skip


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)  # a table's ids may be dates
