"""Screen the candidates for the record: one run of each, for equal processor time.

    python benchmarks/candidates.py --corpus work/novels --runs work/screen
    python benchmarks/candidates.py --corpus work/novels --runs work/screen qk_norm gates

A step of each candidate is timed in turn with a step of the recipe without changes (`same`). The
candidate then trains for the processor time that `--steps` steps of `same` take; each phase of a
candidate is timed. Use a text that is not the record's:

    bert-jax tokenizer --input FILES --vocab-size 8192 --out work/tokenizer
    bert-jax corpus --input FILES --tokenizer work/tokenizer --heldout-rate 0.04 --out work/novels

Repeat the command to continue a run that was stopped; candidates that have a line in `--out` are
skipped. The table has the loss of 2,048 held-out rows at 15% masked tokens, best first.
"""

import argparse
import importlib
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from recurrent_steps import stepper

from bert_jax.config.command_line import load_config, overridden
from bert_jax.terminal import markdown_table
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus, open_corpus
from bert_jax.training.pretrain.train import train

RECIPE = Path(__file__).parents[1] / "records" / "recipes" / "candidates" / "recipe.py"
TIMED = 42
"""Number of steps that are timed; the first two warm up."""


def config_of(name: str, corpus: str, seed: int) -> PretrainConfig:
    """Make the configuration of a candidate, without its own number of steps."""
    fields = {"data.corpus": corpus, "seed": seed, "training.eval_every_steps": 0}
    fields |= {"training.eval_rows": 2048, "masking.eval_rate": 0.15}
    given = [f"--config.{field}={value}" for field, value in fields.items()]
    return load_config(PretrainConfig, f"{RECIPE}:{name}", given)


def relative_time(
    same: PretrainConfig, changed: PretrainConfig, corpus: Corpus, own: Corpus
) -> float:
    """Return the processor time of a step of `changed`, the mean of its phases, in steps of `same`.

    `own` is the corpus of `changed`. Batches that still grow do not count.
    """
    phases = changed.phases
    takes = [stepper(same, corpus), *(stepper(changed, own, n) for n in range(len(phases)))]
    steps = [[take(number).seconds for take in takes] for number in range(TIMED)]
    # A machine is slow for seconds, so a step is compared with the step of `same` beside it.
    ratios = [[each / row[0] for each in row[1:]] for row in steps[2:]]
    medians = map(statistics.median, zip(*ratios, strict=True))
    return statistics.fmean(medians, [phase.num_steps for phase in phases])


class StoppedError(Exception):
    """A signal stopped a run; the command continues it."""


Row = dict[str, Any]
"""Relative time of a step, number of steps and loss of a candidate."""


def timed_run(
    config: PretrainConfig, same: PretrainConfig, steps: float, workdir: Path, corpus: Corpus,
    own: Corpus | None = None,
) -> Row:  # fmt: skip
    """Train for the processor time of so many steps of `same`, which reads `corpus`.

    `own` is the corpus of `config`; None means `corpus`. The measured time is kept beside
    `workdir`. Raise a StoppedError if a signal stopped the run.
    """
    timed = workdir.with_suffix(".json")
    if not timed.exists():
        measured = 1.0 if config == same else relative_time(same, config, corpus, own or corpus)
        timed.parent.mkdir(parents=True, exist_ok=True)
        timed.write_text(json.dumps(measured))
    return run(config, steps, workdir, json.loads(timed.read_text()))


def run(config: PretrainConfig, steps: float, workdir: Path, time: float = 1.0) -> Row:
    """Train for the processor time of `steps` steps; a step of `config` takes the `time` of one.

    Raise a StoppedError if a signal stopped the run.
    """
    changes = [f"--config.training.num_steps={round(steps / time)}"]
    found = train(overridden(config, changes), workdir)
    if found.stopped_by:
        raise StoppedError
    return {"time": time, "steps": found.step, "loss": found.eval_metrics["eval/mlm_loss"]}


def alone(name: str, options: argparse.Namespace, corpus: Corpus) -> Row:
    """Train a candidate of one run."""
    same, config = (config_of(each, options.corpus, options.seed) for each in ("same", name))
    return timed_run(config, same, options.steps, options.runs / f"{name}-{options.seed}", corpus)


def compare(
    doc: str, names: Iterable[str], train_one: Callable[[str, argparse.Namespace, Corpus], Row],
    further: Iterable[str] = (),
) -> int:  # fmt: skip
    """Train candidates that have no line with `train_one`, append their lines, print the table.

    `further` has names of options that are files, which the command needs.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="candidates; default: all")
    parser.add_argument("--corpus", required=True)
    for option in further:
        parser.add_argument(f"--{option}", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True, help="directory of the runs")
    parser.add_argument(
        "--out", type=Path, default=Path("work/candidates.jsonl"), help="file of the lines"
    )
    parser.add_argument("--steps", type=int, default=1700, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    rows = [json.loads(line) for line in lines]
    corpus = open_corpus(options.corpus)
    shared = {"seed": options.seed, "budget": options.steps, "corpus": corpus.train.fingerprint}
    for name in options.names or names:
        known = {"name": name, **shared}
        if any(known.items() <= row.items() for row in rows):
            continue
        try:
            rows.append(known | train_one(name, options, corpus))
        except StoppedError:
            return 1
        with options.out.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    rows = [row for row in rows if shared.items() <= row.items()]
    base = next((row["loss"] for row in rows if row["name"] == "same"), None)
    shown = ["name", "time", "steps", "loss"]
    more = [name for name in (rows[0] if rows else ()) if name not in (*shared, *shown)]
    table = [["candidate", "time of a step", "steps", "loss", "below `same`", *more]]
    for row in sorted(rows, key=lambda row: row["loss"]):
        gain = "" if base is None else f"{base - row['loss']:+.3f}"
        cells = [f"{row['time']:.2f}", f"{row['steps']:,}", f"{row['loss']:.3f}", gain]
        cells += [f"{row.get(name, math.nan):.3f}" for name in more]
        table.append([f"`{row['name']}`", *cells])
    print(markdown_table(table, figures=True))
    return 0


def main() -> int:
    sys.path.append(str(RECIPE.parent))
    return compare(__doc__, importlib.import_module("recipe").CANDIDATES, alone)


if __name__ == "__main__":
    sys.exit(main())
