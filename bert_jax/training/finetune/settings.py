"""Settings of a fine-tuning run, computed from its configuration, model and batches."""

import dataclasses
import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.steps.optim import MAX_STEPS
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
    """Groups of trials that train together. All groups have the same size: the last group is filled
    up with copies of its last trial."""
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

    Raises:
        UserError: A wave has more than `MAX_STEPS` steps.
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

    Raises:
        UserError: `training.freeze` is 0, or more layers than the model has.
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
        model, hidden_dropout_rate=rate, attention_dropout_rate=0.0 if keeps else rate
    )
