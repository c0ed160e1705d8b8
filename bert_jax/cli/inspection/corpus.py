"""A look at a corpus: its rows, its longest and shortest documents, its words and its duplicates.

Counts come from the corpus's record. Lengths and duplicates come from the documents that are read:
all documents of a small corpus, or evenly spaced documents of a large corpus.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.cli.inspection.replay import describe_batch
from bert_jax.data.corpus.datasheet import scripts_as_json, vocabulary_scripts
from bert_jax.data.pairings import PAIRINGS, DataConfig
from bert_jax.data.phases import Phase
from bert_jax.data.pipeline import ExampleStream
from bert_jax.data.shard import Shard
from bert_jax.data.store import TokenStore, is_store, open_store
from bert_jax.errors import UserError
from bert_jax.files.urls import scheme
from bert_jax.hashing import hash_key, hash_u64
from bert_jax.terminal import progress_bar, table_lines
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.training.pretrain.corpus import open_corpus

SAMPLE_TOKENS = 50_000_000
"""Approximate number of tokens in the sample that is read, by default, from a larger corpus."""
_BLOCK = 1 << 20
_QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
_SHOWN_TOKENS = 40
_MOST_GROUPS = 5
_DUPLICATES = 0x64757065  # "dupe", so that no other hash has these keys
_TEXT_WIDTH = 76
_SCRIPTS = ["script", "share", "words", "tokens", "per word"]


@dataclass(frozen=True)
class CorpusLook:
    """Findings of `inspect_corpus`."""

    path: str
    counts: dict[str, int]
    """Documents, sentences, tokens and shards of the store."""
    unknown_rate: float
    rows: str
    """Decoded rows as a run sees them before masking."""
    documents_read: int
    is_sample: bool
    """Whether only some documents were read; duplicates are then a lower bound."""
    lengths: np.ndarray
    """Numbers of tokens (n,), int64, in the documents that were read."""
    longest: list[dict[str, Any]]
    """Longest documents, as dicts with the keys shard, document, sentences, tokens and text."""
    shortest: list[dict[str, Any]]
    scripts: dict[str, dict[str, Any]]
    """Tokens per word and other counts for each writing system, over the full store."""
    duplicates: int
    """Number of documents that equal an earlier document, among the documents that were read."""
    duplicate_groups: list[dict[str, Any]]
    """Documents that occur most often, as dicts with `count` and the keys of `longest`."""

    @property
    def quantiles(self) -> dict[str, int]:
        """Quantiles of the document lengths. The keys are probabilities: "0.5" is the median."""
        found = np.quantile(self.lengths, _QUANTILES, method="inverted_cdf").tolist()
        return {f"{share:g}": int(tokens) for share, tokens in zip(_QUANTILES, found, strict=True)}

    def as_json(self) -> dict[str, Any]:
        """Return all findings as JSON values."""
        lengths = {"mean": float(self.lengths.mean()), "quantiles": self.quantiles}
        return {**vars(self), "lengths": lengths, "rows": self.rows.split("\n")}


def inspect_corpus(
    path: str,
    *,
    part: str = "train",
    pairing: str = "",
    length: int = 128,
    rows: int = 4,
    documents: int = 5,
    seed: int = 0,
    full: bool = False,
    progress: bool = False,
) -> CorpusLook:
    """Look at a corpus without changing it.

    `path` is the output of `bert-jax corpus`, or one store in this output, as a local directory or
    as gs://BUCKET/DIRECTORY. If `pairing` is empty, a row holds a source and its translation if the
    corpus has pairs, or a single text otherwise. The result lists the `documents` longest and the
    `documents` shortest documents. If `full` is true, all documents of a large corpus are read.
    Raise a UserError if there is no such corpus or part, or pairing or length do not fit the
    corpus.
    """
    store: TokenStore | None
    if scheme(path) is None:
        store = open_store(path if is_store(path) else Path(path) / part)
    else:
        store = getattr(open_corpus(path), part)
    if store is None:
        raise UserError(f"{path} has no store {part}; use --part train")
    assert store.path is not None
    tokenizer = load_tokenizer(store.path / "tokenizer")
    pairing = pairing or ("translation" if store.is_pairs else "none")
    if pairing not in PAIRINGS:
        raise UserError(f"--pairing is {pairing!r}; it must be one of {', '.join(PAIRINGS)}")
    most = store.num_tokens if full else SAMPLE_TOKENS
    sizes: list[np.ndarray] = []
    hashes: list[np.ndarray] = []
    places: list[tuple[int, int, int]] = []  # shard, first document, number of documents
    most_read = min(most, store.num_tokens)
    with progress_bar(of="documents", unit="tokens", total=most_read, shown=progress) as bar:
        for number, first, starts in _blocks(store, most):
            sizes.append(np.diff(starts))
            hashes.append(_hashes(store.shards[number], starts))
            places.append((number, first, starts.size - 1))
            bar.update(int(starts[-1] - starts[0]))
    lengths, keys = np.concatenate(sizes), np.concatenate(hashes)
    ends = np.cumsum([count for _, _, count in places])

    def described(index: int) -> dict[str, Any]:
        block = int(np.searchsorted(ends, index, side="right"))
        number, first, count = places[block]
        document, shard = first + index - int(ends[block]) + count, store.shards[number]
        start, last = shard.document_offsets[document : document + 2]
        begin, end = int(shard.sentence_offsets[start]), int(shard.sentence_offsets[last])
        text = tokenizer.decode(shard.tokens[begin : min(end, begin + _SHOWN_TOKENS)])
        return {
            "shard": number,
            "document": document,
            "sentences": int(last - start),
            "tokens": end - begin,
            "text": text + (" ..." if end - begin > _SHOWN_TOKENS else ""),
        }

    data = DataConfig(pairing=pairing)  # type: ignore[arg-type]
    batch = ExampleStream(store, data, (Phase(length, rows, 1),), seed).batch(0)
    _, firsts, counts = np.unique(keys, return_index=True, return_counts=True)
    often = [at for at in np.argsort(-counts, kind="stable")[:_MOST_GROUPS] if counts[at] > 1]
    longest = heapq.nlargest(documents, range(lengths.size), lengths.__getitem__)
    shortest = heapq.nsmallest(documents, range(lengths.size), lengths.__getitem__)
    return CorpusLook(
        path=path if scheme(path) is not None else f"{store.path}",
        counts={
            "documents": store.num_documents,
            "sentences": store.num_sentences,
            "tokens": store.num_tokens,
            "shards": len(store.shards),
        },
        unknown_rate=store.unknown_rate,
        rows=describe_batch(batch, None, tokenizer, pairing=pairing),
        documents_read=lengths.size,
        is_sample=lengths.size < store.num_documents,
        lengths=lengths,
        longest=[described(index) for index in longest],
        shortest=[described(index) for index in shortest],
        scripts=scripts_as_json(vocabulary_scripts(tokenizer, store.unigram_counts)),
        duplicates=int(lengths.size - firsts.size),
        duplicate_groups=[{"count": int(counts[at]), **described(int(firsts[at]))} for at in often],
    )


def _blocks(store: TokenStore, most: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield the shard index, the index of the first document and the document starts of each block.

    A block of n documents has about a million tokens and n + 1 starts (the last is the end). If the
    store has more than `most` tokens, take every k-th shard or, of few shards, every k-th block.
    """
    stride = -(-store.num_tokens // most)
    by_shard = stride if len(store.shards) >= 2 * stride else 1
    by_block = 1 if by_shard > 1 else stride
    for number in range(0, len(store.shards), by_shard):
        shard = store.shards[number]
        starts = np.asarray(shard.sentence_offsets)[np.asarray(shard.document_offsets)]
        cuts = np.searchsorted(starts, np.arange(_BLOCK, starts[-1], _BLOCK))
        edges = np.unique([0, *cuts.tolist(), starts.size - 1])
        for first, last in list(itertools.pairwise(edges.tolist()))[::by_block]:
            yield number, first, starts[first : last + 1]


def _hashes(shard: Shard, starts: np.ndarray) -> np.ndarray:
    """Return hashes (n,), uint64, of the documents' tokens in order; `starts` has n + 1 entries."""
    tokens = np.asarray(shard.tokens[starts[0] : starts[-1]]).astype(np.uint64)
    sizes = np.diff(starts)
    begins = starts[:-1] - starts[0]
    place = np.arange(tokens.size) - np.repeat(begins, sizes)
    tokens += np.uint64(1)
    tokens *= hash_u64(hash_key(_DUPLICATES), place) | np.uint64(1)
    return np.add.reduceat(tokens, begins) ^ hash_u64(hash_key(_DUPLICATES), sizes)


def corpus_lines(look: CorpusLook) -> list[str]:
    """Describe a corpus: counts, lengths, documents, scripts, duplicates and rows."""
    counts = look.counts
    shards = f" in {counts['shards']:,} shards" if counts["shards"] > 1 else ""
    read = "all documents" if not look.is_sample else f"{look.documents_read:,} documents, a sample"
    words = {"0": "least", "0.5": "half", "1": "most"}
    quantiles = [
        f"{words.get(name, f'p{100 * float(name):g}')} {tokens:,}"
        for name, tokens in look.quantiles.items()
    ]
    scripts = [
        [name, f"{one['tokens'] / counts['tokens']:.2%}", f"{one['words']:,}", f"{one['tokens']:,}",
         "-" if one["tokens_per_word"] is None else f"{one['tokens_per_word']:.2f}"]
        for name, one in look.scripts.items()
    ]  # fmt: skip
    share = look.duplicates / look.documents_read
    least = "at least: this is a sample; --full reads all" if look.is_sample else "all were read"
    return [
        f"{look.path}: {counts['documents']:,} documents, {counts['sentences']:,} sentences, "
        f"{counts['tokens']:,} tokens{shards}; {look.unknown_rate:.2%} of the tokens [UNK]",
        "",
        f"tokens per document ({read}): mean {look.lengths.mean():,.1f}",
        "  " + "  ".join(quantiles),
        "",
        "longest documents",
        *map(_document, look.longest),
        "",
        "shortest documents",
        *map(_document, look.shortest),
        "",
        "tokens per word, by script of the token (the whole corpus)",
        *(f"  {line}" for line in table_lines([_SCRIPTS, *scripts])),
        "",
        f"exact duplicates: {look.duplicates:,} of {look.documents_read:,} documents ({share:.2%}) "
        f"equal an earlier one ({least})",
        *(f"  {one['count']:,} times{_document(one)}" for one in look.duplicate_groups),
        "",
        look.rows,
    ]


def _document(one: dict[str, Any]) -> str:
    text = "".join(c if c.isprintable() else " " for c in one["text"])
    place = f"{one['shard']}/{one['document']:,}" if one["shard"] else f"{one['document']:,}"
    short = text if len(text) <= _TEXT_WIDTH else text[: _TEXT_WIDTH - 4] + " ..."
    return f"  document {place}, {one['tokens']:,} tokens: {short}"
