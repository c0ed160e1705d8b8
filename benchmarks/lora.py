r"""Low-rank updates against full fine-tuning: scores, parameters, bytes.

    python benchmarks/lora.py --init work/tiny --data DATA/glue --out work/lora
    python benchmarks/lora.py --init work/tiny --data DATA/glue --out work/lora --rows 0 --rank 16

Each task has two sweeps over the same seeds, one of each arm with learning rates of its own: full
fine-tuning, and LoRA. An arm counts with the learning rate of the highest median on the dev data.
The first --rows rows of the training data are trained on; 0: all. A sweep that is finished in --out
is not run again. The table is printed and written to OUT/table.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

from bert_jax.config.command_line import load_config
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.setup import set_up
from bert_jax.training.finetune.train import finetune
from bert_jax.training.steps.trials import state_sizes

EPOCHS = {"sst2": 2, "stsb": 2}
LENGTHS = {"sst2": 32, "stsb": 48}
FOLDERS = {"sst2": "SST-2", "stsb": "STS-B"}
RATES = {"full": "5e-4,1e-3", "lora": "2e-3,5e-3"}


def main() -> None:
    """Run the sweeps that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--init", required=True, help="work directory of a pretraining run")
    parser.add_argument("--data", required=True, help="directory of GLUE's tasks")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--tasks", default=",".join(EPOCHS))
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", default="query,value")
    arguments = parser.parse_args()
    lines = [
        "| task | arm | rate | trained | optimizer | save | median | difference, 95% |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task in arguments.tasks.split(","):
        found = {arm: run(arguments, task, arm) for arm in RATES}
        differences = found["lora"]["scores"] - found["full"]["scores"]
        for arm, row in found.items():
            sizes = row["sizes"]
            difference = interval(differences) if arm == "lora" else ""
            lines.append(
                f"| {task} | {arm} | {row['rate']:g} | {sizes.trained:,} of {sizes.params:,} | "
                f"{sizes.optimizer_bytes / 2**20:.2f} MiB | {sizes.saved_bytes / 2**20:.2f} MiB | "
                f"{np.median(row['scores']):.1f} | {difference} |"
            )
    print("\n".join(lines))
    (arguments.out / "table.md").write_text("\n".join(lines) + "\n")


def run(arguments: argparse.Namespace, task: str, arm: str) -> dict[str, Any]:
    """Run one arm on one task, and return its best rate, the scores of the seeds and its sizes."""
    fields = {
        "init": arguments.init,
        "task.data": shortened(arguments, task),
        "task.max_length": LENGTHS[task],
        "training.max_buckets": 1,
        "training.num_epochs": EPOCHS[task],
        "sweep.seeds": arguments.seeds,
        "sweep.learning_rates": RATES[arm],
    }
    if arm == "lora":
        fields |= {"lora.rank": arguments.rank, "lora.targets": arguments.targets}
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    config = load_config(FinetuneConfig, f"configs/finetune/glue.py:{task}", overrides)
    workdir = arguments.out / f"{task}-{arm}"
    finetune(config, workdir)
    outcomes = json.loads((workdir / "statistics.json").read_text())["outcomes"]
    scores: dict[float, list[float]] = {}
    for outcome in outcomes:
        scores.setdefault(outcome["member"]["learning_rate"], []).append(100 * outcome["best"])
    rate = max(scores, key=lambda each: float(np.median(scores[each])))
    sizes = state_sizes(set_up(config).step)
    return {"rate": rate, "scores": np.array(scores[rate]), "sizes": sizes}


def shortened(arguments: argparse.Namespace, task: str) -> Path:
    """Copy the data of a task with the first rows of its training file, and return the copy."""
    source, copy = Path(arguments.data) / FOLDERS[task], arguments.out / "data" / FOLDERS[task]
    copy.mkdir(parents=True, exist_ok=True)
    for name in ("train.tsv", "dev.tsv"):
        lines = (source / name).read_text(encoding="utf-8").splitlines(keepends=True)
        kept = lines[: arguments.rows + 1] if name == "train.tsv" and arguments.rows else lines
        (copy / name).write_text("".join(kept), encoding="utf-8")
    return copy


def interval(differences: np.ndarray) -> str:
    """Write the mean of paired differences with its 95% interval by Student's t."""
    mean, count = differences.mean(), len(differences)
    half = student.ppf(0.975, count - 1) * differences.std(ddof=1) / count**0.5
    return f"{mean:+.1f} ({mean - half:+.1f} to {mean + half:+.1f})"


if __name__ == "__main__":
    main()
