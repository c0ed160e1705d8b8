"""Lines of answers that stay when a verb ends before its input does."""

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from bert_jax.errors import UserError
from bert_jax.files.staging import staged_file
from bert_jax.infer.records import PAUSE, Record


class KeptLines:
    """Answers on their way to a file, also in OUT.partial, after which the same command goes on.

    A line there, behind a CRC, is used again for the same record, model and command.
    """

    def __init__(self, out: Path, made_by: str) -> None:
        """Read what is there; `made_by` names the model and the command."""
        self._out, self._path, self._made_by = out, Path(f"{out}.partial"), made_by
        old = self._path.read_bytes() if self._path.is_file() else b""
        self._old = deque(old.split(b"\n")[:-1])

    def found(self, records: Iterable[Record]) -> Iterator[Record]:
        """Pair records with their lines, up to the first record without a line."""
        for record in records:
            if self._old and record is not PAUSE:
                if self._old[0].startswith(self._crc(record)):
                    record.line = self._old.popleft()[8:] + b"\n"
                else:
                    self._old.clear()
            yield record

    def write(self, chunks: Iterable[list[Record]], line_of: Callable[[Record], str]) -> None:
        """Write a line for each record; a `UserError` that ends them says what is kept."""
        count, ended = 0, False
        try:
            with staged_file(self._out) as file, open(self._path, "wb") as kept:
                for chunk in chunks:
                    for record in chunk:
                        line = record.line or line_of(record).encode()
                        file.write(line)
                        kept.write(self._crc(record) + line)
                    kept.flush()
                    count += len(chunk)
            ended = True
        except UserError as error:
            more = f". {count:,} answers are kept in {self._path}; the same command goes on there"
            raise UserError(f"{error}{more if count else ''}") from error
        finally:
            if ended or not count:
                self._path.unlink(missing_ok=True)

    def _crc(self, record: Record) -> bytes:
        told = f"{self._made_by} {record.origin.line} {record.fields}"
        return f"{zlib.crc32(told.encode()):08x}".encode()
