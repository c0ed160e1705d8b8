"""What a teacher is worth: a student of half its layers, with and without it, at equal steps.

    bert-jax tokenizer --input prose.txt --vocab-size 512 --out work/tokenizer
    bert-jax corpus --input prose.txt --tokenizer work/tokenizer --out work/corpus
    python benchmarks/distillation.py --corpus work/corpus --out work/distillation

A teacher is pretrained on the corpus; then students of half the layers, one for each arm and seed.
Students of one seed begin with the same weights and read the same masked rows; they differ in the
loss alone. The table has the held-out masked-LM loss at the end, the paired difference to the arm
without a teacher over the seeds with Student's interval, and the processor time of a step. Results
are kept in OUT/results.json, so that a measurement that was stopped goes on; the table is written
to OUT/table.md.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy.stats import t as student

from bert_jax.artefacts.saved.reading import read_model
from bert_jax.config.command_line import load_config
from bert_jax.data.pipeline import ExampleStream
from bert_jax.distributed.parallel.sharding import make_mesh, place_batch
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import open_corpus
from bert_jax.training.pretrain.evaluate import HeldOut, heldout_rows
from bert_jax.training.pretrain.settings import step_config
from bert_jax.training.pretrain.start import resolve_start
from bert_jax.training.pretrain.train import train
from bert_jax.training.steps.state import abstract_state, jitted_init
from bert_jax.training.steps.step import make_train_step

ARMS: dict[str, dict[str, Any]] = {
    "labels alone": {},
    "predictions": {"hard_weight": 0.5, "temperature": 2.0},
    "predictions, states and relations": {"hidden_weight": 0.1, "attention_weight": 0.1},
}


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--corpus", required=True, help="directory of a corpus")
    parser.add_argument("--out", required=True, type=Path, help="directory of runs and results")
    parser.add_argument("--layers", type=int, default=4, help="layers of the teacher")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16, help="rows of 64 tokens in a batch")
    parser.add_argument("--teacher-steps", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=300, help="steps of a student")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", default=",".join(map(str, range(len(ARMS)))))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    sizes = {n: v for n, v in vars(arguments).items() if n not in ("out", "arms", "seeds")}
    if results and results.get("sizes") != sizes:
        parser.error(f"{file} has results of {results.get('sizes')}; choose another --out")
    results["sizes"] = sizes
    if "teacher" not in results:
        config = configured(arguments, arguments.layers, arguments.teacher_steps, {}, seed=100)
        values = train(config, arguments.out / "teacher").eval_metrics
        results["teacher"] = {name: values[f"eval/{name}"] for name in ("mlm_loss", "mlm_accuracy")}
        file.write_text(json.dumps(results, indent=2) + "\n")
    arms = [list(ARMS)[int(number)] for number in arguments.arms.split(",")]
    for arm in arms:
        missing = [n for n in range(arguments.seeds) if f"{arm} {n}" not in results]
        students = Students(arguments, arm) if missing else None
        for seed in missing:
            assert students is not None
            results[f"{arm} {seed}"] = found = students.run(seed)
            file.write_text(json.dumps(results, indent=2) + "\n")
            print(arm, seed, found, flush=True)
    lines = table(results, arms, arguments.seeds)
    (arguments.out / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def configured(
    arguments: argparse.Namespace, layers: int, steps: int, distil: dict[str, Any], seed: int = 0
) -> PretrainConfig:
    """Return the configuration of the teacher or of the students."""
    fields = {
        "data.corpus": arguments.corpus,
        "data.pairing": "none",
        "model.pooler": False,
        "model.num_layers": layers,
        "model.hidden_dim": arguments.width,
        "model.num_heads": arguments.width // 32,
        "model.mlp_dim": arguments.width * 11 // 4,
        "training.num_steps": steps,
        "training.phases[0].batch_size": arguments.rows,
        "training.eval_every_steps": 0,
        "optimizer.name": "adamw",
        "optimizer.learning_rate": 2e-3,
        "optimizer.warmup_steps": max(1, steps // 12),
        "checkpoint.save_every_steps": steps,
        "seed": seed,
        **{f"distil.{name}": value for name, value in distil.items()},
    }
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    return load_config(PretrainConfig, "configs/pretrain/demo.py", overrides)


class Students:
    """Students of one arm, whose step is compiled once."""

    def __init__(self, arguments: argparse.Namespace, arm: str) -> None:
        distil: dict[str, Any] = {}
        if ARMS[arm]:
            distil = {"teacher": str(arguments.out / "teacher"), **ARMS[arm]}
        corpus = open_corpus(arguments.corpus)
        assert corpus.heldout is not None
        config = configured(arguments, arguments.layers // 2, arguments.steps, distil)
        config, self.start = resolve_start(config, read_model)
        self.config = config = config.with_vocabulary(corpus.train.vocab_size)
        self.store, self.mesh = corpus.train, make_mesh(config.mesh)
        self.settings = step_config(config, corpus)
        self.init = jitted_init(self.settings, self.mesh)
        self.step = make_train_step(self.settings, self.mesh)
        evaluation = [step_config(config, corpus, evaluates=True)]
        rows = heldout_rows(config, corpus.heldout, self.mesh)
        self.held_out = HeldOut(evaluation, self.mesh, rows)

    def run(self, seed: int) -> dict[str, float]:
        """Train a student; return its held-out values and the median time of its steps."""
        config, abstract = self.config, abstract_state(self.settings, self.mesh)
        axes, state = self.settings.objective.axes(), self.init(jax.random.key(seed))
        state = self.start.with_teacher(state, abstract, axes)
        stream = ExampleStream(self.store, config.data, config.phases, seed)
        seconds = []
        for number in range(config.training.num_steps):
            batch = place_batch(stream.batch(number), self.mesh)
            began = time.process_time()
            state, metrics = self.step(state, batch)
            jax.block_until_ready(metrics)
            seconds.append(time.process_time() - began)
        values = self.held_out.evaluate(state.params, 0)
        return {
            **{name: values[f"eval/{name}"] for name in ("mlm_loss", "mlm_accuracy")},
            "milliseconds": 1000 * statistics.median(seconds),
        }


def table(results: dict[str, Any], arms: list[str], seeds: int) -> list[str]:
    """Return the lines of the table."""
    teacher = results["teacher"]
    lines = [
        f"Teacher: {teacher['mlm_loss']:.3f} nats, accuracy {teacher['mlm_accuracy']:.3f}.",
        "",
        "| student learns from | loss, by seed | mean | accuracy | difference, 95% | CPU ms |",
        "|---|---|---|---|---|---|",
    ]
    base = _column(results, arms[0], seeds, "mlm_loss")
    for arm in arms:
        loss, accuracy, milliseconds = (
            _column(results, arm, seeds, name)
            for name in ("mlm_loss", "mlm_accuracy", "milliseconds")
        )
        difference = interval(loss - base) if arm != arms[0] else ""
        lines.append(
            f"| {arm} | {', '.join(f'{each:.3f}' for each in loss)} | {loss.mean():.3f} | "
            f"{accuracy.mean():.3f} | {difference} | {np.median(milliseconds):.0f} |"
        )
    return lines


def _column(results: dict[str, Any], arm: str, seeds: int, name: str) -> np.ndarray:
    return np.array([results[f"{arm} {seed}"][name] for seed in range(seeds)])


def interval(differences: np.ndarray) -> str:
    """Write the mean of paired differences with its 95% interval by Student's t."""
    mean, count = differences.mean(), len(differences)
    half = student.ppf(0.975, count - 1) * differences.std(ddof=1) / count**0.5
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


if __name__ == "__main__":
    main()
