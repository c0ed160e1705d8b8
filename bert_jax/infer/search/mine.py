"""Mining of hard negatives: documents that are near a query but do not answer it.

Source: Moreira et al. 2024 (NV-Retriever), section 4. Documents with a score near the positive's
score are excluded, because they may be answers that nobody labelled.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.files.staging import staged_file
from bert_jax.infer.embed import text_vectors
from bert_jax.infer.exact_search import top_k
from bert_jax.infer.predictor import Cuts
from bert_jax.tasks.config import TableConfig
from bert_jax.tasks.embedding import text_key
from bert_jax.tasks.text.tables import read_texts


@dataclass(frozen=True)
class Pair:
    """A query and a document that answers it."""

    query: str
    document: str


@dataclass(frozen=True)
class Mined:
    """Result of mining: pairs with their negatives, and counts to print."""

    pairs: Sequence[Pair]
    negatives: Sequence[Sequence[str]]
    scores: Sequence[Sequence[float]]
    """Similarities of each query with its document and with each negative, by the model."""
    documents: int
    """Number of distinct documents that were searched."""
    too_near: int
    """Number of documents that the margin excluded, as a sum over all pairs."""
    warning: str = ""
    """Warning about cut texts; may be empty."""

    def lines(self) -> list[str]:
        """Format the counts for people."""
        counts = np.array([len(found) for found in self.negatives])
        short = np.count_nonzero(counts < counts.max())
        times = Counter(text for found in self.negatives for text in found)
        most = max(times.values(), default=0)
        return [
            f"{len(self.pairs):,} pairs, {self.documents:,} distinct documents, {counts.sum():,} "
            f"negatives ({counts.mean():.2f} per pair; {short:,} pairs have fewer than others)",
            f"{len(times):,} different documents are negatives, one of them for {most:,} pairs",
            f"{self.too_near:,} documents were left out: they are nearer than the margin allows",
        ]


def read_pairs(
    source: str, query: str = "query", document: str = "document", **written: Any
) -> list[Pair]:
    """Read the pairs of a CSV, TSV, JSON lines or parquet file. Skip rows with an empty text.

    `query` and `document` name columns. `written` has fields of `TableConfig` such as `header`.
    Raise a UserError if the file or a column cannot be read.
    """
    table = TableConfig(text=query, text_pair=document, empty="skip", **written)
    found = read_texts(source, table, labelled=False)
    return [Pair(each.text, each.text_pair or "") for each in found.examples]


def mine(
    model: SavedModel, pairs: Sequence[Pair], *, negatives: int = 5, margin: float = 0.05,
    first: int = 1, last: int = 100, corpus: Iterable[str] = (),
    advance: Callable[[int], object] = lambda count: None,
) -> Mined:  # fmt: skip
    """Find hard negatives for pairs by exact search in the documents of the pairs and in `corpus`.

    The text of the query and all documents that are paired with the query are never negatives.
    Texts that differ only in case and white space count as equal. The result is deterministic.

    Args:
        negatives: Largest number of negatives for each pair. The nearest documents are taken.
        margin: Smallest difference between the pair's cosine and a negative's; may be below 0.
        first, last: First and last rank, from 1. A high `first` skips the nearest, likely answers.
        advance: Function that is called after each part with the number of texts in the part.
    """
    documents: dict[bytes, str] = {}
    for text in (*(pair.document for pair in pairs), *corpus):
        documents.setdefault(text_key(text), text)
    queries = {text_key(pair.query): pair.query for pair in pairs}
    own: dict[bytes, set[bytes]] = {query: {query} for query in queries}
    for pair in pairs:
        own[text_key(pair.query)].add(text_key(pair.document))
    cuts = Cuts()
    asked = text_vectors(model, [*queries.values()], "query", cuts=cuts, advance=advance)
    known = text_vectors(model, [*documents.values()], "document", cuts=cuts, advance=advance)
    scores, numbers = top_k(asked, known, last + max(map(len, own.values())))
    keys, texts = [*documents], [*documents.values()]
    number_of = {key: number for number, key in enumerate(keys)}
    row_of = {query: row for row, query in enumerate(queries)}
    found, similar, too_near = [], [], 0
    for pair in pairs:
        query = text_key(pair.query)
        row = row_of[query]
        others = [
            (float(score), int(number))
            for score, number in zip(scores[row], numbers[row], strict=True)
            if keys[number] not in own[query]
        ][first - 1 : last]
        own_score = float(asked[row] @ known[number_of[text_key(pair.document)]])
        kept = [each for each in others if each[0] <= own_score - margin]
        too_near += len(others) - len(kept)
        chosen = kept[:negatives]
        found.append([texts[number] for _, number in chosen])
        similar.append([own_score, *(score for score, _ in chosen)])
    return Mined(pairs, found, similar, len(documents), too_near, cuts.warning())


def write_mined(path: Path, mined: Mined) -> None:
    """Write JSON lines (query, document, negatives, scores) for the tasks embedding and rerank."""
    rows = [
        {**asdict(pair), "negatives": list(negatives), "scores": [round(n, 6) for n in scores]}
        for pair, negatives, scores in zip(mined.pairs, mined.negatives, mined.scores, strict=True)
    ]
    with staged_file(path) as file:
        file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n".encode() for row in rows)
