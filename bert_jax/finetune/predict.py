"""Predictions of a fine-tuned model on other data."""

import sys
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from bert_jax.config.mapping import build
from bert_jax.errors import UserError
from bert_jax.files.remote import scheme
from bert_jax.finetune.batches import choose_buckets
from bert_jax.finetune.evaluate import judge_rows
from bert_jax.finetune.trials import place_params
from bert_jax.objectives.task import TaskObjective
from bert_jax.parallel.sharding import MeshConfig, make_trial_mesh
from bert_jax.saved.model import SavedModel, read_finetuned
from bert_jax.tasks.config import TaskConfig
from bert_jax.tasks.opening import open_task
from bert_jax.tasks.task import Outputs, Split, Task
from bert_jax.training.optim import OptimizerConfig
from bert_jax.training.state import StepConfig
from bert_jax.training.step import make_eval_step


def evaluate_finetuned(workdir: Path | str, data: str | None = None) -> dict[str, float]:
    """Scores of the best model of a run.

    Args:
        workdir: Work directory of `bert-jax finetune`.
        data: A file with labels, of GLUE also a split; None: the dev data of the run.

    Returns:
        Scores by name, of a second dev split (MNLI) with its name before them.

    Raises:
        UserError: No such run, or the data cannot be read or have no labels.
    """
    model = read_finetuned(workdir)
    if data is not None:
        split = _open(model, data)
        return split.score(split_outputs(model, split), model.origin.metrics)
    # Rows may have been held out of the training data, so all of it is read as the run did.
    config = build(TaskConfig, model.origin.config["task"], f"{workdir}: task")
    task = open_task(config, model.tokenizer, model.config.num_positions)
    if task.describe() != _task(model).describe():
        raise UserError(
            f"the data of {workdir} have changed since it was trained: other labels. Name data "
            "with --data"
        )
    values: dict[str, float] = {}
    for number, split in enumerate(task.dev_splits()):
        prefix = f"{split.name}/" if number else ""
        found = split.score(split_outputs(model, split))
        values.update({f"{prefix}{name}": value for name, value in found.items()})
    return values


def predict_finetuned(workdir: Path | str, data: str, out: Path) -> list[Path]:
    """Write the predictions of the best model of a run.

    Args:
        workdir: Work directory of `bert-jax finetune`.
        data: A file with the columns that the model was trained on; labels are not read. Of GLUE
            also a split.
        out: Directory for them.

    Returns:
        The files.

    Raises:
        UserError: No such run, the data cannot be read, or the directory cannot be written.
    """
    if scheme(out) is not None:
        raise UserError(f"--out is {out}; predictions are written to a local directory")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a directory")
    model = read_finetuned(workdir)
    split = _open(model, data, labelled=False)
    return split.write_predictions(split_outputs(model, split), out, model.origin.metrics)


def split_outputs(model: SavedModel, split: Split, *, batch_size: int = 64) -> Outputs:
    """Logits of the rows of a split, as `Split.score` takes them; on all devices."""
    assert model.outputs is not None
    objective = TaskObjective(model.config, model.outputs.head, model.outputs.objective)
    config = StepConfig(objective, OptimizerConfig(), num_steps=1)
    mesh = make_trial_mesh(MeshConfig(), 1)
    one = jax.tree.map(lambda leaf: np.asarray(leaf)[None], model.params)
    params = place_params(config, mesh, one)
    lengths = split.rows.lengths
    buckets = choose_buckets(lengths, 8, limit=model.config.num_positions)
    with tqdm(total=len(lengths), unit="row", disable=not sys.stderr.isatty()) as bar:
        (judged,) = judge_rows(
            make_eval_step(config, mesh, seed=0), mesh, params, split.rows, buckets=buckets,
            batch_size=batch_size, pad_id=model.tokenizer.special_ids.pad, done=bar.update,
        )  # fmt: skip
    return judged.outputs


def _task(model: SavedModel) -> Task:
    assert model.origin.task is not None  # of `read_finetuned`
    return model.origin.task


def _open(model: SavedModel, data: str, *, labelled: bool = True) -> Split:
    split = _task(model).open_split(data, labelled=labelled)
    for warning in split.warnings:
        print(f"Warning: {warning}", file=sys.stderr)
    return split
