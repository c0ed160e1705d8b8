"""The parts of a fine-tuning run: settings, data and models, checked to fit together."""

import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from bert_jax.artefacts.saved.model import SavedModel, digest_of
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.objectives.embedding import EmbeddingObjective
from bert_jax.objectives.objective import Objective
from bert_jax.objectives.task import TaskObjective
from bert_jax.tasks.opening import open_task
from bert_jax.tasks.overlap import example_keys, overlap_warning
from bert_jax.tasks.rows import Batch, TrainBatches, choose_buckets
from bert_jax.tasks.skew import repeats
from bert_jax.tasks.task import Split, Task
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.start import Read, read_inits, with_head, with_teacher, with_vectors
from bert_jax.training.start import Start
from bert_jax.training.steps.optim import MAX_STEPS
from bert_jax.training.steps.state import StepConfig
from bert_jax.training.sweep.statistics import Trial

_ENCODER = frozenset({"encoder/embeddings", "encoder/layers", "encoder/final_norm"})
_BASE_WIDTH = 768
_HEAD_RATE = 1e-3
_FEW_ROWS = 3000
_log = logging.getLogger("bert_jax")


@dataclass(frozen=True)
class Schedule:
    """Schedule of trials and steps: groups of trials (waves) train one after another."""

    waves: tuple[tuple[Trial, ...], ...]
    """Groups of trials that train together; copies of the last trial fill up the last group."""
    num_steps: int
    """Number of steps in each wave."""
    epoch: int
    """Number of steps in an epoch."""
    interval: float
    """Number of steps between two evaluations on dev, at least 1; may be fractional."""

    @property
    def num_trials(self) -> int:
        """Number of trials, without copies."""
        return len({trial for wave in self.waves for trial in wave})

    @property
    def total_steps(self) -> int:
        """Number of steps in all waves together."""
        return len(self.waves) * self.num_steps

    def evaluates_after(self, step: int) -> bool:
        """Return true if dev is scored after `step` steps of a wave; always true for the last."""
        nearest = round(step / self.interval) * self.interval
        return step == self.num_steps or step == round(nearest)


def with_rates(config: FinetuneConfig, width: int, num_rows: int) -> FinetuneConfig:
    """Fill in the learning rates that depend on the encoder's width and the number of rows."""
    if config.optimizer.learning_rate:
        return config
    rate = config.optimizer.rate_of(width)
    head = config.optimizer.head_learning_rate
    if head is None and width < _BASE_WIDTH:
        head = max(rate, _HEAD_RATE)
    optimizer = dataclasses.replace(config.optimizer, learning_rate=rate, head_learning_rate=head)
    sweep = config.sweep
    if num_rows < _FEW_ROWS and not (sweep.learning_rates or config.task.fold):
        rates = tuple(float(f"{factor * rate:.2g}") for factor in (1 / 3, 1, 3))
        sweep = dataclasses.replace(sweep, learning_rates=rates)
    return dataclasses.replace(config, optimizer=optimizer, sweep=sweep)


def schedule_of(config: FinetuneConfig, epoch: int, inits: Iterable[str]) -> Schedule:
    """Return the schedule of a run with `epoch` batches per epoch, started from each of `inits`.

    Raise a UserError if a wave has more than `MAX_STEPS` steps.
    """
    steps = config.training.num_epochs * epoch
    if steps > MAX_STEPS:
        raise UserError(
            f"training.num_epochs is {config.training.num_epochs:g}; with {epoch:,} steps per "
            f"epoch, this means {steps:.4g} steps, but a run has at most {MAX_STEPS:,} steps. Set "
            f"training.num_epochs to {MAX_STEPS // epoch:,} or less"
        )
    num_steps, seeds = max(1, round(steps)), range(config.seed, config.seed + config.sweep.seeds)
    interval = epoch / config.training.evals_per_epoch
    # A cross-validation fold is scored only after the last step, and selects no checkpoint.
    interval = float(num_steps) if config.task.fold else interval
    trials = tuple(Trial(*each) for each in itertools.product(inits, config.learning_rates, seeds))
    size = min(config.sweep.at_once or len(trials), len(trials))
    waves = (trials[start : start + size] for start in range(0, len(trials), size))
    filled = tuple(wave + wave[-1:] * (size - len(wave)) for wave in waves)
    return Schedule(filled, num_steps, epoch, max(1.0, interval))


