"""Search for held-out documents that are near-duplicates of training documents."""

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bert_jax.data.corpus.overlap import search
from bert_jax.data.corpus.overlap.ngrams import SHINGLE, sign, similarity
from bert_jax.data.store import TokenStore
from bert_jax.errors import UserError
from bert_jax.files.staging import replace_file
from bert_jax.tokenization.tokenizer import Tokenizer

MAX_DOCUMENTS = 1 << 15  # largest number of documents to compare; a process needs 4 KB for each
_SHOWN = 10
_SHOWN_CHARS = 60


@dataclass(frozen=True)
class Twin:
    """A held-out document and the most similar training document."""

    document: int
    train_document: int
    similarity: float
    """Jaccard similarity of the word 5-shingles of the two documents."""
    text: str
    """Beginning of the held-out document."""


@dataclass(frozen=True)
class HeldoutReport:
    """Result of the search for held-out documents that nearly duplicate training documents."""

    corpus: str
    threshold: float
    """Lowest similarity at which two documents count as near-duplicates."""
    documents: int
    """Number of held-out documents that were compared. They are spread evenly over the store."""
    of: int
    """Number of held-out documents in the store."""
    twins: tuple[Twin, ...]
    fingerprints: dict[str, str]

    def lines(self) -> list[str]:
        """Return the lines of a readable summary, with the most similar pairs."""
        share = len(self.twins) / max(self.documents, 1)
        lines = [
            f"{self.corpus}: {len(self.twins):,} of {self.documents:,} held-out documents "
            f"({share:.2%}) are near-duplicates of a training document (their word "
            f"{SHINGLE}-shingles have a Jaccard similarity of at least {self.threshold:g})"
        ]
        if self.of > MAX_DOCUMENTS:
            lines.append(f"compared: an evenly spread sample of the {self.of:,} held-out documents")
        best = sorted(self.twins, key=lambda twin: (-twin.similarity, twin.document))[:_SHOWN]
        return lines + [
            f"  {each.similarity:.2f}  held-out {each.document}  train {each.train_document}  "
            f"{each.text}"
            for each in best
        ]

    def save(self, path: Path) -> None:
        """Write the report as JSON, atomically."""
        replace_file(path, (json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n").encode())


def heldout_twins(
    corpus: str, opens: Mapping[str, search.Opens], engine: search.Mapper, *,
    threshold: float = 0.8, show: Callable = iter,
) -> HeldoutReport:  # fmt: skip
    """Find held-out documents with a similarity of `threshold` or more to a training document.

    `opens` has functions that open the stores `train` and `heldout` of the corpus with the name
    `corpus`, in any process. `show` wraps a sequence to show progress, as tqdm does. Raise a
    UserError if a store is missing or damaged, or rensa is not installed.
    """
    for part in ("train", "heldout"):
        if part not in opens:
            raise UserError(f"{corpus} has no store {part!r}; the comparison needs the stores "
                            "train and heldout.")  # fmt: skip
    (train, tokenizer), heldout = search.opened(opens["train"]), opens["heldout"]()
    texts = _texts(heldout, tokenizer)
    signatures = sign(list(texts.values()), near=threshold)
    numbers = np.array(list(texts))
    keys = signatures.bands.reshape(-1)
    order = np.argsort(keys, kind="stable")
    index = keys[order], order // signatures.bands.shape[1], signatures.sketches, threshold
    best: dict[int, tuple[float, int]] = {}
    bases = np.cumsum([0, *(counts.num_documents for counts in train.counts)])
    spans = search.store_spans(train)
    compare = functools.partial(search.with_texts, _compare, index)
    compared = search.map_spans(compare, opens["train"], spans, engine)
    for span, found in zip(show(spans), compared, strict=True):
        for row, other, value in found:
            document = int(numbers[row])
            if value > best.get(document, (0.0, 0))[0]:
                best[document] = value, int(bases[span[0]]) + span[1] + other
    twins = tuple(
        Twin(document, place, round(value, 4), texts[document][:_SHOWN_CHARS])
        for document, (value, place) in sorted(best.items())
    )
    fingerprints = {"train": train.fingerprint, "heldout": heldout.fingerprint}
    return HeldoutReport(corpus, threshold, len(texts), heldout.num_documents, twins, fingerprints)


_Index = tuple[np.ndarray, np.ndarray, list[np.ndarray], float]
"""Held-out documents, prepared for comparison: the band keys (n,) of all documents, ascending; the
index of the document (n,) that has each key; the sketch of each document; and the threshold."""


def _texts(store: TokenStore, tokenizer: Tokenizer) -> dict[int, str]:
    """Return {index: text} of up to `MAX_DOCUMENTS` documents with text, evenly spread."""
    total = store.num_documents
    chosen = set(np.linspace(0, total - 1, min(total, MAX_DOCUMENTS)).astype(int).tolist())
    spans = search.store_spans(store)
    texts = (text for span in spans for text in search.decoded(store, tokenizer, span))
    return {number: text for number, text in enumerate(texts) if number in chosen and text.strip()}


def _compare(index: _Index, texts: Iterable[str]) -> list[tuple[int, int, float]]:
    """Return (index of the held-out document, index of the text, similarity) of near-duplicates."""
    known, documents, held, threshold = index
    found = sign(list(texts), near=threshold)
    keys = found.bands.reshape(-1)
    begins = np.searchsorted(known, keys)
    counts = np.searchsorted(known, keys, side="right") - begins
    hits = np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    mine = np.repeat(np.arange(len(keys)) // found.bands.shape[1], counts)
    pairs = np.unique(np.column_stack([documents[hits], mine]), axis=0)
    twins = []
    for document, other in pairs.tolist():
        value = similarity(held[document], found.sketches[other])
        if value >= threshold:
            twins.append((document, other, value))
    return twins
