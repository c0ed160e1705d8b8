"""Words and columns for the trials of a sweep."""

import math
from collections.abc import Sequence

from scipy.special import bdtrik, stdtrit

from bert_jax.training.sweep.statistics import LEVEL, quantile

_CORRELATIONS = ("matthews", "pearson", "spearman")


class NoModelError(RuntimeError):
    """End of a sweep in which no run of the initialisation has a finite score."""

    exit_code = 1


class NothingLearnedError(RuntimeError):
    """End of a complete run that is no better than a constant prediction."""

    exit_code = 8


def score_range(scores: Sequence[float | None]) -> str:
    """Describe the scores of one or several runs in a metric."""
    known = [value for value in scores if value is not None and math.isfinite(value)]
    median = quantile(scores, 0.5)
    text = "not a number" if median is None else f"{median:.4g}"
    if len(scores) > 1 and known:
        text = f"median {text}, from {min(known):.4g} to {max(known):.4g}"
        if len(known) < len(scores):
            text += f"; {len(scores) - len(known)} of {len(scores)} not a number"
    return text


def goal_score(metric: str, constant_score: float, rows: int, num_labels: int = 0) -> float:
    """Compute the score that predictions without the text exceed in at most about 5% of cases.

    Their expected score is at most `constant_score`; for macro F1 it is 1 / `num_labels`, by
    drawing labels as often as they occur. The mean of `rows` values in [0, 1] deviates from its
    expectation no more than the share of successes of a binomial, whose bound is used: exact for
    accuracy and generous for F1. For correlations the bound is Student's.

    The score is a fraction or a correlation. A `constant_score` of NaN gives minus infinity;
    `num_labels` is 0 but in single-label tasks.
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
