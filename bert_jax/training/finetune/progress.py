"""Words and columns for the trials of a sweep."""

import math
from collections.abc import Mapping, Sequence

from scipy.special import bdtrik, stdtrit

from bert_jax.training.progress import null
from bert_jax.training.sweep.intervals import LEVEL
from bert_jax.training.sweep.statistics import quantile

_CORRELATIONS = ("matthews", "pearson", "spearman")


class NoModelError(RuntimeError):
    """End of a sweep in which no run of the initialisation has a finite score."""

    exit_code = 1


class NothingLearnedError(RuntimeError):
    """End of a complete run that is no better than a constant prediction."""

    exit_code = 8


def evaluation_columns(
    losses: Sequence[float | None], scores: Sequence[Mapping[str, float]]
) -> dict[str, Sequence[float | None]]:
    """Return the columns of an evaluation's row, with a value for each trial.

    `losses` come from the first dev split; scores are empty where logits were not finite.
    """
    columns: dict[str, Sequence[float | None]] = {}
    if any(loss is not None for loss in losses):
        columns["eval/loss"] = losses
    for name in dict.fromkeys(name for mine in scores for name in mine):
        columns[f"eval/{name}"] = [null(mine.get(name, math.nan)) for mine in scores]
    return columns


def evaluation_line(
    where: str, losses: Sequence[float | None], scores: Sequence[Mapping[str, float]], metric: str
) -> str:
    """Describe an evaluation at epoch and step `where`: training losses, and scores in `metric`."""
    found = [mine.get(metric) for mine in scores]
    known = [value for value in found if value is not None and math.isfinite(value)]
    text = _number(quantile(found, 0.5), "g")
    if len(scores) > 1 and known:
        text = f"median {text}, from {min(known):.4g} to {max(known):.4g}"
        if len(known) < len(scores):
            text += f"; {len(scores) - len(known)} of {len(scores)} not a number"
    return f"{where}  loss {_number(median_loss(losses), 'f')}  {metric} {text}"


def median_loss(losses: Sequence[float | None]) -> float | None:
    """Return the median loss; a trial without a loss counts as the highest."""
    # The lowest loss is the best: a lost trial counts above all other trials.
    median = quantile([None if value is None else -value for value in losses], 0.5)
    return None if median is None else -median


def goal_score(metric: str, constant_score: float, rows: int, num_labels: int = 0) -> float:
    """Compute the score that predictions without the text exceed in at most about 5% of cases.

    Their expected score is at most `constant_score`; for macro F1 it is 1 / `num_labels`, by
    drawing labels as often as they occur. The mean of `rows` values in [0, 1] deviates from its
    expectation no more than the share of successes of a binomial, whose bound is used: exact for
    accuracy and generous for F1. For correlations the bound is Student's.

    Args:
        metric: Name of the score; a fraction or a correlation.
        constant_score: Score of the best constant prediction; NaN: the result is minus infinity.
        rows: Number of rows scored.
        num_labels: Number of labels in single-label tasks, else 0.
    """
    if not math.isfinite(constant_score):
        return -math.inf
    if metric in _CORRELATIONS:
        t = stdtrit(max(rows - 2, 1), LEVEL)
        return max(constant_score, float(t / math.sqrt(max(rows - 2, 1) + t * t)))
    expected = constant_score
    if metric == "macro_f1" and num_labels:
        expected = max(expected, 1 / num_labels)
    if not 0 < expected < 1:
        return expected
    return math.ceil(bdtrik(LEVEL, rows, expected)) / rows


def unlearned(bests: Sequence[float | None], metric: str, constant_score: float) -> str:
    """Say that no run's best score is above the constant prediction's; "" if one is."""
    best = max((best for best in bests if best is not None), default=math.inf)
    if not best <= constant_score:
        return ""
    return (
        f"no run learned anything: the best {metric} on dev is {best:.4g}, and a constant "
        f"prediction has {constant_score:.4g}. Try other rates "
        "(sweep.learning_rates=1e-5,3e-5,1e-4), more steps (training.num_epochs), or a larger "
        "pretrained model (init)"
    )


def _number(value: float | None, kind: str) -> str:
    return "not a number" if value is None else f"{value:.4{kind}}"
