"""The biaffine head against its formulas, pair by pair."""

import jax
import numpy as np
from huggingface_directory import MODEL, random_tree

from bert_jax.model.flops import TRAIN_OVER_FORWARD, biaffine_flops, encoder_flops, task_flops
from bert_jax.model.heads import init_params, with_params
from bert_jax.model.task_heads import ARC_WIDTH, RELATION_WIDTH, BiaffineHead


def test_scores_of_each_pair():
    """Dozat and Manning 2017, equations 4 to 9, in float64."""
    params = random_tree(lambda: init_params(MODEL, jax.random.key(0), BiaffineHead, 3))
    states = np.random.default_rng(1).normal(size=(2, 4, MODEL.hidden_dim)).astype(np.float32)
    module = jax.jit(lambda params, x: with_params(params, BiaffineHead, MODEL, 3)(x))
    found = np.asarray(module(params, states))
    assert found.shape == (2, 4, 4, 4)
    assert found.dtype == np.float32
    weights = jax.tree.map(np.float64, params)

    def mapped(name, x):
        return x @ weights[name]["kernel"] + weights[name]["bias"]

    def rectified(name, x):
        y = mapped(name, x)
        return np.where(y > 0, y, 0.1 * y)

    for b, i, j in np.ndindex(2, 4, 4):
        word, head = states[b, i].astype(float), states[b, j].astype(float)
        a, h = rectified("arc_word", word), rectified("arc_head", head)
        u, bias = weights["arc"]["kernel"], weights["arc"]["bias"]
        np.testing.assert_allclose(found[b, i, j, 0], a @ u @ h + bias @ h, rtol=1e-3, atol=1e-2)
        a, h = rectified("relation_word", word), rectified("relation_head", head)
        u = weights["relation"]["kernel"].reshape(RELATION_WIDTH, 3, RELATION_WIDTH)
        of_head = weights["relation"]["bias"].reshape(3, RELATION_WIDTH) @ h
        expected = np.einsum("e,erf,f->r", a, u, h) + of_head + mapped("relation_of_word", a)
        np.testing.assert_allclose(found[b, i, j, 1:], expected, rtol=1e-3, atol=1e-2)


def test_operations_are_counted():
    """Of all products of matrices, a multiply and an add each as one."""
    length, relations, d = 8, 5, MODEL.hidden_dim
    vectors = 4 * length * d * (ARC_WIDTH + RELATION_WIDTH)
    arcs = 2 * length * ARC_WIDTH**2 + 2 * length**2 * ARC_WIDTH
    maps = 2 * length * RELATION_WIDTH * relations * (RELATION_WIDTH + 1)
    pairs = 2 * length**2 * RELATION_WIDTH * relations
    assert biaffine_flops(MODEL, length, relations) == vectors + arcs + maps + pairs
    whole = encoder_flops(MODEL, length) + vectors + arcs + maps + pairs
    assert task_flops(MODEL, length, "parsing", relations) == TRAIN_OVER_FORWARD * whole
