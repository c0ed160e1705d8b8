"""Candidates for the record that are more than one run: growth, a teacher, averages.

    python benchmarks/staged_candidates.py --corpus work/novels --runs work/staged

Each candidate has the processor time of `--steps` steps of the recipe without changes (`same` of
`candidates.py`, which explains the text and the loss):

- `grown`: a model of one layer trains for a third of the time at a constant rate, is then grown to
  two layers, and trains for the rest.
- `taught`: a teacher of one layer trains for a quarter of the time. A model of two layers then
  learns from its logits and from the labels, half each. The steps count the teacher's forward pass.
- `averaged`: the rate stays constant, and the last checkpoints are averaged.
- `averaged_decay`: `same`, whose last checkpoints are averaged.

Repeat the command to continue; candidates that have a line in `--out` are skipped.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from candidates import Row, compare, config_of, timed_run

from bert_jax.artefacts.saved.average import average
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.cli.inspection.evaluate import evaluate_run
from bert_jax.config.command_line import config_from, overridden
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus
from bert_jax.training.pretrain.growing import grow_model
from bert_jax.training.pretrain.start import resolve_teacher

AVERAGED, BETWEEN = 5, 30
"""Number of averaged checkpoints, and steps between them."""


class Budget(NamedTuple):
    """Processor time of a candidate, and what it trains on."""

    corpus: Corpus
    same: PretrainConfig
    steps: int
    """Steps of `same` that take the whole time."""
    runs: Path
    """Directory of the candidate's runs."""

    def train(self, name: str, share: float, *changes: str) -> Row:
        """Train `same` with changes for a share of the time; return time, steps and loss."""
        config = overridden(self.same, [f"--config.{change}" for change in changes])
        config, _ = resolve_teacher(config, read_model)
        return timed_run(config, self.same, share * self.steps, self.runs / name, self.corpus)


def grown(budget: Budget) -> Row:
    """Train one layer, then two."""
    budget.train("small", 1 / 3, "model.num_layers=1", "optimizer.schedule=constant")
    out = budget.runs / "grown"
    if not out.exists():
        grow_model(budget.runs / "small", out, lambda model: replace(model, num_layers=2))
    return budget.train("large", 2 / 3, f"init={out}")


def taught(budget: Budget) -> Row:
    """Train a small teacher, then a student."""
    budget.train("teacher", 1 / 4, "model.num_layers=1")
    return budget.train("student", 3 / 4, f"distil.teacher={budget.runs / 'teacher'}")


def averaged(budget: Budget, schedule: str = "constant") -> Row:
    """Train, and average the last checkpoints."""
    row = budget.train("run", 1.0, f"optimizer.schedule={schedule}")
    out, same = budget.runs / "average", budget.same
    if not out.exists():
        average([f"{budget.runs / 'run'}"], out, last=AVERAGED)
    rows, length = same.training.eval_rows, same.training.phases[-1].length
    found = evaluate_run(out, corpus=same.data.corpus, max_rows=rows, length=length)
    return row | {"loss": found["eval/mlm_loss"], "last": row["loss"]}


def averaged_decay(budget: Budget) -> Row:
    """Train with the decay of `same`, and average the last checkpoints."""
    return averaged(budget, budget.same.optimizer.schedule)


STAGED: dict[str, Callable[[Budget], Row]] = {
    each.__name__: each for each in (grown, taught, averaged, averaged_decay)
}


def staged(name: str, options: argparse.Namespace, corpus: Corpus) -> Row:
    """Run a candidate."""
    changes = {
        "objective": {"name": "masked_lm"},  # what a teacher and `read_model` need
        "checkpoint": {"keep": AVERAGED, "save_every_steps": BETWEEN},
    }
    same = config_of("same", options.corpus, options.seed)
    same = config_from(PretrainConfig, same, changes)
    runs = options.runs / f"{name}-{options.seed}"
    return STAGED[name](Budget(corpus, same, options.steps, runs))


if __name__ == "__main__":
    sys.exit(compare(__doc__, STAGED, staged))
