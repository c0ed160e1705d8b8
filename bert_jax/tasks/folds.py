"""Division of examples into parts that keep groups together and have the same mix of labels."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int64
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

_BINS = 5  # of scores: as many of each are in every part


def strata(labels: Sequence[Any]) -> list[Hashable]:
    """Return the stratum of each example: its label, or the quintile of a numeric label."""
    if not all(isinstance(label, float) for label in labels):
        return list(labels)
    ranks = np.argsort(np.argsort(np.array(labels), kind="stable"), kind="stable")
    return (ranks * _BINS // max(len(labels), 1)).tolist()


def joined(*keys: Sequence[Hashable]) -> Int64[np.ndarray, " N"]:
    """Return the number of each example's group; examples that share a key share a group."""
    count = len(keys[0])
    nodes: list[np.ndarray] = []
    total = count
    for each in keys:
        numbers = {key: number for number, key in enumerate(dict.fromkeys(each))}
        nodes.append(total + np.array([numbers[key] for key in each], np.int64))
        total += len(numbers)
    examples = np.tile(np.arange(count), len(keys))
    edges = (np.ones(len(examples), bool), (examples, np.concatenate(nodes)))
    _, found = connected_components(coo_array(edges, shape=(total, total)), directed=False)
    groups: np.ndarray = found[:count].astype(np.int64)
    return groups


def deal(
    kinds: Sequence[Hashable],
    groups: Int64[np.ndarray, " N"],
    keys: Sequence[bytes],
    shares: Sequence[float],
) -> Int64[np.ndarray, " N"]:
    """Deal examples into parts; the result does not depend on the order of the examples.

    Groups with the same content are dealt evenly, the largest first. Each remaining group goes to
    the part that lacks its content most: the part that minimises the squared differences from the
    shares, relative to the number of examples of each kind.

    Args:
        kinds: kind of each example, see `strata`.
        groups: number of each example's group; a group is in one part.
        keys: hash of each example's content, which orders groups.
        shares: share of each part; they sum to 1.

    Returns:
        Number of each example's part.
    """
    number = {kind: n for n, kind in enumerate(sorted(set(kinds), key=repr))}
    kind_of = np.array([number[kind] for kind in kinds])
    named, group_of = np.unique(groups, return_inverse=True)
    content = np.zeros((len(named), len(number)), np.int64)
    np.add.at(content, (group_of, kind_of), 1)
    content = np.column_stack([content, content.sum(axis=1)])  # the size counts as a kind does
    first: list[bytes] = [b""] * len(named)
    for group, key in zip(group_of.tolist(), keys, strict=True):
        first[group] = min(first[group] or key, key)
    order = np.array(sorted(range(len(named)), key=first.__getitem__))
    alike, alike_of = np.unique(content[order], axis=0, return_inverse=True)
    part_of = np.zeros(len(named), np.int64)
    totals = content.sum(axis=0)
    wanted = np.array(shares)
    lacks = np.outer(wanted, totals).astype(float)
    for same in np.lexsort((np.arange(len(alike)), -alike.sum(axis=1))):
        members = order[alike_of.ravel() == same]
        even = np.floor(len(members) * wanted).astype(int)
        lacks -= np.outer(even, alike[same])
        parts = np.repeat(np.arange(len(shares)), even).tolist()
        for _ in range(len(members) - len(parts)):
            parts.append(_neediest(lacks, alike[same], totals))
            lacks[parts[-1]] -= alike[same]
        part_of[members] = parts
    found: np.ndarray = part_of[group_of]
    return found


def _neediest(
    lacks: Float[np.ndarray, "P C"],
    content: Int64[np.ndarray, " C"],
    totals: Int64[np.ndarray, " C"],
) -> int:
    return int((lacks / totals.astype(float) ** 2 @ content).round(12).argmax())
