"""Tokens per second and core of the training pipeline, against Transformers' MLM collator.

    python benchmarks/input_pipeline.py [--corpus DIR] [--shards N] [--check]

Ours, on one core: plan rows in shuffled order, gathered from the token store into batches, through
Grain's threads, as training reads them (the host's work: masking belongs to the accelerator); then
the same with our masking step compiled for that core as well. The peer is
`DataCollatorForLanguageModeling` over the very same rows, already in memory as lists of ids with
their special-token masks, in the faster of its numpy and PyTorch forms; reading and pairing
sentences is not charged to it.

The process is pinned to one core. Rates are real tokens (padding excluded) per second of that
core's time spent in this process, so that other processes on the machine count for little; on an
idle machine it is the wall clock. The three alternate; medians over the repeats.

With `--shards` the host's work alone is measured: from one shard and a step at a time, as before
there were shards; from one shard, rows of several steps together; and from so many. `--check`
then exits 1 unless the last is at least 0.95 of the first.

`--check` exits 1 unless every host ratio is at least 20, every ratio with masking at least 3, and
the host's rate at least 10 M tokens/s, which is what eight fast chips consume.
"""

import argparse
import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from bert_jax.data.store import TokenStore

HOST_BAR, MASKED_BAR, RATE_BAR = 20.0, 3.0, 10e6
SHARDED_BAR = 0.95
ORDER_BLOCK = 1 << 14
"""Rows whose order was made at once before there were shards."""
Shape = tuple[int, int, Literal["nsp", "sop", "none"]]
SHAPES: tuple[Shape, ...] = (  # L, B, pairing: 32,768 places a batch
    (128, 256, "nsp"),
    (128, 256, "none"),
    (512, 64, "nsp"),
    (512, 64, "none"),
    (8192, 4, "none"),
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, help="directory of a token store, or of `train`")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, default=200, help="batches of ours in a repeat")
    parser.add_argument("--shards", type=int, help="compare with the text in so many shards")
    parser.add_argument("--core", type=int, help="default: the last core this process may use")
    parser.add_argument("--check", action="store_true", help="exit 1 below the bars")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    core = arguments.core
    if core is None:
        core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})  # before the libraries start their threads
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    store = open_corpus(arguments.corpus) if arguments.corpus else synthetic_store()
    print(
        f"{store.num_tokens / 1e6:.1f} M tokens, {store.num_documents} documents, "
        f"core {core}, {arguments.repeats} repeats; M tokens/s of one core"
    )
    if arguments.shards:
        return compare_shards(store, arguments)
    print(
        f"{'L':>4} {'B':>4} {'pairing':>9} | {'collator':>8} | {'host':>6} {'ratio':>6} | "
        f"{'+ masking':>9} {'ratio':>6}"
    )
    passed = True
    for length, batch_size, pairing in SHAPES:
        theirs, host, masked = measure(store, length, batch_size, pairing, arguments)
        passed &= host / theirs >= HOST_BAR and masked / theirs >= MASKED_BAR
        passed &= host >= RATE_BAR
        print(
            f"{length:>4} {batch_size:>4} {pairing:>9} | {theirs / 1e6:>8.2f} | "
            f"{host / 1e6:>6.1f} {host / theirs:>5.1f}x | {masked / 1e6:>9.1f} "
            f"{masked / theirs:>5.1f}x",
            flush=True,
        )
    bars = f"bars: host {HOST_BAR:.0f}x and {RATE_BAR / 1e6:.0f} M, with masking {MASKED_BAR:.0f}x"
    print(f"{bars}: {'reached' if passed else 'MISSED'}")
    return 1 if arguments.check and not passed else 0


