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
from bert_jax.untrusted.json_file import read_json_object

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
    keys: tuple[str, ...]
    """Key of each example, see `evaluation.example_key`."""
    shares: tuple[float, ...]
    """Share of the n-grams of each example that the corpus holds; NaN: too short to be judged."""
    settings: Mapping[str, int]
    """Words of an n-gram (ngram) and of the shortest text that is looked for (min_words)."""

    @cached_property
    def by_key(self) -> Mapping[str, float]:
        """Share by key; of equal examples they are equal."""
        return dict(zip(self.keys, self.shares, strict=True))

    def counts(self) -> dict[str, dict[str, int | float]]:
        """Return, by split and for `all`, examples, those too short, seen, and all but seen.

        `seen` examples share an n-gram with the corpus, `half` at least half of their n-grams,
        `whole` all; `share` is the mean share of those judged.
        """
        shares, splits = np.array(self.shares), np.array(self.splits)
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
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        table = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in (head, *rows)
        ]
        return [
            f"{self.evaluation} in {self.corpus}: {ngram}-grams of normalised words",
            *table,
            f"seen: one of its {ngram}-grams is in the corpus; a text of {shortest} to {ngram - 1} "
            f"words: the whole of it; fewer than {shortest} words: too short to be judged",
        ]

    def summary(self) -> dict[str, Any]:
        """Return what a model's record and card say."""
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
        splits = []
        names, shares = np.array(self.splits), np.array(self.shares)
        for name in dict.fromkeys(self.splits):
            mine = np.flatnonzero(names == name).tolist()
            splits.append(
                {
                    "name": name,
                    "keys": [self.keys[at] for at in mine],
                    "shares": [None if math.isnan(s) else round(s, 6) for s in shares[mine]],
                }
            )
        value = {
            "format": FORMAT, "version": VERSION,
            "corpus": {"name": self.corpus, "fingerprint": self.fingerprint},
            "evaluation": {
                "name": self.evaluation, "sha256": self.digest,
                "files": [{"name": name, "sha256": digest} for name, digest in self.files],
            },
            **self.settings, "counts": self.counts(), "splits": splits,
        }  # fmt: skip
        replace_file(path, (json.dumps(value, ensure_ascii=False) + "\n").encode())

    @property
    def file_name(self) -> str:
        """Name of the report's file among those of other evaluations."""
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
        shares = [math.nan if s is None else float(s) for each in splits for s in each["shares"]]
        keys = [str(key) for each in splits for key in each["keys"]]
        if len(keys) != len(shares):
            raise ValueError(f"{len(keys)} keys and {len(shares)} shares")
        return Report(
            corpus=str(value["corpus"]["name"]),
            fingerprint=str(value["corpus"]["fingerprint"]),
            evaluation=str(value["evaluation"]["name"]),
            digest=str(value["evaluation"]["sha256"]),
            files=tuple((str(f["name"]), str(f["sha256"])) for f in value["evaluation"]["files"]),
            splits=tuple(str(each["name"]) for each in splits for _ in each["keys"]),
            keys=tuple(keys),
            shares=tuple(shares),
            settings={name: int(value[name]) for name in ("ngram", "min_words")},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def reports_of(store: Path) -> list[Report]:
    """Return the reports beside the `corpus.json` of a token store, by name."""
    files = sorted((store / DIRECTORY).glob("*.json"))
    return [read_report(path) for path in files if path.name != HELDOUT]


def merged(reports: Iterable[Report]) -> dict[str, float]:
    """Return the highest share of each example in any of the reports, by key."""
    found: dict[str, float] = {}
    for report in reports:
        for key, share in report.by_key.items():
            found[key] = float(np.fmax(found.get(key, math.nan), share))
    return found


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
