"""Held-out loss of `bert-jax demo` by recipe, after equal steps and equal processor time.

    python benchmarks/demo_recipes.py --out work/recipes                  # all groups: hours
    python benchmarks/demo_recipes.py --out work/recipes --group parts    # one group
    python benchmarks/demo_recipes.py --out work/recipes --time           # processor time of a step
    python benchmarks/demo_recipes.py --out work/recipes --table          # of the trials so far

A recipe is a file of `configs/pretrain` with some fields changed; a trial is a recipe, a number of
steps and a seed. Trials are kept in OUT/trials.jsonl, so that a measurement that was stopped goes
on. A trial is run again when its recipe has changed since.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from bert_jax.cli.demo.masked_words import HELDOUT_RATE, VOCAB_SIZE
from bert_jax.config.command_line import load_config
from bert_jax.config.mapping import diff
from bert_jax.data.corpus.build import build_corpus, is_corpus, iter_texts
from bert_jax.data.pipeline import EvalBatches, ExampleStream
from bert_jax.distributed.parallel.sharding import make_mesh, place_batch
from bert_jax.tokenization.training import train_wordpiece
from bert_jax.training.pretrain.config import FREE_FIELDS, PretrainConfig
from bert_jax.training.pretrain.corpus import open_corpus
from bert_jax.training.pretrain.evaluate import EVAL_SEED, evaluate
from bert_jax.training.pretrain.settings import step_config
from bert_jax.training.steps.state import jitted_init
from bert_jax.training.steps.step import make_eval_step, make_train_step

BERT, MODERN = "pretrain/demo_bert.py", "pretrain/demo.py"
PAIRINGS = 4
"""Plans of held-out pairs that an evaluation reads: about a thousand pairs each."""


class Recipe(NamedTuple):
    """A configuration file and the fields that differ from it."""

    config: str
    changes: tuple[str, ...] = ()


def _optimizer(name: str, schedule: str, rate: float) -> Recipe:
    values = {"name": name, "schedule": schedule, "learning_rate": rate, "decay_share": 0.4}
    return Recipe(BERT, tuple(f"optimizer.{field}={value}" for field, value in values.items()))


_SMALL_BATCH = "training.phases[0].batch_size=32"
RECIPES = {
    "BERT's": Recipe(BERT),
    "modern": Recipe(MODERN),
    **{
        f"{name} {schedule} {rate:g}": _optimizer(name, schedule, rate)
        for name, schedule, rate in (
            ("adamw", "cosine", 1.5e-3), ("adamw", "cosine", 3e-3), ("adamw", "wsd", 1.5e-3),
            ("muon", "wsd", 1.5e-3), ("muon", "wsd", 3e-3),
        )
    },
    "modern, learned positions": Recipe(MODERN, ("model.positions=learned",)),
    "modern, norms behind": Recipe(MODERN, ("model.norm_order=post", "model.first_norm=true")),
    "modern, no gate": Recipe(MODERN, ("model.gated=false", "model.mlp_dim=192")),
    "modern, AdamW 1.5e-3": Recipe(
        MODERN, ("optimizer.name=adamw", "optimizer.learning_rate=1.5e-3")
    ),
    "modern, 30% masked": Recipe(MODERN, ("masking.rate=0.3",)),
    "modern, 352 wide": Recipe(MODERN, ("model.mlp_dim=352",)),
    "modern, 32 rows": Recipe(MODERN, (_SMALL_BATCH,)),
    "modern, 30% masked, 352 wide, 32 rows": Recipe(
        MODERN, ("masking.rate=0.3", "model.mlp_dim=352", _SMALL_BATCH)
    ),
}  # fmt: skip
PARTS = (
    "modern, learned positions", "modern, norms behind", "modern, no gate", "modern, AdamW 1.5e-3",
    "modern, 30% masked", "modern, 352 wide",
)  # fmt: skip
"""Recipes that lack one part of the modern one."""


class Trial(NamedTuple):
    """One run."""

    recipe: str
    steps: int
    seed: int

    @property
    def config(self) -> PretrainConfig:
        """Configuration of the run, without a corpus."""
        config, changes = RECIPES[self.recipe]
        fields = (*changes, f"training.num_steps={self.steps}", f"seed={self.seed}")
        return load_config(PretrainConfig, config, [f"--config.{field}" for field in fields])

    @property
    def fields(self) -> dict[str, Any]:
        """Fields that shape the training and are not the default's, by dotted name."""
        changed = diff(PretrainConfig(), self.config, FREE_FIELDS)
        return {name: value for name, _, value in changed}


def _trials(recipes: Iterable[str], steps: int, seeds: Iterable[int]) -> list[Trial]:
    return [Trial(recipe, steps, seed) for seed in seeds for recipe in recipes]


FULL, HALF, BERT_STEPS = 2560, 1280, 2200
"""Steps of the modern recipe in the time of BERT's, and in half of that time."""
GROUPS = {
    "demo": [
        *_trials(["modern"], HALF, range(3)),
        *(
            trial
            for seed in range(3)
            for trial in (Trial("modern", FULL, seed), Trial("BERT's", BERT_STEPS, seed))
        ),
    ],
    "optimizers": _trials(("muon wsd 0.003", "adamw wsd 0.0015"), 1500, range(3)),
    "parts": _trials(PARTS, HALF, (0,)),
    "before": [
        Trial("modern, 30% masked, 352 wide, 32 rows", 1570, 0),
        Trial("modern, 32 rows", 2 * HALF, 0),
    ],
}
"""Trials by what they compare."""


