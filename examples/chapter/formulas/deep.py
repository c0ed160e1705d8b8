"""Formulas of station 5: layers that add to what they read, and a picture as a list of vectors."""

import numpy as np


def deep_stack(x, layers, residual_from):
    """Run layers, which map vectors (S, D) to vectors (S, D); the later ones add their input."""
    for number, layer in enumerate(layers, 1):
        x = x + layer(x) if number >= residual_from else layer(x)
    return x


def both_ways(x, forward, backward):
    """Read x (S, E) in both directions, and join the states at each place."""
    return np.concatenate([forward(x), backward(x[::-1])[::-1]], axis=1)


def windows(picture, size, stride):
    """Cut a picture (height, width) into square windows, row by row: (number, size * size)."""
    places = [range(0, length - size + 1, stride) for length in picture.shape]
    cut = [picture[i : i + size, j : j + size].ravel() for i in places[0] for j in places[1]]
    return np.stack(cut)


def seen(cut, W, b, positions):
    """Turn each window into a vector, and add the vector of its place in the picture."""
    return cut @ W.T + b + positions
