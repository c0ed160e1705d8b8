"""A look at a corpus: its rows, its longest and shortest documents, its words and its duplicates.

Counts come from the corpus's record. Lengths and duplicates come from the documents that are read:
all documents of a small corpus, or evenly spaced documents of a large corpus.
"""

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_jax.cli.inspection.replay import describe_batch
from bert_jax.data.corpus.datasheet import scripts_as_json, vocabulary_scripts
from bert_jax.data.corpus.overlap.equal import measure
from bert_jax.data.corpus.overlap.search import Mapper, map_spans, opened, store_spans
from bert_jax.data.corpus.sharded.engine import Engine
from bert_jax.data.pairings import DataConfig
from bert_jax.data.phases import Phase
from bert_jax.data.pipeline import ExampleStream
from bert_jax.errors import UserError
from bert_jax.files.urls import scheme
from bert_jax.terminal import progress_bar, table_lines
from bert_jax.training.pretrain.corpus import open_corpus, store_openers

SAMPLE_TOKENS = 50_000_000
"""Approximate number of tokens in the sample that is read, by default, from a larger corpus."""
_QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
_SHOWN_TOKENS = 40
_MOST_GROUPS = 5
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
    engine: Mapper | None = None,
    progress: bool = False,
) -> CorpusLook:
    """Look at a corpus without changing it.

    `path` is the output of `bert-jax corpus`, or one store in it, as a local directory or as gs://
    or s3://BUCKET/DIRECTORY. If `pairing` is empty, a row holds a source and its translation if the
    corpus has pairs, else a single text. The result lists the `documents` longest and shortest
    documents. Unless `full` is true, the engine (by default, this process) samples a corpus above
    `SAMPLE_TOKENS` tokens: every k-th shard or, if there are few shards, every k-th block. Raise a
    UserError if there is no such corpus or part, or pairing or length do not fit it.
    """
    stores = store_openers(path)
    opens = stores.get(part) or (stores.get("") if part == "train" else None)
    if opens is None:
        open_corpus(path)  # raises if there is no corpus
        raise UserError(f"{path} has no store {part}; use --part train")
    store, tokenizer = opened(opens)
    pairing = pairing or ("translation" if store.is_pairs else "none")
    spans, stride = store_spans(store), 1 if full else -(-store.num_tokens // SAMPLE_TOKENS)
    if len(store.counts) >= 2 * stride:
        spans = [span for span in spans if span[0] % stride == 0]
    else:
        spans = spans[::stride]
    found = map_spans(measure, opens, spans, engine or Engine(1))
    bar = progress_bar(found, of="documents", unit="blocks", total=len(spans), shown=progress)
    lengths, keys = map(np.concatenate, zip(*bar, strict=True))
    ends = np.cumsum([last - first for _, first, last in spans])

    def described(index: int) -> dict[str, Any]:
        block = int(np.searchsorted(ends, index, side="right"))
        number, _, last = spans[block]
        document, shard = last + index - int(ends[block]), store.shards[number]
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
