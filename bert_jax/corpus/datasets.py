"""Text in tables: parquet files and TensorFlow Datasets. Their libraries are optional."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from bert_jax.corpus.documents import ReadOptions, Source, field_text, missing_field, paragraphs
from bert_jax.data.tfds import open_tfds
from bert_jax.errors import UserError


class ParquetSource(Source):
    """A column of a parquet file; needs pyarrow."""

    def __init__(self, name: str, options: ReadOptions) -> None:
        super().__init__(name, Path(name).stat().st_size, options.field)

    def _texts(self) -> Iterator[str]:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise UserError(
                f"{self.name}: reading parquet needs pyarrow: pip install 'bert_jax[data]'."
            ) from error
        try:
            with open(self.name, "rb") as content:
                self._digest = hashlib.file_digest(content, "sha256")
            with pq.ParquetFile(self.name) as file:
                columns = file.schema_arrow.names
                if self._field not in columns:
                    raise UserError(f"{self.name}: {missing_field(self._field, columns)}")
                done = 0
                for batch in file.iter_batches(256, columns=[self._field]):
                    for row, value in enumerate(batch.column(0).to_pylist(), done + 1):
                        if value is not None:
                            where = f"{self.name}, row {row}"
                            yield paragraphs(field_text({self._field: value}, self._field, where))
                    done += batch.num_rows
                    self.bytes_read = self.size * done // max(1, file.metadata.num_rows)
        except UserError:
            raise
        except (pa.ArrowException, OSError, ValueError, ArithmeticError) as error:
            # ValueError: text that is not UTF-8, a date that Python cannot hold.
            raise UserError(f"{self.name} is not a sound parquet file: {error}") from error


class TfdsSource(Source):
    """A TensorFlow Datasets data set in array_record format, read without TensorFlow."""

    unit = "examples"

    def __init__(self, name: str, options: ReadOptions) -> None:
        super().__init__(name, field=options.field)  # the size is known once opened
        _, self._dataset, *split = name.split(":", 2)
        self._split = split[0] if split else "train"
        if not self._dataset:
            raise UserError(f"{name!r} names no data set; write tfds:NAME or tfds:NAME:SPLIT.")

    def _texts(self) -> Iterator[str]:
        prepared = open_tfds(self.name, self._dataset, self._split)
        self.size = len(prepared.examples)
        self._details["version"] = prepared.version
        for row, example in enumerate(prepared.examples, 1):
            text = paragraphs(field_text(example, self._field, f"{self.name}, example {row}"))
            self._digest.update(text.encode() + b"\0")
            self.bytes_read = row
            yield text
