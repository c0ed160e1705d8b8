"""The search for evaluation texts in a token store, or in text before it is tokenized."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.data.corpus.overlap.evaluation import EvaluationSet, text_key
from bert_jax.data.corpus.overlap.ngrams import (
    MIN_WORDS,
    NGRAM,
    NgramTable,
    normalised_words,
    word_hashes,
)
from bert_jax.data.corpus.overlap.report import Report
from bert_jax.data.corpus.workers import grouped, map_ordered
from bert_jax.data.store import TokenStore, open_store
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.tokenizer import Tokenizer

BLOCK_TOKENS = 1 << 18
_BLOCK_CHARS = 1 << 20

Span = tuple[int, int, int]
"""A shard of a store, and its documents from the second number up to the third."""


def search_store(
    path: Path, evaluation: EvaluationSet, *, num_workers: int = 1, show: Callable = iter
) -> Report:
    """Look for evaluation texts in a token store; `show` wraps a sequence, as tqdm does.

    The store has tokens: documents are decoded, and the evaluation texts are encoded and decoded
    by the same tokenizer, so that both have lost the same case, accents and characters.

    Raises:
        UserError: no store there, or a damaged one.
    """
    store = open_store(path)
    tokenizer = load_tokenizer(path / "tokenizer")
    encoded = (tokenizer.encode_batch([text])[0] for text in evaluation.texts)
    table = NgramTable(normalised_words(tokenizer.decode(ids)) for ids in encoded)
    found = map_spans(_search_texts, table, path, show(store_spans(store)), num_workers)
    name = path.resolve().parent.name if path.name == "train" else path.resolve().name
    return _report(name, store.fingerprint, evaluation, table, found)


def search_texts(
    name: str, documents: Iterable[str], evaluation: EvaluationSet, *, num_workers: int = 1
) -> Report:
    """Look for evaluation texts in the documents of the corpus `name`."""
    table = NgramTable(map(normalised_words, evaluation.texts))
    blocks = grouped(documents, len, _BLOCK_CHARS)
    found = map_ordered(functools.partial(_search_texts, table), blocks, num_workers)
    return _report(name, "", evaluation, table, found)


def store_spans(store: TokenStore) -> list[Span]:
    """Divide the documents of a store into spans of about `BLOCK_TOKENS` tokens."""
    spans = []
    for number, counts in enumerate(store.counts):
        pieces = -(-counts.num_tokens // BLOCK_TOKENS)
        edges = [counts.num_documents * piece // pieces for piece in range(pieces + 1)]
        spans += [(number, a, b) for a, b in itertools.pairwise(edges) if a < b]
    return spans


def decoded(store: TokenStore, tokenizer: Tokenizer, span: Span) -> Iterator[str]:
    """Yield the documents of a span of a store as text, a paragraph each."""
    shard = store.shards[span[0]]
    sentences = shard.document_offsets[span[1] : span[2] + 1]
    offsets = shard.sentence_offsets[sentences]
    for begin, end in itertools.pairwise(offsets.tolist()):
        yield tokenizer.decode(shard.tokens[begin:end].tolist())


def map_spans(
    function: Callable, state: Any, path: Path, spans: Iterable[Span], num_workers: int
) -> Iterator[Any]:
    """Apply a function to `state` and the texts of each span of a store, in processes."""
    given = functools.partial(function, state), path
    return map_ordered(_of_span, spans, num_workers, initializer=_start, arguments=given)


_worker: tuple[Callable[[Iterable[str]], Any], TokenStore, Tokenizer] | None = None


def _start(function: Callable, path: Path) -> None:
    global _worker
    _worker = function, open_store(path), load_tokenizer(path / "tokenizer")


def _of_span(span: Span) -> Any:
    assert _worker is not None
    function, store, tokenizer = _worker
    return function(decoded(store, tokenizer, span))


def _search_texts(table: NgramTable, texts: Iterable[str]) -> dict[int, np.ndarray]:
    """Return the numbers of the n-grams that texts have, by size."""
    seen = table.nothing_seen()
    for text in texts:
        table.mark(seen, word_hashes(normalised_words(text)))
    return {size: np.flatnonzero(marks) for size, marks in seen.items()}


def _report(
    name: str,
    fingerprint: str,
    evaluation: EvaluationSet,
    table: NgramTable,
    found: Iterable[dict[int, np.ndarray]],
) -> Report:
    seen = table.nothing_seen()
    for block in found:
        for size, numbers in block.items():
            seen[size][numbers] = True
    counts = map(tuple, np.column_stack(table.counts(seen)).tolist())
    examples: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for each in evaluation.examples:
        examples[each.split].append(tuple(map(text_key, each.texts)))
    return Report(
        corpus=name,
        fingerprint=fingerprint,
        evaluation=evaluation.name,
        digest=evaluation.digest,
        files=evaluation.files,
        examples={split: tuple(keys) for split, keys in examples.items()},
        texts=dict(zip(map(text_key, evaluation.texts), counts, strict=True)),
        ngram=NGRAM,
        min_words=MIN_WORDS,
    )
