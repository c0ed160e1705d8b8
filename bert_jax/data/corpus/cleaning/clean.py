"""Cleaning of one document after the other, in the process that tokenizes them.

A build without a search for duplicates cleans in one pass: `Cleaner(config).clean(number, text)`.
With it every task is read twice: `scan.scan` writes signatures of the documents that stay,
`duplicates.find_duplicates` decides which to drop, and `Cleaner(config, drops)` drops them.
"""

import functools
import itertools
from typing import NamedTuple

import numpy as np

from bert_jax.data.corpus.cleaning.config import CleaningConfig
from bert_jax.data.corpus.cleaning.drops import Drops
from bert_jax.data.corpus.cleaning.filters import Prose, resolve_filters
from bert_jax.data.corpus.cleaning.language import identify
from bert_jax.data.corpus.cleaning.report import CleaningReport
from bert_jax.data.corpus.overlap.evaluation import read_evaluation
from bert_jax.data.corpus.overlap.ngrams import NgramTable
from bert_jax.data.corpus.overlap.words import normalised_words, word_hashes

NO_LINES = "no-lines-left"
"""Reason for dropping a document whose every line was left out."""
EVALUATION = "evaluation-text"
"""Reason of paragraphs that share an n-gram with evaluation texts, and of such documents."""


class Dropped(NamedTuple):
    """A document that is left out."""

    reason: str
    """Name of the filter, or language, duplicate, near-duplicate, evaluation-text or
    no-lines-left."""
    detail: str
    """Measured value and bound, or the document that stays."""


class Cleaner:
    """Cleaner of the documents of one task, in their order or any other.

    Args:
        config: rules.
        drops: decisions of a scan of all tasks; None where `config.needs_scan` is false, and
            during the scan.
        source: name of the source, for samples.
        samples: dropped documents to keep for each reason.
    """

    def __init__(
        self,
        config: CleaningConfig,
        drops: Drops | None = None,
        *,
        source: str = "",
        samples: int = 0,
    ) -> None:
        self._config, self._drops, self._source = config, drops, source
        self._edits, self._filters = resolve_filters(config.filters)
        digests = tuple(read_evaluation(spec).digest for spec in config.without)
        self._passages = _passages(config.without, digests) if digests else None
        self.report = CleaningReport(samples)
        """Counts and samples of what was dropped so far."""

    def clean(self, number: int, text: str) -> str | Dropped:
        """Clean a document: return its text without the lines that are left out.

        Args:
            number: number of the document in the task, from 0.
            text: paragraphs joined by newlines, as `Source.documents` yields them.
        """
        found = self._clean(number, text)
        if isinstance(found, Dropped):
            self.report.add(found.reason, found.detail, self._source, number, text)
        return found

    def _clean(self, number: int, text: str) -> str | Dropped:
        text = self._edited(text)
        if not text:
            return Dropped(NO_LINES, "all lines were left out")
        if self._passages is not None and not (text := self._without(text, self._passages)):
            return Dropped(EVALUATION, "all paragraphs share an n-gram with evaluation texts")
        if self._drops is None:
            return self._unwanted(text) or text
        if self._drops.is_filtered(number) and (unwanted := self._unwanted(text)):
            return unwanted
        if duplicate := self._drops.duplicate(number):
            exact, task, first = duplicate
            reason = "duplicate" if exact else "near-duplicate"
            return Dropped(reason, f"document {first} of task {task} stays")
        paragraphs = text.split("\n")
        for paragraph in reversed(list(self._drops.dropped_paragraphs(number))):
            self.report.lines["duplicate-paragraph"] += 1
            del paragraphs[paragraph]
        return "\n".join(paragraphs) or Dropped(NO_LINES, "all paragraphs stand elsewhere")

    def _edited(self, text: str) -> str:
        for name, edit in self._edits.items():
            lines = text.split("\n")
            kept = [changed for line in lines if (changed := edit.change(line))]
            if len(kept) < len(lines):
                self.report.lines[name] += len(lines) - len(kept)
            if not kept:
                return ""
            text = "\n".join(kept)
        return text

    def _without(self, text: str, passages: NgramTable) -> str:
        """Leave out the paragraphs with a word of an n-gram of the evaluation texts."""
        lines = text.split("\n")
        words = [normalised_words(line) for line in lines]
        covered = passages.covered(word_hashes(list(itertools.chain.from_iterable(words))))
        if not covered.any():
            return text
        ends = np.cumsum([len(each) for each in words])
        kept = [
            line
            for line, end, each in zip(lines, ends, words, strict=True)
            if not covered[end - len(each) : end].any()
        ]
        self.report.lines[EVALUATION] += len(lines) - len(kept)
        return "\n".join(kept)

    def _unwanted(self, text: str) -> Dropped | None:
        """Return the reason of the first filter that drops a document; None where it stays."""
        prose = Prose(text)
        for name, each in self._filters.items():
            if reason := each.reason(prose):
                return Dropped(name, reason)
        if self._config.language:
            language, probability = identify(text)
            if language != self._config.language:
                return Dropped("language", f"{language} with probability {probability:.2f}")
            if probability < self._config.language_threshold:
                return Dropped("language", f"{language} with only {probability:.2f}")
        return None


@functools.lru_cache(1)
def _passages(specs: tuple[str, ...], digests: tuple[str, ...]) -> NgramTable:
    """Return the n-grams of evaluation files that have these digests."""
    del digests
    sets = (read_evaluation(spec) for spec in specs)
    texts = {text for each in sets for example in each.examples for text in example.texts}
    return NgramTable(map(normalised_words, texts))
