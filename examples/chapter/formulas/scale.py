"""Formulas of station 9: how often each language is read, and a layer cut over several chips."""

import numpy as np


def shares(sizes, alpha):
    """Return the share of each language (N) in the training, given the sizes of their texts (N)."""
    powers = (sizes / sizes.max()) ** alpha
    return powers / powers.sum()


def feed_forward(x, W_1, b_1, W_2, b_2):
    """Map each vector of x (L, D): to more numbers, of which only positive ones pass, and back."""
    return np.maximum(x @ W_1.T + b_1, 0) @ W_2.T + b_2


def cut_feed_forward(x, W_1, b_1, W_2, b_2, num_chips):
    """Do the same on several chips: each has some rows of W_1 and the same columns of W_2."""
    first, bias = np.split(W_1, num_chips, axis=0), np.split(b_1, num_chips)
    second = np.split(W_2, num_chips, axis=1)
    parts = [
        np.maximum(x @ first[n].T + bias[n], 0) @ second[n].T  # what chip n computes by itself
        for n in range(num_chips)
    ]
    return sum(parts) + b_2  # the only step for which the chips talk to each other


def bytes_of(parameters, chips):
    """Return the bytes on each chip: parameter, gradient and Adam's two moments, 4 bytes each."""
    return 4 * 4 * parameters / chips
