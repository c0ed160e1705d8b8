"""Report of the evaluation texts that a corpus holds, and its file beside `corpus.json`."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
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
VERSION = 1
_MAX_BYTES = 1 << 28


@dataclass(frozen=True)
class Report:
    """Shares of the n-grams of evaluation texts that a corpus holds."""

    corpus: str
    """Name of the corpus."""
    fingerprint: str
    """Fingerprint of the token store; empty for text files."""
    evaluation: str
    """Name of the evaluation texts."""
    digest: str
    """sha256 of the evaluation texts."""
    files: tuple[tuple[str, str], ...]
    """Name and sha256 of each evaluation file."""
    splits: tuple[str, ...]
    """Name of the split of each example."""
    examples: tuple[tuple[str, ...], ...]
    """Keys of the texts of each example, see `evaluation.text_key`."""
    texts: Mapping[str, tuple[int, int]]
    """n-grams of each text, and those that the corpus has, by key; (0, 0) where it is too short."""
    settings: Mapping[str, int]
    """Words of an n-gram (ngram) and of the shortest text that is looked for (min_words)."""

    @cached_property
    def shares(self) -> np.ndarray:
        """Share of the n-grams of each example that the corpus holds; NaN: too short."""
        return np.array([share_of(self.texts, keys) for keys in self.examples])

    def counts(self) -> dict[str, dict[str, int | float]]:
        """Return, by split and for `all`, examples, those too short, seen, and all but seen.

        `seen` examples share an n-gram with the corpus, `half` at least half of their n-grams,
        `whole` all; `share` is the mean share of those judged.
        """
        shares, splits = self.shares, np.array(self.splits)
        found = {name: _counts(shares[splits == name]) for name in dict.fromkeys(self.splits)}
        return found if len(found) == 1 else {**found, "all": _counts(shares)}

    def lines(self) -> list[str]:
        """Return the counts as a table for people."""
        ngram, shortest = self.settings["ngram"], self.settings["min_words"]
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
            **self.settings, **(counts.get("all") or next(iter(counts.values()))),
        }  # fmt: skip

    def save(self, path: Path) -> None:
        """Write the report as JSON, whole or not at all.

        Raises:
            UserError: the place cannot be written.
        """
        names = np.array(self.splits)
        splits = [
            {"name": name, "examples": [self.examples[at] for at in np.flatnonzero(names == name)]}
            for name in dict.fromkeys(self.splits)
        ]
        value = {
            "format": FORMAT, "version": VERSION,
            "corpus": {"name": self.corpus, "fingerprint": self.fingerprint},
            "evaluation": {
                "name": self.evaluation, "sha256": self.digest,
                "files": [{"name": name, "sha256": digest} for name, digest in self.files],
            },
            **self.settings, "counts": self.counts(), "splits": splits, "texts": dict(self.texts),
        }  # fmt: skip
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
        splits = value["splits"]
        texts = {str(key): (int(total), int(seen)) for key, (total, seen) in value["texts"].items()}
        return Report(
            corpus=str(value["corpus"]["name"]),
            fingerprint=str(value["corpus"]["fingerprint"]),
            evaluation=str(value["evaluation"]["name"]),
            digest=str(value["evaluation"]["sha256"]),
            files=tuple((str(f["name"]), str(f["sha256"])) for f in value["evaluation"]["files"]),
            splits=tuple(str(each["name"]) for each in splits for _ in each["examples"]),
            examples=tuple(tuple(map(str, keys)) for each in splits for keys in each["examples"]),
            texts=texts,
            settings={name: int(value[name]) for name in ("ngram", "min_words")},
        )
    except (KeyError, TypeError, ValueError) as error:
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
    return {
        "examples": len(shares),
        "short": len(shares) - len(judged),
        "seen": int((judged > 0).sum()),
        "half": int((judged >= 0.5).sum()),
        "whole": int((judged == 1).sum()),
        "share": float(judged.mean()) if len(judged) else 0.0,
    }
