"""One reading of sources: documents are cleaned, divided among corpora, tokenized and written."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.data.corpus.cleaning.clean import CleaningReport, Drops
from bert_jax.data.corpus.cleaning.config import CleaningConfig
from bert_jax.data.corpus.datasheet import Tally
from bert_jax.data.corpus.documents import Document, Source
from bert_jax.data.corpus.encode import (
    Block,
    Cleaning,
    EncodedBlock,
    clean_and_encode,
    start_worker,
)
from bert_jax.data.corpus.workers import map_ordered
from bert_jax.data.shard import OFFSET_DTYPE, token_dtype
from bert_jax.data.store import ShardEntry
from bert_jax.data.store_writer import ShardWriter
from bert_jax.errors import UserError
from bert_jax.tokenization.tokenizer import Tokenizer

BLOCK_BYTES = 1 << 20
PARTS = ("train", "heldout")
MIN_HELDOUT_DOCUMENTS = 2
"""Sentence pairs take a random partner from another document, so evaluation needs two."""
MAX_CORPORA = 100
"""Values of the field that divides sources; each has files open as long as a pass lasts."""
_MIN_DOCUMENTS = 4  # fewer distinct ones are not divided
_WAITING_BYTES = 64 << 20


@dataclass(frozen=True)
class Recipe:
    """Settings that determine, with the sources, what is written."""

    tokenizer: Tokenizer
    """Picklable tokenizer; each process gets a copy."""
    heldout_rate: float = 0.01
    """Share of the documents to hold out, at least 0 and below 1."""
    splitter: str = "fast"
    """Sentence splitter: `fast`, `lines` or `syntok`."""
    by_field: str = ""
    """Field whose values are names of corpora; empty: one corpus."""
    cleaning: CleaningConfig = field(default_factory=CleaningConfig)

    def __post_init__(self) -> None:
        """Refuse, with a UserError, a share to hold out that leaves nothing to train on."""
        check_rate(self.heldout_rate)

    def threshold(self) -> int:
        """Return the hash below which documents are held out, unless few documents say else."""
        return int(self.heldout_rate * 2**64)

    def identity(self) -> dict[str, Any]:
        """Return the values in which equal recipes agree, as JSON."""
        found = {name.name: getattr(self, name.name) for name in dataclasses.fields(self)}
        return {
            **found,
            "tokenizer": self.tokenizer.fingerprint,
            "cleaning": self.cleaning.record(),  # with the digests of evaluation texts
        }


@dataclass
class Written:
    """Counts of one corpus, of one pass or of several."""

    train: int = 0
    """Documents."""
    heldout: int = 0
    """Documents."""
    text_bytes: int = 0
    """UTF-8 bytes of text that were tokenized."""
    smallest: list[int] = field(default_factory=list)
    """Smallest hashes of distinct documents, at most four."""

    def add(self, other: "Written") -> None:
        """Add the counts of another pass over other documents."""
        self.train += other.train
        self.heldout += other.heldout
        self.text_bytes += other.text_bytes
        self.smallest = sorted({*self.smallest, *other.smallest})[:_MIN_DOCUMENTS]

    def better_threshold(self) -> int | None:
        """Return the threshold that divides few documents; None where the rate divides them well.

        Of four distinct documents or more two are held out, of fewer none.
        """
        if len(self.smallest) == _MIN_DOCUMENTS and self.heldout < MIN_HELDOUT_DOCUMENTS:
            return self.smallest[MIN_HELDOUT_DOCUMENTS - 1] + 1
        if len(self.smallest) < _MIN_DOCUMENTS and self.heldout:
            return 0
        return None


def check_rate(heldout_rate: float) -> None:
    """Refuse, with a UserError, a share to hold out that leaves nothing to train on."""
    if not 0 <= heldout_rate < 1:
        raise UserError(f"heldout_rate is {heldout_rate}; it must be at least 0 and below 1.")


def better_thresholds(
    recipe: Recipe, thresholds: Mapping[str, int], found: Mapping[str, Written]
) -> dict[str, int]:
    """Return the thresholds of corpora that another pass must divide in another way."""
    if not recipe.heldout_rate:
        return {}
    better = {name: each.better_threshold() for name, each in found.items()}
    return {k: value for k, value in better.items() if value is not None and k not in thresholds}


class Pass(contextlib.AbstractContextManager["Pass"]):
    """A context manager that writes the shards of one reading of sources.

    Leaving it without `finish`, by an error or not, removes what was written.

    Args:
        recipe: settings.
        place: directory of the shard of a corpus and a part, `train` or `heldout`.
        thresholds: hashes below which documents of a corpus are held out, where the recipe's rate
            does not say it.
        drops: decisions of a scan of the same sources.
        samples: dropped documents to keep for each reason.
    """

    def __init__(
        self,
        recipe: Recipe,
        place: Callable[[str, str], Path],
        *,
        thresholds: Mapping[str, int] | None = None,
        drops: Drops | None = None,
        samples: int = 0,
    ) -> None:
        self._recipe, self._place = recipe, place
        self._thresholds = thresholds or {}
        self._cleaning = Cleaning(recipe.cleaning, drops, samples)
        self._writers: dict[str, dict[str, ShardWriter]] = {}
        self._written: dict[str, Written] = {}
        self.report = CleaningReport(samples)
        """Counts and samples of what was dropped."""
        self.sources: list[dict[str, Any]] = []
        """Records of the sources, each with the number of its documents."""
        self.tallies: dict[str, Tally] = {}
        """Languages, licences and coverage of each corpus, before cleaning."""

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of text that were tokenized so far."""
        return sum(each.text_bytes for each in self._written.values())

    def run(
        self,
        sources: Sequence[Source],
        num_workers: int = 1,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        """Read the sources and write what they hold.

        Args:
            sources: sources of this pass, in their order.
            num_workers: processes that tokenize; 1 is this process.
            advance: function that is called after each block.

        Raises:
            UserError: bad input, a disk that is full, a worker that was killed.
        """
        blocks = self._blocks(sources)
        first = list(itertools.islice(blocks, 2))
        encoded = map_ordered(
            clean_and_encode,
            itertools.chain(first, blocks),
            num_workers if len(first) > 1 else 1,  # starting processes costs more than a MB
            initializer=start_worker,
            arguments=(self._recipe.tokenizer, self._recipe.splitter, self._cleaning),
        )
        with contextlib.closing(encoded), contextlib.closing(blocks):
            for corpus, block, report in encoded:
                self._append(corpus, block)
                if report is not None:
                    self.report.merge([report])
                advance()

    def written(self) -> dict[str, Written]:
        """Return the counts of each corpus so far."""
        for corpus, writers in self._writers.items():
            for part, writer in writers.items():
                setattr(self._written[corpus], part, writer.num_documents)
        return self._written

    def sizes(self) -> tuple[int, int]:
        """Return the tokens so far, and the bytes of the arrays of all shards."""
        writers = [writer for each in self._writers.values() for writer in each.values()]
        tokens = sum(writer.num_tokens for writer in writers)
        offsets = sum(writer.num_sentences + writer.num_documents + 2 for writer in writers)
        token_bytes = token_dtype(self._recipe.tokenizer.vocab_size).itemsize
        return tokens, tokens * token_bytes + offsets * OFFSET_DTYPE.itemsize

    def finish(self) -> dict[tuple[str, str], ShardEntry]:
        """Complete the shards that have documents, and return their entries by corpus and part."""
        return {
            (corpus, part): writer.finish()
            for corpus, writers in self._writers.items()
            for part, writer in writers.items()
            if writer.num_documents
        }

    def _append(self, corpus: str, block: EncodedBlock) -> None:
        if corpus not in self._writers:
            self._open(corpus)
        written = self._written[corpus]
        written.add(
            Written(0, 0, block.text_bytes, np.unique(block.hashes)[:_MIN_DOCUMENTS].tolist())
        )
        threshold = self._thresholds.get(corpus, self._recipe.threshold())
        heldout = block.hashes < np.uint64(threshold)
        tokens, sentence_lengths, document_lengths = block.arrays
        for part, kept in zip(PARTS, (~heldout, heldout), strict=True):
            sentences = np.repeat(kept, document_lengths)
            self._writers[corpus][part].append(
                tokens[np.repeat(sentences, sentence_lengths)],
                sentence_lengths[sentences],
                document_lengths[kept],
            )

    def _open(self, corpus: str) -> None:
        if len(self._writers) == MAX_CORPORA:
            raise UserError(
                f"the field {self._recipe.by_field!r} has more than {MAX_CORPORA} values, such as "
                f"{corpus!r}; --by-column takes a field of few values, such as a language."
            )
        self._writers[corpus] = {}
        self._written[corpus] = Written()
        for part in PARTS:
            self._writers[corpus][part] = ShardWriter(
                self._place(corpus, part), self._recipe.tokenizer
            )

    def _blocks(self, sources: Iterable[Source]) -> Generator[Block, None, None]:
        """Yield about a megabyte of documents each, of one corpus."""
        waiting: dict[str, list[tuple[int, bytes]]] = {}
        sizes: dict[str, int] = {}
        number, cleaned = 0, not self._recipe.cleaning.is_empty
        self.sources, self.tallies = [], {}

        def block(corpus: str, source: str) -> Block:
            numbers, texts = zip(*waiting.pop(corpus), strict=True)
            del sizes[corpus]
            return Block(corpus, source, list(numbers), b"\n\n".join(texts))

        for source in sources:
            first = number
            name = source.name if cleaned else ""
            for document in source.documents():
                corpus, data = self._corpus(document), document.text.encode()
                if corpus not in self.tallies:
                    self.tallies[corpus] = Tally(self._recipe.tokenizer)
                self.tallies[corpus].count(document.text, document.source, document.fields)
                waiting.setdefault(corpus, []).append((number, data))
                sizes[corpus] = sizes.get(corpus, 0) + len(data)
                number += 1
                if sizes[corpus] >= BLOCK_BYTES:
                    yield block(corpus, name)
                elif len(sizes) > 1 and sum(sizes.values()) >= _WAITING_BYTES:
                    yield block(max(sizes, key=lambda each: sizes[each]), name)
            if cleaned:  # samples of dropped documents name their source
                yield from (block(corpus, name) for corpus in list(waiting))
            self.sources.append({**source.record(), "documents": number - first})
        yield from (block(corpus, "") for corpus in list(waiting))

    def _corpus(self, document: Document) -> str:
        field = self._recipe.by_field
        if not field:
            return ""
        where = f"{document.source}, document {document.number}"
        if field not in document.fields:
            raise UserError(
                f"{where}: no field {field!r}, which --by-column names; such a field is a column "
                "of a table or a member of a JSON object."
            )
        value = document.fields[field]
        name = "unknown" if value is None else str(value)
        if not name.replace("-", "").replace("_", "").isalnum() or len(name) > 64:
            raise UserError(
                f"{where}: the field {field!r} is {name[:80]!r}, which is no name of a corpus "
                "(letters, digits, - and _; at most 64)."
            )
        return name

    def __exit__(self, *exception: object) -> None:
        for writers in self._writers.values():
            for writer in writers.values():
                writer.close()
        self._writers = {}


def store_meta(
    recipe: Recipe,
    part: str,
    text_bytes: int,
    report: CleaningReport,
    accounted: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the entries of a store's `corpus.json` that say what was read and how.

    `accounted` is what `datasheet.account` returns.
    """
    cleaning = {} if recipe.cleaning.is_empty else {
        "cleaning": recipe.cleaning.record(), **report.record()
    }  # fmt: skip
    return {
        "part": part,
        "heldout_rate": recipe.heldout_rate,
        "splitter": recipe.splitter,
        "text_bytes": text_bytes,
        **accounted,
        **cleaning,
    }