def compare_shards(store: "TokenStore", arguments: argparse.Namespace) -> int:
    """Compare the host's work from one shard and from several."""
    import numpy as np

    from bert_jax.data.pairings import DataConfig
    from bert_jax.data.phases import Phase
    from bert_jax.data.pipeline import ExampleStream, TrainBatches
    from bert_jax.hashing import permute

    class StepByStep(ExampleStream):
        """One shard, read as before there were shards: the order in blocks, rows step by step."""

        def batch(self, step: int, *_: int) -> dict[str, Any]:
            size = self.phases[0].batch_size
            block, within = divmod(step * size, ORDER_BLOCK)  # sizes divide it
            rows = self.order(block)[within : within + size]
            return self.plan(0).batch(store.shards[0], rows)

        @functools.lru_cache(maxsize=4)  # noqa: B019 - one stream a shape
        def order(self, block: int) -> np.ndarray:
            num_rows = self.corpora(0)[0].order.num_rows
            epoch, first = divmod(block * ORDER_BLOCK, num_rows)
            positions = np.arange(first, first + ORDER_BLOCK) % num_rows
            return permute(positions, num_rows, epoch)

    num_batches, passed = arguments.batches, True
    several = cut(store, arguments.shards)
    print(
        f"{'L':>4} {'B':>4} {'pairing':>9} | {'a step':>6} {'flat':>6} {'sharded':>7} | "
        f"{'sharded to a step':>17}"
    )
    for length, batch_size, pairing in SHAPES:
        phase = Phase(length, batch_size, num_batches * (arguments.repeats + 1))
        config = DataConfig(pairing=pairing)
        before = StepByStep(store, config, [phase])
        streams = [before, *(ExampleStream(each, config, [phase]) for each in (store, several))]

        def read(stream: ExampleStream, first: int) -> int:
            batches = TrainBatches(stream, first)
            total = sum(batch["tokens"].size for batch in itertools.islice(batches, num_batches))
            batches.close()
            return total

        for stream in streams:  # plans
            read(stream, num_batches * arguments.repeats)
        rates: tuple[list[float], ...] = ([], [], [])
        for first in range(0, num_batches * arguments.repeats, num_batches):
            for stream, values in zip(streams, rates, strict=True):
                start = time.process_time()
                total = read(stream, first)
                values.append(total / (time.process_time() - start))
        step, flat, sharded = (statistics.median(values) / 1e6 for values in rates)
        ratio = statistics.median(b / a for a, b in zip(rates[0], rates[2], strict=True))
        passed &= ratio >= SHARDED_BAR
        print(
            f"{length:>4} {batch_size:>4} {pairing:>9} | {step:>6.1f} {flat:>6.1f} {sharded:>7.1f} "
            f"| {ratio:>16.2f}x",
            flush=True,
        )
    print(f"bar: {SHARDED_BAR}x: {'reached' if passed else 'MISSED'}; M places/s of one core")
    return 1 if arguments.check and not passed else 0


def cut(store: "TokenStore", count: int) -> "TokenStore":
    """Cut the only shard of a store between documents, into shards of equally many."""
    import numpy as np

    from bert_jax.data.shard import Shard
    from bert_jax.data.store import TokenStore

    whole, shards = store.shards[0], []
    edges = np.linspace(0, whole.num_documents, count + 1).astype(int)
    for first, last in itertools.pairwise(edges.tolist()):
        documents = whole.document_offsets[first : last + 1]
        sentences = whole.sentence_offsets[documents[0] : documents[-1] + 1]
        shards.append(
            Shard(
                np.array(whole.tokens[sentences[0] : sentences[-1]]),
                sentences - sentences[0],
                documents - documents[0],
                whole.vocab_size,
                whole.special_ids,
            )
        )
    return TokenStore.of(shards, store.unigram_counts)


