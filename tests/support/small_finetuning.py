"""A pretrained model of 16 wide, tables that it can learn in seconds, and what is compared."""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from huggingface_directory import MODEL, write_huggingface, write_safetensors

from bert_jax.config.mapping import build, to_dict
from bert_jax.distributed.checkpoint.reading import load_newest
from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.distributed.parallel.sharding import make_trial_mesh
from bert_jax.training import loop
from bert_jax.training.finetune import evaluate, report
from bert_jax.training.finetune import train as train_module
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.run.telemetry import read_metrics
from bert_jax.training.steps import trials


def use_devices(patch: pytest.MonkeyPatch, count: int) -> None:
    """Runs take the first devices alone: nothing is compiled for eight."""
    for module in (train_module, evaluate):
        patch.setattr(
            module, "make_trial_mesh", lambda c, n: make_trial_mesh(c, n, jax.devices()[:count])
        )


def compile_once(patch: pytest.MonkeyPatch) -> None:
    """One device, and each step traced and compiled once."""
    use_devices(patch, 1)
    for module, name in (
        (loop, "make_train_step"), (report, "make_eval_step"), (trials, "make_keep_best"),
        (evaluate, "make_eval_step"),
    ):  # fmt: skip
        patch.setattr(module, name, functools.cache(getattr(module, name)))


def write_table(path: Path, num_rows: int, seed: int, *, labels: bool = True) -> str:
    """Cats and dogs, of which the label says which are more; some labels are wrong."""
    random = np.random.default_rng(seed)
    rows = ["text,label" if labels else "text"]
    for number in range(num_rows):
        animals = random.choice(["cat", "dog"], 5).tolist()
        label = max(("cat", "dog"), key=animals.count)
        if number % 7 == 6:
            label = random.choice(["cat", "dog"])
        rows.append(f"the {' '.join(animals)} sat ." + (f",{label}" if labels else ""))
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def write_files(directory: Path, num_positions: int = MODEL.num_positions) -> dict[str, str]:
    """A model, and tables for training and for choosing."""
    directory.mkdir(exist_ok=True)
    weights = write_huggingface(directory / "bert", max_position_embeddings=num_positions)
    name = "bert.embeddings.position_embeddings.weight"
    weights[name] = weights[name][:num_positions]
    for name in weights:
        scale, shift = (0.1, "LayerNorm.weight" in name) if "LayerNorm" in name else (0.3, 0)
        weights[name] = weights[name] * np.float32(scale) + np.float32(shift)
    write_safetensors(directory / "bert" / "model.safetensors", weights)
    return {
        "init": str(directory / "bert"),
        "train": write_table(directory / "train.csv", 44, 0),
        "dev": write_table(directory / "dev.csv", 24, 1),
    }


def small_config(
    files: dict[str, str], *, table: dict[str, Any] | None = None, **changes: Any
) -> FinetuneConfig:
    """6 batches an epoch, the last of 4 rows; one length.

    Args:
        files: From `write_files`.
        **changes: By dotted name with __ for the dot, such as `sweep__seeds=3`.
        table: The fields of the task, in place of the names of its files.
    """
    own = {"train": files["train"], "dev": files["dev"]}
    sections: dict[str, Any] = {
        "task": {"kind": "table", "max_length": 16, **(table or own)},
        "init": files["init"],
        "training": {"num_epochs": 3.0, "batch_size": 8, "eval_batch_size": 24, "max_buckets": 1},
        "optimizer": {"learning_rate": 1e-2},
        "seed": 6,
    }
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            sections.setdefault(section, {})[field] = value
        else:
            sections[section] = value
    return build(FinetuneConfig, sections)


def write_config(path: Path, config: FinetuneConfig) -> str:
    """A configuration as a file that the command line takes."""
    text = json.dumps(to_dict(config))
    path.write_text(f"import json\ndef get_config():\n    return json.loads({text!r})\n")
    return str(path)


def fingerprint(workdir: Path) -> dict[str, Any]:
    """Outcomes, metrics and the saved parameters, without what a clock has a part in."""
    statistics = json.loads((workdir / "statistics.json").read_text())
    restored = load_newest(workdir / "checkpoints")
    assert restored is not None
    assert len(saved_steps(workdir / "checkpoints")) == 1
    return {
        "outcomes": [
            {name: value for name, value in outcome.items() if name != "seconds"}
            for outcome in statistics["outcomes"]
        ],
        "metrics": [
            {name: value for name, value in row.items() if not name.startswith(("perf/", "event/"))}
            for row in read_metrics(workdir / "metrics.jsonl")
        ],
        "scores": restored.record.extra["scores"],
        "member": restored.record.extra["member"],
        "params": {
            jax.tree_util.keystr(path): hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
            for path, leaf in jax.tree_util.tree_leaves_with_path(restored.state)
        },
    }
