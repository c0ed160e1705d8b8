"""Fine-tuning with rows padded to a few lengths against rows padded to one.

    BERT_JAX_DATA=DIR python benchmarks/finetune_buckets.py --check
    BERT_JAX_DATA=DIR python benchmarks/finetune_buckets.py --repeats 0     # only counts tokens

MRPC and CoNLL-2003 (from DIR/glue and DIR/ner, with BERT's vocabularies from DIR/vocab), batches of
32 rows. `128`: all rows are padded to max_length; `longest`: to the longest row of the training
data; `buckets`: to the lengths that `choose_buckets` finds. Tokens are those of an epoch's batches,
padding included; `real` is the share that is none.

The time of an epoch is that of its steps: of each length the median over the repeats of one
training step (forward, backward, AdamW, dropout 0.1), times the number of batches of this length.
Steps of all lengths are taken in turns in one process, on real batches. Compiling is not in it: a
length is compiled once a run, the column `compile s` says for how long.

`per batch` is what padding each batch to its own longest row would come to, in random order,
rounded up to 8: the way of frameworks that do not compile, with up to 16 lengths in 128.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_LENGTH = 128
MIN_GAIN = {"mrpc": 1.5, "conll2003": 2.5}
"""Least time of an epoch padded to 128 over that in buckets."""
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_dim": 128, "num_layers": 2, "num_heads": 2, "mlp_dim": 512},
    "mini": {"hidden_dim": 256, "num_layers": 4, "num_heads": 4, "mlp_dim": 1024},
    "base": {"hidden_dim": 768, "num_layers": 12, "num_heads": 12, "mlp_dim": 3072},
}


def open_data(name: str, data: Path) -> tuple[Any, Any]:
    """The task and the tokenizer."""
    from bert_jax.tasks.config import GlueConfig, TaggingConfig, TaskConfig
    from bert_jax.tasks.opening import open_task
    from bert_jax.tokenization.load import load_tokenizer

    if name == "mrpc":
        config: TaskConfig = GlueConfig(name="mrpc", data=str(data / "glue"), max_length=MAX_LENGTH)
    else:
        train, dev = (
            str(data / "ner" / "conll2003" / f"eng.{part}") for part in ("train", "testa")
        )
        config = TaggingConfig(train=train, dev=dev, max_length=MAX_LENGTH)
    vocabulary = "bert-base-uncased" if name == "mrpc" else "bert-base-cased"
    tokenizer = load_tokenizer(data / "vocab" / vocabulary)
    return open_task(config, tokenizer, MAX_LENGTH), tokenizer


class Steps:
    """One training step after another on batches of a length, with their times."""

    def __init__(self, task: Any, tokenizer: Any, size: str, num_steps: int):
        import jax
        import numpy as np

        from bert_jax.distributed.parallel.sharding import MeshConfig, make_trial_mesh
        from bert_jax.model.config import ModelConfig
        from bert_jax.model.task_heads import TaskHeadConfig
        from bert_jax.objectives.task import TaskObjective
        from bert_jax.training.steps.optim import OptimizerConfig
        from bert_jax.training.steps.state import StepConfig
        from bert_jax.training.steps.step import make_train_step
        from bert_jax.training.steps.trials import init_trials, place_settings

        kind: Any = "tagging" if task.objective == "tags" else "classification"
        model = ModelConfig(vocab_size=tokenizer.vocab_size, **SIZES[size])
        head = TaskHeadConfig(kind, num_labels=task.num_outputs)
        objective = TaskObjective(model, head, task.objective)
        config = StepConfig(objective, OptimizerConfig(learning_rate=1.0), num_steps)
        self.mesh = make_trial_mesh(MeshConfig(), 1, jax.devices()[:1])
        self.step = make_train_step(config, self.mesh)
        self.settings = place_settings([3e-5], [0], self.mesh)
        first = np.zeros(1, np.int32)
        seeds = first.astype(np.uint32)
        self.state = init_trials(config, self.mesh, seeds, [{}], first).train
        self.compile_seconds: dict[int, float] = {}
        self.seconds: dict[int, list[float]] = {}

    def take(self, length: int, batches: Iterator[Any]) -> None:
        """Times one step; the first of a length compiles."""
        import jax

        from bert_jax.training.steps.trials import place_rows

        host_batch = next(batches)  # it passes over those of other lengths
        start = time.perf_counter()
        batch = place_rows(host_batch, self.mesh)
        self.state, metrics = self.step(self.state, batch, self.settings)
        jax.block_until_ready((self.state, metrics))
        seconds = time.perf_counter() - start
        if length in self.compile_seconds:
            self.seconds.setdefault(length, []).append(seconds)
        else:
            self.compile_seconds[length] = seconds


def batches_of_length(batches: Any, length: int) -> Iterator[Any]:
    """Epoch after epoch the batches of one length."""
    epoch = 0
    while True:
        for batch in batches.epoch(epoch, [0]):
            if batch["tokens"].shape[-1] == length:
                yield batch
        epoch += 1


def per_batch_tokens(lengths: Any, batch_size: int) -> int:
    """Tokens of an epoch in random order, each batch padded to its longest row."""
    import numpy as np

    shuffled = np.random.default_rng(0).permutation(lengths)
    longest = [shuffled[i : i + batch_size].max() for i in range(0, len(shuffled), batch_size)]
    return sum(-(-int(n) // 8) * 8 for n in longest) * batch_size


def measure(name: str, options: argparse.Namespace) -> float:
    """Prints the table of one data set and returns the gain of buckets over padding to 128."""
    from bert_jax.tasks.rows import TrainBatches, choose_buckets

    task, tokenizer = open_data(name, options.data)
    rows = task.train_split().rows
    pad = tokenizer.special_ids.pad
    buckets = {
        f"{MAX_LENGTH}": (MAX_LENGTH,),
        "longest": choose_buckets(rows.lengths, 1, limit=MAX_LENGTH),
        "buckets": choose_buckets(rows.lengths, options.buckets, limit=MAX_LENGTH),
    }
    plans = {
        way: TrainBatches(rows, lengths, options.batch_size, pad)
        for way, lengths in buckets.items()
    }
    lengths = sorted({length for plan in plans.values() for length in plan.batches_of})
    steps = Steps(task, tokenizer, options.size, 1_000_000)
    sources = {
        length: batches_of_length(plan, length)
        for plan in plans.values()
        for length in plan.batches_of
    }
    for _ in range(options.repeats + 1 if options.repeats else 0):
        for length in lengths:
            steps.take(length, sources[length])

    print(f"{name}: {len(rows):,} rows, {rows.lengths.mean():.1f} tokens on average, "
          f"{rows.lengths.max()} at most")  # fmt: skip
    print("padded to     tokens   real   gain   epoch s    gain  compile s  batches of each length")
    gains: dict[str, float] = {}
    tokens: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for way, plan in plans.items():
        counts = plan.batches_of
        tokens[way] = sum(n * count for n, count in counts.items()) * options.batch_size
        timed = "         -       -          -"
        gains[way] = tokens[f"{MAX_LENGTH}"] / tokens[way]
        token_gain = gains[way]
        if options.repeats:
            medians = {n: statistics.median(steps.seconds[n]) for n in counts}
            seconds[way] = sum(medians[n] * count for n, count in counts.items())
            compiled = sum(max(steps.compile_seconds[n] - medians[n], 0) for n in counts)
            gains[way] = seconds[f"{MAX_LENGTH}"] / seconds[way]
            timed = f"{seconds[way]:10.1f} {gains[way]:7.2f} {compiled:10.1f}"
        real = rows.lengths.sum() / tokens[way]
        shape = ", ".join(f"{count} x {n}" for n, count in counts.items())
        print(f"{way:9} {tokens[way]:10,} {real:6.1%} {token_gain:6.2f}{timed}  {shape}")
    dynamic = per_batch_tokens(rows.lengths, options.batch_size)
    share, gain = rows.lengths.sum() / dynamic, tokens[f"{MAX_LENGTH}"] / dynamic
    print(f"per batch {dynamic:10,} {share:6.1%} {gain:6.2f}\n", flush=True)
    return gains["buckets"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=os.environ.get("BERT_JAX_DATA"))
    parser.add_argument("--repeats", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--buckets", type=int, default=4, help="lengths; default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--size", choices=SIZES, default="mini", help="default: %(default)s")
    parser.add_argument("--only", choices=MIN_GAIN, help="of the two data sets")
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit 1 when an epoch in buckets is not "
        + " and ".join(f"{gain} times ({name})" for name, gain in MIN_GAIN.items())
        + f" as fast as padded to {MAX_LENGTH}",
    )
    options = parser.parse_args()
    if options.data is None:
        parser.error("give --data, or BERT_JAX_DATA in the environment")
    print(f"{options.size}, {options.batch_size} rows, medians of {options.repeats}\n")
    names = [options.only] if options.only else list(MIN_GAIN)
    gains = {name: measure(name, options) for name in names}
    return int(options.check and any(gain < MIN_GAIN[name] for name, gain in gains.items()))


if __name__ == "__main__":
    sys.exit(main())
