"""Parts of a fine-tuning run, with a refusal of everything that does not fit."""

import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from bert_jax.errors import UserError
from bert_jax.finetune.batches import TrainBatches, choose_buckets
from bert_jax.finetune.config import FinetuneConfig
from bert_jax.finetune.start import (
    RANDOM,
    encoder_of,
    fingerprint_of,
    frozen_by,
    pooling_of,
    read_baseline,
    start_of,
)
from bert_jax.finetune.teacher import read_teacher
from bert_jax.model.task_heads import TaskHeadConfig
from bert_jax.objectives.distillation import TEACHER
from bert_jax.objectives.task import HEADS, TaskObjective
from bert_jax.saved.model import SavedModel, read_model
from bert_jax.sweep.statistics import Trial
from bert_jax.tasks.opening import open_task
from bert_jax.tasks.rows import Batch, Rows
from bert_jax.tasks.task import Split, Task
from bert_jax.training.config import MAX_STEPS
from bert_jax.training.state import StepConfig

_HEAD_DROPOUT = 0.1
_log = logging.getLogger("bert_jax")


@dataclass(frozen=True)
class Setup:
    """A run before its first step."""

    step: StepConfig
    task: Task
    initial: SavedModel
    starts: tuple[Any, ...]
    """Parts of the parameters with which each initialisation begins, {} for random weights."""
    inits: tuple[str, ...]
    """Names of the initialisations."""
    fingerprints: dict[str, str]
    """Fingerprints of the content that fields of the configuration name, by field."""
    members: tuple[Trial, ...]
    train: Split
    dev: tuple[Split, ...]
    batches: TrainBatches
    steps_per_eval: float
    """Updates from one evaluation of the dev splits to the next; at least 1."""
    waves: tuple[tuple[Trial, ...], ...]
    """Members that train together; all waves have the same number, the last filled up with
    repetitions of its last member."""

    @property
    def objective(self) -> TaskObjective:
        """Objective of the step."""
        return cast(TaskObjective, self.step.objective)

    def rows_of(self, wave: int, step: int) -> Iterator[Batch]:
        """Yield the batches of the members of a wave from number `step` on, without end."""
        seeds = [member.seed for member in self.waves[wave]]
        epoch, start = divmod(step, self.batches.num_batches)
        while True:
            yield from self.batches.epoch(epoch, seeds, start)
            epoch, start = epoch + 1, 0

    def evaluates_after(self, step: int) -> bool:
        """Say whether the dev splits are scored after `step` updates; always after the last."""
        nearest = round(step / self.steps_per_eval) * self.steps_per_eval
        return step == self.step.num_steps or step == round(nearest)


def set_up(config: FinetuneConfig) -> Setup:
    """Read the initialisations and the data.

    Raises:
        UserError: Says what does not fit, with the field of the configuration.
    """
    if not config.init:
        raise UserError(
            "init is empty; give --config.init=DIR, the work directory of a pretraining run or a "
            "directory in Hugging Face's format"
        )
    config.task.check_sections()
    initial = read_model(config.init, encoder_only=True)
    given: list[SavedModel | None] = [None if config.reinitialise else initial]
    inits = [RANDOM if config.reinitialise else config.init]
    if config.sweep.baseline:
        given.append(read_baseline(config.sweep.baseline, initial))
        inits.append(config.sweep.baseline)
    if len(set(inits)) < len(inits):
        raise UserError(f"sweep.baseline is {config.sweep.baseline!r}, the same as init")
    model = encoder_of(initial, config)
    task = open_task(config.task, initial.tokenizer, model.num_positions)
    network = HEADS[task.objective].network
    pools = network == "classification" and model.pooler
    if pools and not (initial.has_pooler or config.reinitialise):
        _log.warning(
            "%s has no pooler, which this task reads: it begins at random, as the head does",
            initial.name,
        )
    train, dev = task.train_split(), tuple(task.dev_splits())
    rate = config.training.dropout_rate
    head = TaskHeadConfig(
        network,
        num_labels=task.num_outputs,
        # BERT's SQuAD head reads the encoder's output as it is.
        dropout_rate=0.0 if task.objective == "span" else _HEAD_DROPOUT if rate is None else rate,
        pooling=pooling_of(config, initial, network),
    )
    starts = tuple(
        start_of(config, name, saved, model, head, task)
        for name, saved in zip(inits, given, strict=True)
    )
    frozen = frozen_by(config, model)
    objective = TaskObjective(
        model, head, task.objective, lora=config.lora, frozen=frozen.entries,
        frozen_layers=frozen.layers,
    )  # fmt: skip
    fingerprints = {
        name: fingerprint_of(start, initial.tokenizer)
        for name, start in zip(("init", "sweep.baseline"), starts, strict=False)
    }
    if config.distil.teacher:
        teacher = read_teacher(config.distil, initial, task, head, train.rows)
        objective = teacher.taught(objective, config.distil)
        starts = tuple({**start, TEACHER: teacher.params} for start in starts)
        fingerprints["distil.teacher"] = fingerprint_of(teacher.params, initial.tokenizer)
    buckets = choose_buckets(
        train.rows.lengths, config.training.max_buckets, limit=model.num_positions
    )
    pad_id = initial.tokenizer.special_ids.pad
    batches = TrainBatches(train.rows, buckets, config.training.batch_size, pad_id)
    steps = config.training.num_epochs * batches.num_batches
    if steps > MAX_STEPS:
        raise UserError(
            f"training.num_epochs is {config.training.num_epochs:g}, {steps:.4g} steps of "
            f"{batches.num_batches:,} an epoch; a run has at most {MAX_STEPS:,}: set it to "
            f"{MAX_STEPS // batches.num_batches:,} or less"
        )
    num_steps = max(1, round(steps))
    members = tuple(
        Trial(init, rate, config.seed + number)
        for init, rate, number in itertools.product(
            inits, config.learning_rates, range(config.sweep.seeds)
        )
    )
    size = min(config.sweep.at_once or len(members), len(members))
    waves = [members[start : start + size] for start in range(0, len(members), size)]
    return Setup(
        step=StepConfig(
            objective=objective,
            # Each trial's own rate multiplies its updates.
            optimizer=dataclasses.replace(config.optimizer, learning_rate=1.0),
            num_steps=num_steps,
            layer_decay=config.optimizer.layer_decay,
            accumulation=config.training.accumulation,
            guard=config.guard,
        ),
        task=task,
        initial=initial,
        starts=starts,
        inits=tuple(inits),
        fingerprints={
            **fingerprints,
            "task": _rows_fingerprint(split.rows for split in (train, *dev)),
        },
        members=members,
        train=train,
        dev=dev,
        batches=batches,
        steps_per_eval=max(1.0, batches.num_batches / config.training.evals_per_epoch),
        waves=tuple(wave + wave[-1:] * (size - len(wave)) for wave in waves),
    )


def _rows_fingerprint(splits: Iterable[Rows]) -> str:
    """Return the SHA-256 of the tokens and labels of all splits."""
    digest = hashlib.sha256()
    for rows in splits:
        labels = () if rows.labels is None else rows.labels
        for array in (rows.lengths, rows.second_start, *rows.tokens, *labels):
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
