"""Formulas of station 4: attention to all states of the source, and two ways to use it.

The states are h (S, D), the decoder's state is s (D). Cells, start and readout are functions.
"""

import numpy as np


def dot(h, s):
    """Score each state by its product with s."""
    return h @ s


def multiplicative(h, s, W):
    """Score each state, mapped by W, by its product with s."""
    return h @ W.T @ s


def additive(h, s, v, W1, W2, b):
    """Score each state by a small network that sees the state and s."""
    return np.tanh(h @ W1.T + W2 @ s + b) @ v


def attend(h, scores):
    """Return the weights, which sum to 1, and the weighted mean of the states."""
    weights = np.exp(scores - scores.max())
    weights = weights / weights.sum()
    return weights, weights @ h


def write_before(y, h, s, score, cell, readout):
    """Let the state *before* a step attend (Bahdanau); return readouts (T, E), weights (T, S)."""
    readouts, looked = [], []
    for y_t in y:
        weights, a = attend(h, score(h, s))
        s = cell(np.concatenate([y_t, a]), s)
        readouts.append(readout(np.concatenate([s, a, y_t])))
        looked.append(weights)
    return np.stack(readouts), np.stack(looked)


def write_after(y, h, s, score, cell, readout, width):
    """Let the state *after* a step attend (Luong); the readout is fed to the next step."""
    r, readouts, looked = np.zeros(width), [], []
    for y_t in y:
        s = cell(np.concatenate([y_t, r]), s)
        weights, a = attend(h, score(h, s))
        r = readout(np.concatenate([s, a]))
        readouts.append(r)
        looked.append(weights)
    return np.stack(readouts), np.stack(looked)
