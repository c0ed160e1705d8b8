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
import statistics
import sys
from pathlib import Path

from recurrent_steps import stepper

from bert_jax.config.command_line import load_config, overridden
from bert_jax.terminal import markdown_table
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus, open_corpus
from bert_jax.training.pretrain.train import train

RECIPE = Path(__file__).parents[1] / "records" / "recipes" / "candidates" / "recipe.py"
TIMED = 20
"""Number of steps that are timed; the first two warm up."""


def config_of(name: str, corpus: str, seed: int) -> PretrainConfig:
    """Make the configuration of a candidate, without its own number of steps."""
    fields = {"data.corpus": corpus, "seed": seed, "training.eval_every_steps": 0}
    fields |= {"training.eval_rows": 2048, "masking.eval_rate": 0.15}
    given = [f"--config.{field}={value}" for field, value in fields.items()]
    return load_config(PretrainConfig, f"{RECIPE}:{name}", given)


def relative_time(same: PretrainConfig, changed: PretrainConfig, corpus: Corpus) -> float:
    """Return the processor time of a step of `changed`, the mean of its phases, in steps of `same`.

    Batches that still grow do not count.
    """
    phases = changed.phases
    takes = [stepper(same, corpus), *(stepper(changed, corpus, n) for n in range(len(phases)))]
    steps = [[take(number).seconds for take in takes] for number in range(TIMED)]
    unit, *medians = map(statistics.median, zip(*steps[2:], strict=True))
    return statistics.fmean(medians, [phase.num_steps for phase in phases]) / unit


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="candidates; default: all")
    parser.add_argument("--corpus", required=True)
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
    shared = {"seed": options.seed, "corpus": corpus.train.fingerprint}
    sys.path.append(str(RECIPE.parent))
    for name in options.names or importlib.import_module("recipe").CANDIDATES:
        known = {"name": name, **shared}
        if any(known.items() <= row.items() for row in rows):
            continue
        config = config_of(name, options.corpus, options.seed)
        runs = options.runs / f"{name}-{options.seed}"
        timed = runs.with_suffix(".json")
        if not timed.exists():
            same = config_of("same", options.corpus, options.seed)
            measured = 1.0 if name == "same" else relative_time(same, config, corpus)
            timed.parent.mkdir(parents=True, exist_ok=True)
            timed.write_text(json.dumps(measured))
        time = json.loads(timed.read_text())
        steps = [f"--config.training.num_steps={round(options.steps / time)}"]
        result = train(overridden(config, steps), runs)
        if result.stopped_by:
            return 1
        loss = result.eval_metrics["eval/mlm_loss"]
        row = {**known, "time": time, "steps": result.step, "loss": loss}
        rows.append(row)
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    rows = [row for row in rows if shared.items() <= row.items()]
    base = next((row["loss"] for row in rows if row["name"] == "same"), None)
    table = [["candidate", "time of a step", "steps", "loss", "below `same`"]]
    for row in sorted(rows, key=lambda row: row["loss"]):
        gain = "" if base is None else f"{base - row['loss']:+.3f}"
        cells = f"{row['time']:.2f}", f"{row['steps']:,}", f"{row['loss']:.3f}", gain
        table.append([f"`{row['name']}`", *cells])
    print(markdown_table(table, figures=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
