"""What a store of 10^8 to 10^11 tokens costs a host: bytes and opened files, not seconds.

    python benchmarks/large_stores.py [--tokens 1e8 1e9 1e10 1e11] [--window 8] [--check]

A store of any size is one shard of 10^8 tokens that is linked as often as needed: the manifest, the
order, the plans and the memory maps are those of a store of that size. Each store is opened by a
process of its own, which then reads batches of 256 rows of 128 tokens (pairing `nsp`).

- read: pages of the shards' files that the process has mapped and touched, and the manifest.
- held: private memory above that of the process before it opened the store; the most, sampled.
- a batch: tokens gathered and files opened, for the mean of the batches after the first ones.

`--check` exits 1 unless opening touches at most the offsets of one shard, no store takes more than
4 GiB, and a batch gathers as many bytes from each store as from the smallest, within 5%.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.data.pairings import DataConfig
from bert_jax.data.phases import Phase
from bert_jax.data.pipeline import ExampleStream
from bert_jax.data.shard import Shard
from bert_jax.data.store import open_store
from bert_jax.data.store_writer import ShardWriter, write_manifest
from bert_jax.tokenization.special_ids import SpecialIds

SHARD_TOKENS, SENTENCE, DOCUMENT = 100_000_000, 20, 20
LENGTH, ROWS, BATCHES = 128, 256, 128
MEMORY_BAR, SAME = 4 << 30, 1.05


class NoTokenizer:
    """The part of a tokenizer that a store needs."""

    vocab_size, fingerprint = 30522, "0" * 64
    special_ids = SpecialIds(pad=0, unk=100, cls=101, sep=102, mask=103)

    def save(self, directory: Path) -> None:
        """Write nothing."""
        directory.mkdir()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=float, nargs="+", default=[1e8, 1e9, 1e10, 1e11])
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--check", action="store_true", help="exit 1 beyond the bars")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(arguments.one, arguments.window)))
        return 0
    rows = []
    print(
        f"{'tokens':>7} {'shards':>6} {'manifest':>9} | {'opening: files':>14} {'read':>8} "
        f"{'held':>7} | {'first batch: files':>18} {'read':>9} {'held':>8} | "
        f"{'a batch: files':>14} {'gathers':>8} | {'most held':>9}"
    )
    with tempfile.TemporaryDirectory() as directory:
        shard = write_shard(Path(directory))
        for tokens in arguments.tokens:
            path = link(Path(directory) / f"{tokens:.0e}", shard, round(tokens / SHARD_TOKENS))
            command = [sys.executable, __file__, "--one", str(path), f"--window={arguments.window}"]
            row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            rows.append(row)
            opening, first = row["opening"], row["first"]
            print(
                f"{tokens:>7.0e} {row['shards']:>6} {size(row['manifest']):>9} | "
                f"{opening['files']:>14} {size(opening['read']):>8} {size(opening['held']):>7} | "
                f"{first['files']:>18} {size(first['read']):>9} {size(first['held']):>8} | "
                f"{row['batch_files']:>14.2f} {size(row['gathered']):>8} | {size(row['most']):>9}",
                flush=True,
            )
        offsets = sum(p.stat().st_size for p in shard.glob("*_offsets.bin"))
    passed = all(
        row["opening"]["read"] - row["manifest"] <= offsets * SAME
        and row["most"] <= MEMORY_BAR
        and row["gathered"] <= rows[0]["gathered"] * SAME
        for row in rows
    )
    print(f"bars: opening {size(offsets)}, memory {size(MEMORY_BAR)}, batches alike: "
          f"{'kept' if passed else 'MISSED'}")  # fmt: skip
    return 1 if arguments.check and not passed else 0


def write_shard(directory: Path) -> Path:
    """Write the shard: sentences of 10 to 30 tokens, documents of 20 sentences."""
    random = np.random.default_rng(0)
    with ShardWriter(directory / "shards" / "0", NoTokenizer()) as writer:
        for _ in range(100):
            lengths = random.integers(SENTENCE // 2, 3 * SENTENCE // 2 + 1, SHARD_TOKENS // 2000)
            tokens = random.integers(1000, 30522, lengths.sum(), np.uint16)
            writer.append(tokens, lengths, np.full(lengths.size // DOCUMENT, DOCUMENT))
        write_manifest(directory, [writer.finish()], NoTokenizer())
    return writer.path


def link(path: Path, shard: Path, count: int) -> Path:
    """Make a store of one shard many times, as `write_manifest` writes it."""
    header = json.loads((shard.parent.parent / "corpus.json").read_text())
    counts = np.fromfile(shard / "unigram_counts.bin", "<i8")
    numbers = {name: header[name] for name in ("num_tokens", "num_sentences", "num_documents")}
    (entry,) = header["shards"]
    for name in ("crc32", "crc32c"):  # of the store of one shard
        header.pop(name)
    names = [f"{number:06}" for number in range(count)]
    (path / "shards").mkdir(parents=True)
    for name in names:
        (path / "shards" / name).symlink_to(shard)
    (path / "unigram_counts.bin").write_bytes((counts * count).tobytes())
    header |= {name: number * count for name, number in numbers.items()}
    header["shards"] = [{**entry, "name": name} for name in names]
    (path / "corpus.json").write_text(json.dumps(header, indent=2))
    return path


def measured(path: Path, window: int) -> dict[str, Any]:
    """Open a store and read batches of it, in a fresh process."""
    files, gathered = [0], [0]

    def opened(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(str(path)):
            files[0] += 1

    sys.addaudithook(opened)
    take_spans = Shard.take_spans

    def counted(shard: Shard, starts: Any, spans: Any, *others: Any) -> Any:
        gathered[0] += int(spans.sum()) * shard.tokens.itemsize
        return take_spans(shard, starts, spans, *others)

    Shard.take_spans = counted  # type: ignore[method-assign, assignment]
    before, most, done = private_bytes(), [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.02):
            most[0] = max(most[0], private_bytes() - before)

    threading.Thread(target=sample, daemon=True).start()
    manifest = (path / "corpus.json").stat().st_size

    def so_far() -> dict[str, int]:
        read = manifest + mapped_bytes(path.parent)
        return {"files": files[0], "read": read, "held": private_bytes() - before}

    store = open_store(path)
    config = DataConfig(window=window)
    stream = ExampleStream(store, config, [Phase(LENGTH, ROWS, 10**9)])
    stream.plan(0)
    opening = so_far()
    stream.batch(0)
    first = so_far()
    time.sleep(0.1)
    while any(thread.name == "plan ahead" for thread in threading.enumerate()):
        time.sleep(0.1)  # of the next window; part of no batch
    files[0] = gathered[0] = 0
    for step in range(1, 1 + BATCHES):
        stream.batch(step)
    done.set()
    return {
        "shards": len(store.counts), "manifest": manifest, "opening": opening, "first": first,
        "batch_files": files[0] / BATCHES, "gathered": gathered[0] / BATCHES, "most": most[0],
    }  # fmt: skip


def private_bytes() -> int:
    """Memory of this process that is no file's."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


def mapped_bytes(directory: Path) -> int:
    """Pages of files below a directory that this process has touched."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = str(directory) in line
        elif ours and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def size(count: float) -> str:
    """Return bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


if __name__ == "__main__":
    sys.exit(main())
