"""Dependency trees: the best tree of a sentence, and the share of right arcs.

Sources: Chu and Liu 1965, Edmonds 1967 (best arborescence); the evaluation of the CoNLL 2018 shared
task (Zeman et al. 2018, section 5): all words count, punctuation too; of a relation, only the part
before the colon counts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int64


class Tree(NamedTuple):
    """Heads (numbers from 1, or 0 for the root) and relations of the words of a sentence."""

    heads: Sequence[int]
    relations: Sequence[str]


def right_arcs(gold: Tree, predicted: Tree) -> tuple[int, int]:
    """Count the words with the right head, and the words with the right head and relation."""
    heads = [a == b for a, b in zip(gold.heads, predicted.heads, strict=True)]
    relations = zip(gold.relations, predicted.relations, strict=True)
    pairs = zip(heads, relations, strict=True)
    both = [right and universal(a) == universal(b) for right, (a, b) in pairs]
    return sum(heads), sum(both)


def universal(relation: str) -> str:
    """Return a relation without its subtype."""
    return relation.partition(":")[0]


def tree_fault(heads: Sequence[int]) -> str:
    """Explain why heads make no tree with a single root; "" where they make one."""
    if (roots := sum(head == 0 for head in heads)) != 1:
        return f"{roots} words have the head 0"
    cycle = find_cycle(np.array([0, *heads]))
    return f"the heads of words {', '.join(map(str, cycle))} go round" if len(cycle) else ""


def find_cycle(heads: Int64[np.ndarray, " n"]) -> list[int]:
    """Return the nodes of a cycle, ascending; none where all nodes lead to node 0."""
    state = np.zeros(len(heads), int)  # the walk that met a node first
    for start in range(1, len(heads)):
        node = start
        while node and not state[node]:
            state[node] = start
            node = int(heads[node])
        if node and state[node] == start:
            cycle = {node}
            while (node := int(heads[node])) not in cycle:
                cycle.add(node)
            return sorted(cycle)
    return []


def best_tree(scores: Float[np.ndarray, "n n1"]) -> Int64[np.ndarray, " n"]:
    """Return the heads of the single-rooted tree with the greatest sum of scores.

    `scores` are finite: each word's arc to the root (column 0) and to word j (column j, from 1); a
    word's score for itself is not read. A head is 0 or the number of a word from 1.
    """
    count = len(scores)
    whole = np.zeros((count + 1, count + 1))
    whole[1:] = scores
    # An arc to the root costs more than all other arcs together, so the best tree has just one.
    spread = (scores.max(axis=1) - scores.min(axis=1)).sum()
    whole[1:, 0] -= spread + 1.0
    np.fill_diagonal(whole, -np.inf)
    return _arborescence(whole)[1:]


def _arborescence(scores: Float[np.ndarray, "n n"]) -> Int64[np.ndarray, " n"]:
    """Return the best parent of each node but node 0; `scores[i, j]` scores the arc from j to i."""
    parents = scores.argmax(axis=1)
    parents[0] = 0
    cycle = find_cycle(parents)
    if not cycle:
        return parents
    inside = np.array(cycle)
    outside = np.setdiff1d(np.arange(len(scores)), inside)
    # The cycle becomes the last node of a smaller graph; entering it at a node breaks that arc.
    entering = scores[np.ix_(inside, outside)] - scores[inside, parents[inside]][:, None]
    leaving = scores[np.ix_(outside, inside)]
    smaller = np.full((len(outside) + 1, len(outside) + 1), -np.inf)
    smaller[:-1, :-1] = scores[np.ix_(outside, outside)]
    smaller[-1, :-1] = entering.max(axis=0)
    smaller[:-1, -1] = leaving.max(axis=1)
    found = _arborescence(smaller)
    last = len(outside)
    for node, parent in enumerate(found[:-1].tolist()):
        if node:
            from_cycle = inside[leaving[node].argmax()]
            parents[outside[node]] = from_cycle if parent == last else outside[parent]
    entry = int(found[last])
    parents[inside[entering[:, entry].argmax()]] = outside[entry]
    return parents
