"""Raw text to a corpus: two token stores, `train` and `heldout`.

The parent process reads, decompresses and divides into documents; workers split sentences and
tokenize blocks of about a megabyte; the parent appends what comes back, in order. The result is the
same whatever the number of workers.
"""

import contextlib
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bert_jax.corpus.documents import ReadOptions, Source
from bert_jax.corpus.encode import EncodedBlock, encode_block, start_worker
from bert_jax.corpus.sentences import get_splitter
from bert_jax.corpus.sources import resolve_sources
from bert_jax.corpus.workers import grouped, map_ordered, worker_count
from bert_jax.data.pairs import DEFAULT_PAIRING, losses, plan_pairs
from bert_jax.data.store import TokenStore, is_store, open_store
from bert_jax.data.store_writer import StoreWriter
from bert_jax.errors import UserError
from bert_jax.files.staging import StagedDirectory
from bert_jax.tokenization.tokenizer import Tokenizer

BLOCK_BYTES = 1 << 20
DEFAULT_LENGTH = 128
"""Tokens in a row of the first phase of `PretrainConfig`."""
MIN_HELDOUT_DOCUMENTS = 2
"""Sentence pairs take a random partner from another document, so evaluation needs two."""
_MIN_DOCUMENTS = 4  # fewer distinct ones are not divided


@dataclass(frozen=True)
class BuiltCorpus:
    """Result of `build_corpus`."""

    path: Path
    train: TokenStore
    heldout: TokenStore | None
    """None where nothing was held out: a rate of 0, or fewer than four distinct documents."""
    text_bytes: int
    """UTF-8 bytes of text that were tokenized."""
    seconds: float

    def summary(self) -> str:
        """Return counts, rate, and the sentence pairs of rows of the default length, for people."""
        rate = self.text_bytes / 1e6 / max(self.seconds, 1e-9)
        lines = [
            f"{self.path}: {self.text_bytes / 1e6:.1f} MB of text in {self.seconds:.1f} s "
            f"({rate:.1f} MB/s)"
        ]
        for name, store in (("train", self.train), ("heldout", self.heldout)):
            if store is None:
                lines.append(f"  {name}: none")
                continue
            lines.append(
                f"  {name}: {store.num_documents:,} documents, {store.num_sentences:,} sentences, "
                f"{store.num_tokens:,} tokens, {store.unknown_rate:.2%} of them [UNK]"
            )
        try:
            plan = plan_pairs(self.train.shards[0], DEFAULT_LENGTH)
        except UserError as error:
            return "\n".join([*lines, f"Warning: {error}"])
        clause, warning = losses(plan, self.train.shards[0], DEFAULT_PAIRING)
        lines.append(f"  as sentence pairs: {len(plan):,} rows of {plan.length} tokens; {clause}")
        return "\n".join([*lines, warning] if warning else lines)


def is_corpus(path: Path) -> bool:
    """Return true when `path` holds what `build_corpus` makes."""
    return is_store(path / "train")


def check_rate(heldout_rate: float) -> None:
    """Refuse, with a UserError, a share to hold out that leaves nothing to train on."""
    if not 0 <= heldout_rate < 1:
        raise UserError(f"heldout_rate is {heldout_rate}; it must be at least 0 and below 1.")


