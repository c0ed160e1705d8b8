"""Phases of a run: as a configuration gives them, and as the pipeline takes them."""

from dataclasses import dataclass
from typing import Literal

from bert_jax.config.mapping import check_values
from bert_jax.errors import UserError

THETAS = ("rope_theta", "local_rope_theta")
"""Fields of a phase that stand for fields of the model."""


@dataclass(frozen=True)
class PhaseConfig:
    """A stretch of training with rows of one length; BERT spends 90% of its steps at 128.

    Fields that are not set take the run's values.
    """

    length: int = 128
    """Tokens per row, special tokens included."""
    batch_size: int = 256
    """Rows per step, over all devices and micro-batches."""
    share: float = 1.0
    """Share of the run's steps; the shares of all phases sum to 1."""
    masking_rate: float | None = None
    """Share of a row's tokens that are predicted; None: `masking.rate`."""
    learning_rate: float | None = None
    """Peak of the learning rate; None: `optimizer.learning_rate`."""
    decay: Literal["", "constant", "linear", "cosine", "one_minus_sqrt"] = ""
    """Shape of the learning rate from the first to the last step of the phase; empty: the run's
    schedule goes on. The warm-up is the run's."""
    end_rate: float | None = None
    """Learning rate at the end of `decay`; None: `optimizer.end_share` of the phase's peak."""
    rope_theta: float | None = None
    """Base of the rotations' wavelengths in global layers; None: `model.rope_theta`."""
    local_rope_theta: float | None = None
    """Base of the rotations' wavelengths in local layers; None: `model.local_rope_theta`."""
    corpus: str = ""
    """Directory of the training text, with the run's tokenizer; empty: `data.corpus`, whose
    held-out text is evaluated in all phases."""

    def check(self, number: int) -> None:
        """Refuse values that train nothing; `number` is that of the phase, from 0.

        Raises:
            UserError: Names the phase and the field.
        """
        masking, peak, end = self.masking_rate, self.learning_rate, self.end_rate
        check_values(
            f"training.phases[{number}]",
            self,
            length=(self.length >= 8, "at least 8"),
            batch_size=(self.batch_size >= 1, "at least 1"),
            share=(0 < self.share <= 1, "in (0, 1]"),
            masking_rate=(masking is None or 0 < masking <= 1, "above 0 and at most 1, or None"),
            learning_rate=(peak is None or peak > 0, "positive, or None"),
            end_rate=(end is None or end >= 0, "at least 0, or None"),
            **{
                name: ((theta := getattr(self, name)) is None or theta > 0, "above 0, or None")
                for name in THETAS
            },
        )
        if end is not None and self.decay in ("", "constant"):
            raise UserError(
                f"training.phases[{number}].end_rate is {end:g}, but the phase's decay is "
                f"{self.decay!r}, which has no end; expected linear, cosine or one_minus_sqrt"
            )


@dataclass(frozen=True)
class Phase:
    """A stretch of training with one shape."""

    length: int
    """L, special tokens included."""
    batch_size: int
    """B, rows of a step over all processes."""
    num_steps: int
