"""Report of the evaluation texts that a corpus holds, and its file beside `corpus.json`."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.errors import UserError
from bert_jax.files.staging import replace_file
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.terminal import table_lines

DIRECTORY = "contamination"
"""Directory of the reports, in the token store."""
HELDOUT = "heldout.json"
"""Report of held-out documents, see `heldout`."""
FORMAT = "bert_jax contamination"
VERSION = 2
_MAX_BYTES = 1 << 28


@dataclass(frozen=True)
class Report:
    """Shares of the n-grams of evaluation texts that a corpus holds; its file has these fields."""

    corpus: str
    fingerprint: str
    """Fingerprint of the token store; empty for text files."""
    evaluation: str
    """Name of the evaluation texts."""
    digest: str
    """sha256 of the evaluation texts."""
    files: tuple[tuple[str, str], ...]
    """Name and sha256 of each evaluation file."""
    examples: Mapping[str, tuple[tuple[str, ...], ...]]
    """Keys of the texts of each example, by split; see `evaluation.text_key`."""
    texts: Mapping[str, tuple[int, int]]
    """n-grams of each text, and those that the corpus has, by key; (0, 0) where it is too short."""
    ngram: int
    min_words: int
    """Words of the shortest text that is looked for."""

    def shares(self) -> dict[str, np.ndarray]:
        """Return the share of each example's n-grams in the corpus, by split; NaN: too short."""
        return {
            split: np.array([share_of(self.texts, keys) for keys in examples])
            for split, examples in self.examples.items()
        }

    def counts(self) -> dict[str, dict[str, int | float]]:
        """Return, by split and for `all`, examples, those too short, seen, and all but seen.

        `seen` examples share an n-gram with the corpus, `half` at least half of their n-grams,
        `whole` all; `share` is the mean share of those judged.
        """
        shares = self.shares()
        if len(shares) > 1:
            shares["all"] = np.concatenate([*shares.values()])
        return {split: _counts(each) for split, each in shares.items()}

    def lines(self) -> list[str]:
        """Return the counts as a table for people."""
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
            f"seen: one of its {ngram}-grams is in the corpus; a text of {shortest} to {ngram - 1} "
            f"words: the whole of it; fewer than {shortest} words: too short to be judged",
        ]

    def summary(self) -> dict[str, Any]:
        """Return the entry for a model's record and card."""
        counts = self.counts()
        return {
            "corpus": self.corpus, "corpus_fingerprint": self.fingerprint,
            "evaluation": self.evaluation, "evaluation_sha256": self.digest,
            "ngram": self.ngram, "min_words": self.min_words,
            **(counts.get("all") or next(iter(counts.values()))),
        }  # fmt: skip

    def save(self, path: Path) -> None:
        """Write the report as JSON, whole or not at all.

        Raises:
            UserError: the place cannot be written.
        """
        value = {"format": FORMAT, "version": VERSION, **vars(self), "counts": self.counts()}
        replace_file(path, (json.dumps(value, ensure_ascii=False) + "\n").encode())

    @property
    def file_name(self) -> str:
        """File name of the report, unique to the evaluation."""
        plain = "".join(c if c.isalnum() or c in ".-" else "-" for c in self.evaluation)
        return f"{plain[:80]}-{self.digest[:8]}.json"


def read_report(path: Path) -> Report:
    """Read what `Report.save` wrote.

    Raises:
        UserError: no such file, or it is no report.
    """
    value = read_json_object(path, max_bytes=_MAX_BYTES)
    if value.get("format") != FORMAT or value.get("version") != VERSION:
        raise UserError(
            f"{path} is no report of contamination of version {VERSION}; `bert-jax contamination` "
            "writes one"
        )
    try:
        found = value["examples"].items()
        return Report(
            *(str(value[name]) for name in ("corpus", "fingerprint", "evaluation", "digest")),
            files=tuple((str(name), str(digest)) for name, digest in value["files"]),
            examples={split: tuple(tuple(map(str, e)) for e in listed) for split, listed in found},
            texts={key: (int(total), int(seen)) for key, (total, seen) in value["texts"].items()},
            ngram=int(value["ngram"]),
            min_words=int(value["min_words"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def reports_of(store: Path) -> list[Report]:
    """Return the reports beside the `corpus.json` of a token store, by name."""
    files = sorted((store / DIRECTORY).glob("*.json"))
    return [read_report(path) for path in files if path.name != HELDOUT]


def merged(reports: Iterable[Report]) -> dict[str, tuple[int, int]]:
    """Return n-grams and seen n-grams of each text by key, as the report that saw most of them."""
    found: dict[str, tuple[int, int]] = {}
    for report in reports:
        for key, counts in report.texts.items():
            found[key] = max(found.get(key, (0, 0)), counts, key=lambda each: each[::-1])
    return found


def share_of(texts: Mapping[str, tuple[int, int]], keys: Iterable[str]) -> float:
    """Return the share of the n-grams of an example that is seen; NaN: none, or an unknown text."""
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
