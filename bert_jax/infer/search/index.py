"""Search index of passages and their vectors (a LanceDB table), and a reranker.

A reranker reads a query and a passage together and scores the pair (Nogueira and Cho 2019).
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float

from bert_jax.artefacts.saved.model import SavedModel, digest_of
from bert_jax.config.mapping import build
from bert_jax.errors import UserError, needs_package
from bert_jax.files.checks import DIGESTS, MAX_RECORD_BYTES, differing, digests_of
from bert_jax.files.staging import StagedDirectory
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.infer.classify import Classifier
from bert_jax.infer.embed import text_vectors
from bert_jax.infer.predictor import Cuts
from bert_jax.infer.search.passages import TABLE, Passage
from bert_jax.tasks.retrieval.metrics import unit

Item = TypeVar("Item")
RECORD = "index.json"
Hit = dict[str, Any]
"""A passage that was found: its score, then all its columns except the vector."""
LINK = "model"
"""Name of the symbolic link to the model in an index. The model is read through this link, which
the user can see, and never from the path stored in the record."""
BLOCK = 1 << 14
"""Number of passages that are embedded and written at a time."""
WORDS = {"base_tokenizer": "icu/split", "stem": False, "remove_stop_words": False}
"""Settings of the full-text index: words of all languages and scripts, not stemmed or filtered."""
JOINED = 100
"""Smallest number of passages that hybrid search takes from each search before joining both."""


@dataclass(frozen=True)
class IndexedBy:
    """Description of the model that computed the vectors of an index."""

    model: str = ""
    """Absolute path of the model's directory."""
    digest: str = ""
    """Digest of the model (`model_digest`)."""


def write_index(
    path: Path, model: SavedModel, place: str | Path, passages: Iterable[Passage], *,
    dimensions: int | None = None, overwrite: bool = False,
    advance: Callable[[int], object] = lambda count: None,
) -> tuple[int, str]:  # fmt: skip
    """Write an index. The directory appears only when it is complete.

    The directory is a LanceDB database. Its table `TABLE` has the columns id, passage, source, text
    and vector (float32, of length 1), the columns of the documents, and a full-text index of the
    text. Beside the table are `RECORD`, with the CRC-32C of each file, and a link to the model.
    `BLOCK` passages are written at a time, so that memory does not grow with their number.

    `place` is the model's directory. `dimensions` is the number of leading values of each vector to
    keep (None: all). `advance` is called after each part with its number of passages. Return the
    number of passages, and a warning about cut passages or "". Raise a UserError if there is no
    passage, a column has several types, lancedb is missing, or the directory cannot be written.
    """
    lancedb, pa = _lancedb()
    model_path = Path(place).resolve()  # may not be UTF-8
    by = IndexedBy(f"{model_path}".encode(errors="replace").decode(), model_digest(model))
    rest, cuts, count = iter(passages), Cuts(), 0
    with StagedDirectory(path, _is_only_index, overwrite=overwrite) as staged:
        text, width = pa.string(), dimensions or model.vector_width()
        kinds = {"id": text, "passage": pa.int32(), "source": text, "text": text}
        schema = pa.schema([*kinds.items(), ("vector", pa.list_(pa.float32(), width))])
        with _errors_of(path):
            table = lancedb.connect(staged.path).create_table(TABLE, schema=schema)
        while some := list(islice(rest, BLOCK)):
            columns = _columns(table.schema, some)
            with _errors_of(path):
                if new := [each for each in columns.schema if each.name not in table.schema.names]:
                    table.add_columns(new)
            vectors = text_vectors(
                model, [each["text"] for each in some], "document", dimensions=dimensions,
                cuts=cuts, advance=advance,
            )  # fmt: skip
            with _errors_of(path):
                vector = pa.array([*vectors], schema.field("vector").type)
                table.add(columns.append_column("vector", vector))
            count += len(some)
        if not count:
            raise UserError(f"there is no text to index, so {path} is not written")
        with _errors_of(path):
            table.create_index("text", config=lancedb.index.FTS(**WORDS))
        crcs = {name: c for name, c in digests_of(staged.path).items() if ".json" not in name}
        (staged.path / RECORD).write_text(json.dumps(asdict(by) | {DIGESTS: crcs}))
        with contextlib.suppress(OSError):  # if links are impossible, `search` asks for --model
            (staged.path / LINK).symlink_to(model_path)
        staged.commit()
    return count, cuts.warning()