def build_corpus(
    sources: Sequence[str | Source],
    tokenizer: Tokenizer,
    out: str | Path,
    *,
    heldout_rate: float = 0.01,
    splitter: str = "fast",
    num_workers: int | None = None,
    options: ReadOptions | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> BuiltCorpus:
    """Make the directory `out` with the token stores `train` and `heldout`.

    A document is held out by a hash of its content, so that equal documents are never on both
    sides and a corpus that grows keeps its division. Where the rate would hold out fewer than two
    of at least four distinct documents, the two with the smallest hashes are held out.

    Args:
        sources: see `resolve_sources`.
        tokenizer: picklable tokenizer; each worker gets a copy.
        out: directory that appears by one rename when everything is in it.
        heldout_rate: share of the documents to hold out, at least 0 and below 1.
        splitter: `fast`, `lines` or `syntok`.
        num_workers: processes; all cores by default. 1 runs in this process.
        overwrite: replace a corpus that is there already, once the new one is complete.

    Raises:
        UserError: bad input (see `sources`), no text at all, `out` exists, disk full, or a worker
            was killed. Nothing is left behind.
    """
    check_rate(heldout_rate)
    workers = worker_count(num_workers)
    get_splitter(splitter)  # says now what is missing
    resolved = resolve_sources(sources, options)
    begin = time.perf_counter()
    with contextlib.ExitStack() as stack:
        staged = stack.enter_context(StagedDirectory(out, is_corpus, overwrite=overwrite))
        build = _Build(resolved, tokenizer, splitter, workers, progress)
        stack.callback(build.close)
        threshold = int(heldout_rate * 2**64)
        build.run(staged.path, threshold)
        if heldout_rate:
            num_heldout = build.writers["heldout"].num_documents
            if len(build.smallest) == _MIN_DOCUMENTS and num_heldout < MIN_HELDOUT_DOCUMENTS:
                build.run(staged.path, int(build.smallest[MIN_HELDOUT_DOCUMENTS - 1]) + 1)
            elif len(build.smallest) < _MIN_DOCUMENTS and num_heldout:
                build.run(staged.path, 0)
        records = [source.record() for source in resolved]
        for name, writer in build.writers.items():
            if writer.num_documents:  # an empty held-out store is left out
                writer.finish(
                    part=name,
                    heldout_rate=heldout_rate,
                    splitter=splitter,
                    text_bytes=build.text_bytes,
                    sources=records,
                )
        build.close()
        staged.commit()
    out = Path(out)
    return BuiltCorpus(
        path=out,
        train=open_store(out / "train"),
        heldout=open_store(out / "heldout") if is_store(out / "heldout") else None,
        text_bytes=build.text_bytes,
        seconds=time.perf_counter() - begin,
    )


@dataclass
class _Build:
    """Passes over the sources; the last one counts."""

    sources: Sequence[Source]
    tokenizer: Tokenizer
    splitter: str
    num_workers: int
    progress: bool
    writers: dict[str, StoreWriter] = field(default_factory=dict)

    def run(self, directory: Path, threshold: int) -> None:
        """Write both stores; documents with a hash below `threshold` are held out."""
        self.close()
        self.text_bytes = 0
        self.smallest = np.zeros(0, np.uint64)  # at most `_MIN_DOCUMENTS` hashes of documents
        self.writers = {
            name: StoreWriter(directory / name, self.tokenizer) for name in ("train", "heldout")
        }
        blocks = _blocks(self.sources)
        first = list(itertools.islice(blocks, 2))
        encoded = map_ordered(
            encode_block,
            itertools.chain(first, blocks),
            self.num_workers if len(first) > 1 else 1,  # starting processes costs more than a MB
            initializer=start_worker,
            arguments=(self.tokenizer, self.splitter),
        )
        bar = tqdm(
            total=sum(source.size for source in self.sources),
            unit="B",
            unit_scale=True,
            desc="corpus",
            disable=not (self.progress and sys.stderr.isatty()),
        )
        begin = time.perf_counter()
        with contextlib.closing(encoded), bar:
            for block in encoded:
                self._append(block, threshold)
                rate = self.text_bytes / 1e6 / max(time.perf_counter() - begin, 1e-9)
                bar.set_postfix_str(f"{rate:.1f} MB/s of text", refresh=False)
                bar.update(sum(source.bytes_read for source in self.sources) - bar.n)
        if not sum(writer.num_documents for writer in self.writers.values()):
            raise UserError("the sources hold no text that gives a token: the corpus is empty.")

    def _append(self, block: EncodedBlock, threshold: int) -> None:
        self.text_bytes += block.text_bytes
        self.smallest = np.unique(np.concatenate([self.smallest, block.hashes]))[:_MIN_DOCUMENTS]
        heldout = block.hashes < np.uint64(threshold)
        tokens, sentence_lengths, document_lengths = block.arrays
        for name, kept in (("train", ~heldout), ("heldout", heldout)):
            sentences = np.repeat(kept, document_lengths)
            self.writers[name].append(
                tokens[np.repeat(sentences, sentence_lengths)],
                sentence_lengths[sentences],
                document_lengths[kept],
            )

    def close(self) -> None:
        """Remove what is not finished."""
        for writer in self.writers.values():
            writer.close()


def _blocks(sources: Iterable[Source]) -> Iterator[bytes]:
    """About a megabyte of documents each: paragraphs end in a newline, documents in two."""
    documents = (text.encode() for source in sources for text in source.documents())
    return (b"\n\n".join(group) for group in grouped(documents, len, BLOCK_BYTES))


def iter_texts(
    sources: Sequence[str | Source],
    *,
    max_bytes: int | None = None,
    options: ReadOptions | None = None,
) -> Iterator[str]:
    """Yield paragraphs of the sources, for training a tokenizer.

    With `max_bytes` they are about so much text, evenly spread over the whole corpus, which is read
    once; the sample is held in memory. Otherwise they are everything, streamed.
    """
    blocks = _blocks(resolve_sources(sources, options))
    if max_bytes is not None:
        blocks = iter(_spread(blocks, max_bytes))
    for block in blocks:
        yield from filter(None, block.decode().split("\n"))


def _spread(blocks: Iterable[bytes], max_bytes: int) -> list[bytes]:
    """Every k-th piece, where k doubles whenever there are too many: one pass, no total needed."""
    piece_bytes = max(64, min(1 << 16, max_bytes // 64))
    pieces = (
        b"".join(lines)
        for block in blocks
        for lines in grouped(block.splitlines(keepends=True), len, piece_bytes + 1)
    )
    kept: list[bytes] = []
    size = 0
    stride = 1
    for number, piece in enumerate(pieces):
        if number % stride == 0:
            kept.append(piece)
            size += len(piece)
        while size > max_bytes and len(kept) > 1:
            kept = kept[::2]
            size = sum(map(len, kept))
            stride *= 2
    return kept
