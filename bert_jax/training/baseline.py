"""Is the model learning context, or only word frequencies?

A masked LM falls within minutes to the unigram entropy of its corpus, the loss of predicting each
token by its frequency. Some runs never leave that level. Every run is therefore compared with it.
"""

import math
from dataclasses import dataclass
from typing import Any

from bert_jax.data.store import TokenStore
from bert_jax.training.config import PretrainConfig

MARGIN = 0.05
"""Nats below the baseline from which on a run counts as having left it."""


_FAR_ABOVE = 0.3  # nats; a loss so far above the line is not the plateau


@dataclass
class PlateauDetector:
    """Watches the masked-LM loss of training and explains, once, why it may have stopped falling.

    The judgement falls a quarter of the run after the warm-up (at most 10,000 steps after it, and
    at the end of the run at the latest): healthy runs spend their first steps at the baseline too.
    """

    baseline: float
    """Unigram entropy of the training corpus, nats."""
    unknown_rate: float
    """Share of the corpus's tokens that are the unknown token."""
    config: PretrainConfig
    mean: float = 0.0
    weight: float = 0.0
    done: bool = False

    @classmethod
    def of(cls, store: TokenStore, config: PretrainConfig) -> "PlateauDetector":
        """For a run on this store."""
        unknown = int(store.unigram_counts[store.special_ids.unk])
        return cls(store.unigram_entropy, unknown / max(1, store.num_tokens), config)

    @property
    def window(self) -> int:
        """Steps over which the loss is smoothed."""
        return max(5, min(100, self.config.training.num_steps // 20))

    @property
    def judged_at(self) -> int:
        """The step at which the loss has to be below the baseline."""
        num_steps = self.config.training.num_steps
        return min(
            self.config.warmup_steps + max(self.window, min(num_steps // 4, 10_000)), num_steps
        )

    @property
    def smoothed(self) -> float:
        """The smoothed loss, nats; NaN before the first step."""
        return self.mean / self.weight if self.weight else math.nan

    def observe(self, step: int, mlm_loss: float) -> str | None:
        """Takes the loss of one step (the number of updates made); the warning, when it is due."""
        decay = 1 - 1 / self.window
        self.mean = decay * self.mean + (1 - decay) * mlm_loss
        self.weight = decay * self.weight + (1 - decay)
        if self.done or step < self.judged_at:
            return None
        self.done = True
        if self.smoothed < self.baseline - MARGIN:
            return None
        return self._explanation(step)

    def state(self) -> dict[str, Any]:
        """JSON values that `restore` takes."""
        return {"mean": self.mean, "weight": self.weight, "done": self.done}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from what `state` gave."""
        self.mean, self.weight, self.done = state["mean"], state["weight"], state["done"]

    def _explanation(self, step: int) -> str:
        training, optimizer = self.config.training, self.config.optimizer
        warmup = self.config.warmup_steps
        phase = training.phases[0]
        tokens = phase.batch_size * phase.length
        rate = optimizer.learning_rate
        above = self.smoothed > self.baseline + _FAR_ABOVE
        met = "the model predicts how frequent each token is and has learnt nothing from context"
        causes = [f"the learning rate, {rate:g}, is too high (try {_two_digits(rate / 3)})"]
        if above:
            met = "the model has not yet learnt even how frequent each token is"
            causes = [
                f"the learning rate, {rate:g}, is too low for so short a run (try "
                f"{_two_digits(rate * 3)}), or so high that the loss diverges "
                f"(try {_two_digits(rate / 3)})"
            ]
        if warmup < 0.05 * training.num_steps:
            causes.append(
                f"the warm-up is too short: {warmup:,} of {training.num_steps:,} steps (5 to 10% "
                f"suits a model of {self.config.model.num_layers} post-norm layers)"
            )
        if tokens < 32_768:
            causes.append(
                f"the batch is too small for this learning rate: {phase.batch_size} rows of "
                f"{phase.length}, {tokens:,} tokens a step"
            )
        if training.num_steps < 20_000:
            causes.append(f"{training.num_steps:,} steps are too few for this model and corpus")
        causes.append(
            "the corpus and its tokenizer do not fit each other "
            f"({100 * self.unknown_rate:.2g}% of its tokens are unknown)"
        )
        return (
            f"Warning: the masked-LM loss is {self.smoothed:.3f} nats at step {step:,} (mean of "
            f"the last {self.window} or so), and the unigram entropy of the corpus is "
            f"{self.baseline:.3f}: {met}. Runs that are still there after the warm-up tend to "
            f"stay. Likely causes, the most frequent first: {'; '.join(causes)}."
        )


def compare(mlm_loss: float, baseline: float) -> str:
    """A loss beside the baseline, for people: `6.512 nats, 0.431 below unigram entropy`."""
    side = "below" if mlm_loss <= baseline else "above"
    return f"{mlm_loss:.3f} nats, {abs(baseline - mlm_loss):.3f} {side} unigram entropy"


def _two_digits(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")
