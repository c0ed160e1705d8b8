"""Whether the plateau alarm is silent in healthy runs, and says what it says of others.

    python benchmarks/plateau_alarm.py --out work/plateau            # 20 runs of 400 steps
    python benchmarks/plateau_alarm.py --out work/plateau --table    # of the runs so far

Each run is one of six recipes in a tiny size, on the corpus of `bert-jax demo`. The losses of its
steps are kept in OUT/losses.jsonl, so that a measurement that was stopped goes on, and are judged
by `LossMonitor` as a run of the same length judges them, and as one that looks once; then again
with a plateau planted, as if no loss fell below the line.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
from demo_recipes import Run

from bert_jax.config.command_line import load_config
from bert_jax.data.corpus.build import build_corpus, is_corpus, iter_texts
from bert_jax.distributed.parallel.sharding import place_batch
from bert_jax.tokenization.training import train_wordpiece
from bert_jax.training.loss_monitor import MARGIN
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.settings import loss_monitor, objective_of, step_config

STEPS = 400
MODERN, BERT = "pretrain/demo", "pretrain/demo:bert"
TINY = (
    "model.num_layers=2", "model.hidden_dim=64", "model.num_heads=2", "model.mlp_dim=128",
    "optimizer.warmup_steps=20", f"training.num_steps={STEPS}",
)  # fmt: skip
RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "modern, Muon 3e-3": (MODERN, ()),
    "modern, Muon 1e-2": (MODERN, ("optimizer.learning_rate=1e-2",)),
    "modern, AdamW 3e-3": (MODERN, ("optimizer.name=adamw",)),
    "BERT, AdamW 3e-3": (BERT, ("optimizer.learning_rate=3e-3",)),
    "BERT, LAMB 1e-2": (BERT, ("optimizer.name=lamb", "optimizer.learning_rate=1e-2")),
    "modern, StableAdamW 1e-2": (
        MODERN, ("optimizer.name=stable_adamw", "optimizer.learning_rate=1e-2"),
    ),
}  # fmt: skip
TRIALS = [(name, seed) for seed in range(4) for name in RECIPES][:20]


def configured(recipe: str, seed: int) -> PretrainConfig:
    """Return the configuration of a run."""
    file, changes = RECIPES[recipe]
    fields = (*TINY, *changes, f"seed={seed}")
    return load_config(PretrainConfig, file, [f"--config.{field}" for field in fields])


def losses_of(config: PretrainConfig, corpus: Path) -> dict[str, Any]:
    """Train, and return the loss of each step and the baseline."""
    run, losses = Run(config, corpus), []
    settings = step_config(run.config, run.corpus)
    for number in range(STEPS):
        batch = place_batch(run.stream.batch(number), run.mesh)
        run.state, metrics = run.train_steps[0](run.state, batch)
        losses.append(metrics[settings.objective.metrics[0].name])
    values = [round(float(loss), 4) for loss in jax.device_get(losses)]
    return {"losses": values, "baseline": settings.objective.baseline}


def judged(config: PretrainConfig, row: dict[str, Any], *, waits: bool = True) -> dict[str, Any]:
    """Replay a run's losses; `waits` False: judge once, whether or not the loss falls."""
    objective = dataclasses.replace(objective_of(config), baseline=row["baseline"])
    monitor = loss_monitor(config, objective)
    alarm, at_look = None, 0.0
    for step, loss in enumerate(row["losses"], start=1):
        findings = monitor.observe(step, loss)
        if step == monitor.judged_at:
            at_look = monitor.smoothed
            if not waits:
                late = at_look >= row["baseline"] - MARGIN
                return {"alarm": step if late else None, "at_look": at_look}
        alarm = next((step for found in findings if found.kind == "plateau"), alarm)
    return {"alarm": alarm, "at_look": at_look, "end": monitor.smoothed}


def main() -> None:
    """Train what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    file, corpus = arguments.out / "losses.jsonl", arguments.out / "corpus"
    jax.config.update("jax_compilation_cache_dir", str((arguments.out / "cache").absolute()))
    if not arguments.table and not is_corpus(corpus):
        tokenizer = train_wordpiece(iter_texts(["python-docs"]), 4000)
        print(build_corpus(["python-docs"], tokenizer, corpus, heldout_rate=0.02).summary())
    rows = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        row = json.loads(line)
        rows[row["recipe"], row["seed"]] = row
    for recipe, seed in [] if arguments.table else TRIALS:
        if (recipe, seed) not in rows:
            row = {"recipe": recipe, "seed": seed, **losses_of(configured(recipe, seed), corpus)}
            rows[recipe, seed] = row
            with file.open("a") as out:
                out.write(json.dumps(row) + "\n")
    print("| recipe | seed | line | at the first look | end | judged once | alarm | planted |")
    print("|---|---|---|---|---|---|---|---|")
    for (recipe, seed), row in rows.items():
        config = configured(recipe, seed)
        now, once = judged(config, row), judged(config, row, waits=False)
        held = row | {"losses": [max(loss, row["baseline"]) for loss in row["losses"]]}
        planted = [judged(config, held, waits=waits)["alarm"] or "-" for waits in (False, True)]
        print(
            f"| {recipe} | {seed} | {row['baseline']:.3f} | {now['at_look']:.3f} | {now['end']:.3f}"
            f" | {once['alarm'] or '-'} | {now['alarm'] or '-'} | {planted[0]}, {planted[1]} |"
        )


if __name__ == "__main__":
    main()
