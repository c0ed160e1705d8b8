"""A linear model of word counts, the score that a fine-tuned model of texts should beat."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_jax.tasks.examples import TextExample

MAX_EXAMPLES = 50_000
"""Largest number of training examples; the fit then takes at most about a minute."""


def predictions(
    objective: str,
    train: Sequence[TextExample],
    labels: np.ndarray,
    examples: Sequence[TextExample],
) -> np.ndarray | None:
    """Predict the labels of examples by words and pairs of words, without a neural network.

    Texts become TF-IDF vectors. Logistic regression predicts classes, and ridge regression scores.

    Args:
        objective: "single_label", "multi_label" or "regression".
        train: N labelled examples.
        labels: labels of `train`: (N,) classes or scores, or (N, K) bool.
        examples: M examples to predict.

    Returns:
        Predictions (M,) or (M, K); None if scikit-learn (the extra `baseline`) is not installed.
    """
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression, Ridge
        from sklearn.multiclass import OneVsRestClassifier
        from sklearn.pipeline import make_pipeline
    except ImportError:
        return None
    linear: Any = Ridge() if objective == "regression" else LogisticRegression(C=10, max_iter=1000)
    if objective == "multi_label":
        linear = OneVsRestClassifier(linear)
    model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True), linear)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about classes that never occur, and convergence
        found = model.fit([_text(each) for each in train], labels).predict(
            [_text(each) for each in examples]
        )
    return np.asarray(found).astype(labels.dtype)


def _text(example: TextExample) -> str:
    """Return the text of an example; words of the second text become other words."""
    second = (example.text_pair or "").split()
    return " ".join([example.text, *(f"second_{word}" for word in second)])
