"""Detection of examples that share texts, and splits that keep such examples together."""

import hashlib
import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from bert_jax.errors import UserError

_BINS = 5  # quantile groups of scores; each part gets the same mix of them

Texts = Sequence[tuple[str, ...]]
"""Texts of each example, as `Split.texts` returns them."""


def example_key(texts: Sequence[str]) -> bytes:
    """Hash the texts of an example to 16 bytes; case and the amount of white space are ignored."""
    whole = (*texts, "")[: max(2, len(texts))]  # one text equals a pair with an empty second text
    joined = "\0".join(" ".join(text.casefold().split()) for text in whole)
    return hashlib.blake2b(joined.encode(), digest_size=16).digest()


def example_keys(examples: Texts) -> np.ndarray:
    """Return keys (N,), uint64, of all examples: the first 8 bytes of each `example_key`."""
    return np.frombuffer(b"".join(example_key(texts)[:8] for texts in examples), "<u8")


def overlap_warning(name: str, examples: Texts, known: np.ndarray) -> str:
    """Return a warning that counts examples whose texts occur in training; "" if there are none.

    `known` are the keys of the training examples.
    """
    shared = np.flatnonzero(np.isin(example_keys(examples), known))
    if not len(shared):
        return ""
    first = " | ".join(examples[shared[0]])
    short = f"{first[:60]}..." if len(first) > 60 else first
    return (
        f"{name}: {len(shared):,} of {len(examples):,} examples have the texts of training "
        f"examples (the first: {short!r}), so their scores say less about new texts"
    )


def strata(labels: Sequence[Any]) -> list[Hashable]:
    """Return the stratum of each example: its label, or the quintile of a numeric label."""
    if not all(isinstance(label, float) for label in labels):
        return list(labels)
    ranks = np.argsort(np.argsort(np.array(labels), kind="stable"), kind="stable")
    return (ranks * _BINS // max(len(labels), 1)).tolist()


def joined(*keys: Sequence[Hashable]) -> Int64[np.ndarray, " N"]:
    """Return each example's group index. Examples with an equal key in any list share a group."""
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
    return found[:count].astype(np.int64)


def held_out(path: str, keys: Sequence[bytes], rate: float, least: int, what: str) -> list[bool]:
    """Choose keys to hold out: a share `rate` of the distinct keys, but at least `least`.

    Return true for each held-out key; order does not matter. Messages name the file `path` and call
    the keys `what`. Raise a UserError if fewer than `least` distinct keys would remain.
    """
    ranked = sorted(set(keys))
    if len(ranked) < 2 * least:
        raise UserError(
            f"{path} has {len(ranked)} distinct {what}; at least {2 * least} are needed to hold "
            f"{'one' if least == 1 else 'some'} out. Name a second file in task.dev"
        )
    count = min(max(least, math.ceil(rate * len(ranked))), len(ranked) - least)
    chosen = set(ranked[:count])
    return [key in chosen for key in keys]


def deal(
    kinds: Sequence[Hashable],
    groups: Int64[np.ndarray, " N"],
    keys: Sequence[bytes],
    shares: Sequence[float],
) -> Int64[np.ndarray, " N"]:
    """Divide examples into parts that have the same mix of kinds and do not split groups.

    `kinds` are the strata of the examples (see `strata`), `groups` the groups, and `keys` hashes of
    the texts. `shares` are the sizes of the parts and sum to 1. The result is the index of each
    example's part. It does not depend on the order of the examples.

    Groups with the same number of examples of each kind are divided evenly among the parts, largest
    groups first. Each remaining group goes to the part that most lacks the group's kinds. This
    greedily minimises the squared differences from the shares, relative to the size of each kind.
    """
    number = {kind: n for n, kind in enumerate(sorted(set(kinds), key=repr))}
    kind_of = np.array([number[kind] for kind in kinds])
    named, group_of = np.unique(groups, return_inverse=True)
    content = np.zeros((len(named), len(number)), np.int64)
    np.add.at(content, (group_of, kind_of), 1)
    content = np.column_stack([content, content.sum(axis=1)])  # balance sizes as one more kind
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
            needs = lacks / totals.astype(float) ** 2 @ alike[same]
            parts.append(int(needs.round(12).argmax()))
            lacks[parts[-1]] -= alike[same]
        part_of[members] = parts
    return part_of[group_of]
