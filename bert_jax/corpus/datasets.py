"""Text in tables: parquet files and TensorFlow Datasets. Their libraries are optional."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bert_jax.corpus.documents import ReadOptions, field_text, missing_field, paragraphs
from bert_jax.corpus.lines import HashedFile
from bert_jax.data.tfds import open_tfds
from bert_jax.errors import UserError


class ParquetSource:
    """A column of a parquet file; needs pyarrow."""

    def __init__(self, name: str, options: ReadOptions) -> None:
        self.name = name
        self.size = Path(name).stat().st_size
        self.bytes_read = 0
        self._field = options.field
        self._sha256 = ""

    def documents(self) -> Iterator[str]:
        """One document for each row.

        Raises:
            UserError: pyarrow is missing, the file is damaged, or lacks the column.
        """
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise UserError(
                f"{self.name}: reading parquet needs pyarrow: pip install 'bert_jax[data]'."
            ) from error
        self._sha256 = _digest(self.name)
        found = False
        try:
            with pq.ParquetFile(self.name) as file:
                columns = file.schema_arrow.names
                if self._field not in columns:
                    raise UserError(f"{self.name}: {missing_field(self._field, columns)}")
                total = max(1, file.metadata.num_rows)
                done = 0
                for batch in file.iter_batches(256, columns=[self._field]):
                    for row, value in enumerate(batch.column(0).to_pylist(), done + 1):
                        if value is None:
                            continue
                        where = f"{self.name}, row {row}"
                        text = paragraphs(field_text({self._field: value}, self._field, where))
                        if text:
                            found = True
                            yield text
                    done += batch.num_rows
                    self.bytes_read = self.size * done // total
        except UserError:
            raise
        except (pa.ArrowException, OSError, ValueError, ArithmeticError) as error:
            # ValueError: text that is not UTF-8, a date that Python cannot hold.
            raise UserError(f"{self.name} is not a sound parquet file: {error}") from error
        if not found:
            raise UserError(f"{self.name} holds no text in the column {self._field!r}.")

    def record(self) -> dict[str, Any]:
        """Name, bytes, sha256 and column."""
        record = {"name": self.name, "bytes": self.size, "sha256": self._sha256}
        return {**record, "field": self._field}


def _digest(name: str) -> str:
    file = HashedFile(Path(name))
    try:
        while file.read(1 << 20):
            pass
        return file.sha256()
    finally:
        file.close()


class TfdsSource:
    """A TensorFlow Datasets data set in array_record format, read without TensorFlow."""

    def __init__(self, name: str, options: ReadOptions) -> None:
        self.name = name
        _, self._dataset, *split = name.split(":", 2)
        self._split = split[0] if split else "train"
        if not self._dataset:
            raise UserError(f"{name!r} names no data set; write tfds:NAME or tfds:NAME:SPLIT.")
        self._field = options.field
        self.size = 0  # known once opened
        self.bytes_read = 0
        self._digest = hashlib.sha256()
        self._version = ""

    def documents(self) -> Iterator[str]:
        """One document for each example.

        Raises:
            UserError: tensorflow-datasets is missing, the data set is unknown or not prepared, or
                its examples lack the field.
        """
        _, examples, self._version = open_tfds(self.name, self._dataset, self._split)
        self._digest = hashlib.sha256()
        self.size = len(examples)
        found = False
        for row, example in enumerate(examples, 1):
            text = paragraphs(field_text(example, self._field, f"{self.name}, example {row}"))
            self._digest.update(text.encode() + b"\0")
            self.bytes_read = row
            if text:
                found = True
                yield text
        if not found:
            raise UserError(f"{self.name} holds no text in the field {self._field!r}.")

    def record(self) -> dict[str, Any]:
        """Name, version, number of examples, field and sha256 of the text."""
        return {
            "name": self.name,
            "version": self._version,
            "examples": self.bytes_read,
            "field": self._field,
            "sha256": self._digest.hexdigest(),
        }
