"""Token stores of one shard, written block by block."""

from pathlib import Path
from typing import Any

from bert_jax.data.shard import StoreTokenizer
from bert_jax.data.store import TokenStore, open_store
from bert_jax.data.store_writer import ShardWriter, write_manifest


class StoreWriter(ShardWriter):
    """The writer of a shard that makes a store of it."""

    def __init__(self, path: Path, tokenizer: StoreTokenizer) -> None:
        super().__init__(path / "shards" / "00000", tokenizer)

    def store(self, **meta: Any) -> TokenStore:
        """Complete the shard and the store, and open the store."""
        root = self.path.parent.parent
        write_manifest(root, [self.finish()], self._tokenizer, **meta)
        return open_store(root)
