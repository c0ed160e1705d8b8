"""Search for evaluation texts in a token store or in raw text, and a report of the result."""

import functools
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np

from bert_jax.data.corpus.overlap import ngrams
from bert_jax.data.corpus.overlap.evaluation import EvaluationSet, text_key
from bert_jax.data.corpus.workers import grouped
from bert_jax.data.store import TokenStore
from bert_jax.errors import UserError
from bert_jax.files.staging import replace_file
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.terminal import table_lines
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.tokenizer import Tokenizer

DIRECTORY = "contamination"  # directory of a token store, with the reports
HELDOUT = "heldout.json"  # file with the report on held-out documents (see `heldout`)
FORMAT = "bert_jax contamination"
VERSION = 3
_MAX_BYTES = 1 << 28

T = TypeVar("T")


@dataclass(frozen=True)
class Report:
    """Result of a search for evaluation texts in a corpus. The report's file has these fields."""

    corpus: str
    fingerprint: str
    """Fingerprint of the token store; empty for text files."""
    evaluation: str
    digest: str
    """sha256 of the evaluation texts."""
    files: tuple[tuple[str, str], ...]
    """Name and sha256 of each evaluation file."""
    examples: Mapping[str, tuple[tuple[str, ...], ...]]
    """For each split: the text keys of each example; see `evaluation.text_key`."""
    texts: Mapping[str, tuple[int, int]]
    """For each text key: number of n-grams, and how many the corpus has; 0 and 0 if too short."""
    ngram: int
    min_words: int
    """Smallest number of words that a text must have to be searched for."""

    def shares(self) -> dict[str, np.ndarray]:
        """Return, by split, each example's fraction of n-grams in the corpus; NaN if too short."""
        return {
            split: np.array([share_of(self.texts, keys) for keys in examples])
            for split, examples in self.examples.items()
        }

    def counts(self) -> dict[str, dict[str, int | float]]:
        """Count the examples of each split and, if there are several splits, of `all` together.

        `short` counts the examples that are too short to search for. Among the others, `seen`,
        `half` and `whole` count the examples with at least one, at least half, and all of their
        n-grams in the corpus; `share` is the mean fraction of n-grams in the corpus.
        """
        shares = self.shares()
        if len(shares) > 1:
            shares["all"] = np.concatenate([*shares.values()])
        return {split: _counts(each) for split, each in shares.items()}

    def lines(self) -> list[str]:
        """Return the lines of a readable table of the counts."""
        ngram, shortest = self.ngram, self.min_words
        head = ("split", "examples", "too short", "seen", "half seen", "all seen", "mean share")
        rows = [
            (name, *(f"{each[key]:,.0f}" for key in ("examples", "short", "seen", "half", "whole")),
             f"{each['share']:.2%}")
            for name, each in self.counts().items()
        ]  # fmt: skip
        return [
            f"{self.evaluation} in {self.corpus}: {ngram}-grams of normalised words",
            *table_lines([head, *rows]),
            f"seen: the corpus has a {ngram}-gram of the example (of {shortest} to {ngram - 1} "
            f"words: the complete text); fewer than {shortest} words are too short to judge",
        ]

    def summary(self) -> dict[str, Any]:
        """Return a summary, for the record and the model card of a model trained on the corpus."""
        counts = self.counts()
        return {
            "corpus": self.corpus, "corpus_fingerprint": self.fingerprint,
            "evaluation": self.evaluation, "evaluation_sha256": self.digest,
            "ngram": self.ngram, "min_words": self.min_words,
            **(counts.get("all") or next(iter(counts.values()))),
        }  # fmt: skip

    def save(self, path: Path) -> None:
        """Write the report as JSON, atomically. Raise a UserError if the file cannot be written."""
        value = {"format": FORMAT, "version": VERSION, **vars(self), "counts": self.counts()}
        replace_file(path, (json.dumps(value, ensure_ascii=False) + "\n").encode())

    @property
    def file_name(self) -> str:
        """File name of the report, unique to the evaluation."""
        plain = "".join(c if c.isalnum() or c in ".-" else "-" for c in self.evaluation)
        return f"{plain[:80]}-{self.digest[:8]}.json"


