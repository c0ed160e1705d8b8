"""Formulas of station 7: encoder and decoder made of attention, and two ways to write with them.

Each layer is a dict of functions: `look` (self-attention), `read` (attention from the target to the
source), `feed`, and one norm for each, such as `look_norm`.
"""

import numpy as np


def norm(x, scale, shift, eps=1e-6):
    """Give each vector the mean 0 and the variance 1, then scale and shift its numbers."""
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale + shift


def feed_forward(x, W_1, b_1, W_2, b_2):
    """Map each vector by itself: to more numbers, of which only positive ones pass, and back."""
    return np.maximum(x @ W_1.T + b_1, 0) @ W_2.T + b_2


def read(y, source, heads, W_o, b_o):
    """Let each place of the target y (T, D) look at all places of the source (S, D)."""
    means = []
    for W_q, b_q, W_k, b_k, W_v, b_v in heads:
        q, k, v = y @ W_q.T + b_q, source @ W_k.T + b_k, source @ W_v.T + b_v
        powers = np.exp(q @ k.T / np.sqrt(k.shape[1]))
        means.append(powers / powers.sum(1, keepdims=True) @ v)
    return np.concatenate(means, axis=1) @ W_o.T + b_o


def encode(x, layers):
    """Run the encoder on the vectors of the source x (S, D)."""
    for layer in layers:
        x = layer["look_norm"](x + layer["look"](x))
        x = layer["feed_norm"](x + layer["feed"](x))
    return x


def decode(y, source, layers):
    """Run the decoder on the vectors of the target y (T, D), given the encoded source (S, D)."""
    for layer in layers:
        y = layer["look_norm"](y + layer["look"](y))
        y = layer["read_norm"](y + layer["read"](y, source))
        y = layer["feed_norm"](y + layer["feed"](y))
    return y


def greedy(log_p, end, most):
    """Append the most probable word until the end; log_p maps the words so far to numbers (V)."""
    words, score = (), 0.0
    while len(words) < most and words[-1:] != (end,):
        scores = log_p(words)
        words, score = (*words, int(scores.argmax())), score + scores.max()
    return words, score / len(words)


def beam_search(log_p, end, most, num_beams):
    """Keep the best beginnings of a text; return the best text and its mean score a word."""
    beams, done = [((), 0.0)], []
    for length in range(1, most + 1):
        grown = [((*y, w), s + p) for y, s in beams for w, p in enumerate(log_p(y))]
        grown.sort(key=lambda each: -each[1])
        stops = [each for each in grown[:num_beams] if each[0][-1] == end or length == most]
        done += [(score / length, words) for words, score in stops]
        beams = [each for each in grown if each[0][-1] != end][:num_beams]
    score, words = max(done)
    return words, score


def exhaustive(log_p, end, most):
    """Try all texts of at most so many words; return the best one and its mean score a word."""

    def texts(words, score):
        if words and (words[-1] == end or len(words) == most):
            return [(score / len(words), words)]
        scores = log_p(words)
        return [t for w, p in enumerate(scores) for t in texts((*words, w), score + p)]

    score, words = max(texts((), 0.0))
    return words, score
