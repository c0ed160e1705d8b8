"""Eight fine-tuning runs together against the same eight one after another.

    python benchmarks/finetune_sweep.py
    python benchmarks/finetune_sweep.py --model mini --length 64 --batch-size 16 --repeats 5

Both sides make the same number of updates of every member, on batches of synthetic rows that are
built as `bert-jax finetune` builds them: one program with 8 members, and a program with 1 member,
8 times. The second is compiled once, too, so that what is compared is the running; compilations are
printed beside it. Times are medians over repeats, the sides taking turns.
"""

import argparse
import json
import statistics
import time
from typing import Any


def main() -> int:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="tiny, mini, small, base (default: tiny)")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="longest row")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20, help="a repeat, of each member")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--json", action="store_true", help="one JSON object a side")
    options = parser.parse_args()

    import jax

    together = Side(options, options.members)
    alone = Side(options, 1)
    times: dict[str, list[float]] = {"together": [], "alone": []}
    for _ in range(options.repeats):
        times["together"].append(together.run())
        times["alone"].append(sum(alone.run() for _ in range(options.members)))
    updates = options.members * options.steps
    if options.json:
        for side in (together, alone):
            name = "together" if side is together else "alone"
            record = {
                "case": f"{options.members} x {options.model}, {options.batch_size} rows of up to "
                f"{options.length} tokens",
                "side": name,
                "milliseconds": 1e3 * statistics.median(times[name]) / updates,
                "compile_seconds": side.compile_seconds,
            }
            print(json.dumps(record))
        return 0
    device = jax.devices()[0]
    print(
        f"{options.model}, {options.members} members, {options.batch_size} rows of up to "
        f"{options.length} tokens, {options.steps} steps, {device.device_kind}, medians of "
        f"{options.repeats}"
    )
    for name, side in (("together", together), ("alone", alone)):
        median = statistics.median(times[name])
        print(
            f"  {name:10} {median:8.3f} s  {1e3 * median / updates:8.2f} ms an update  "
            f"({side.compile_seconds:.1f} s to compile)"
        )
    ratios = [a / t for a, t in zip(times["alone"], times["together"], strict=True)]
    print(
        f"  together is {statistics.median(ratios):.2f} times as fast "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )
    return 0


class Side:
    """A compiled program with some members, and batches for it."""

    def __init__(self, options: argparse.Namespace, members: int):
        import dataclasses

        import numpy as np

        from bert_jax.distributed.parallel.sharding import MeshConfig, make_trial_mesh
        from bert_jax.model.config import SIZES
        from bert_jax.model.task_heads import TaskHeadConfig
        from bert_jax.objectives.task import TaskObjective
        from bert_jax.tasks.rows import Rows, TrainBatches
        from bert_jax.training.steps.optim import OptimizerConfig
        from bert_jax.training.steps.state import StepConfig
        from bert_jax.training.steps.step import make_train_step
        from bert_jax.training.steps.trials import init_trials, place_settings

        model = dataclasses.replace(
            SIZES[options.model],
            vocab_size=8192,
            hidden_dropout_rate=options.dropout,
            attention_dropout_rate=options.dropout,
        )
        head = TaskHeadConfig("classification", 2, dropout_rate=options.dropout)
        random = np.random.default_rng(0)
        lengths = random.integers(options.length // 2, options.length + 1, 2048)
        tokens = [random.integers(5, 8192, n).astype(np.int32) for n in lengths]
        labels = random.integers(0, 2, len(tokens)).astype(np.int32)
        rows = Rows(tokens, (lengths // 2).astype(np.int32), labels)
        self.batches = TrainBatches(rows, (options.length,), options.batch_size, 0)
        self.seeds, self.num_steps = list(range(members)), options.steps
        config = StepConfig(
            TaskObjective(model, head, "single_label"),
            OptimizerConfig(learning_rate=1.0),
            10 * options.steps,
        )
        self.mesh = make_trial_mesh(MeshConfig(), members)
        self.settings = place_settings([1e-4] * members, self.seeds, self.mesh)
        self.state: Any = init_trials(
            config, self.mesh, np.array(self.seeds), [{}], np.zeros(members, np.int32)
        ).train
        self.step = make_train_step(config, self.mesh)
        start = time.perf_counter()
        self.run(1)
        self.compile_seconds = time.perf_counter() - start

    def run(self, num_steps: int | None = None) -> float:
        """Seconds of some updates of all members, the building of batches included."""
        import jax

        from bert_jax.training.steps.trials import place_rows

        start = time.perf_counter()
        batches = self.batches.epoch(0, self.seeds)
        for _ in range(num_steps or self.num_steps):
            self.state, metrics = self.step(
                self.state, place_rows(next(batches), self.mesh), self.settings
            )
        jax.block_until_ready(metrics)
        return time.perf_counter() - start


if __name__ == "__main__":
    raise SystemExit(main())
