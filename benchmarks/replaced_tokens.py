"""Replaced-token detection against masked LM: equal operations, then fine-tuning with equal seeds.

    python benchmarks/replaced_tokens.py --prose books.txt.xz --glue glue --out work/rtd

Both objectives pretrain the same encoder on the first megabytes of the prose; masked LM gets more
steps, until its operations (as `Objective.flops` counts them, the generator's among them) are those
of replaced-token detection. Both are fine-tuned on each task with the same seeds, and the paired
differences have their intervals. A measurement that was stopped goes on.
"""

import argparse
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config.mapping import build
from bert_jax.data.corpus.build import build_corpus, is_corpus, iter_texts
from bert_jax.tokenization.training import train_wordpiece
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.train import finetune
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import open_corpus
from bert_jax.training.pretrain.settings import objective_of
from bert_jax.training.pretrain.train import train

OBJECTIVES = ("replaced_tokens", "masked_lm")
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


def pretraining(options: argparse.Namespace, corpus: Path, name: str, steps: int) -> PretrainConfig:
    """Configure one run; both differ in the objective and the steps alone."""
    objective: dict[str, Any] = {"name": name}
    if name == "replaced_tokens":
        objective["generator_size"] = options.generator_size
    return build(
        PretrainConfig,
        {
            "objective": objective,
            "model": {
                "num_layers": options.layers,
                "hidden_dim": options.width,
                "num_heads": options.width // 32,
                "mlp_dim": 4 * options.width,
                "num_positions": 128,
                "pooler_activation": "gelu",
            },
            "data": {"corpus": str(corpus), "pairing": "none"},
            "training": {
                "num_steps": steps,
                "phases": ({"length": options.length, "batch_size": 64},),
                "eval_every_steps": max(steps // 4, 1),
                "eval_rows": 512,
            },
            "optimizer": {"learning_rate": options.learning_rate, "warmup_steps": steps // 10},
            "checkpoint": {"save_every_steps": max(steps // 4, 1)},
        },
    )


def row_flops(config: PretrainConfig, vocab_size: int, length: int) -> int:
    rows = {"tokens": np.zeros((1, length))}
    return objective_of(config.with_vocabulary(vocab_size)).flops(rows)


def compare(options: argparse.Namespace, task: str) -> dict[str, Any]:
    """Fine-tune both encoders; return the paired difference of their scores."""
    directory = options.out / task
    config = build(
        FinetuneConfig,
        {
            "task": {"kind": "glue", "name": task, "data": str(options.glue)},
            "init": str(options.out / OBJECTIVES[0]),
            "training": {"num_epochs": options.epochs or EPOCHS[task], "batch_size": 32},
            "optimizer": {"learning_rate": 1e-4},
            "sweep": {"seeds": options.seeds, "baseline": str(options.out / OBJECTIVES[1])},
        },
    )
    assert finetune(config, directory).finished
    found: dict[str, Any] = json.loads((directory / "statistics.json").read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of everything made")
    parser.add_argument("--prose", type=Path, required=True, help="text, compressed with xz")
    parser.add_argument("--glue", type=Path, required=True, help="directory of GLUE's files")
    parser.add_argument("--megabytes", type=float, default=20, help="default: %(default)s")
    parser.add_argument("--vocab-size", type=int, default=8192, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=4000, help="of replaced-token detection")
    parser.add_argument("--layers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--length", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--generator-size", type=float, default=0.25, help="default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--tasks", default="sst2,mrpc", help="default: %(default)s")
    parser.add_argument("--epochs", type=float, default=0.0, help="0: as many as suit the task")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    corpus = corpus_of(options)
    vocab_size = open_corpus(str(corpus)).train.vocab_size
    costs = {
        name: row_flops(pretraining(options, corpus, name, 10), vocab_size, options.length)
        for name in OBJECTIVES
    }
    steps = {name: round(options.steps * costs[OBJECTIVES[0]] / costs[name]) for name in OBJECTIVES}
    for name in OBJECTIVES:
        print(f"{name}: {steps[name]:,} steps of {64 * costs[name] / 1e9:.1f} GFLOP", flush=True)
        run = train(pretraining(options, corpus, name, steps[name]), options.out / name)
        assert run.finished
    print("\n| task | pairs | difference, replaced tokens less masked LM | 95% interval | wins |")
    print("|---|---|---|---|---|")
    for task in options.tasks.split(","):
        for found in compare(options, task)["comparisons"]:
            low, high = found["student"] or (float("nan"), float("nan"))
            print(
                f"| {task} | {found['pairs']} | {100 * found['mean']:.2f} | "
                f"{100 * low:.2f} to {100 * high:.2f} | {found['wins']} of {found['pairs']} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
