"""Held-out loss of the demo's model by optimizer, after equal steps and equal processor time.

    python benchmarks/optimizers.py --out work/optimizers              # 3 seeds, an hour on 2 cores
    python benchmarks/optimizers.py --out work/optimizers --seeds 1    # the pilot
    python benchmarks/optimizers.py --out work/optimizers --table      # of the trials so far

Each optimizer is tried with seed 0 under a few schedules and learning rates; its best setting goes
on with the other seeds. Equal processor time is the time that AdamW needs for its steps: a dearer
optimizer gets fewer steps, and its schedule ends there. Trials are kept in OUT/trials.jsonl, so
that a measurement that was stopped goes on.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax

from bert_jax.config.command_line import load_config
from bert_jax.corpus.build import build_corpus, is_corpus, iter_texts
from bert_jax.data.pipeline import ExampleStream
from bert_jax.demo import HELDOUT_RATE, VOCAB_SIZE
from bert_jax.parallel.sharding import make_mesh, place_batch
from bert_jax.tokenization.wordpiece_training import train_wordpiece
from bert_jax.training.config import PretrainConfig
from bert_jax.training.corpus import evaluation_config, open_corpus, step_config
from bert_jax.training.evaluate import HeldOut
from bert_jax.training.optim import OptimizerConfig
from bert_jax.training.state import init_state
from bert_jax.training.step import make_train_step

STEPS, WARMUP, DECAY_SHARE = 1500, 100, 0.4
BASE = "adamw"
SWEEP: dict[str, tuple[tuple[str, float], ...]] = {
    "muon": (("wsd", 3e-3), ("wsd", 1.5e-3), ("wsd", 6e-3), ("cosine", 3e-3)),
    "adamw": (("cosine", 1.5e-3), ("cosine", 2e-3), ("wsd", 1.5e-3)),
}
"""Schedules and peak learning rates that are tried with each optimizer."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run."""

    optimizer: str
    schedule: str
    learning_rate: float
    seed: int
    steps: int


def demo_corpus(directory: Path) -> Path:
    """Build the corpus of `bert-jax demo`, if it is not there."""
    corpus = directory / "corpus"
    if not is_corpus(corpus):
        tokenizer = train_wordpiece(iter_texts(["python-docs"]), VOCAB_SIZE)
        print(build_corpus(["python-docs"], tokenizer, corpus, heldout_rate=HELDOUT_RATE).summary())
    return corpus


def run(trial: Trial, directory: Path) -> dict[str, float]:
    """Train, and evaluate at the end; processor time is that of all steps but the compiled one."""
    corpus = open_corpus(str(directory))
    demo = load_config(PretrainConfig, "pretrain/demo.py")
    optimizer = OptimizerConfig(
        name=trial.optimizer, schedule=trial.schedule, decay_share=DECAY_SHARE,
        learning_rate=trial.learning_rate, warmup_steps=WARMUP,
    )  # fmt: skip
    config = dataclasses.replace(
        demo,
        data=dataclasses.replace(demo.data, corpus=str(directory)),
        training=dataclasses.replace(demo.training, num_steps=trial.steps),
        optimizer=optimizer,
        seed=trial.seed,
    ).with_vocabulary(corpus.train.vocab_size)
    mesh, step = make_mesh(config.mesh), step_config(config, corpus)
    stream = ExampleStream(corpus.train, config.data, config.phases, config.seed)
    assert corpus.heldout is not None
    held_out = HeldOut(config, corpus.heldout, [evaluation_config(config, corpus, 0)], mesh)
    train_step = make_train_step(step, mesh)
    state = init_state(step, mesh, jax.random.key(config.seed))
    began = 0.0
    for number in range(trial.steps):
        state, metrics = train_step(state, place_batch(stream.batch(number), mesh))
        jax.block_until_ready(metrics)
        if number == 0:
            began = time.process_time()
    seconds = time.process_time() - began
    values = held_out.evaluate(state.params, 0)
    return {
        "below_unigram": corpus.train.unigram_entropy - values["eval/mlm_loss"],
        "nsp_accuracy": values["eval/nsp_accuracy"],
        "milliseconds": 1000 * seconds / (trial.steps - 1),
    }


class Trials:
    """The trials so far, on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[Trial, dict[str, float]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self.done[Trial(**row["trial"])] = row["result"]

    def result(self, trial: Trial, corpus: Path) -> dict[str, float]:
        """The result of a trial, which is run if it has not been."""
        if trial not in self.done:
            self.done[trial] = run(trial, corpus)
            with self.path.open("a") as file:
                row = {"trial": dataclasses.asdict(trial), "result": self.done[trial]}
                file.write(json.dumps(row) + "\n")
            print(trial, {k: round(v, 3) for k, v in self.done[trial].items()}, flush=True)
        return self.done[trial]

    def best(self, optimizer: str, steps: int) -> Trial:
        """The trial with the lowest loss of seed 0."""
        swept = [t for t in self.done if (t.optimizer, t.seed, t.steps) == (optimizer, 0, steps)]
        return max(swept, key=lambda trial: self.done[trial]["below_unigram"])

    def milliseconds(self, optimizer: str) -> float:
        """Processor time of a step: the median of all trials."""
        return statistics.median(
            result["milliseconds"] for t, result in self.done.items() if t.optimizer == optimizer
        )

    def table(self) -> None:
        """Print a line for each optimizer, schedule, rate and number of steps."""
        groups: dict[tuple[Any, ...], list[dict[str, float]]] = {}
        for trial, result in sorted(self.done.items(), key=lambda item: item[0].seed):
            key = (trial.optimizer, trial.steps, trial.schedule, trial.learning_rate)
            groups.setdefault(key, []).append(result)
        print(
            "\n| optimizer | steps | schedule | peak rate | CPU ms a step | nats below unigram, "
            "seed by seed | mean | next-sentence accuracy |\n|---|---|---|---|---|---|---|---|"
        )
        for (name, steps, schedule, rate), results in sorted(groups.items()):
            gains = [result["below_unigram"] for result in results]
            cost = statistics.median(result["milliseconds"] for result in results)
            nsp = statistics.mean(result["nsp_accuracy"] for result in results)
            print(f"| {name} | {steps:,} | {schedule} | {rate:g} | {cost:.0f} | "
                  f"{', '.join(f'{gain:.2f}' for gain in gains)} | "
                  f"{statistics.mean(gains):.2f} | {nsp:.2f} |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of corpus and trials")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parser.add_argument("--table", action="store_true", help="print what is there, and run nothing")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    trials = Trials(options.out / "trials.jsonl")
    if options.table:
        trials.table()
        return
    corpus = demo_corpus(options.out)
    for name, settings in SWEEP.items():
        for schedule, rate in settings:
            trials.result(Trial(name, schedule, rate, 0, options.steps), corpus)
    best = [trials.best(name, options.steps) for name in SWEEP]
    for seed in range(1, options.seeds):
        for trial in best:
            trials.result(dataclasses.replace(trial, seed=seed), corpus)
    for trial in best:
        cost = trials.milliseconds(trial.optimizer) / trials.milliseconds(BASE)
        fewer = round(options.steps / cost)
        if trial.optimizer != BASE and fewer < options.steps:
            for seed in range(options.seeds):
                trials.result(dataclasses.replace(trial, seed=seed, steps=fewer), corpus)
    trials.table()


if __name__ == "__main__":
    main()
