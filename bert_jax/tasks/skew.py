"""Imbalanced classes: class weights in the loss, and oversampling of rows.

Both depend only on the training labels and the options, so they are the same on any mesh. The
weights of a long text's windows (`Rows.weights`) sum to 1, so texts are counted, not windows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from bert_jax.config.bounds import Bounded, Fraction, NonNegative, Rate
from bert_jax.errors import UserError
from bert_jax.tasks.examples import LabelSet
from bert_jax.tasks.rows import Rows

BALANCED = "balanced"


@dataclass(frozen=True, kw_only=True)
class SkewConfig(Bounded, section="task"):
    """Options for rare classes and uncertain labels, used in training only."""

    class_weights: str = ""
    """Weights of the classes in the loss: a list such as spam=2.5,news=2 (unlisted labels weigh 1),
    or balanced: (all rows) / (number of classes that occur * rows of the class). With multi_label,
    a label's weight applies to the rows that have the label, and balanced means (rows without the
    label) / (rows with the label). Tags count as classes. If empty, all classes weigh 1."""
    focal_gamma: NonNegative = 0.0
    """Exponent of the focal loss (Lin et al. 2017), which lowers the loss of confident predictions;
    2 is usual. 0 means cross entropy."""
    label_smoothing: Rate = 0.0
    """Share of each target's probability that is spread evenly over all classes, such as 0.1."""
    oversampling: Fraction = 0.0
    """Exponent for repeating rows of rare classes. On average, a row occurs (most / own) **
    oversampling times in an epoch, where `most` and `own` count the rows of the most frequent class
    and of the row's rarest class. 0 repeats no row; 1 makes all classes equally frequent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        gamma, smoothing = self.focal_gamma, self.label_smoothing
        if gamma and smoothing:
            raise UserError(
                f"{self.SECTION}.focal_gamma is {gamma:g} and label_smoothing {smoothing:g}; the "
                "focal loss does not support label smoothing: set one of the two options to 0"
            )

    def check_has_classes(self, where: str) -> None:
        """Raise a UserError if an option is set; `where` names the task, which has no classes."""
        for name in ("class_weights", "focal_gamma", "label_smoothing", "oversampling"):
            if value := getattr(self, name):
                raise UserError(
                    f"{self.SECTION}.{name} is {value!r}, but {where} has no classes; leave it out"
                )


def class_weights(
    given: str, rows: Rows, names: Sequence[str], where: str = "class_weights"
) -> tuple[float, ...]:
    """Return the weight of each class in the loss; () if all weigh 1.

    `names` are the labels in the order of the outputs; `where` is the field's name in messages.
    Raise a UserError if a part of `given` is not LABEL=NUMBER (known, positive) or repeats a label.
    """
    if not given:
        return ()
    if given.strip() == BALANCED:
        return _balanced(rows, len(names))
    found = dict.fromkeys(names, 1.0)
    labels = LabelSet(tuple(names))
    met: set[str] = set()
    for part in given.split(","):
        label, sign, value = (piece.strip() for piece in part.rpartition("="))
        try:
            weight = float(value)
        except ValueError:
            weight = 0.0
        if not sign or not 0 < weight < math.inf:
            raise UserError(
                f"{where} has {part.strip()!r}; expected {BALANCED!r}, or labels with weights "
                f"above 0, such as {names[0]}=2.5"
            )
        labels.id(label, where)
        if label in met:
            raise UserError(f"{where} names {label!r} twice; name each label once")
        met.add(label)
        found[label] = weight
    return tuple(found.values())


def _shares(rows: Rows) -> Float[np.ndarray, " N"]:
    """Return each row's share of its text: 1, or less for a window of a long text."""
    return np.ones(len(rows)) if rows.weights is None else rows.weights.astype(np.float64)


def _balanced(rows: Rows, num_classes: int) -> tuple[float, ...]:
    """Return weights that make all classes count equally; 1 for a class that no row has."""
    labels = rows.labels
    shares = _shares(rows)
    if isinstance(labels, np.ndarray) and labels.ndim == 2:  # texts without / texts with the label
        total, held = np.rint(shares.sum()), np.rint(shares @ labels)
        counts = np.where((held > 0) & (held < total), held, total / 2)
        return tuple(((total - counts) / counts).tolist())
    assert labels is not None
    if rows.has_tags:
        flat = np.concatenate([*labels])
        counts = np.bincount(flat[flat >= 0], minlength=num_classes)
    else:
        counts = np.rint(np.bincount(np.asarray(labels), shares, num_classes))
    present = int((counts > 0).sum())
    weights = counts.sum() / (present * np.maximum(counts, 1))
    return tuple(np.where(counts > 0, weights, 1.0).tolist())


def repeats(rows: Rows, num_classes: int, power: float) -> Float[np.ndarray, " N"]:
    """Compute how often each row occurs in an epoch, on average; the minimum is 1.

    A row's rarest class decides (repeat factor sampling, Gupta et al. 2019, with the frequency of
    the most frequent class as the threshold). A row without a class occurs once.
    """
    labels = rows.labels
    assert labels is not None
    has = np.zeros((len(rows), num_classes), bool)
    if not isinstance(labels, np.ndarray):
        for mine, tags in zip(has, labels, strict=True):
            mine[tags[tags >= 0]] = True
    elif labels.ndim == 2:
        has = labels > 0
    else:
        has[np.arange(len(rows)), labels] = True
    counts = np.rint(_shares(rows) @ has)
    factors = (counts.max(initial=0) / np.maximum(counts, 1)) ** power
    return np.where(has, factors, 1.0).max(axis=1, initial=1.0)
