"""Losses of 100 steps, in this tree and in another commit: what a change of structure may not move.

    python benchmarks/same_losses.py --against HEAD~1                    # bit for bit
    python benchmarks/same_losses.py --against HEAD~1 --tolerance 1e-5   # within 1e-5, relative

Four runs are trained by `bert-jax pretrain` from both trees, one after the other on this machine:
next-sentence rows; packed rows with whole words; LAMB across a change of length; and a mesh of
2 x 2 x 2 fake devices with two micro-batches. Exit code 1: a loss differs by more than allowed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
NUM_STEPS = 100
DEVICES = "--xla_force_host_platform_device_count={}"

SHARED = {
    "model.num_layers": 2,
    "model.hidden_dim": 128,
    "model.num_heads": 2,
    "model.mlp_dim": 512,
    "training.num_steps": NUM_STEPS,
    "training.phases": "({'length': 64, 'batch_size': 16},)",
    "training.log_every_steps": 1,
    "training.eval_every_steps": 0,
    "training.eval_rows": 64,
    "checkpoint.save_every_steps": NUM_STEPS,
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_steps": 10,
    "guard.spike_sigmas": 0.0,
}
RUNS: dict[str, dict[str, object]] = {
    "next sentence": {"data.objective": "nsp"},
    "packed, whole words": {"data.objective": "none", "masking.whole_word": True},
    "LAMB, two lengths": {
        "optimizer.name": "lamb",
        "training.phases": "({'length': 32, 'batch_size': 32, 'share': 0.5},"
        " {'length': 128, 'batch_size': 8, 'share': 0.5})",
    },
    "mesh 2 x 2 x 2, accumulation": {
        "mesh.data": 2,
        "mesh.fsdp": 2,
        "mesh.tensor": 2,
        "training.accumulation": 2,
    },
}


def bert_jax(tree: Path, *words: object, devices: int = 1) -> None:
    """Run a verb of the package in `tree`; its output is shown only if the verb fails."""
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": DEVICES.format(devices),
    }
    done = subprocess.run(
        [sys.executable, "-m", "bert_jax.cli", *map(str, words)],
        env=environment, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"bert-jax {' '.join(map(str, words))} failed in {tree}:\n{done.stdout}")


def losses(tree: Path, settings: Mapping[str, object], corpus: Path, workdir: Path) -> list[float]:
    """Training losses of a run, step by step."""
    settings = {**SHARED, **settings, "data.corpus": corpus}
    devices = 8 if "mesh.tensor" in settings else 1
    overrides = [f"--config.{name}={value}" for name, value in settings.items()]
    recipe = tree / "configs/pretrain/bert_tiny.py"
    bert_jax(
        tree, "pretrain", f"--config={recipe}", f"--workdir={workdir}", *overrides, devices=devices
    )
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--against", required=True, metavar="COMMIT", help="the commit before")
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative (default: 0)")
    parser.add_argument("--only", choices=list(RUNS), help="one of the runs")
    options = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        before = scratch / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(before), options.against],
                       check=True)  # fmt: skip
        try:
            bert_jax(ROOT, "tokenizer", "--input", "python-docs", "--vocab-size", 2048,
                     "--max-mb", 2, "--out", scratch / "tokenizer")  # fmt: skip
            bert_jax(ROOT, "corpus", "--input", "python-docs", "--tokenizer",
                     scratch / "tokenizer", "--out", scratch / "corpus")  # fmt: skip
            for number, (name, settings) in enumerate(RUNS.items()):
                if options.only not in (None, name):
                    continue
                old, new = (
                    losses(tree, settings, scratch / "corpus", scratch / f"{tree.name}-{number}")
                    for tree in (before, ROOT)
                )
                if not len(old) == len(new) == NUM_STEPS:
                    sys.exit(f"{name}: {len(old)} and {len(new)} losses; expected {NUM_STEPS}")
                apart = max(abs(a - b) / abs(a) for a, b in zip(old, new, strict=True))
                worst = max(worst, apart)
                said = "equal to the last bit" if old == new else f"largest difference {apart:.1e}"
                print(f"{name:30} {old[0]:.4f} -> {old[-1]:.4f}   {said}", flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)
    if worst > options.tolerance:
        sys.exit(f"losses differ by {worst:.1e}; allowed are {options.tolerance:g}")


if __name__ == "__main__":
    main()
