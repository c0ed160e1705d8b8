"""Index of passages and their vectors in a parquet file, exact search in it, and a reranker.

A reranker reads a query and a passage together and scores the pair (Nogueira and Cho 2019).
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float

from bert_jax.artefacts.saved.model import SavedModel, digest_of
from bert_jax.config.mapping import build
from bert_jax.errors import UserError, needs_package
from bert_jax.files.checks import crc_of
from bert_jax.files.staging import staged_file
from bert_jax.files.untrusted.json_file import parse_json
from bert_jax.infer.classify import Classifier
from bert_jax.infer.embed import text_vectors
from bert_jax.infer.exact_search import BLOCK, top_k
from bert_jax.infer.predictor import Cuts
from bert_jax.infer.search.passages import Passage

Item = TypeVar("Item")
_KEY, _DIGESTS = b"bert_jax.index", b"bert_jax.crc32c"
LINK = ".model"
"""Suffix of the symbolic link to the model, which lies beside the index. The model is read through
this link, which the user can see, and never from the path stored inside the index file."""
_SUFFIX = ".parquet"


@dataclass(frozen=True)
class IndexedBy:
    """Description of the model that computed the vectors of an index."""

    model: str
    """Absolute path of the model's directory."""
    digest: str
    """Digest of the model (`model_digest`)."""
    dimensions: int
    """Width of a vector."""


@dataclass(frozen=True)
class Hit:
    """A passage that was found for a query."""

    score: float
    """Cosine between passage and query, or the reranker's score."""
    passage: Passage

    def as_json(self) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        return {"score": round(self.score, 6), **self.passage._asdict()}


def check_index_name(path: Path) -> None:
    """Raise a UserError if a path does not name a parquet file."""
    if path.suffix.lower() != _SUFFIX or path.is_dir():
        raise UserError(f"{path}: an index is one parquet file; name a file that ends in {_SUFFIX}")


def write_index(
    path: Path, model: SavedModel, place: str | Path, passages: Iterable[Passage], *,
    dimensions: int | None = None, advance: Callable[[int], object] = lambda count: None,
) -> tuple[int, str]:  # fmt: skip
    """Write an index. The file appears only when it is complete.

    The file has the columns id, source, text and vector (float32, of length 1). Its row groups have
    `exact_search.BLOCK` passages, so that memory does not grow with the number of passages.

    Args:
        path: File to write.
        model: Model from `forward.on_device`.
        place: Directory of the model.
        passages: Passages to index.
        dimensions: Number of leading values of each vector to keep. None means all values.
        advance: Function that is called after each part with the number of passages in the part.

    Returns:
        The number of passages, and a warning about cut passages, which may be empty.

    Raises:
        UserError: There is no passage, pyarrow is missing, or the file cannot be written.
    """
    pa, pq = _arrow()
    width = dimensions or model.vector_width
    by = IndexedBy(f"{Path(place).resolve()}", model_digest(model), width)
    schema = _schema(width).with_metadata({_KEY: json.dumps(asdict(by))})
    rest, cuts, count, digests = iter(passages), Cuts(), 0, []
    with staged_file(path) as file:
        with pq.ParquetWriter(file, schema, write_page_checksum=True) as writer:
            while some := list(islice(rest, BLOCK)):
                texts = [passage.text for passage in some]
                vectors = text_vectors(
                    model, texts, "document", dimensions=dimensions, cuts=cuts, advance=advance
                )
                flat = pa.array(vectors.reshape(-1), pa.float32())
                arrays = [
                    *(pa.array(column, pa.string()) for column in zip(*some, strict=True)),
                    pa.FixedSizeListArray.from_arrays(flat, width),
                ]
                table = pa.Table.from_arrays(arrays, schema=schema)
                digests.append({name: _digest(table, name) for name in schema.names})
                writer.write_table(table)
                count += len(some)
            writer.add_key_value_metadata({_DIGESTS: json.dumps(digests)})
        if not count:
            raise UserError(f"there is no text to index, so {path} is not written")
    with contextlib.suppress(OSError):  # if links are impossible, `search` asks for --model
        Path(f"{path}{LINK}").unlink(missing_ok=True)
        Path(f"{path}{LINK}").symlink_to(by.model)
    return count, cuts.warning()