class Index:
    """An index on disk, which other programs may have updated with LanceDB."""

    def __init__(self, path: Path) -> None:
        """Open an index. Raise a UserError if `path` has no index, or the index is damaged.

        Files of `write_index` are compared with their CRCs, unless an update has removed them.
        """
        lancedb, _ = _lancedb()
        self.path, self.link = path, path / LINK
        self.by, digests = read_record(path)
        if other := differing(path, digests, missing_ok=True):
            raise UserError(f"{path} is damaged: {other} differs from what `bert-jax index` wrote")
        with _errors_of(path):
            self.table = lancedb.connect(path).open_table(TABLE)
            self.dimensions: int = self.table.schema.field("vector").type.list_size

    def check_model(self, model: SavedModel) -> None:
        """Raise a UserError if the index was made with a model other than `model`."""
        if model_digest(model) != self.by.digest:
            raise UserError(
                f"{self.path} was made with another model than {model.name}: with {self.by.model}, "
                "which may have changed since; name the model that made the index (--model), or "
                "rerun `bert-jax index`"
            )

    def search(
        self, top: int, *, words: Sequence[str] = (),
        vectors: Sequence[np.ndarray] | Float[np.ndarray, "Q D"] = (),
    ) -> list[list[Hit]]:  # fmt: skip
        """Find the `top` passages for each query, best first.

        `words` are queries to search by BM25. `vectors` are vectors of queries, of length 1, to
        search by cosine; the search is exact, unless an update gave the table an approximate index.
        If both are given, the score is the mean of the cosine and of BM25 / the query's best BM25
        (Bruch et al. 2023). Raise a UserError if LanceDB cannot search the table.
        """
        with _errors_of(self.path):
            most = min(top, self.table.count_rows())
            return [self._found(most, *each) for each in zip_longest(words, vectors)]

    def _found(self, top: int, text: str | None, vector: np.ndarray | None) -> list[Hit]:
        from lancedb.query import MatchQuery

        asked, rows, hits = [], dict[int, Hit](), list[Hit]()
        if text is not None:
            asked.append(self.table.search(MatchQuery(text, "text")))
        if vector is not None:
            asked.append(self.table.search(vector, "vector").distance_type("cosine"))
        for each in asked:
            table = each.with_row_id(True).limit(max(top, JOINED)).to_arrow()
            cosines = np.zeros(len(table))
            if vector is not None:
                flat = table["vector"].combine_chunks().flatten().to_numpy()
                cosines = unit(flat.reshape(-1, self.dimensions)) @ vector
            for row, cosine in zip(
                table.drop_columns(["vector"]).to_pylist(), cosines.tolist(), strict=True
            ):
                rows.setdefault(row.pop("_rowid"), {"_score": 0.0}).update(row, _distance=cosine)
        best = max((row["_score"] for row in rows.values()), default=0.0) or 1.0
        for row in rows.values():
            words, cosine = row.pop("_score"), row.pop("_distance")
            mean = (cosine + words / best) / 2
            score = words if vector is None else cosine if text is None else mean
            hits.append({"score": score, **row, "text": row["text"] or ""})
        return sorted(hits, key=lambda hit: -hit["score"])[:top]


