"""Formulas of station 8: hidden words, the two losses of BERT, and four heads.

States are h (L, D), those of one row. All random numbers are arguments, one for each place.
"""

import numpy as np


def corrupt(tokens, chance, action, drawn, mask, special, rate=0.15):
    """Hide some tokens (L); return what the model sees, and the places that it has to guess."""
    number = max(1, round(rate * len(tokens)))
    chance = np.where(np.isin(tokens, special), -1, chance)
    places = np.sort(np.argsort(-chance)[:number])
    act, true = action[places], tokens[places]
    seen = tokens.copy()
    seen[places] = np.where(act < 0.8, mask, np.where(act < 0.9, drawn[places], true))
    return seen, places


def surprise(scores, labels):
    """Return -log of the probability of each label: scores (N, V), labels (N)."""
    scores = scores - scores.max(-1, keepdims=True)
    return np.log(np.exp(scores).sum(-1)) - scores[np.arange(len(labels)), labels]


def gelu(z):
    """Let large numbers pass and stop small ones; this is the form of BERT's own program."""
    return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


def word_scores(h, W, b, norm, table, bias):
    """Score all words of the table (V, D) at places with the states h (N, D)."""
    return norm(gelu(h @ W.T + b)) @ table.T + bias


def pooled(h, W, b):
    """Make one vector (D) for the whole row from the state of [CLS]."""
    return np.tanh(W @ h[0] + b)


def row_scores(h, pool, W, b):
    """Score the classes of a row: of one text or of two (next sentence)."""
    return W @ pooled(h, *pool) + b


def tag_scores(h, W, b):
    """Score the classes of each word (L, C)."""
    return h @ W.T + b


def span_loss(h, W, b, first, last):
    """Score each place as the start and as the end of an answer; return the mean surprise."""
    return surprise((h @ W.T + b).T, np.array([first, last])).mean()
