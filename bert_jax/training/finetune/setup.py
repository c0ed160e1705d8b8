"""The parts of a fine-tuning run: settings, data and models, checked to fit together."""

import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np

from bert_jax.artefacts.saved.model import SavedModel, digest_of
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.objectives.embedding import EmbeddingObjective
from bert_jax.objectives.objective import Objective
from bert_jax.objectives.task import TaskObjective
from bert_jax.tasks.opening import open_task
from bert_jax.tasks.overlap import example_keys, overlap_warning
from bert_jax.tasks.rows import Batch, TrainBatches, choose_buckets
from bert_jax.tasks.skew import repeats
from bert_jax.tasks.task import Split, Task
from bert_jax.training.finetune import settings
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.start import Read, read_inits, with_head, with_teacher, with_vectors
from bert_jax.training.start import Start
from bert_jax.training.steps.state import StepConfig


@dataclass(frozen=True)
class Setup:
    """Everything that a fine-tuning run needs before its first step."""

    config: FinetuneConfig
    """Configuration of the run, with the learning rates that depend on model and data."""
    step: StepConfig
    task: Task
    initial: SavedModel
    """Model named by `init`. The run uses its tokenizer."""
    start: Start
    fingerprints: dict[str, str]
    """Fingerprints of the models and data that the configuration names, by field."""
    train: Split
    dev: tuple[Split, ...]
    test: tuple[Split, ...]
    """Splits to score once, after training."""
    batches: TrainBatches
    schedule: settings.Schedule

    @property
    def objective(self) -> TaskObjective | EmbeddingObjective:
        """Objective of training, without the teacher, for evaluations and the saved model."""
        return cast(TaskObjective | EmbeddingObjective, self.step.objective.for_evaluation())

    @property
    def inits(self) -> tuple[str, ...]:
        """Names of the initialisations."""
        return tuple(self.start.inits)

    @property
    def splits(self) -> tuple[Split, ...]:
        """All splits, the training data first."""
        return (self.train, *self.dev, *self.test)

    def overlaps(self) -> list[str]:
        """Return a warning for each split that shares texts with the training data."""
        known = example_keys(self.train.texts())
        others = [(split.name, split.texts()) for split in (*self.dev, *self.test)]
        return [said for other in others if (said := overlap_warning(*other, known))]

    def rows_of(self, wave: int, step: int) -> Iterator[Batch]:
        """Yield the batches of a wave endlessly, beginning after the first `step` batches."""
        seeds = [trial.seed for trial in self.schedule.waves[wave]]
        epoch, start = divmod(step, self.batches.num_batches)
        while True:
            yield from self.batches.epoch(epoch, seeds, start)
            epoch, start = epoch + 1, 0


def set_up(config: FinetuneConfig, read: Read = read_model) -> Setup:
    """Read the models and the data of a run, and check that they fit together.

    Raises:
        UserError: Something does not fit; the message names the field of the configuration.
    """
    config.distil.check_section()
    initial, given = read_inits(config, read)
    model = settings.encoder_of(initial, config)
    frozen = settings.frozen_parts(config, model)
    task = open_task(config.task, initial.tokenizer, model.num_positions)
    train, dev = task.train_split(), tuple(task.dev_splits())
    test = tuple(task.test_splits())
    config = settings.with_rates(config, model.hidden_dim, len(train.rows))
    skew = task.config.skew
    objective: Objective
    if task.objective == "embedding":
        objective, inits = with_vectors(config, model, task, given, frozen)
    else:
        objective, inits = with_head(config, initial, model, task, given, frozen, read)
    teacher = None
    if config.distil.teacher:
        objective, teacher = with_teacher(config.distil, objective, initial, task, read)
    start = Start(teacher=teacher, inits=inits)
    fingerprints = {
        name: digest_of(parts, initial.tokenizer.fingerprint)
        for name, parts in zip(("init", "sweep.baseline"), inits.values(), strict=False)
    }
    if teacher:
        fingerprints["distil.teacher"] = start.teacher_digest
    digest = hashlib.sha256()
    for rows in (split.rows for split in (train, *dev)):
        labels = () if rows.labels is None else rows.labels
        for array in (rows.row_lengths, rows.second_start, *rows.tokens, *labels):
            digest.update(np.ascontiguousarray(array).tobytes())
    fingerprints["task"] = digest.hexdigest()
    fingerprints |= {f"task.{split.name}": split.fingerprint for split in test}
    buckets = choose_buckets(
        train.rows.lengths, config.training.max_buckets, limit=model.num_positions
    )
    pad_id = initial.tokenizer.special_ids.pad
    times = None
    if skew.oversampling:
        times = repeats(train.rows, task.num_outputs, skew.oversampling)
    batches = TrainBatches(train.rows, buckets, config.training.batch_size, pad_id, times)
    schedule = settings.schedule_of(config, batches.num_batches, inits)
    return Setup(
        config=config,
        step=StepConfig(
            objective=objective,
            # The updates of each trial are multiplied by the trial's learning rate.
            optimizer=dataclasses.replace(config.optimizer, learning_rate=1.0),
            num_steps=schedule.num_steps,
            layer_decay=config.optimizer.layer_decay,
            accumulation=config.training.accumulation,
            guard=config.guard,
        ),
        schedule=schedule,
        task=task,
        initial=initial,
        start=start,
        fingerprints=fingerprints,
        train=train,
        dev=dev,
        test=test,
        batches=batches,
    )