def read_report(path: Path) -> Report:
    """Read a report; raise a UserError if the file is missing or damaged, or is not a report."""
    value = read_json_object(path, max_bytes=_MAX_BYTES)
    if value.get("format") != FORMAT or value.get("version") != VERSION:
        raise UserError(
            f"{path} is not a contamination report of version {VERSION}; write one with "
            "`bert-jax contamination`."
        )
    try:
        found = value["examples"].items()
        return Report(
            corpus=str(value["corpus"]),
            fingerprint=str(value["fingerprint"]),
            evaluation=str(value["evaluation"]),
            digest=str(value["digest"]),
            files=tuple((str(name), str(digest)) for name, digest in value["files"]),
            examples={split: tuple(tuple(map(str, e)) for e in listed) for split, listed in found},
            texts={key: (int(total), int(seen)) for key, (total, seen) in value["texts"].items()},
            ngram=int(value["ngram"]),
            min_words=int(value["min_words"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def reports_of(store: Path) -> list[Report]:
    """Return the reports in a token store, sorted by file name."""
    files = sorted((store / DIRECTORY).glob("*.json"))
    return [read_report(path) for path in files if path.name != HELDOUT]


def merged(reports: Iterable[Report]) -> dict[str, tuple[int, int]]:
    """Merge the reports' `texts`. For each key, keep the counts with the most n-grams found."""
    found: dict[str, tuple[int, int]] = {}
    for report in reports:
        for key, counts in report.texts.items():
            found[key] = max(found.get(key, (0, 0)), counts, key=lambda each: each[::-1])
    return found


def share_of(texts: Mapping[str, tuple[int, int]], keys: Iterable[str]) -> float:
    """Return the fraction of an example's n-grams that occur in the corpus.

    The result is NaN if the example has no n-grams, or if one of its `keys` is not in `texts`.
    """
    counts = [texts.get(key) for key in keys]
    total = 0 if None in counts else sum(each[0] for each in counts if each)
    return sum(each[1] for each in counts if each) / total if total else math.nan


def _counts(shares: np.ndarray) -> dict[str, int | float]:
    judged = shares[~np.isnan(shares)]
    bounds = {"seen": judged > 0, "half": judged >= 0.5, "whole": judged == 1}
    return {
        "examples": len(shares),
        "short": len(shares) - len(judged),
        **{name: int(chosen.sum()) for name, chosen in bounds.items()},
        "share": float(judged.mean()) if len(judged) else 0.0,
    }


@runtime_checkable
class Mapper(Protocol):
    """The part of an engine (`sharded.engine.Engine`) that a search needs."""

    is_local: bool

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterable[Any]:
        """Yield the function's results in the order of the items."""


BLOCK_TOKENS = 1 << 18
_BLOCK_CHARS = 1 << 20
_TASK_BYTES = 64 << 20

Opens: TypeAlias = Callable[[], TokenStore]
"""Function that opens a store, in this process or on another machine."""
Span = tuple[int, int, int]
"""Index of a shard, and the begin and end of a range of document indices in this shard."""


def search_store(
    corpus: str, opens: Opens, evaluation: EvaluationSet, engine: Mapper, *, show: Callable = iter
) -> Report:
    """Search for evaluation texts in a token store; `show` adds a progress bar, as tqdm does.

    `corpus` is the name of the corpus, and `opens` opens its store in any process. The evaluation
    texts are first encoded and decoded, so that they lose what the tokenizer also removes from the
    documents, such as case. Raise a UserError if the store is missing or damaged.
    """
    store, tokenizer = opened(opens)
    spans = store_spans(store)
    encoded = (tokenizer.encode_batch([text])[0] for text in evaluation.texts)
    texts = (_known(tokenizer, ids) for ids in encoded)
    table = ngrams.NgramTable(map(ngrams.normalised_words, texts))
    search = functools.partial(with_texts, _search_texts, table)
    searched = zip(show(spans), map_spans(search, opens, spans, engine), strict=True)
    return _report(corpus, store.fingerprint, evaluation, table, (found for _, found in searched))


def search_sources(
    name: str, sources: Sequence[Any], evaluation: EvaluationSet, engine: Mapper
) -> Report:
    """Search for evaluation texts in `sources` (`documents.Source`), called `name` in the report.

    Local worker processes receive the texts. Workers of a cluster read the sources themselves.
    """
    table = ngrams.NgramTable(map(ngrams.normalised_words, evaluation.texts))
    if engine.is_local:
        texts = itertools.chain.from_iterable(source.texts() for source in sources)
        blocks = grouped(texts, len, _BLOCK_CHARS)
        found = engine.map(functools.partial(_search_texts, table), blocks)
    else:
        parts = (part for source in sources for part in source.divided(_TASK_BYTES))
        tasks = grouped(parts, lambda part: part.size, _TASK_BYTES)
        found = engine.map(functools.partial(_search_parts, table), tasks)
    return _report(name, "", evaluation, table, found)


def opened(opens: Opens) -> tuple[TokenStore, Tokenizer]:
    """Open a store and its tokenizer."""
    store = opens()
    assert store.path is not None
    return store, load_tokenizer(store.path / "tokenizer")


def store_spans(store: TokenStore) -> list[Span]:
    """Divide the documents of a store into spans of about `BLOCK_TOKENS` tokens."""
    spans = []
    for number, counts in enumerate(store.counts):
        pieces = -(-counts.num_tokens // BLOCK_TOKENS)
        edges = [counts.num_documents * piece // pieces for piece in range(pieces + 1)]
        spans += [(number, a, b) for a, b in itertools.pairwise(edges) if a < b]
    return spans


def _known(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Decode without unknown tokens, which would make different texts equal."""
    return tokenizer.decode(ids[ids != tokenizer.special_ids.unk].tolist())


def decoded(store: TokenStore, tokenizer: Tokenizer, span: Span) -> Iterator[str]:
    """Yield the known text of each document of a span, as a single paragraph."""
    shard = store.shards[span[0]]
    sentences = shard.document_offsets[span[1] : span[2] + 1]
    for begin, end in itertools.pairwise(shard.sentence_offsets[sentences].tolist()):
        yield _known(tokenizer, shard.tokens[begin:end])


def with_texts(
    function: Callable[[Any, Iterable[str]], T], state: Any, store: TokenStore,
    tokenizer: Tokenizer, span: Span,
) -> T:  # fmt: skip
    """Return `function(state, texts)` for the texts of a span."""
    return function(state, decoded(store, tokenizer, span))


def map_spans(
    function: Callable[[TokenStore, Tokenizer, Span], T], opens: Opens, spans: Sequence[Span],
    engine: Mapper,
) -> Iterator[T]:  # fmt: skip
    """Yield `function(store, tokenizer, span)` for each span, computed by the engine.

    On a cluster, all spans of a shard are one task, so that the shard is opened only once.
    """
    by_shard = (list(each) for _, each in itertools.groupby(spans, lambda span: span[0]))
    tasks = ([span] for span in spans) if engine.is_local else by_shard
    for found in engine.map(_Reader(function, opens), tasks):
        yield from found


@dataclass(frozen=True)
class _Reader:
    """Callable that applies `function` to the texts of spans. The first call opens the store."""

    function: Callable[[TokenStore, Tokenizer, Span], Any]
    opens: Opens

    @functools.cached_property
    def _opened(self) -> tuple[TokenStore, Tokenizer]:
        return opened(self.opens)

    def __call__(self, spans: Sequence[Span]) -> list[Any]:
        return [self.function(*self._opened, span) for span in spans]


def _search_parts(table: ngrams.NgramTable, parts: Iterable[Any]) -> dict[int, np.ndarray]:
    return _search_texts(table, itertools.chain.from_iterable(part.texts() for part in parts))


def _search_texts(table: ngrams.NgramTable, texts: Iterable[str]) -> dict[int, np.ndarray]:
    """Return, for each n-gram size, the indices of the table's n-grams that occur in the texts."""
    seen = table.nothing_seen()
    for text in texts:
        found = table.find(ngrams.word_hashes(ngrams.normalised_words(text)))
        for size, (_, numbers) in found.items():
            seen[size][numbers] = True
    return {size: np.flatnonzero(marks) for size, marks in seen.items()}


def _report(
    name: str, fingerprint: str, evaluation: EvaluationSet, table: ngrams.NgramTable,
    found: Iterable[dict[int, np.ndarray]],
) -> Report:  # fmt: skip
    seen = table.nothing_seen()
    for block in found:
        for size, numbers in block.items():
            seen[size][numbers] = True
    counts = map(tuple, np.column_stack(table.counts(seen)).tolist())
    examples: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for each in evaluation.examples:
        examples[each.split].append(tuple(map(text_key, each.texts)))
    return Report(
        name, fingerprint, evaluation.name, evaluation.digest, evaluation.files,
        examples={split: tuple(keys) for split, keys in examples.items()},
        texts=dict(zip(map(text_key, evaluation.texts), counts, strict=True)),
        ngram=ngrams.NGRAM, min_words=ngrams.MIN_WORDS,
    )  # fmt: skip
