"""Rules for cleaning documents, and the cleaner that applies them, one document at a time.

A build with a search for duplicates reads each task twice: `scan` (in `sharded.duplicates`) writes
the signatures of the documents that pass the filters, `find_duplicates` decides what to drop, and
`Cleaner(config, drops)` cleans the documents. Other builds clean in one pass.
"""

import functools
import io
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert_jax.data.corpus.cleaning.filters import Prose, resolve_filters
from bert_jax.data.corpus.intake import DropReport
from bert_jax.data.corpus.overlap import ngrams
from bert_jax.data.corpus.overlap.evaluation import read_evaluation
from bert_jax.errors import UserError, needs_package, suggestion
from bert_jax.files.staging import staged_file

_MAX_CHARS = 1000  # leading characters to identify, since identifying is as slow as tokenizing


@functools.cache
def _identifier() -> tuple[Callable[[str], tuple[str, float]], frozenset[str]]:
    with needs_package(
        "finding the language of documents needs py3langid: pip install 'bert_jax[corpora]'."
    ):
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    return identifier.classify, frozenset(identifier.nb_classes)


def identify(text: str) -> tuple[str, float]:
    """Return the language (ISO 639 code) of a text's first 1,000 characters and its probability."""
    language, probability = _identifier()[0](text[:_MAX_CHARS])
    return str(language), float(probability)


MIN_SIMILARITY = 0.5


@dataclass(frozen=True)
class CleaningConfig:
    """Rules for cleaning documents; by default nothing is changed or dropped."""

    filters: tuple[str, ...] = ()
    """Names of filters, edits and groups of them, or NAME=LOW:HIGH; see `resolve_filters`."""
    language: str = ""
    """Code of the language to keep, such as de; the empty string keeps all languages."""
    language_threshold: float = 0.8
    """Lowest probability of `language` at which a document is kept."""
    duplicates: bool = False
    """Whether to drop word-for-word duplicates of documents (implied by the next two fields)."""
    duplicate_paragraphs: bool = False
    """Whether to leave out paragraphs with exactly the words of an earlier paragraph."""
    near_duplicates: float | None = None
    """Lowest Jaccard similarity (word 5-shingles) of near-duplicates to drop; None drops none."""
    without: tuple[str, ...] = ()
    """Evaluation texts (see `read_evaluation`). Paragraphs that share an n-gram are left out."""

    def __post_init__(self) -> None:
        """Raise a UserError for values out of range."""
        resolve_filters(self.filters)
        if self.language and self.language not in (known := _identifier()[1]):
            hint = suggestion(self.language, sorted(known))
            raise UserError(
                f"--language is {self.language!r}, which py3langid does not know.{hint} Give one "
                f"of the {len(known)} ISO 639 codes that it knows, such as en, de or zh."
            )
        if not 0 < self.language_threshold <= 1:
            raise UserError(
                f"--language {self.language}:{self.language_threshold:g}: the probability must be "
                "above 0 and at most 1."
            )
        similarity = self.near_duplicates
        if similarity is not None and not MIN_SIMILARITY <= similarity <= 1:
            raise UserError(
                f"--drop-duplicates near={similarity:g}: the Jaccard similarity must be "
                f"{MIN_SIMILARITY} to 1, such as 0.8."
            )
        if similarity is not None:
            with needs_package(ngrams.NEEDS_RENSA):
                metadata.version("rensa")

    @property
    def is_empty(self) -> bool:
        """Whether the rules leave all documents unchanged."""
        return not (self.filters or self.language or self.without or self.needs_scan)

    @property
    def needs_scan(self) -> bool:
        """Whether all documents must be read once, to find duplicates, before any is written."""
        return self.duplicates or self.duplicate_paragraphs or self.near_duplicates is not None

    def record(self) -> dict[str, Any]:
        """Return the rules that are set, as JSON; raise a UserError for bad evaluation texts."""
        edits, filters = resolve_filters(self.filters)
        found: dict[str, Any] = {"edits": list(edits)} if edits else {}
        if filters:
            found["filters"] = {name: each.record() for name, each in filters.items()}
        if self.language:
            found["language"] = {
                "code": self.language, "threshold": self.language_threshold,
                "py3langid": metadata.version("py3langid"),
            }  # fmt: skip
        flags = ("duplicates", "duplicate_paragraphs")
        found |= {name: True for name in flags if getattr(self, name)}
        if self.near_duplicates is not None:
            bands, rows = ngrams.banding(self.near_duplicates)
            found["near_duplicates"] = {
                "similarity": self.near_duplicates, "shingle": ngrams.SHINGLE,
                "bands": bands, "rows": rows, "rensa": metadata.version("rensa"),
            }  # fmt: skip
        if self.without:
            sets = map(read_evaluation, self.without)
            found["without"] = [
                {"name": s.name, "sha256": s.digest, "ngram": ngrams.NGRAM} for s in sets
            ]
        return found


SAMPLES = 20  # number of dropped documents that `--keep-dropped` writes for each reason


