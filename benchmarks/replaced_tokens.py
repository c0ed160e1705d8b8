"""Two ways of pretraining with equal operations, then fine-tuning with equal seeds.

    python benchmarks/replaced_tokens.py --prose books.txt.xz --glue glue --out work/rtd
    python benchmarks/replaced_tokens.py --question sharing --recipe deberta_v3:tiny \
        --prose books.txt.xz --glue glue --out work/sharing

`--question objectives` compares replaced-token detection with masked LM, `--question sharing`
gradient-disentangled embedding sharing (He et al. 2023) with one table for both networks. Both
sides pretrain the same encoder on the first megabytes of the prose, with as many steps as cost the
same operations (as `Objective.flops` counts them, the generator's among them). Both are fine-tuned
on each task with the same seeds, and the paired differences have their intervals: of the
fine-tuning seeds after each pretraining seed, and of the pretraining seeds, each with the mean of
its fine-tuning seeds. A measurement that was stopped goes on.
"""

import argparse
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config.command_line import load_config
from bert_jax.config.mapping import build
from bert_jax.data.corpus.build import build_corpus, is_corpus, iter_texts
from bert_jax.terminal import markdown_table
from bert_jax.tokenization.training import train_wordpiece
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.train import finetune
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import open_corpus
from bert_jax.training.pretrain.settings import objective_of
from bert_jax.training.pretrain.train import train
from bert_jax.training.run.telemetry import read_metrics
from bert_jax.training.sweep.statistics import student_interval

DETECTS = "objective.name=replaced_tokens"
QUESTIONS = {
    "objectives": {
        "replaced_tokens": [DETECTS],
        "masked_lm": ["objective.name=masked_lm"],
    },
    "sharing": {
        "disentangled": [DETECTS, "objective.disentangled=True"],
        "shared": [DETECTS, "objective.disentangled=False"],
    },
}
"""Fields of the two sides. The cost of a step of the first side decides the operations of both."""
HELDOUT_RATE = 0.02
EPOCHS = {"sst2": 1.0, "mrpc": 10.0}


def corpus_of(options: argparse.Namespace) -> Path:
    """Cut the prose, and build tokenizer and corpus, if they are not there."""
    corpus: Path = options.out / "corpus"
    if not is_corpus(corpus):
        text = options.out / "prose.txt"
        with lzma.open(options.prose, "rb") as file:
            text.write_bytes(file.read(int(options.megabytes * 1e6)).rpartition(b"\n")[0])
        tokenizer = train_wordpiece(iter_texts([str(text)]), options.vocab_size)
        print(build_corpus([str(text)], tokenizer, corpus, heldout_rate=HELDOUT_RATE).summary())
    return corpus


