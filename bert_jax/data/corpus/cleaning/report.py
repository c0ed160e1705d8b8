"""Counts and samples of what cleaning dropped."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bert_jax.data.corpus.overlap.words import hash_text
from bert_jax.files.staging import replace_file

SAMPLES = 20
"""Samples of each reason in `--keep-dropped`."""
_SAMPLE_CHARS = 2000


@dataclass
class CleaningReport:
    """Counts of what was dropped from some documents, by reason; reports of tasks are merged."""

    samples_limit: int = 0
    """Samples kept for each reason; 0 keeps none."""
    documents: Counter[str] = field(default_factory=Counter)
    """Dropped documents."""
    lines: Counter[str] = field(default_factory=Counter)
    """Lines left out of documents that stay, and of those dropped for want of lines."""
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Samples of dropped documents: those whose texts have the smallest hashes."""

    def add(self, reason: str, detail: str, source: str, number: int, text: str) -> None:
        """Count a dropped document, and keep it where it belongs to the sample."""
        self.documents[reason] += 1
        if self.samples_limit:
            sample = {
                "reason": reason, "detail": detail, "source": source, "document": number,
                "hash": f"{hash_text(text):016x}", "text": text[:_SAMPLE_CHARS],
            }  # fmt: skip
            self._keep(reason, [sample])

    def merge(self, others: Iterable["CleaningReport"]) -> "CleaningReport":
        """Add the counts and samples of other reports; return this report."""
        for other in others:
            self.documents.update(other.documents)
            self.lines.update(other.lines)
            for reason, samples in other.samples.items():
                self._keep(reason, samples)
        return self

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
        """Write a JSON lines file for each reason.

        Raises:
            UserError: the directory cannot be written.
        """
        for reason, samples in self.samples.items():
            lines = [json.dumps(each, ensure_ascii=False) + "\n" for each in samples]
            replace_file(directory / f"{reason}.jsonl", "".join(lines).encode())
