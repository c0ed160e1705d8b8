"""Write tests/golden/stopped_finetuning.tar.gz: a sweep that was stopped, and how it went on.

    python tests/golden/make_stopped_finetuning.py

Made once, by version 0.1.0, and never again: `tests/test_old_directories.py` holds later versions
to it. Beside the model and the table of directories.tar.gz, in the working directory:

    stopped/                   a sweep of two runs, stopped after 7 of 18 steps
    expected_finetuning.json   the losses of the same sweep without a stop
"""

import contextlib
import json
import os
import signal
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


SWEEP = {
    "task": {"kind": "table", "max_length": 24, "train": "table.csv"},
    "init": "imported",
    "training": {"num_epochs": 3.0, "batch_size": 6, "max_buckets": 1, "evals_per_epoch": 1},
    "optimizer": {"learning_rate": 0.01},
    "sweep": {"seeds": 2},
    "seed": 5,
}
"""Configuration; paths are relative to the directory of the archive."""


def losses(workdir: Path) -> dict[str, list[float]]:
    """Training losses of both runs, by step."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {str(row["step"]): row["train/loss"] for row in rows}


def main() -> None:
    from bert_jax.training.finetune.config import FinetuneConfig
    from bert_jax.training.finetune.train import finetune
    from bert_jax.training.pretrain.config import build  # of version 0.1.0

    config = build(FinetuneConfig, SWEEP)

    def stop_at_first_evaluation(line: str) -> None:
        if line.startswith("epoch 1.00"):
            os.kill(os.getpid(), signal.SIGTERM)

    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        with tarfile.open(HERE / "directories.tar.gz") as archive:
            archive.extractall(".", filter="data")
        assert finetune(config, "whole", echo=print).finished
        assert not finetune(config, "stopped", echo=stop_at_first_evaluation).finished
        expected = Path("expected_finetuning.json")
        expected.write_text(json.dumps(losses(Path("whole"))) + "\n")
        with tarfile.open(HERE / "stopped_finetuning.tar.gz", "w:gz") as archive:
            archive.add("stopped")
            archive.add(expected)


if __name__ == "__main__":
    sys.exit(main())
