"""Formulas of station 10: what a head looks at. Weights are (L, L): row looks at column."""

import numpy as np


def entropy(weights):
    """Return the mean entropy, in nats, of the weights of the places (rows)."""
    return -(weights * np.log(np.maximum(weights, 1e-30))).sum(-1).mean()


def on_offset(weights, offset):
    """Return the weight on the place `offset` further on, averaged over rows that have one."""
    return np.diagonal(weights, offset).mean()


def on_same_word(weights, tokens):
    """Return the weight on other places with the same word, averaged over rows that have one."""
    same = (tokens[:, None] == tokens) & ~np.eye(len(tokens), dtype=bool)
    return (weights * same).sum(-1)[same.any(-1)].mean()


def without_head(means, W_o, b_o, removed):
    """Join the means of all heads (H, L, K), one of them replaced by zeros, and map them."""
    means = means * (np.arange(len(means)) != removed)[:, None, None]
    return np.concatenate(list(means), axis=1) @ W_o.T + b_o