class Drops(NamedTuple):
    """Decisions about the documents of one task. Indices of documents count from 0 in the task."""

    filtered: np.ndarray
    """(k,) int64, indices of the documents that filters drop, ascending."""
    duplicates: np.ndarray
    """(n,) int64, indices of the documents that are dropped as duplicates, ascending."""
    exact: np.ndarray
    """(n,) bool, whether each duplicate has exactly the words of the document that is kept."""
    firsts: np.ndarray
    """(n, 2) int64 for each duplicate: task and index of the document that is kept instead."""
    paragraphs: np.ndarray
    """(m, 2) int64, ascending: document and index in the document, for each omitted paragraph."""

    @classmethod
    def load(cls, data: bytes) -> "Drops":
        """Read the decisions from the content of a file that `save` wrote."""
        with np.load(io.BytesIO(data)) as arrays:
            return cls(**arrays)

    def save(self, path: Path) -> None:
        """Write the decisions to a file, atomically."""
        with staged_file(path) as file:
            np.savez(file, **self._asdict())


def _rows(numbers: np.ndarray, number: int) -> slice:
    """Return the slice in which the ascending `numbers` equal `number`."""
    return slice(*np.searchsorted(numbers, [number, number + 1]).tolist())


NO_LINES = "no-lines-left"
EVALUATION = "evaluation-text"  # reason: the text shares an n-gram with evaluation texts


class Dropped(NamedTuple):
    """Reason for dropping a document."""

    reason: str
    """Name of a filter; or language, duplicate, near-duplicate, evaluation-text, no-lines-left."""
    detail: str
    """Explanation for people: the value and the bound it violates, or the document kept instead."""


class Cleaner:
    """A cleaner for the documents of one task. The documents may come in any order.

    `drops` are the decisions of the search for duplicates, if there was one. For each reason,
    `samples` dropped documents are kept as samples, with the name of their `source`.
    """

    def __init__(
        self, config: CleaningConfig, drops: Drops | None = None, *, source: str = "",
        samples: int = 0,
    ) -> None:  # fmt: skip
        self._config, self._drops, self._source = config, drops, source
        self._edits, self._filters = resolve_filters(config.filters)
        digests = tuple(read_evaluation(spec).digest for spec in config.without)
        self._passages = _passages(config.without, digests) if digests else None
        self.report = DropReport(samples)
        """Counts and samples of what has been dropped so far."""

    def clean(self, number: int, text: str) -> str | Dropped:
        """Return the cleaned text, or why the task's document with index `number` is dropped."""
        found = self._clean(number, text)
        if isinstance(found, Dropped):
            self.report.add(found.reason, found.detail, self._source, number, text)
        return found

    def _clean(self, number: int, text: str) -> str | Dropped:
        for name, edit in self._edits.items():
            lines = text.split("\n")
            kept = [changed for line in lines if (changed := edit(line))]
            if len(kept) < len(lines):
                self.report.lines[name] += len(lines) - len(kept)
            if not kept:
                return Dropped(NO_LINES, "all lines were left out")
            text = "\n".join(kept)
        if self._passages is not None and not (text := self._without(text, self._passages)):
            return Dropped(EVALUATION, "all paragraphs share an n-gram with evaluation texts")
        if (drops := self._drops) is None:
            return self._unwanted(text) or text
        is_filtered = drops.filtered[_rows(drops.filtered, number)].size
        if is_filtered and (unwanted := self._unwanted(text)):
            return unwanted
        same = _rows(drops.duplicates, number)  # one document or none
        for exact, (task, first) in zip(drops.exact[same], drops.firsts[same], strict=True):
            reason = "duplicate" if exact else "near-duplicate"
            return Dropped(reason, f"document {first} of task {task} is kept instead")
        paragraphs = text.split("\n")
        dropped = drops.paragraphs[_rows(drops.paragraphs[:, 0], number), 1]
        for paragraph in reversed(dropped.tolist()):
            self.report.lines["duplicate-paragraph"] += 1
            del paragraphs[paragraph]
        return "\n".join(paragraphs) or Dropped(NO_LINES, "all paragraphs occur earlier")

    def _without(self, text: str, passages: ngrams.NgramTable) -> str:
        """Leave out each paragraph that holds all or part of an n-gram of the evaluation texts."""
        lines = text.split("\n")
        words = [ngrams.normalised_words(line) for line in lines]
        covered = passages.covered(ngrams.word_hashes(list(itertools.chain.from_iterable(words))))
        if not covered.any():
            return text
        of_lines = np.split(covered, np.cumsum(list(map(len, words)))[:-1])
        kept = [line for line, each in zip(lines, of_lines, strict=True) if not each.any()]
        self.report.lines[EVALUATION] += len(lines) - len(kept)
        return "\n".join(kept)

    def _unwanted(self, text: str) -> Dropped | None:
        """Return why a document is dropped, by a filter or for its language; None if it is kept."""
        prose = Prose(text)
        for name, each in self._filters.items():
            if reason := each.reason(prose):
                return Dropped(name, reason)
        if self._config.language:
            language, probability = identify(text)
            if language != self._config.language:
                return Dropped("language", f"{language} with probability {probability:.2f}")
            if probability < self._config.language_threshold:
                return Dropped("language", f"{language} with probability {probability:.2f} only")
        return None


@functools.lru_cache(1)
def _passages(specs: tuple[str, ...], digests: tuple[str, ...]) -> ngrams.NgramTable:
    """Return the n-grams of evaluation texts. `digests`, part of the cache key, detects changes."""
    del digests
    sets = (read_evaluation(spec) for spec in specs)
    texts = {text for each in sets for example in each.examples for text in example.texts}
    return ngrams.NgramTable(map(ngrams.normalised_words, texts))
