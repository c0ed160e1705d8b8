"""Division of sources into tasks; each task makes one shard."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bert_jax.data.corpus.documents import Source
from bert_jax.data.corpus.workers import grouped
from bert_jax.errors import UserError

SHARD_BYTES = 1 << 30
"""Bytes of files for a shard by default; less than twice as many make a store without shards."""


@dataclass(frozen=True)
class Task:
    """Consecutive sources, or parts of one, that become one shard."""

    number: int
    """Number of the task in the order of the corpus."""
    sources: tuple[Source, ...]

    @property
    def name(self) -> str:
        """Name of the shard."""
        return f"{self.number:05d}"

    @property
    def size(self) -> int:
        """Bytes of the files; rows or examples where a source counts those."""
        return sum(source.size for source in self.sources)

    def identity(self) -> list[dict[str, Any]]:
        """Return the values that determine the documents, without reading them."""
        return [source.identity() for source in self.sources]


def plan_tasks(sources: Sequence[Source], shard_bytes: int = SHARD_BYTES) -> list[Task]:
    """Divide sources into tasks of about `shard_bytes` of files each, in the sources' order.

    The division depends only on names, sizes and the content at the cuts. Larger files are cut
    between documents where their format allows it; smaller ones share a task.

    Raises:
        UserError: `shard_bytes` is below 1, or a file cannot be read.
    """
    if shard_bytes < 1:
        raise UserError(f"a shard of {shard_bytes} bytes holds nothing; it must be at least 1.")
    if sum(source.size for source in sources) < 2 * shard_bytes:
        return [Task(0, tuple(sources))]
    parts = [part for source in sources for part in source.divided(shard_bytes)]
    # Parts are a little smaller than a shard; two of them are not to be one.
    groups = grouped(parts, lambda part: part.size, max(1, shard_bytes // 2))
    return [Task(number, tuple(group)) for number, group in enumerate(groups)]