class Index:
    """An index on disk. A search reads the vectors in blocks, then the passages that it found."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raise a UserError if it is missing, damaged or not an index."""
        pa, pq = _arrow()
        self.path = path
        self._damage = (pa.ArrowException, OSError, ValueError, LookupError, TypeError)
        if not path.is_file():
            raise UserError(f"there is no file {path}; create it with `bert-jax index`")
        try:
            self._file = pq.ParquetFile(path, page_checksum_verification=True)
        except self._damage as error:
            raise UserError(f"{path} is not a sound parquet file: {error}") from error
        found = (self._file.schema_arrow.metadata or {}).get(_KEY)
        if found is None:
            raise UserError(f"{path} is a parquet file, but `bert-jax index` did not write it")
        where = f"{path}: metadata {_KEY.decode()}"
        self.by = build(IndexedBy, parse_json(found, where=where), where)
        width = self.by.dimensions
        if not 0 < width < 1 << 20 or not self._file.schema_arrow.equals(_schema(width)):
            raise UserError(f"{path}: the columns do not fit {where}; rerun `bert-jax index`")
        groups = range(self._file.num_row_groups)
        sizes = [self._file.metadata.row_group(group).num_rows for group in groups]
        if sizes and max(sizes) > BLOCK:
            raise UserError(
                f"{path}: a row group has {max(sizes):,} passages, more than the {BLOCK:,} that "
                "`bert-jax index` writes; rerun `bert-jax index`"
            )
        self._ends = np.cumsum(np.array(sizes, np.int64))
        digests = self._file.metadata.metadata.get(_DIGESTS)  # missing in older indexes
        self._digests = digests and parse_json(digests, where=f"{path}: {_DIGESTS.decode()}")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def check_model(self, model: SavedModel) -> None:
        """Raise a UserError if the index was made with a model other than `model`."""
        if model_digest(model) != self.by.digest:
            raise UserError(
                f"{self.path} was made with another model than {model.name}: with {self.by.model}, "
                "which may have changed since; name the model that made the index (--model), or "
                "rerun `bert-jax index`"
            )

    def search(self, queries: Float[np.ndarray, "Q D"], top: int) -> list[list[Hit]]:
        """Find the `top` passages nearest to each query by exact search, best first.

        `queries` are vectors of length 1.

        Raises:
            UserError: The file is damaged.
        """
        scores, numbers = top_k(queries, self._blocks(), min(top, max(len(self), 1)))
        known = self._passages(numbers)
        return [
            [Hit(float(score), known[int(number)]) for score, number in zip(*row, strict=True)]
            for row in zip(scores, numbers, strict=True)
        ]

    def _blocks(self) -> Iterator[Float[np.ndarray, "n D"]]:
        for group in range(len(self._ends)):
            table = self._read(group, ["vector"])
            flat = table.column(0).combine_chunks().flatten().to_numpy(zero_copy_only=False)
            if len(flat) != len(table) * self.by.dimensions or not np.isfinite(flat).all():
                raise self._damaged("a vector is missing or not finite")
            yield flat.reshape(-1, self.by.dimensions)

    def _passages(self, numbers: np.ndarray) -> Mapping[int, Passage]:
        """Read the passages with the given indices. Each row group is read at most once."""
        wanted = np.unique(numbers)
        groups = np.searchsorted(self._ends, wanted, side="right")
        found: dict[int, Passage] = {}
        for group in np.unique(groups):
            own = wanted[groups == group]
            first = int(self._ends[group - 1]) if group else 0
            table = self._read(int(group), list(Passage._fields)).take(own - first)
            if any(column.null_count for column in table.columns):
                raise self._damaged("a passage has no text")
            rows = table.to_pylist()
            found.update((int(n), Passage(**row)) for n, row in zip(own, rows, strict=True))
        return found

    def _read(self, group: int, columns: Sequence[str]) -> Any:
        try:
            table = self._file.read_row_group(group, columns=columns)
            table.validate(full=True)
            found = {name: _digest(table, name) for name in columns if self._digests}
            rows = self._file.metadata.row_group(group).num_rows
            if len(table) != rows or any(self._digests[group][n] != d for n, d in found.items()):
                raise ValueError(f"row group {group} differs from what was written")
        except self._damage as error:
            raise self._damaged(f"{error}") from error
        return table

    def _damaged(self, fault: str) -> UserError:
        return UserError(f"{self.path} is damaged: {fault}; rerun `bert-jax index`")


