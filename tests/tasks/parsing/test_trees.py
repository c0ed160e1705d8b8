"""The best tree against all trees, and faults of trees."""

from itertools import product

import numpy as np
import pytest

from bert_jax.tasks.parsing.trees import Tree, best_tree, right_arcs, tree_fault


def is_tree(heads: tuple[int, ...]) -> bool:
    """One root, and each word leads to it in at most as many steps as there are words."""

    def root_of(word: int) -> int:
        for _ in heads:
            word = heads[word - 1] if word else 0
        return word

    return heads.count(0) == 1 and all(root_of(word) == 0 for word in range(1, len(heads) + 1))


TREES = {
    n: [heads for heads in product(range(n + 1), repeat=n) if is_tree(heads)] for n in range(1, 6)
}


def test_the_number_of_trees_is_the_known_one():
    """n ** (n - 1) rooted labelled trees of n nodes (Cayley)."""
    assert {n: len(trees) for n, trees in TREES.items()} == {n: n ** (n - 1) for n in TREES}


@pytest.mark.parametrize("size", TREES)
def test_the_best_of_all_trees_is_found(size):
    """Small integers tie often and have many cycles."""
    random = np.random.default_rng(size)
    words = np.arange(size)
    trees = np.array(TREES[size])
    for draw in range(60):
        scores = random.normal(size=(size, size + 1)) * 3
        if draw % 2:
            scores = scores.round()
        if draw % 5 == 0:
            scores[:, 0] += 20  # every word would like to be the root
        found = best_tree(scores)
        assert is_tree(tuple(found.tolist()))
        best = scores[words, trees].sum(axis=1).max()
        np.testing.assert_allclose(scores[words, found].sum(), best, rtol=1e-9, atol=1e-9)


def test_a_long_cycle_of_cycles():
    """Pairs of words that like each other best, in pairs of pairs: contraction in contraction."""
    size = 32
    scores = np.full((size, size + 1), -50.0)
    for level, step in enumerate((1, 2, 4, 8, 16)):
        for word in range(size):
            scores[word, 1 + (word ^ step)] = -level
    scores[:, 0] = -20.0
    scores[7, 0] = -19.0
    found = best_tree(scores)
    assert tree_fault(found.tolist()) == ""
    assert found[7] == 0
    assert scores[np.arange(size), found].sum() == -19 - (0 * 16 + 1 * 8 + 2 * 4 + 3 * 2 + 4 * 1)


@pytest.mark.parametrize(
    ("heads", "fault"),
    [
        ([0], ""),
        ([2, 0, 2], ""),
        ([2, 1], "0 words have the head 0"),
        ([0, 0], "2 words have the head 0"),
        ([0, 3, 4, 2], "the heads of words 2, 3, 4 form a cycle"),
        ([0, 2], "the heads of words 2 form a cycle"),
    ],
)
def test_faults_of_trees(heads, fault):
    assert tree_fault(heads) == fault
    assert is_tree(tuple(heads)) == (not fault)


def test_a_relation_counts_without_its_subtype_and_with_its_head():
    gold = Tree([2, 0, 2, 3], ["nsubj:pass", "root", "obl", "punct"])
    said = Tree([2, 0, 2, 2], ["nsubj", "root", "obl:agent", "punct"])
    assert right_arcs(gold, said) == (3, 3)
    assert right_arcs(gold, Tree([2, 0, 2, 3], ["obj", "root", "nmod", "punct"])) == (4, 2)
