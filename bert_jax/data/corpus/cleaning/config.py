"""Settings of cleaning, and the language of a text, by py3langid (Lui and Baldwin 2012)."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from bert_jax.data.corpus.cleaning.filters import resolve_filters
from bert_jax.data.corpus.overlap.evaluation import read_evaluation
from bert_jax.data.corpus.overlap.ngrams import NGRAM
from bert_jax.data.corpus.overlap.signatures import BANDS, ROWS, SHINGLE
from bert_jax.errors import UserError, nearest, needs_package

_MAX_CHARS = 1000
"""Characters that are looked at: identification costs about as much as tokenizing."""


@functools.cache
def _identifier() -> tuple[Callable[[str], tuple[str, float]], frozenset[str]]:
    with needs_package(
        "finding the language of documents needs py3langid: pip install 'bert_jax[corpora]'."
    ):
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    return identifier.classify, frozenset(identifier.nb_classes)


def identify(text: str) -> tuple[str, float]:
    """Return the code (ISO 639-1 where there is one) and the probability of a text's language.

    The first 1,000 characters decide.
    """
    language, probability = _identifier()[0](text[:_MAX_CHARS])
    return str(language), float(probability)


def check_language(code: str) -> None:
    """Refuse, with a UserError, a code that the model does not know."""
    known = _identifier()[1]
    if code not in known:
        near = nearest(code, sorted(known))
        hint = f" Did you mean {near!r}?" if near else ""
        raise UserError(
            f"--language is {code!r}, which py3langid does not know.{hint} Codes are those of ISO "
            f"639, such as en, de and zh; {len(known)} are known."
        )


MIN_SIMILARITY = 0.5


@dataclass(frozen=True)
class CleaningConfig:
    """Rules that documents are cleaned by; by default nothing is changed or dropped."""

    filters: tuple[str, ...] = ()
    """Filters, edits and groups of them, as `filters.resolve_filters` reads them."""
    language: str = ""
    """Code of the language that stays, such as de; empty: all languages."""
    language_threshold: float = 0.8
    """Lowest probability of the language."""
    duplicates: bool = False
    """Whether documents with the words of an earlier document are dropped."""
    duplicate_paragraphs: bool = False
    """Whether paragraphs with the words of an earlier paragraph are left out."""
    near_duplicates: float | None = None
    """Jaccard similarity of word 5-shingles from which the later document is dropped; None keeps
    near-duplicates."""
    without: tuple[str, ...] = ()
    """Evaluation texts whose passages are left out, as `bert-jax contamination --against` takes
    them."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        resolve_filters(self.filters)
        if self.language:
            check_language(self.language)
        if not 0 < self.language_threshold <= 1:
            raise UserError(
                f"--language {self.language}:{self.language_threshold:g}: the probability must be "
                "above 0 and at most 1"
            )
        similarity = self.near_duplicates
        if similarity is not None and not MIN_SIMILARITY <= similarity <= 1:
            raise UserError(
                f"--drop-duplicates near={similarity:g}: the Jaccard similarity must be "
                f"{MIN_SIMILARITY} to 1, such as 0.8"
            )

    @property
    def is_empty(self) -> bool:
        """Whether documents stay as they are."""
        return not (self.filters or self.language or self.without or self.needs_scan)

    @property
    def needs_scan(self) -> bool:
        """Whether all documents are read before the first is written, to find duplicates."""
        return self.duplicates or self.duplicate_paragraphs or self.near_duplicates is not None

    def record(self) -> dict[str, Any]:
        """Return the settings for `corpus.json`; empty where documents stay as they are.

        Raises:
            UserError: evaluation texts cannot be read.
        """
        edits, filters = resolve_filters(self.filters)
        found: dict[str, Any] = {}
        if edits:
            found["edits"] = list(edits)
        if filters:
            found["filters"] = {name: each.record() for name, each in filters.items()}
        if self.language:
            found["language"] = {
                "code": self.language, "threshold": self.language_threshold,
                "py3langid": metadata.version("py3langid"),
            }  # fmt: skip
        for name in ("duplicates", "duplicate_paragraphs"):
            if getattr(self, name):
                found[name] = True
        if self.near_duplicates is not None:
            found["near_duplicates"] = {
                "similarity": self.near_duplicates, "shingle": SHINGLE, "bands": BANDS,
                "rows": ROWS, "rensa": metadata.version("rensa"),
            }  # fmt: skip
        if self.without:
            sets = [read_evaluation(spec) for spec in self.without]
            found["without"] = [
                {"name": each.name, "sha256": each.digest, "ngram": NGRAM} for each in sets
            ]
        return found