def frozen_parts(config: FinetuneConfig, model: ModelConfig) -> dict[str, Any]:
    """Return the fields of an objective that name frozen parts; LoRA freezes the whole encoder.

    Raise a UserError if `training.freeze` is 0 or exceeds the number of layers.
    """
    freeze = config.training.freeze
    if config.lora.rank or freeze == "encoder":
        return {"frozen": _ENCODER}
    if not freeze:
        return {}
    embeddings = frozenset({"encoder/embeddings"})
    if freeze == "embeddings":
        return {"frozen": embeddings}
    layers = int(freeze)
    if not 1 <= layers <= model.num_layers:
        raise UserError(
            f"training.freeze is {layers}, but the model has {model.num_layers} layers; it must "
            f"be from 1 to {model.num_layers}, or 'embeddings'"
        )
    if layers == model.num_layers:
        return {"frozen": embeddings | {"encoder/layers"}}
    return {"frozen": embeddings, "frozen_layers": layers}


def encoder_of(initial: SavedModel, config: FinetuneConfig) -> ModelConfig:
    """Return the configuration of the initial encoder, with the settings of this run."""
    training, model = config.training, initial.config
    model = dataclasses.replace(model, remat=training.remat, attention_impl=training.attention_impl)
    length, rotates = config.task.max_length, model.positions == "rope"
    if rotates and length > model.num_positions:
        _log.warning(
            "task.max_length is %d, but %s was trained on rows of at most %d tokens. Its rotary "
            "positions allow longer rows, but only this run trains the model on them",
            length, initial.name, model.num_positions,
        )  # fmt: skip
        model = dataclasses.replace(model, num_positions=length)
    rate = training.dropout_rate
    if rate is None:
        return model
    # Kernels for long rows and for windows have no dropout on attention probabilities.
    keeps = rotates and not model.attention_dropout_rate
    return dataclasses.replace(
        model, hidden_dropout_rate=rate, attention_dropout_rate=0.0 if keeps else rate,
        embedding_dropout_rate=model.embedding_dropout_rate and rate,
        mlp_dropout_rate=model.mlp_dropout_rate and rate,
    )  # fmt: skip


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
    schedule: Schedule

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

    Raise a UserError if something does not fit; the message names the field of the configuration.
    """
    config.distil.check_section()
    config.lora.check_section()
    initial, given = read_inits(config, read)
    model = encoder_of(initial, config)
    frozen = frozen_parts(config, model)
    task = open_task(config.task, initial.tokenizer, model.num_positions)
    train, dev = task.train_split(), tuple(task.dev_splits())
    if task.metric == "recall@100" and dev[0].constant_score == 1:
        raise UserError(
            "task.metric is 'recall@100', but the dev rows have at most 100 candidates, so every "
            "ranking scores 1; choose another metric"
        )
    test = tuple(task.test_splits())
    config = with_rates(config, model.hidden_dim, len(train.rows))
    power = task.config.skew.oversampling
    objective: Objective
    if task.objective == "embedding":
        objective, digested, inits = with_vectors(config, model, task, given, frozen)
    else:
        objective, inits = with_head(config, initial, model, task, given, frozen, read)
        digested = inits
    teacher = None
    if config.distil.teacher:
        objective, teacher = with_teacher(config.distil, objective, initial, task, read)
    start = Start(teacher=teacher, inits=inits)
    fingerprints = {
        name: digest_of(parts, initial.tokenizer.fingerprint)
        for name, parts in zip(("init", "sweep.baseline"), digested.values(), strict=False)
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
    times = repeats(train.rows, task.num_outputs, power) if power else None
    batches = TrainBatches(train.rows, buckets, config.training.batch_size, pad_id, times)
    schedule = schedule_of(config, batches.num_batches, inits)
    step = StepConfig(
        objective=objective,
        # The updates of each trial are multiplied by the trial's learning rate.
        optimizer=dataclasses.replace(config.optimizer, learning_rate=1.0),
        num_steps=schedule.num_steps, layer_decay=config.optimizer.layer_decay,
        accumulation=config.training.accumulation, guard=config.guard,
    )  # fmt: skip
    return Setup(
        config=config, step=step, schedule=schedule, task=task, initial=initial, start=start,
        fingerprints=fingerprints, train=train, dev=dev, test=test, batches=batches,
    )  # fmt: skip
