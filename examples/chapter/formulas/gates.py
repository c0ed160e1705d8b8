"""Formulas of station 2: the cells LSTM and GRU. Matrices and biases have one entry a gate."""

import numpy as np


def sigmoid(z):
    """Squash numbers into 0 to 1."""
    return 1 / (1 + np.exp(-z))


def lstm_step(x, h, c, W, U, b):
    """Take one step; return the new h and c (width), and the gates i, f, g, o (4, width)."""
    i, f, g, o = (W[n] @ x + U[n] @ h + b[n] for n in range(4))
    i, f, o, g = sigmoid(i), sigmoid(f), sigmoid(o), np.tanh(g)
    c = f * c + i * g
    return o * np.tanh(c), c, np.stack([i, f, g, o])


def gru_step(x, h, W, U, b, d):
    """Take one step; return the new h (width). The biases d belong to U."""
    r = sigmoid(W[0] @ x + b[0] + U[0] @ h + d[0])
    z = sigmoid(W[1] @ x + b[1] + U[1] @ h + d[1])
    n = np.tanh(W[2] @ x + b[2] + r * (U[2] @ h + d[2]))
    return z * h + (1 - z) * n