class Reranker:
    """Scorer of pairs of query and passage; its model has a score or two classes (no, yes)."""

    def __init__(self, model: SavedModel) -> None:
        """Make a reranker of a model from `forward.on_device`.

        Raise a UserError if the head of the model predicts neither one score nor two classes.
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
        """Return the score of each pair or, for two classes, the log odds of the second class.

        A higher score is better. `cuts` and `advance` are as in `Predictor.parts`.
        """
        reader, found = self._classifier, [np.zeros(0, np.float32)]
        pairs = {"text": queries, "text_b": passages}
        for part in reader.parts(pairs, what="pair", cuts=cuts, advance=advance):
            logits = reader.long.pooled(np.stack(reader.outputs(part.rows)), part.context)
            found.append(logits[:, 1] - logits[:, 0] if self._two else logits[:, 0])
        return np.concatenate(found)

    def order(self, query: str, hits: Sequence[Hit]) -> list[Hit]:
        """Replace the scores of a query's hits by the reranker's scores; sort, best first."""
        scores = self.scores([query] * len(hits), [hit["text"] for hit in hits])
        scored = zip(scores, hits, strict=True)
        return reranked(scores, [hit | {"score": float(score)} for score, hit in scored])


def reranked(scores: Float[np.ndarray, " N"], ranking: Sequence[Item]) -> list[Item]:
    """Sort a ranking by descending scores. Entries with equal scores keep their order."""
    return [ranking[place] for place in np.argsort(-scores, kind="stable")]


def model_digest(model: SavedModel) -> str:
    """Compute the SHA-256 of what the vectors depend on: weights, tokenizer, settings, length."""
    own = None if model.embedding is None else asdict(model.embedding)
    told = f"{model.tokenizer.fingerprint} {own} {model.max_length}"
    parts = {name: model.params[name] for name in ("encoder", "pooling") if name in model.params}
    return digest_of(parts, told)


def _is_index(directory: Path) -> bool:
    return (directory / RECORD).is_file()


def _is_only_index(directory: Path) -> bool:
    own = {RECORD, LINK, f"{TABLE}.lance"}  # a user may keep other tables in the database
    return _is_index(directory) and own.issuperset(each.name for each in directory.iterdir())


def read_record(directory: Path) -> tuple[IndexedBy, Any]:
    """Read the record of an index: the model, and the CRC-32C of each file that was written.

    Raise a UserError if the directory is no index, or the record is damaged.
    """
    if not _is_index(directory):
        what = "is no index" if directory.exists() else "does not exist"
        raise UserError(f"{directory} {what}; name a directory that `bert-jax index` wrote")
    record = read_json_object(directory / RECORD, max_bytes=MAX_RECORD_BYTES)
    digests = record.pop(DIGESTS, None)
    return build(IndexedBy, record, f"{directory / RECORD}"), digests


def _columns(schema: Any, passages: Sequence[Passage]) -> Any:
    """Return an Arrow table of passages without vectors. Columns in `schema` keep their types."""
    import pyarrow as pa

    found = {}
    for name in dict.fromkeys(name for each in passages for name in each):
        kind = schema.field(name).type if name in schema.names else None
        given = [each.get(name) for each in passages]
        try:
            values = pa.array(given, kind)
            nested = kind is not None and pa.types.is_nested(kind)
            if nested and (new := _keys(pa.array(given).type) - _keys(kind)):  # Arrow drops them
                key = ".".join(min(new))
                raise pa.ArrowInvalid(f"its key {key!r} first occurs after {BLOCK:,} passages")
        except (pa.ArrowException, OverflowError, UnicodeError) as error:
            raise UserError(
                f"the column {name!r} cannot be indexed: {error}. Its values must have one type"
            ) from error
        if values.type != pa.null():  # a later value will show the type
            found[name] = values
    return pa.table(found)


def _keys(kind: Any, above: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Return the keys of all objects in an Arrow type, each after the keys above it."""
    fields = [kind.field(n) for n in range(kind.num_fields)]
    return {above}.union(*(_keys(each.type, (*above, each.name)) for each in fields))


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Raise a UserError for an error of LanceDB, whose errors have no class in common."""
    try:
        yield
    except Exception as error:
        said = f"{error}".split(", /")[0]  # without the place in LanceDB's source
        raise UserError(f"{path}: LanceDB fails: {said:.300}") from error


def _lancedb() -> tuple[Any, Any]:
    with needs_package("an index needs LanceDB: pip install 'bert_jax[lancedb]'"):
        import lancedb
        import lancedb.index
        import pyarrow
    return lancedb, pyarrow
