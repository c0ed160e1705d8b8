"""Counts and samples of what a build leaves out: bad records, and documents that cleaning drops."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bert_jax.data.corpus.overlap.ngrams import hash_text
from bert_jax.errors import BadRecord, UserError
from bert_jax.files.staging import replace_file

QUARANTINE = "quarantine"
"""Reaction that leaves bad records out but saves them in a directory of this name."""
MARKS = "tasks"
"""Name of the directory of marks. A mark is a JSON file that marks a task as complete."""
DUPLICATES = "duplicates"
"""Prefix of a duplicate search's directory; a hash of OUT follows and tells builds apart."""
OWN_NAMES = (MARKS, QUARANTINE)
"""Names of a build's own directories; a corpus cannot have any of these names."""
ON_BAD = ("stop", "skip", QUARANTINE)
"""Reactions to a bad record: raise an error, leave it out, or leave it out and save a copy."""
MOST_HEADERS, MOST_PAGE, PARSE_SECONDS, PARSE_BYTES = 1 << 20, 4 << 20, 30.0, 1 << 30
"""Limits: bytes of a web record's headers; bytes of a wiki page (twice MediaWiki's own limit); and
processor seconds and bytes of memory for parsing a page."""
BAD_SAMPLES = 100  # number of bad records that a build keeps for each reason
_SAMPLE_CHARS = 8000
_MANY = 100_000


@dataclass
class DropReport:
    """Counts of dropped documents, records or lines, by reason, with samples."""

    samples_limit: int = 0  # number of samples to keep for each reason
    documents: Counter[str] = field(default_factory=Counter)
    """Number of documents, or of bad records, by reason."""
    lines: Counter[str] = field(default_factory=Counter)
    """Number of lines left out, by reason, including lines of documents that are dropped later."""
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Samples of dropped documents by reason: documents whose texts have the smallest hashes."""
    records: int = 0
    """Number of records that were read, including bad ones. Empty records do not count."""
    unread: int = 0
    """Number of bytes of damaged files that hold an unknown number of records."""

    def add(self, reason: str, detail: str, source: str, number: int, text: str) -> None:
        """Count a dropped document; keep it as a sample if its hash is among the smallest."""
        self.documents[reason] += 1
        if self.samples_limit:
            sample = {
                "reason": reason, "detail": detail, "source": source, "document": number,
                "hash": f"{hash_text(text):016x}", "text": text[:_SAMPLE_CHARS],
            }  # fmt: skip
            self._keep(reason, [sample])

    def lose(self, error: BadRecord, source: str) -> None:
        """Count a bad record; keep it as a sample if its hash is among the smallest."""
        self.add(error.reason, f"{error}", source, self.records + 1, error.text())
        self.documents[error.reason] += error.count - 1
        self.records += error.count
        self.unread += error.unread

    def check(self, most: float, size: int | None = None) -> None:
        """Raise a UserError if more than the share `most` of the records or of the bytes is bad.

        `size` is the number of bytes of all sources; None means that they are still being read.
        Then fewer than 100,000 records count as 100,000, so that a few early errors are allowed.
        """
        records = max(self.records, _MANY if size is None else 0)
        if self.documents.total() > most * records or (size and self.unread > most * size):
            raise UserError(
                f"{self.bad_records()}. The allowed share is {most:g}: take bad files out of the "
                "input, or set another share, as in --on-bad=skip:0.05"
            )

    def bad_records(self) -> str:
        """Describe how many records are bad."""
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.documents.most_common())
        unread = f", and {self.unread:,} bytes cannot be read" * bool(self.unread)
        return f"{self.documents.total():,} of {self.records:,} records are bad ({reasons}){unread}"

    def merge(self, other: Mapping[str, Any]) -> None:
        """Add the counts and samples of another report, given as a mapping of its fields."""
        self.documents.update(other["documents"])
        self.lines.update(other["lines"])
        self.records += other["records"]
        self.unread += other["unread"]
        for reason, samples in other["samples"].items():
            self._keep(reason, samples)

    def _keep(self, reason: str, samples: list[dict[str, Any]]) -> None:
        found = [*self.samples.get(reason, ()), *samples]
        found.sort(key=lambda each: (each["hash"], each["source"], each["document"]))
        self.samples[reason] = found[: self.samples_limit]

    def record(self) -> dict[str, dict[str, int]]:
        """Return the counts for `corpus.json`, by reason in alphabetical order."""
        return {
            "dropped": dict(sorted(self.documents.items())),
            "dropped_lines": dict(sorted(self.lines.items())),
        }

    def write_samples(self, directory: Path) -> None:
        """Write the samples of each reason to a JSON lines file."""
        for reason, samples in self.samples.items():
            lines = [json.dumps(each, ensure_ascii=False) + "\n" for each in samples]
            replace_file(directory / f"{reason}.jsonl", "".join(lines).encode(errors="replace"))