def measure(
    store: "TokenStore",
    length: int,
    batch_size: int,
    pairing: Literal["nsp", "sop", "none"],
    arguments: argparse.Namespace,
) -> tuple[float, float, float]:
    """Median rates of the collator, our host's work, and ours with masking, in tokens/s."""
    import jax

    from bert_jax.data.pairings import DataConfig
    from bert_jax.data.phases import Phase
    from bert_jax.data.pipeline import ExampleStream, TrainBatches

    num_batches, repeats = arguments.batches, arguments.repeats
    phase = Phase(length, batch_size, num_batches * (repeats + 1))
    stream = ExampleStream(store, DataConfig(pairing=pairing), [phase])
    stream.plan(0)
    mask = masking_step(store)
    jax.block_until_ready(mask(stream.batch(0)))
    collate = fastest_collator(store, stream.batch(0))
    few = max(1, num_batches // 25)  # of theirs, which take longer

    def host(first: int) -> None:
        for _ in ours(first):
            pass

    def host_and_masking(first: int) -> None:
        for batch in ours(first):
            jax.block_until_ready(mask(batch))

    def ours(first: int) -> Iterator[dict[str, Any]]:
        batches = TrainBatches(stream, first)
        yield from itertools.islice(batches, num_batches)
        batches.close()

    def peer(batches: list[list[Any]]) -> None:
        for rows in batches:
            collate(rows)

    rates: tuple[list[float], ...] = ([], [], [])
    for first in range(0, num_batches * repeats, num_batches):
        few_rows = [rows_as_lists(store, stream.batch(first + i)) for i in range(few)]
        few_total = sum(len(row["input_ids"]) for rows in few_rows for row in rows)
        seconds = [
            cpu_seconds(peer, few_rows),
            cpu_seconds(host, first),
            cpu_seconds(host_and_masking, first),
        ]
        # Counted last: the rows of a repeat are new to the core when it is timed.
        steps = range(first, first + num_batches)
        total = sum(int((stream.batch(step)["segment_ids"] != 0).sum()) for step in steps)
        for values, tokens, spent in zip(rates, (few_total, total, total), seconds, strict=True):
            values.append(tokens / spent)
    theirs, ours_alone, with_masking = (statistics.median(values) for values in rates)
    return theirs, ours_alone, with_masking


def cpu_seconds(work: Callable[[Any], object], argument: Any) -> float:
    """Seconds of the core, over all threads of this process."""
    start = time.process_time()
    work(argument)
    return time.process_time() - start


def masking_step(store: "TokenStore") -> Callable[[dict[str, Any]], Any]:
    """Our masking, compiled for this core, from a batch as the host makes it."""
    import jax

    from bert_jax.objectives.masking import MaskingConfig, mask_tokens

    @jax.jit
    def mask(tokens, segment_ids, row_index):
        return mask_tokens(
            tokens,
            segment_ids,
            row_index,
            seed=0,
            config=MaskingConfig(),
            vocab_size=store.vocab_size,
            special_ids=store.special_ids,
        )

    return lambda batch: mask(batch["tokens"], batch["segment_ids"], batch["row_index"])


def rows_as_lists(store: "TokenStore", batch: dict[str, Any]) -> list[dict[str, list[int]]]:
    """What a datasets pipeline hands to the collator: ids and special-token masks, unpadded."""
    rows = []
    for tokens, segment_ids in zip(batch["tokens"], batch["segment_ids"], strict=True):
        ids = tokens[segment_ids != 0].astype(int)
        special = (ids == store.special_ids.cls) | (ids == store.special_ids.sep)
        rows.append(
            {"input_ids": ids.tolist(), "special_tokens_mask": special.astype(int).tolist()}
        )
    return rows


def fastest_collator(store: "TokenStore", batch: dict[str, Any]) -> Callable[[list[Any]], Any]:
    """The collator in its numpy or its PyTorch form, whichever is faster on these rows."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    torch.set_num_threads(1)
    special = store.special_ids
    names = {
        special.pad: "[PAD]",
        special.unk: "[UNK]",
        special.cls: "[CLS]",
        special.sep: "[SEP]",
        special.mask: "[MASK]",
    }
    vocab = {names.get(i, f"t{i}"): i for i in range(store.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordPiece(vocab, unk_token="[UNK]")),
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    rows = rows_as_lists(store, batch)
    timed = []
    for form in ("np", "pt"):
        collate = DataCollatorForLanguageModeling(
            tokenizer, mlm=True, mlm_probability=0.15, return_tensors=form
        )
        collate(rows)
        seconds = min(cpu_seconds(collate, rows) for _ in range(3))
        timed.append((seconds, form, collate))
    return min(timed)[2]


def open_corpus(path: Path) -> "TokenStore":
    from bert_jax.data.store import open_store

    return open_store(path / "train" if (path / "train").is_dir() else path)


def synthetic_store() -> "TokenStore":
    """20 M tokens: log-normal documents of 400 tokens on average, sentences of 23."""
    import numpy as np

    from bert_jax.data.shard import Shard
    from bert_jax.data.store import TokenStore
    from bert_jax.tokenization.special_ids import SpecialIds

    rng = np.random.default_rng(0)
    sizes = np.maximum(1, rng.lognormal(np.log(17) - 0.5, 1.0, 50_000).astype(np.int64))
    lengths = np.maximum(1, rng.lognormal(np.log(23) - 0.18, 0.6, sizes.sum()).astype(np.int64))
    vocab_size = 30522
    sentences = np.concatenate([[0], np.cumsum(lengths)])
    shard = Shard(
        tokens=rng.integers(1000, vocab_size, sentences[-1], dtype=np.uint16),
        sentence_offsets=sentences,
        document_offsets=np.concatenate([[0], np.cumsum(sizes)]),
        vocab_size=vocab_size,
        special_ids=SpecialIds(pad=0, unk=100, cls=101, sep=102, mask=103),
    )
    return TokenStore.of([shard], np.zeros(vocab_size, np.int64))


if __name__ == "__main__":
    sys.exit(main())
