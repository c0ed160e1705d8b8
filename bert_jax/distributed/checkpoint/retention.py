"""Policy for deleting checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bert_jax.config.bounds import Bounded, Count, Natural


@dataclass(frozen=True)
class Retention(Bounded, section="checkpoint"):
    """Rules for keeping checkpoints; one reason to stay is enough."""

    keep: Count = 3
    """The newest ones, counted among those that were read back."""
    keep_every_steps: Natural = 0
    """Interval in steps between checkpoints that are kept for ever; 0: none."""
    keep_best: Natural = 0
    """Number of checkpoints with the best evaluation that stay."""
    best_metric: str = ""
    """Evaluated metric that ranks checkpoints, such as eval/loss: a name that ends in loss is
    best low, any other high. Empty: the first metric of the objective."""

    def superfluous(
        self,
        saved: Sequence[int],
        verified: Sequence[int],
        metrics: Mapping[int, Mapping[str, float]],
        lowest_at: int | None = None,
    ) -> list[int]:
        """Return the steps whose checkpoints may go.

        Nothing goes before `keep` newer ones were read back: a save that was never verified
        replaces none.

        Args:
            saved: Steps of all checkpoints, ascending.
            verified: Steps among them that were read back.
            metrics: Evaluations by step.
            lowest_at: Step of the lowest training loss. The newest verified checkpoint that is no
                newer stays too, or where all are newer, the oldest: the way back from a divergence.
        """
        if len(verified) < self.keep:
            return []
        oldest_kept = verified[-self.keep]
        sign = 1 if self.best_metric.endswith("loss") else -1
        ranked = sorted(
            (sign * metrics[step][self.best_metric], -step)
            for step in verified
            if self.best_metric in metrics.get(step, {})
        )
        best = {-negated for _, negated in ranked[: self.keep_best]}
        if lowest_at is not None:
            best.add(max((step for step in verified if step <= lowest_at), default=verified[0]))
        return [
            step
            for step in saved
            if step < oldest_kept
            and step not in best
            and not (self.keep_every_steps and step % self.keep_every_steps == 0)
        ]
