"""One pass over sources: documents are cleaned, assigned to corpora, tokenized and written."""

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.data.corpus.cleaning.clean import Cleaner, CleaningConfig, Drops
from bert_jax.data.corpus.datasheet import Tally
from bert_jax.data.corpus.documents import Document, Source
from bert_jax.data.corpus.encode import Block, EncodedBlock, clean_and_encode, start_worker
from bert_jax.data.corpus.intake import BAD_SAMPLES, OWN_NAMES, DropReport
from bert_jax.data.corpus.workers import map_ordered
from bert_jax.data.store import ShardEntry
from bert_jax.data.store_writer import ShardWriter
from bert_jax.errors import UserError
from bert_jax.tokenization.tokenizer import Tokenizer

BLOCK_BYTES = 1 << 20
PARTS = ("train", "heldout")
MIN_HELDOUT_DOCUMENTS = 2
"""Smallest number of documents to hold out: random sentence pairs take text from two documents."""
MAX_CORPORA = 100  # largest number of values of `Recipe.by_field`; each keeps some files open
_MIN_DOCUMENTS = 4  # number of distinct documents below which none is held out
_WAITING_BYTES = 64 << 20


@dataclass(frozen=True)
class Recipe:
    """Settings that, with the sources, determine the content of a corpus."""

    tokenizer: Tokenizer
    """Picklable tokenizer; each process gets a copy."""
    heldout_rate: float = 0.01
    """Fraction of the documents to hold out, at least 0 and below 1."""
    splitter: str = "fast"
    """Sentence splitter: `fast`, `lines` or `syntok`."""
    by_field: str = ""
    """Field whose value names the corpus of a document; if empty, there is only one corpus."""
    cleaning: CleaningConfig = field(default_factory=CleaningConfig)

    def __post_init__(self) -> None:
        """Raise a UserError unless `heldout_rate` is at least 0 and below 1."""
        check_rate(self.heldout_rate)

    def identity(self) -> dict[str, Any]:
        """Return the recipe as JSON values, which are equal for equal recipes."""
        return {
            **vars(self),
            "tokenizer": self.tokenizer.fingerprint,
            "cleaning": self.cleaning.record(),  # with the digests of evaluation texts
        }


@dataclass
class Written:
    """Counts of one corpus from one or several passes. `train` and `heldout` count documents."""

    train: int = 0
    heldout: int = 0
    text_bytes: int = 0
    """Size of the tokenized text, in UTF-8 bytes."""
    smallest: list[int] = field(default_factory=list)
    """The four smallest distinct document hashes, or all if there are fewer."""

    def add(self, other: "Written") -> None:
        """Add the counts of another pass over other documents."""
        self.train += other.train
        self.heldout += other.heldout
        self.text_bytes += other.text_bytes
        self.smallest = sorted({*self.smallest, *other.smallest})[:_MIN_DOCUMENTS]


def check_rate(heldout_rate: float) -> None:
    """Raise a UserError unless the rate is at least 0 and below 1."""
    if not 0 <= heldout_rate < 1:
        raise UserError(f"heldout_rate is {heldout_rate}; it must be at least 0 and below 1.")


def better_thresholds(
    recipe: Recipe, thresholds: Mapping[str, int], found: Mapping[str, Written]
) -> dict[str, int]:
    """Return thresholds for corpora that are too small to be divided by the held-out rate.

    Documents with a hash below the threshold are held out: two documents if a corpus has at least
    four distinct documents, else none. Corpora that are in `thresholds` are left out.
    """
    better = {}
    for name, each in found.items() if recipe.heldout_rate else ():
        is_few = len(each.smallest) < _MIN_DOCUMENTS
        is_uneven = not each.train or each.heldout < MIN_HELDOUT_DOCUMENTS
        if each.heldout > 0 if is_few else is_uneven:
            better[name] = 0 if is_few else each.smallest[MIN_HELDOUT_DOCUMENTS - 1] + 1
    return {name: value for name, value in better.items() if name not in thresholds}


