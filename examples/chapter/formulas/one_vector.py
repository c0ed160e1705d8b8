"""Formulas of station 3: one network reads, a second writes, and one vector joins them.

Cells, start and readout are functions, such as those of stations 1 and 2.
"""

import numpy as np


def read(x, h, cell):
    """Read the vectors of all words x (S, E) from the state h on; return the last state."""
    for x_t in x:
        h = cell(x_t, h)
    return h


def write(y, c, start, cell, readout, table):
    """Score all words of the table (V, E) after each word of y (T, E), given the vector c."""
    s, scores = start(c), []
    for y_t in y:
        s = cell(np.concatenate([y_t, c]), s)
        scores.append(table @ readout(np.concatenate([s, c, y_t])))
    return np.stack(scores)


def surprise(scores, labels):
    """Return -log of the probability of each label (T): how far it was from being expected."""
    scores = scores - scores.max(-1, keepdims=True)
    probabilities = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    return -np.log(probabilities[np.arange(len(labels)), labels])