def pretraining(
    options: argparse.Namespace, corpus: Path, side: str, steps: int, seed: int = 0
) -> PretrainConfig:
    """Configure a run of a side."""
    own = list(QUESTIONS[options.question][side])
    if DETECTS in own:
        own.append(f"objective.generator_size={options.generator_size}")
    phases = json.dumps([{"length": options.length, "batch_size": options.rows}])
    every = max(steps // 4, 1)
    given = {
        "seed": seed, "data.corpus": corpus, "data.pairing": "none", "training.num_steps": steps,
        "training.phases": phases, "training.eval_every_steps": every, "training.eval_rows": 1024,
        "checkpoint.save_every_steps": every, "checkpoint.keep": 1, "optimizer.name": "muon",
        "optimizer.learning_rate": options.learning_rate, "optimizer.schedule": "wsd",
        "optimizer.decay_share": 0.4, "optimizer.warmup_steps": max(1, steps // 20),
    }  # fmt: skip
    fields = [*own, *(f"{name}={value}" for name, value in given.items())]
    return load_config(PretrainConfig, options.recipe, [f"--config.{field}" for field in fields])


def row_flops(config: PretrainConfig, vocab_size: int, length: int) -> int:
    rows = {"tokens": np.zeros((1, length))}
    return objective_of(config.with_vocabulary(vocab_size)).flops(rows)


def compare(options: argparse.Namespace, task: str, seed: int) -> dict[str, Any]:
    """Fine-tune both encoders of a pretraining seed; return the paired difference of scores."""
    directory = options.out / f"{task}-{seed}"
    first, second = (str(options.out / f"{side}-{seed}") for side in QUESTIONS[options.question])
    config = build(
        FinetuneConfig,
        {
            "task": {"kind": "glue", "name": task, "data": str(options.glue)},
            "init": first,
            "training": {"num_epochs": options.epochs or EPOCHS[task], "batch_size": 32},
            "optimizer": {"learning_rate": options.finetuning_rate},
            "sweep": {"seeds": options.seeds, "baseline": second},
        },
    )
    assert finetune(config, directory).finished
    (found,) = json.loads((directory / "statistics.json").read_text())["comparisons"]
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--question", choices=QUESTIONS, default="objectives")
    parser.add_argument("--recipe", default="start:2x128", help="default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, help="directory of everything made")
    parser.add_argument("--prose", type=Path, required=True, help="text, compressed with xz")
    parser.add_argument("--glue", type=Path, required=True, help="directory of GLUE's files")
    parser.add_argument("--megabytes", type=float, default=20, help="default: %(default)s")
    parser.add_argument("--vocab-size", type=int, default=8192, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=4000, help="of the first side")
    parser.add_argument("--rows", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--length", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--generator-size", type=float, default=0.5, help="default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="default: %(default)s")
    parser.add_argument("--finetuning-rate", type=float, default=3e-4, help="default: %(default)s")
    parser.add_argument("--pretraining-seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="of fine-tuning")
    parser.add_argument("--tasks", default="sst2,mrpc", help="default: %(default)s")
    parser.add_argument("--epochs", type=float, default=0.0, help="0: as many as suit the task")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    corpus = corpus_of(options)
    vocab_size = open_corpus(str(corpus)).train.vocab_size
    sides = list(QUESTIONS[options.question])
    costs = {
        side: row_flops(pretraining(options, corpus, side, 20), vocab_size, options.length)
        for side in sides
    }
    steps = {side: round(options.steps * costs[sides[0]] / costs[side]) for side in sides}
    rows = [["task", "seed", f"{sides[0]} less {sides[1]}", "95% interval", "better"]]

    def add(task: str, seed: object, mean: float, ends: Any, better: int, count: int) -> None:
        low, high = ends or (float("nan"), float("nan"))
        interval = f"{100 * low:+.2f} to {100 * high:+.2f}"
        rows.append([task, str(seed), f"{100 * mean:+.2f}", interval, f"{better} of {count}"])

    for seed in range(options.pretraining_seeds):
        for side in sides:
            run = options.out / f"{side}-{seed}"
            assert train(pretraining(options, corpus, side, steps[side], seed), run).finished
            rows_of_run = read_metrics(run / "metrics.jsonl")
            evaluated = [{k: v for k, v in row.items() if "eval/" in k} for row in rows_of_run]
            found = [each for each in evaluated if each][-1]
            print(f"{run.name}: {steps[side]:,} steps of {options.rows * costs[side] / 1e9:.1f} "
                  f"GFLOP; {found}", flush=True)  # fmt: skip
    for task in options.tasks.split(","):
        means = []
        for seed in range(options.pretraining_seeds):
            found = compare(options, task, seed)
            print(task, seed, found, flush=True)
            means.append(found["mean"])
            add(task, seed, found["mean"], found["student"], found["wins"], found["pairs"])
        if len(means) > 1:
            values = np.array(means)
            ends = student_interval(values)
            add(task, "all", values.mean(), ends, (values > 0).sum(), len(values))
    print(markdown_table(rows, figures=True))


if __name__ == "__main__":
    main()