class Pass(contextlib.AbstractContextManager["Pass"]):
    """A context manager for one pass over sources, which writes shards.

    If the context ends without `finish`, the shards are removed. `place` maps a corpus and a part
    (`train` or `heldout`) to the shard's directory. `thresholds` maps a corpus to the hash below
    which documents are held out, instead of the rate. `drops` and `samples` are as in `Cleaner`.
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
        self._new_cleaner = None
        if not recipe.cleaning.is_empty:
            self._new_cleaner = functools.partial(Cleaner, recipe.cleaning, drops, samples=samples)
        self._writers: dict[tuple[str, str], ShardWriter] = {}
        self._written: dict[str, Written] = {}
        self.report = DropReport(samples)
        """Counts and samples of what was dropped."""
        self.bad = DropReport(BAD_SAMPLES)
        """Counts and samples of bad records."""
        self.sources: list[dict[str, Any]] = []
        """Records of the sources, each with the number of its documents."""
        self.tallies: dict[str, Tally] = {}
        """Languages, licences and tokenizer coverage of each corpus, before cleaning."""

    def run(
        self,
        sources: Sequence[Source],
        num_workers: int = 1,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        """Read the sources in order, write their documents, and call `advance` after each block.

        Raise a UserError if the input is bad, the disk is full, or a worker was killed.
        """
        blocks, recipe = self._blocks(sources), self._recipe
        encoded = map_ordered(
            clean_and_encode, blocks, num_workers, initializer=start_worker,
            arguments=(recipe.tokenizer, recipe.splitter, self._new_cleaner),
        )  # fmt: skip
        with contextlib.closing(encoded), contextlib.closing(blocks):
            for corpus, block, report in encoded:
                self._append(corpus, block)
                if report is not None:
                    self.report.merge(vars(report))
                advance()

    def written(self) -> dict[str, Written]:
        """Return the counts of documents and text bytes so far, by corpus."""
        for (corpus, part), writer in self._writers.items():
            setattr(self._written[corpus], part, writer.num_documents)
        return self._written

    def finish(self) -> dict[tuple[str, str], ShardEntry]:
        """Complete the shards that have documents; return their entries by corpus and part."""
        return {of: each.finish() for of, each in self._writers.items() if each.num_documents}

    def _append(self, corpus: str, block: EncodedBlock) -> None:
        if corpus not in self._written:
            self._open(corpus)
        smallest = np.unique(block.hashes)[:_MIN_DOCUMENTS].tolist()
        self._written[corpus].add(Written(0, 0, block.text_bytes, smallest))
        threshold = self._thresholds.get(corpus, int(self._recipe.heldout_rate * 2**64))
        heldout = block.hashes < np.uint64(threshold)
        tokens, sentence_lengths, document_lengths = block.arrays
        for part, kept in zip(PARTS, (~heldout, heldout), strict=True):
            sentences = np.repeat(kept, document_lengths)
            self._writers[corpus, part].append(
                tokens[np.repeat(sentences, sentence_lengths)],
                sentence_lengths[sentences],
                document_lengths[kept],
            )

    def _open(self, corpus: str) -> None:
        if len(self._written) == MAX_CORPORA:
            raise UserError(
                f"the field {self._recipe.by_field!r} has more than {MAX_CORPORA} values, such as "
                f"{corpus!r}; --by-column builds a corpus for each value, so name a field with few "
                "values, such as a language."
            )
        self._written[corpus] = Written()
        for part in PARTS:
            writer = ShardWriter(self._place(corpus, part), self._recipe.tokenizer)
            self._writers[corpus, part] = writer

    def _blocks(self, sources: Iterable[Source]) -> Generator[Block, None, None]:
        """Yield blocks of about a megabyte; the documents of a block belong to the same corpus."""
        waiting: dict[str, list[tuple[int, bytes]]] = {}
        sizes: dict[str, int] = {}
        number, cleaned = 0, self._new_cleaner is not None

        def block(corpus: str, source: str) -> Block:
            numbers, texts = zip(*waiting.pop(corpus), strict=True)
            del sizes[corpus]
            return Block(corpus, source, list(numbers), b"\n\n".join(texts))

        for source in sources:
            documents = 0
            name = source.name if cleaned else ""
            for document in source.documents(gaps=True):
                number += 1
                if not document.text:
                    continue
                documents += 1
                corpus, data = self._corpus(document), document.text.encode()
                if corpus not in self.tallies:
                    self.tallies[corpus] = Tally(self._recipe.tokenizer)
                self.tallies[corpus].count(document.text, document.source, document.fields)
                waiting.setdefault(corpus, []).append((number - 1, data))
                sizes[corpus] = sizes.get(corpus, 0) + len(data)
                if sizes[corpus] >= BLOCK_BYTES:
                    yield block(corpus, name)
                elif len(sizes) > 1 and sum(sizes.values()) >= _WAITING_BYTES:
                    yield block(max(sizes, key=lambda each: sizes[each]), name)
            if cleaned:  # a block has one source, which the samples of dropped documents name
                yield from (block(corpus, name) for corpus in list(waiting))
            self.sources.append({**source.record(), "documents": documents})
            self.bad.merge(vars(source.bad))
            if source.options is not None:
                self.bad.check(source.options.most_bad)
        yield from (block(corpus, "") for corpus in list(waiting))

    def _corpus(self, document: Document) -> str:
        field = self._recipe.by_field
        if not field:
            return ""
        where = f"{document.source}, document {document.number}"
        if field not in document.fields:
            how = "Name a column of the table or a member of the JSON objects."
            raise UserError(f"{where}: no field {field!r}, which --by-column names. {how}")
        value = document.fields[field]
        name = "unknown" if value is None else str(value)
        is_sound = name.replace("-", "").replace("_", "").isalnum() and len(name) <= 64
        if not is_sound or name in OWN_NAMES:
            raise UserError(
                f"{where}: the field {field!r} is {name[:80]!r}, which cannot name a corpus. Use "
                f"at most 64 letters, digits, - and _, and none of {', '.join(OWN_NAMES)}."
            )
        return name

    def __exit__(self, *exception: object) -> None:
        while self._writers:
            self._writers.popitem()[1].close()
