"""What checkpoints cost: the digests as a share of a save, and saves as a share of training.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --repeats 9 --check

Digests: a state of --megabytes is saved again and again through `distributed.checkpoint`, as a
training loop does it. The time of `leaf_digests` is compared with that of the whole save: from the
call until Orbax says that the checkpoint is on disk, digests included, the reading back not.

Saves: the same run of a model of 11 million parameters (134 MB of state) with a save every 100
steps and with none, alternately, in one process; the wall time from step 100 to step 300 is
compared, two saves and their reading back included. The share that the loop itself stood still is
printed beside it: the rest is what the writing threads take from the cores that compute.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

MAX_DIGEST_SHARE = 0.05
STEPS, EVERY = 300, 100


class State(NamedTuple):
    """What `Checkpoints` takes."""

    params: dict[str, Any]
    opt_state: dict[str, Any]


def measure_digests(megabytes: float, repeats: int, directory: Path) -> float:
    """Prints the two times and returns the share of the digests."""
    import jax

    from bert_jax.distributed.checkpoint.digest import leaf_digests
    from bert_jax.distributed.checkpoint.manager import Checkpoints
    from bert_jax.distributed.checkpoint.record import named_leaves

    rows = int(megabytes * 1e6 / 4 / 768 / 12)
    leaves = {f"layer{n}": jax.random.normal(jax.random.key(n), (rows, 768)) for n in range(12)}
    state = State(dict(list(leaves.items())[:4]), dict(list(leaves.items())[4:]))
    named = named_leaves(state)
    total = sum(leaf.nbytes for leaf in leaves.values()) / 1e6
    digests, saves = [], []
    leaf_digests(named)  # compiles
    for step in range(repeats):
        start = time.perf_counter()
        leaf_digests(named)
        digests.append(time.perf_counter() - start)
        checkpoints = Checkpoints(directory / "checkpoints")
        start = time.perf_counter()
        checkpoints.save(step + 1, state, config={}, extra={})
        if not checkpoints.wait():
            raise SystemExit("the save failed")
        saves.append(time.perf_counter() - start)
        checkpoints.close()
    digest, save = statistics.median(digests), statistics.median(saves)
    print(f"state of {total:.0f} MB, medians of {repeats}")
    print(f"  save     {save:7.3f} s  {total / save:8.0f} MB/s")
    print(f"  digests  {digest:7.3f} s  {total / digest:8.0f} MB/s")
    print(f"  share    {100 * digest / save:7.1f} %")
    return digest / save


def measure_saves(repeats: int, directory: Path) -> None:
    """Prints the wall time of training with and without saves."""
    import numpy as np

    from bert_jax.data.store import open_store
    from bert_jax.data.store_writer import ShardWriter, write_manifest
    from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS
    from bert_jax.tokenization.wordpiece import WordPieceTokenizer
    from bert_jax.training.pretrain.corpus import Corpus

    words = [*SPECIAL_TOKENS, *(str(n) for n in range(len(SPECIAL_TOKENS), 30_000))]
    random = np.random.default_rng(0)
    store, tokenizer = directory / "store", WordPieceTokenizer(words)
    with ShardWriter(store / "shards" / "00000", tokenizer) as writer:
        for _ in range(3000):
            lengths = random.integers(8, 24, size=8)
            tokens = random.integers(5, len(words), size=lengths.sum())
            writer.append(tokens, lengths, np.array([len(lengths)]))
        write_manifest(store, [writer.finish()], tokenizer)
    corpus = Corpus(open_store(store), None)

    walls: dict[int, list[float]] = {EVERY: [], 10 * STEPS: []}
    blocked = []
    for _ in range(repeats):
        for every, seconds in walls.items():
            wall, share = _train(corpus, every, directory / "run")
            seconds.append(wall)
            if every == EVERY:
                blocked.append(share)
    with_saves, without = (statistics.median(seconds) for seconds in walls.values())
    print(f"steps 6 to {STEPS} of bert_mini, 8 rows of 64, medians of {repeats}")
    print(f"  a save every {EVERY} steps  {with_saves:7.2f} s")
    print(f"  none                   {without:7.2f} s")
    print(f"  lost to saving         {100 * (1 - without / with_saves):7.1f} % of the wall time")
    print(f"  the loop stood still   {100 * statistics.median(blocked):7.1f} %")


def _train(corpus: Any, every: int, workdir: Path) -> tuple[float, float]:
    """Return the seconds after step 5, and the share of them that the loop spent in saves."""
    from bert_jax.config.mapping import build
    from bert_jax.training.pretrain.config import PretrainConfig
    from bert_jax.training.pretrain.train import train
    from bert_jax.training.run.goodput import Clock

    shutil.rmtree(workdir, ignore_errors=True)
    clock = Clock()
    began: list[float] = []

    def note(line: str) -> None:
        if line.startswith("step 5/"):  # the first progress line
            began.extend([time.perf_counter(), clock.spent.get("save", 0.0)])

    config = build(
        PretrainConfig,
        {
            "model": {"hidden_dim": 256, "num_layers": 4, "num_heads": 4, "mlp_dim": 1024},
            "training": {
                "num_steps": STEPS,
                "phases": [{"length": 64, "batch_size": 8}],
                "log_every_steps": EVERY,
                "eval_every_steps": 0,
            },
            "optimizer": {"learning_rate": 1e-4},
            "checkpoint": {"save_every_steps": every},
        },
    )
    train(config, workdir, corpus=corpus, clock=clock, echo=note)
    begin, saved = began
    seconds = time.perf_counter() - begin
    return seconds, (clock.spent.get("save", 0.0) - saved) / seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=440, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--part", choices=["all", "digests", "saves"], default="all")
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"exit 1 when the digests take {MAX_DIGEST_SHARE:.0%}% of a save or more",
    )
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: a new one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        share = 0.0
        if arguments.part != "saves":
            share = measure_digests(arguments.megabytes, arguments.repeats, Path(name))
        if arguments.part != "digests":
            measure_saves(arguments.repeats, Path(name))
    return int(arguments.check and share >= MAX_DIGEST_SHARE)


if __name__ == "__main__":
    sys.exit(main())