def demo_corpus(directory: Path) -> Path:
    """Build the corpus of `bert-jax demo`, if it is not there."""
    corpus = directory / "corpus"
    if not is_corpus(corpus):
        tokenizer = train_wordpiece(iter_texts(["python-docs"]), VOCAB_SIZE)
        print(build_corpus(["python-docs"], tokenizer, corpus, heldout_rate=HELDOUT_RATE).summary())
    return corpus


class Run:
    """A run of a configuration, step by step."""

    def __init__(self, config: PretrainConfig, directory: Path) -> None:
        self.corpus = open_corpus(str(directory))
        data = dataclasses.replace(config.data, corpus=str(directory))
        config = dataclasses.replace(config, data=data)
        self.config = config = config.with_vocabulary(self.corpus.train.vocab_size)
        self.mesh = make_mesh(config.mesh)
        self.stream = ExampleStream(self.corpus.train, data, config.phases, config.seed)
        settings = [step_config(config, self.corpus, n) for n in range(len(config.phases))]
        self.train_steps = [make_train_step(each, self.mesh) for each in settings]
        self.state = jitted_init(settings[0], self.mesh)(jax.random.key(config.seed))

    def steps(self, first: int, end: int) -> float:
        """Take steps `first` to `end` - 1; return the processor time of those not compiled here."""
        seconds, training = 0.0, self.config.training
        for number in range(first, end):
            began = time.process_time()
            batch = place_batch(self.stream.batch(number), self.mesh)
            self.state, metrics = self.train_steps[training.phase_of(number)](self.state, batch)
            jax.block_until_ready(metrics)
            if number not in training.phase_starts:
                seconds += time.process_time() - began
        return seconds

    def evaluate(self) -> dict[str, float]:
        """Evaluate on the held-out text, paired in several ways: pairs are few."""
        last = len(self.config.phases) - 1
        store = self.corpus.heldout
        settings = step_config(self.config, self.corpus, last, evaluates=True)
        assert store is not None
        phase = self.config.phases[-1]
        shape = phase.length, phase.batch_size
        pairings = (EvalBatches(store, self.config.data, *shape, seed=n) for n in range(PAIRINGS))
        step = make_eval_step(settings, self.mesh, EVAL_SEED)
        batches = itertools.chain.from_iterable(pairings)
        values = evaluate(settings.objective, step, self.state.params, batches, self.mesh)
        return {
            "below_unigram": self.corpus.train.unigram_entropy - values["eval/mlm_loss"],
            "nsp_accuracy": values["eval/nsp_accuracy"],
        }


def run(trial: Trial, directory: Path) -> dict[str, float]:
    """Train, and evaluate at the end; processor time is that of all steps but the compiled one."""
    training = Run(trial.config, directory)
    training.steps(0, 1)
    seconds = training.steps(1, trial.steps)
    return {**training.evaluate(), "milliseconds": 1000 * seconds / (trial.steps - 1)}


class Trials:
    """The trials so far, on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[Trial, dict[str, float]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(line)
            trial = Trial(**row["trial"])
            if trial.recipe in RECIPES and trial.fields == row["fields"]:
                self.done[trial] = row["result"]

    def result(self, trial: Trial, corpus: Path) -> dict[str, float]:
        """Return the result of a trial, which is run if it has not been."""
        if trial not in self.done:
            self.done[trial] = run(trial, corpus)
            row = {"trial": trial._asdict(), "fields": trial.fields, "result": self.done[trial]}
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(*trial, {k: round(v, 3) for k, v in self.done[trial].items()}, flush=True)
        return self.done[trial]

    def table(self) -> None:
        """Print a line for each recipe and number of steps."""
        print(
            "\n| recipe | steps | CPU ms a step | nats below unigram, seed by seed | mean | "
            "next-sentence accuracy | mean |\n|---|---|---|---|---|---|---|"
        )
        ordered = sorted(self.done, key=lambda t: (list(RECIPES).index(t.recipe), t.steps, t.seed))
        for (name, steps), trials in itertools.groupby(ordered, key=lambda trial: trial[:2]):
            results = [self.done[trial] for trial in trials]
            cost = statistics.median(result["milliseconds"] for result in results)
            columns = [
                [result[key] for result in results] for key in ("below_unigram", "nsp_accuracy")
            ]
            values = " | ".join(
                f"{', '.join(f'{value:.2f}' for value in column)} | {statistics.mean(column):.2f}"
                for column in columns
            )
            print(f"| {name} | {steps:,} | {cost:.0f} | {values} |")


def time_steps(names: list[str], directory: Path, rounds: int = 8, steps: int = 8) -> None:
    """Print the processor time of a step by recipe: medians of short turns, one after another."""
    runs = {name: Run(Trial(name, 1000, 0).config, directory) for name in names}
    for each in runs.values():
        each.steps(0, 2)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name, each in runs.items():
            first = 2 + turn * steps
            seconds[name].append(each.steps(first, first + steps) / steps)
    for name, values in seconds.items():
        print(f"{name}: {1000 * statistics.median(values):.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of corpus and trials")
    parser.add_argument("--group", choices=GROUPS, help="group of trials; default: all")
    parser.add_argument("--time", action="store_true", help="print the processor time of a step")
    parser.add_argument("--table", action="store_true", help="print what is there, and run nothing")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    trials = Trials(options.out / "trials.jsonl")
    corpus = demo_corpus(options.out)
    if options.time:
        time_steps(["BERT's", "modern"], corpus)
        return
    if not options.table:
        for name, group in GROUPS.items():
            if options.group in (None, name):
                for trial in group:
                    trials.result(trial, corpus)
    trials.table()


if __name__ == "__main__":
    main()