class Reranker:
    """Scorer of a query and a passage, by a model with a score or with two classes (no, yes)."""

    def __init__(self, model: SavedModel) -> None:
        """Take a model from `forward.on_device`.

        Raises:
            UserError: The head of the model predicts neither one score nor two classes.
        """
        self._classifier = Classifier(model)
        outputs = model.outputs
        assert outputs is not None  # `Classifier` checks it
        self._two = outputs.objective == "single_label"
        if outputs.head.num_labels != 1 + self._two:
            raise UserError(
                f"{model.name} predicts {len(outputs.labels)} labels; a reranker predicts one "
                "score, or two classes, where the second means that the passage answers the query"
            )

    def scores(
        self, queries: Sequence[str], passages: Sequence[str], *, cuts: Cuts | None = None,
        advance: Callable[[int], object] = lambda count: None,
    ) -> Float[np.ndarray, " N"]:  # fmt: skip
        """Return each pair's score, or for two classes the second's log odds; higher is better.

        `cuts` and `advance` are as in `Predictor.parts`.
        """
        reader, found = self._classifier, [np.zeros(0, np.float32)]
        pairs = {"text": queries, "text_b": passages}
        for part in reader.parts(pairs, what="pair", cuts=cuts, advance=advance):
            logits = np.stack(reader.outputs(part.rows))
            found.append(logits[:, 1] - logits[:, 0] if self._two else logits[:, 0])
        return np.concatenate(found)

    def order(self, query: str, hits: Sequence[Hit]) -> list[Hit]:
        """Replace the scores of a query's hits by the reranker's scores; sort, best first."""
        scores = self.scores([query] * len(hits), [hit.passage.text for hit in hits])
        scored = zip(scores, hits, strict=True)
        return reranked(scores, [Hit(float(score), hit.passage) for score, hit in scored])


def reranked(scores: Float[np.ndarray, " N"], ranking: Sequence[Item]) -> list[Item]:
    """Sort a ranking by descending scores. Entries with equal scores keep their order."""
    return [ranking[place] for place in np.argsort(-scores, kind="stable")]


def model_digest(model: SavedModel) -> str:
    """Compute the SHA-256 of what the vectors depend on: weights, tokenizer, settings, length."""
    own = None if model.embedding is None else asdict(model.embedding)
    told = f"{model.tokenizer.fingerprint} {own} {model.max_length}"
    parts = {name: model.params[name] for name in ("encoder", "pooling") if name in model.params}
    return digest_of(parts, told)


def _digest(table: Any, name: str) -> str:
    """Compute the CRC-32C of a column."""
    column = table.column(name).combine_chunks()
    if name == "vector":
        return crc_of([column.flatten().to_numpy(zero_copy_only=False).tobytes()])
    return crc_of([json.dumps(column.to_pylist()).encode()])


def _schema(dimensions: int) -> Any:
    """Return the Arrow schema of an index whose vectors have `dimensions` numbers."""
    pa, _ = _arrow()
    texts = [(name, pa.string()) for name in Passage._fields]
    return pa.schema([*texts, ("vector", pa.list_(pa.float32(), dimensions))])


def _arrow() -> tuple[Any, Any]:
    with needs_package("an index needs pyarrow: pip install 'bert_jax[data]'"):
        import pyarrow
        import pyarrow.parquet
    return pyarrow, pyarrow.parquet
