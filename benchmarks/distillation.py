"""What a teacher is worth: a student of half its layers, with and without it, at equal steps.

    bert-jax tokenizer --input prose.txt --vocab-size 512 --out work/tokenizer
    bert-jax corpus --input prose.txt --tokenizer work/tokenizer --out work/corpus
    python benchmarks/distillation.py --corpus work/corpus --out work/distillation

A teacher is pretrained on it; then students of half the
layers, one for each arm and seed, which differ in the objective alone. The table has the held-out
masked-LM loss at the end, the paired difference to the arm without a teacher over the seeds with
Student's interval, and the processor time of a run, compilation included. Results are kept in
OUT/results.json, so that a measurement that was stopped goes on; the table is written to
OUT/table.md.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

from bert_jax.config.command_line import load_config
from bert_jax.training.config import PretrainConfig
from bert_jax.training.train import train

ARMS: dict[str, dict[str, Any]] = {
    "labels alone": {},
    "predictions": {"hard_weight": 0.5, "temperature": 2.0},
    "predictions, states and relations": {"hidden_weight": 0.1, "attention_weight": 0.1},
}
TEACHER = "teacher"


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
    arms = [list(ARMS)[int(number)] for number in arguments.arms.split(",")]
    trials = [(TEACHER, 0), *((arm, seed) for seed in range(arguments.seeds) for arm in arms)]
    for arm, seed in trials:
        if (name := f"{arm} {seed}") not in results:
            results[name] = run(arguments, arm, seed)
            file.write_text(json.dumps(results, indent=2) + "\n")
            print(name, results[name], flush=True)
    lines = table(results, arms, arguments.seeds)
    (arguments.out / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def run(arguments: argparse.Namespace, arm: str, seed: int) -> dict[str, float]:
    """Train the teacher or one student; return its held-out values and its processor time."""
    workdir, is_teacher = arguments.out / f"{arm.replace(',', '').replace(' ', '_')}_{seed}", False
    objective: dict[str, Any] = {}
    if arm == TEACHER:
        is_teacher = True
    elif arm != "labels alone":
        teacher = str(arguments.out / f"{TEACHER}_0")
        objective = {"name": "distilled_masked_lm", "teacher": teacher, **ARMS[arm]}
    steps = arguments.teacher_steps if is_teacher else arguments.steps
    fields = {
        "data.corpus": arguments.corpus,
        "data.pairing": "none",
        "model.pooler": False,
        "model.num_layers": arguments.layers // (1 if is_teacher else 2),
        "model.hidden_dim": arguments.width,
        "model.num_heads": arguments.width // 32,
        "model.mlp_dim": arguments.width * 11 // 4,
        "training.num_steps": steps,
        "training.phases[0].batch_size": arguments.rows,
        "optimizer.name": "adamw",
        "optimizer.learning_rate": 2e-3,
        "optimizer.warmup_steps": max(1, steps // 12),
        "training.eval_every_steps": 0,
        "checkpoint.save_every_steps": steps,
        "seed": 100 + seed if is_teacher else seed,
        **{f"objective.{name}": value for name, value in objective.items()},
    }
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    config = load_config(PretrainConfig, "configs/pretrain/demo.py", overrides)
    began = time.process_time()
    result = train(config, workdir, echo=lambda line: None)
    values = {name: result.eval_metrics[f"eval/{name}"] for name in ("mlm_loss", "mlm_accuracy")}
    return {**values, "seconds": time.process_time() - began}


def table(results: dict[str, Any], arms: list[str], seeds: int) -> list[str]:
    """Return the lines of the table."""
    teacher = results[f"{TEACHER} 0"]
    lines = [
        f"Teacher: {teacher['mlm_loss']:.3f} nats, accuracy {teacher['mlm_accuracy']:.3f}.",
        "",
        "| student learns from | loss, seed by seed | mean | accuracy | difference, 95% | CPU s |",
        "|---|---|---|---|---|---|",
    ]
    base = _column(results, arms[0], seeds, "mlm_loss")
    for arm in arms:
        loss, accuracy, seconds = (
            _column(results, arm, seeds, name) for name in ("mlm_loss", "mlm_accuracy", "seconds")
        )
        difference = interval(loss - base) if arm != arms[0] else ""
        lines.append(
            f"| {arm} | {', '.join(f'{each:.3f}' for each in loss)} | {loss.mean():.3f} | "
            f"{accuracy.mean():.3f} | {difference} | {np.median(seconds):.0f} |"
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
