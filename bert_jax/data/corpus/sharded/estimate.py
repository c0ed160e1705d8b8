"""Estimates of what a build takes, from a sample of its sources."""

import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bert_jax.data.corpus.cleaning.duplicates import scan
from bert_jax.data.corpus.documents import Source
from bert_jax.data.corpus.passes import Pass, Recipe
from bert_jax.data.corpus.sharded.engine import SHARD_BYTES, plan_tasks
from bert_jax.data.store import ARRAYS
from bert_jax.errors import UserError

SAMPLE_BYTES = 32 << 20
"""Bytes of files that are read."""
_PIECES, _ROWS = 32, 10_000
_SCAN_BYTES = 400
"""Memory that the search for duplicates takes for each document of a task."""


@dataclass(frozen=True)
class Estimate:
    """Sizes of a corpus that is not built yet, scaled from a sample of it."""

    total: int
    """Bytes of all sources; rows or examples where a source counts those."""
    sampled: int
    documents: int
    tokens: int
    text_bytes: int
    store_bytes: int
    processor_seconds: float
    """Seconds of one core of this machine."""
    process_bytes: int
    """Largest memory of one process."""
    shards: int
    """Shards, or 1 for a store without them."""

    def lines(self, num_workers: int) -> list[str]:
        """Return the estimate for people."""
        hours = self.processor_seconds / 3600
        share = self.sampled / self.total
        return [
            f"estimate from {self.sampled / 1e6:,.1f} MB of {self.total / 1e6:,.1f} MB "
            f"({min(share, 1):.2%} of the sources); nothing is built",
            f"  documents        {self.documents:,}",
            f"  text             {self.text_bytes / 1e6:,.1f} MB",
            f"  tokens           {self.tokens:,}",
            f"  store            {self.store_bytes / 1e6:,.1f} MB in {self.shards:,} shard(s)",
            f"  processor hours  {hours:,.3g} (with {num_workers} processes like this one: "
            f"{hours / num_workers:,.3g} hours)",
            f"  memory           {self.process_bytes / 2**30:.2f} GiB a process, "
            f"{self.process_bytes * (num_workers + 1) / 2**30:.2f} GiB with {num_workers} of them "
            "on one machine",
        ]


def estimate_corpus(
    sources: Sequence[Source],
    recipe: Recipe,
    *,
    shard_bytes: int = SHARD_BYTES,
    sample_bytes: int = SAMPLE_BYTES,
) -> Estimate:
    """Build a sample, evenly spread over the sources, in a temporary directory and scale it up.

    Of a file that cannot be divided the beginning is read.

    Raises:
        UserError: bad input, or no text in the sample.
    """
    tasks = plan_tasks(sources, shard_bytes)
    sample = _sample(sources, sample_bytes)
    with tempfile.TemporaryDirectory(prefix="bert_jax-") as name:
        directory = Path(name)
        begin = time.process_time()
        if recipe.cleaning.needs_scan:
            (directory / "scan").mkdir()
            texts = (document.text for head in sample for document in head.documents())
            scan(texts, recipe.cleaning, directory / "scan")
        with Pass(recipe, lambda corpus, part: directory / f"{corpus}-{part}") as made:
            made.run(sample)
            seconds = time.process_time() - begin
            tokens = sum(entry.num_tokens for entry in made.finish().values())
            documents = sum(source["documents"] for source in made.sources)
        files = (file for name in ARRAYS for file in directory.glob(f"*/{name}.bin"))
        store_bytes = sum(file.stat().st_size for file in files)
    total, sampled = sum(each.size for each in sources), sum(each.bytes_read for each in sample)
    if not tokens or not sampled:
        raise UserError("the sample of the sources holds no text that gives a token.")
    scale = max(1.0, total / sampled)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if recipe.cleaning.needs_scan:
        memory += int(_SCAN_BYTES * documents * scale / len(tasks))
    return Estimate(
        total=total,
        sampled=sampled,
        documents=int(documents * scale),
        tokens=int(tokens * scale),
        text_bytes=int(sum(each.text_bytes for each in made.written().values()) * scale),
        store_bytes=int(store_bytes * scale),
        processor_seconds=seconds * scale,
        process_bytes=memory,
        shards=len(tasks),
    )


def _sample(sources: Sequence[Source], sample_bytes: int) -> list[Source]:
    """Return pieces of the sources, evenly spread over all of them."""
    total = sum(source.size for source in sources)
    if total <= sample_bytes:
        # A source that knows its size only once it is open counts rows.
        return [source if source.size else source.head(_ROWS) for source in sources]
    wanted = [total * (2 * number + 1) // (2 * _PIECES) for number in range(_PIECES)]
    pieces: list[Source] = []
    begin = 0
    for source in sources:
        mine = [at for at in wanted if begin <= at < begin + source.size]
        begin += source.size
        if not mine:
            continue
        parts = source.divided(max(1, source.size // len(mine)))[: len(mine)]
        limit = sample_bytes * len(mine) // (_PIECES * len(parts))
        pieces += [part.head(max(1, limit)) for part in parts]
    return pieces
