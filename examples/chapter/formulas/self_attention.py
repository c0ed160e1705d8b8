"""Formulas of station 6: a sequence that looks at itself.

The sequence is x (L, D). A head has matrices (K, D) and biases (K) for queries, keys and values.
"""

import numpy as np


def softmax(scores):
    """Turn each row of scores into weights that sum to 1."""
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def head(x, W_q, b_q, W_k, b_k, W_v, b_v, seen, turn=lambda vectors: vectors):
    """Let each place look at the places that it may see; return weights (L, L) and means (L, K)."""
    q, k, v = turn(x @ W_q.T + b_q), turn(x @ W_k.T + b_k), x @ W_v.T + b_v
    scores = q @ k.T / np.sqrt(k.shape[1])
    weights = softmax(np.where(seen, scores, -1e9))
    return weights, weights @ v


def self_attention(x, heads, W_o, b_o, seen, turn=lambda vectors: vectors):
    """Join the means of all heads, and map them to vectors (L, D)."""
    means = [head(x, *weights, seen, turn)[1] for weights in heads]
    return np.concatenate(means, axis=1) @ W_o.T + b_o


def visible(texts, causal=False, window=None):
    """Say which place (row) may see which place (column), given the number of each place's text."""
    distance = np.arange(len(texts))[:, None] - np.arange(len(texts))
    seen = texts[:, None] == texts
    if causal:
        seen = seen & (distance >= 0)
    return seen if window is None else seen & (abs(distance) <= window)


def angles(length, width, base=10000):
    """Return place times frequency (length, width / 2); frequencies fall from 1 to 1 / base."""
    return np.arange(length)[:, None] / base ** (np.arange(0, width, 2) / width)


def sinusoids(length, width):
    """Return the vector of each place: a sine and a cosine for each frequency."""
    turns = angles(length, width)
    return np.stack([np.sin(turns), np.cos(turns)], axis=-1).reshape(length, width)


def rotate(vectors):
    """Turn the pair (i, i + K/2) of each vector (L, K) by the angle of its place."""
    turns = angles(*vectors.shape)
    a, b = np.split(vectors, 2, axis=1)
    return np.concatenate(
        [a * np.cos(turns) - b * np.sin(turns), b * np.cos(turns) + a * np.sin(turns)], axis=1
    )
