"""Embedding tasks for pairs, scored pairs, classes or single texts: reading, rows and scores."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int64

from bert_jax.errors import UserError
from bert_jax.tasks.config import EmbeddingTaskConfig, TableConfig
from bert_jax.tasks.examples import Data, LabelSet, Origin, TextExample, counted
from bert_jax.tasks.overlap import held_out
from bert_jax.tasks.reports.intervals import Grounds, means
from bert_jax.tasks.retrieval.bm25 import rarity
from bert_jax.tasks.retrieval.metrics import EMBEDDING_METRICS, PairKind, chance, search_scores
from bert_jax.tasks.rows import Rows
from bert_jax.tasks.task import Examined, HeadKind, LabelSpec, Outputs, Split, SplitScores, Task
from bert_jax.tasks.text.metrics import text_grounds
from bert_jax.tasks.text.tables import as_score, read_labelled, read_texts
from bert_jax.tokenization.tokenizer import Tokenizer, make_row, num_special

_SHORTEST_HALVES = 8
"""Smallest number of characters that a text must have to be cut into two halves."""


@dataclass(frozen=True)
class GroupData(Data[TextExample]):
    """Examples of one file, with the kind of their content (see `EmbeddingTaskConfig.rows`)."""

    kind: PairKind = "pairs"


def read_dev_groups(
    source: str, config: EmbeddingTaskConfig, labels: LabelSet | None, *, labelled: bool = True
) -> GroupData:
    """Read a file of dev rows; if `labelled`, cut each single text into a pair of halves."""
    data = read_groups(source, config, config.kind_of_dev, labels, labelled=labelled)
    return halved(data) if data.kind == "texts" and labelled else data


def read_groups(
    source: str,
    config: EmbeddingTaskConfig,
    kind: PairKind,
    labels: LabelSet | None = None,
    *,
    labelled: bool = True,
) -> GroupData:
    """Read a file whose rows have the content `kind`. Skip rows with an empty text, with a warning.

    `labels` are the training file's classes (None: this file's). Scores and classes are read only
    if `labelled`. Raise a UserError if the file is unreadable, has invalid rows or lacks labels.
    """
    is_pair = kind in ("pairs", "scores")
    table = TableConfig(
        text=config.query if is_pair else config.text,
        text_pair=config.document if is_pair else "",
        label=config.score if kind == "scores" else config.label,
        problem_type="single_label" if kind == "classes" else "regression",
        id=config.id, empty="skip", ragged=config.ragged, format=config.format,
        header=config.header, quoting=config.quoting, delimiter=config.delimiter,
    )  # fmt: skip

    columns = config.negatives if kind == "pairs" else ()
    score_column = config.scores if columns and labelled else ""
    given: list[tuple[float, ...] | None] = []

    def negatives(origin: Origin, values: Sequence[Any]) -> list[str]:
        found = [text for value in values[: len(columns)] for text in _listed(origin, value)]
        kept = found[: config.max_negatives]
        scores = values[-1] if score_column else None
        if score_column and not (isinstance(scores, list) and len(scores) == 1 + len(found)):
            raise UserError(
                f"{origin}: column {score_column!r} holds {scores!r:.60}; expected a list of "
                f"{1 + len(found)} numbers, for the document and for each negative"
            )
        scores = scores and tuple(as_score(origin, score_column, each) for each in scores)
        given.append(scores and scores[: 1 + len(kept)])
        return kept

    more = (*columns, score_column) if score_column else columns
    labelled = labelled and kind in ("scores", "classes")
    read = read_labelled if labelled else read_texts
    data = read(source, table, labels, labelled=labelled, more=more, texts_of=negatives)
    examples = data.examples
    if columns:
        examples = [replace(each, label=own) for each, own in zip(examples, given, strict=True)]
    return GroupData(data.name, examples, data.labels, data.warnings, kind=kind)


def _listed(origin: Origin, value: Any) -> Iterator[str]:
    """Yield the texts of an entry in a column of negatives: a text, a list of texts, or nothing."""
    for text in value if isinstance(value, list) else [value]:
        if text is not None and not isinstance(text, str):
            raise UserError(
                f"{origin}: a column of negatives holds {text!r:.60}; give a text, a list of "
                "texts, or nothing"
            )
        if text and text.strip():
            yield text


def text_key(text: str) -> bytes:
    """Hash a text; texts that differ only in case and white space get the same hash."""
    words = " ".join(text.casefold().split())
    return hashlib.blake2b(words.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _held_out(source: str, data: GroupData, rate: float) -> list[GroupData]:
    """Hold out a share of the distinct documents (or single texts), each with all its rows."""
    keys = [text_key(each.text_pair or each.text) for each in data.examples]
    held = held_out(source, keys, rate, 2, "documents")
    note = f"{source}: {sum(held):,} of {len(keys):,} rows are held out as dev"
    rest = [each for each, is_held in zip(data.examples, held, strict=True) if not is_held]
    train = replace(data, examples=rest, warnings=(*data.warnings, note))
    dev = replace(data, examples=[*compress(data.examples, held)], warnings=())
    return [train, halved(dev) if dev.kind == "texts" else dev]


def halved(data: GroupData) -> GroupData:
    """Cut each text in two, at the space nearest to its middle or, without spaces, at its middle.

    Raise a UserError if fewer than two texts are long enough.
    """
    found: list[TextExample] = []
    short: list[Origin] = []
    for each in data.examples:
        text = each.text.strip()
        middle = len(text) // 2
        blanks = [text.rfind(" ", 0, middle), text.find(" ", middle)]
        end = min((at for at in blanks if at > 0), key=lambda at: abs(at - middle), default=middle)
        if len(text) < _SHORTEST_HALVES:
            short.append(each.origin)
        else:
            found.append(replace(each, text=text[:end].strip(), text_pair=text[end:].strip()))
    if len(found) < 2:
        raise UserError(
            f"{data.examples[0].origin.path}: {len(found)} of {len(data.examples):,} dev texts "
            "can be cut into halves, but at least 2 are needed; name a file of pairs or scores in "
            "task.dev, and set task.dev_rows"
        )
    notes = counted("texts too short to be cut into halves, not scored", short)
    return replace(data, examples=found, warnings=(*data.warnings, *notes))


def group_rows(
    data: GroupData, config: EmbeddingTaskConfig, tokenizer: Tokenizer
) -> tuple[Rows, list[str]]:
    """Return the rows of one file's texts, and warnings that count cut texts.

    An example becomes a group of rows, one for each text. Smaller groups are padded with empty rows
    to the size of the largest group. Each text gets the prefix of queries or documents, and long
    texts are truncated. In training, texts of the kind `texts` are paired with themselves.
    """
    is_pair = len(data.examples[0].texts) > 1
    limits = {"query": config.query_length, "document": config.length}
    prefixes = {"query": config.query_prefix, "document": config.document_prefix}
    side_of_first = "query" if is_pair else "document"
    groups = [
        [(side_of_first, first), *(("document", text) for text in others)]
        for first, *others in (each.texts for each in data.examples)
    ]
    if data.trains and data.kind == "texts":
        groups = [group * 2 for group in groups]
    different = list(dict.fromkeys(each for group in groups for each in group))
    encoded = tokenizer.encode_batch([prefixes[side] + text for side, text in different])
    found: dict[tuple[str, str], np.ndarray] = {}
    cut: set[tuple[str, str]] = set()
    for (side, text), ids in zip(different, encoded, strict=True):
        room = limits[side] - num_special(tokenizer, pair=False)
        found[side, text] = make_row(tokenizer, ids[:room]).ids
        if len(ids) > room:
            cut.add((side, text))
    numbers: dict[bytes, int] = {}
    id_of = {text: numbers.setdefault(text_key(text), len(numbers)) for _, text in different}
    tokens: list[np.ndarray] = []
    text_ids: list[int] = []
    size = max(map(len, groups))
    for group in groups:
        tokens += [found[each] for each in group] + [np.zeros(0, np.int32)] * (size - len(group))
        text_ids += [id_of[text] for _, text in group] + [-1] * (size - len(group))
    labels = None
    if data.kind == "pairs" and config.loss != "contrast":
        labels = wanted_scores(data.examples, size - 1)
    elif data.kind != "pairs" and data.examples[0].label is not None:
        dtype = np.int32 if data.kind == "classes" else np.float32
        labels = np.array([each.label for each in data.examples], dtype)
    lengths = np.array([*map(len, tokens)], np.int32)
    rows = Rows(tokens, lengths, labels, size, np.array(text_ids, np.int32))
    names = {"query": "queries", "document": "documents" if is_pair else "texts"}
    warnings: list[str] = []
    for side, limit in limits.items():
        long = {each for each in cut if each[0] == side}
        pairs = zip(data.examples, groups, strict=True)
        origins = [each.origin for each, group in pairs if not long.isdisjoint(group)]
        what = f"rows with {names[side]} of more than {limit} tokens, cut there"
        warnings += counted(what, origins)
    return rows, warnings


def wanted_scores(examples: Sequence[TextExample], size: int) -> Float[np.ndarray, "N K"]:
    """Return each pair's `task.scores` or, without scores, 1; zeros pad the rows to `size`."""
    wanted = np.zeros((len(examples), size), np.float32)
    for row, each in zip(wanted, examples, strict=True):
        given = each.label if isinstance(each.label, tuple) else (1.0,)
        row[: len(given)] = given
    return wanted


def token_weights(rows: Rows, vocab_size: int, *, idf: bool) -> Float32[np.ndarray, " V"]:
    """Return each token's weight in a static query: its IDF in the documents of `rows`, or 1."""
    if not idf:
        return np.ones(vocab_size, np.float32)
    known = [rows.tokens[place] for place in _documents(rows)]
    found_in = np.bincount(np.concatenate([*map(np.unique, known)]), minlength=vocab_size)
    return rarity(found_in, len(known)).astype(np.float32)


def _documents(rows: Rows) -> Int64[np.ndarray, " N"]:
    """Return the row index of each distinct document or, for groups of one text, of each text."""
    assert rows.text_ids is not None
    is_query = (np.arange(len(rows.text_ids)) % rows.group == 0) & (rows.group > 1)
    places = np.flatnonzero((rows.text_ids >= 0) & ~is_query)  # -1 marks a missing negative
    return places[np.unique(rows.text_ids[places], return_index=True)[1]]


class EmbeddingSplit(Split):
    """Texts of one file, their rows and their scores."""

    _task: "EmbeddingTask"
    _data: GroupData
    LABELS = "scores"
    baseline = "a random ranking"

    def __init__(self, task: "EmbeddingTask", data: GroupData) -> None:
        self._task, self._data, self.is_collection = task, data, data.kind != "scores"
        rows, cut = group_rows(data, task.config, task.tokenizer)
        super().__init__(data, rows, EMBEDDING_METRICS[data.kind], cut)

    @cached_property
    def constant_score(self) -> float:
        """Expected score of a random ranking: 0 for scored pairs, NaN if labels are missing."""
        if self._data.kind in ("scores", "classes") and self._data.truth is None:
            return math.nan
        if self._data.kind == "scores":
            return 0.0
        _, documents, relevant, hidden = self._search
        counts = np.array([len(found) for found in relevant if len(found)])
        # The search leaves out the document with the query's own text.
        return chance(self._task.metric, counts, len(documents) - (min(hidden) >= 0))

    @cached_property
    def _search(
        self,
    ) -> tuple[Int64[np.ndarray, " Q"], Int64[np.ndarray, " N"], list[list[int]], list[int]]:
        """Row indices of the distinct queries and documents, and two lists with an entry per query.

        Rows are numbered among all N * G rows, documents among the returned documents. One list
        has each query's answers. The other has the document with the query's own text, which the
        search must leave out: -1 if there is no such document, or the document is an answer.
        """
        group, documents = self.rows.group, _documents(self.rows)
        assert self.rows.text_ids is not None
        ids = self.rows.text_ids.reshape(-1, group)
        number_of = {int(text): number for number, text in enumerate(ids.ravel()[documents])}
        queries, at, own = np.unique(ids[:, 0], return_index=True, return_inverse=True)
        relevant: list[list[int]] = [[] for _ in queries]
        if group > 1:
            for query, document in set(zip(own.tolist(), ids[:, 1].tolist(), strict=True)):
                relevant[query].append(number_of[document])
        elif self._data.truth is not None:
            classes = np.array(self._data.truth)[at]
            for query, label in enumerate(classes):
                alike = np.flatnonzero(classes == label)
                relevant[query] = [int(n) for n in alike if n != query]
        if not any(relevant):
            raise UserError(
                f"{self.name} has no two texts of the same class, so no query has an answer; at "
                "least one class must occur twice"
            )
        hidden = []
        for text, found in zip(queries.tolist(), relevant, strict=True):
            number = number_of.get(text, -1)
            hidden.append(-1 if number in found else number)
        return at * group, documents, relevant, hidden

    def _examine(self, outputs: Outputs, scores: SplitScores) -> Examined:
        vectors = self._vectors(outputs)
        if self._data.kind == "scores":
            truth, products = np.array(self._gold, np.float32), self._products(vectors)
            return Examined(text_grounds("regression", truth, products, self.units))
        queries, documents, relevant, hidden = self._search
        flat = vectors.reshape(-1, vectors.shape[-1])
        return self._graded(search_scores(flat[queries], flat[documents], relevant, hidden))

    def _graded(self, values: Mapping[str, Float[np.ndarray, " Q"]]) -> Examined:
        """Return the data for confidence intervals of the queries' mean scores, and the details."""
        each = np.stack([values[name] for name in self._score_names], axis=1)
        found = Grounds(means(self._score_names, each), np.arange(len(each)), each.mean(axis=1))
        return Examined(found, lambda: {"queries": len(each), "units": ["queries", len(each)]})

    def _entries(self, outputs: Outputs, scores: SplitScores) -> list[dict[str, Any]]:
        """Return the cosine of each row's two texts or, for sparse vectors, the inner product."""
        if self.rows.group == 1:
            raise UserError(
                f"{self.name} has single texts, but predictions compare pairs; use `bert-jax "
                "embed` to write the vectors of texts"
            )
        return [{"cosine": round(float(x), 6)} for x in self._products(self._vectors(outputs))]

    @staticmethod
    def _products(vectors: Float[np.ndarray, "N G D"]) -> Float[np.ndarray, " N"]:
        pairs = vectors[:, :2].astype(np.float64)
        return (pairs[:, 0] * pairs[:, 1]).sum(axis=-1)

    def _vectors(self, outputs: Outputs) -> Float[np.ndarray, "N G D"]:
        # A part of a file may have smaller groups than the outputs, which come from the whole file.
        own = np.asarray(outputs, np.float32)[:, : self.rows.group]
        return self._stacked(own, len(self.rows), self.rows.group, dtype=np.float32)


class EmbeddingTask(Task[EmbeddingTaskConfig]):
    """An embedding task, configured by `kind: embedding`."""

    SPLIT: type[EmbeddingSplit] = EmbeddingSplit
    objective: HeadKind = "embedding"
    num_outputs = 0

    @classmethod
    def _read(cls, config: EmbeddingTaskConfig) -> tuple[LabelSpec, Sequence[GroupData]]:
        train = config.source("train")
        data = read_groups(train, config, config.rows)
        spec = LabelSpec(() if data.labels is None else data.labels.names)
        if config.dev:
            return spec, [data, read_dev_groups(config.dev, config, data.labels)]
        return spec, _held_out(train, data, config.dev_rate)

    def _read_other(self, source: str, labelled: bool) -> GroupData:
        labels = LabelSet(self.spec.labels) if self.spec.labels and labelled else None
        return read_dev_groups(source, self.config, labels, labelled=labelled)
