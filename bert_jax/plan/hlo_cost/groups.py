"""Groups of devices in a collective, and the mesh axes of the groups."""

import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import combinations

import numpy as np

MIXED = "mixed"
"""Name of the axis of groups that are not a product of mesh axes."""

_EXPLICIT = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=@?mesh\[([^\]]*)\](?:, ?device_ids=\((.*?)\)(?= ?\{))? ?\{([^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_LIST = re.compile(r"\{([\d,]+)\}")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _iota(dims: str, permutation: str | None) -> np.ndarray:
    """Arrange 0, 1, 2, … in the shape `dims`, transposed."""
    sizes = _numbers(dims)
    array = np.arange(math.prod(sizes)).reshape(sizes)
    return array.transpose(_numbers(permutation)) if permutation else array


@lru_cache(maxsize=4096)
def parse_groups(attributes: str, num_partitions: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of devices in the attributes of a collective; else raise a ValueError.

    Reads `{{0,1},{2,3}}`, `[2,4]<=[4,2]T(1,0)`, `mesh['a'=2,'b'=4] {'b'}` (XLA's form since 2025)
    and `source_target_pairs`, whose pairs are returned as groups. An empty list means all devices.
    """
    if match := _MESH.search(attributes):
        return _mesh_groups(*match.groups())
    if match := _IOTA.search(attributes):
        shape, dims, permutation = match.groups()
        return _rows(_iota(dims, permutation).reshape(_numbers(shape)))
    if match := _PAIRS.search(attributes):
        return tuple(tuple(_numbers(pair)) for pair in _LIST.findall(match.group(1)))
    if match := _EXPLICIT.search(attributes):
        listed = tuple(tuple(_numbers(group)) for group in _LIST.findall(match.group(1)))
        return listed or (tuple(range(num_partitions)),)
    raise ValueError(f"no replica groups in {attributes[:200]!r}")


def _mesh_groups(axes: str, devices: str | None, chosen: str) -> tuple[tuple[int, ...], ...]:
    sizes = {name: int(size) for name, size in re.findall(r"'?\"?([\w.]+)'?\"?=(\d+)", axes)}
    if devices is None:
        ids = np.arange(math.prod(sizes.values()))
    elif match := re.search(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", devices):
        ids = _iota(*match.groups())
    else:
        ids = np.array(_numbers(devices))
    # 'a':(2)4 is the part of axis 'a' of size 4 that has size 2 before it.
    parts = re.findall(r"'?\"?([\w.]+)'?\"?(?::\((\d+)\)(\d+))?", chosen)
    split: list[int] = []
    inside: list[int] = []
    for name, size in sizes.items():
        pieces = [size]
        mine = sorted(
            (int(before or 1), int(part or size)) for n, before, part in parts if n == name
        )
        if mine:
            pieces, done = [], 1
            for before, part in mine:
                pieces += [before // done, part]
                inside.append(len(split) + len(pieces) - 1)
                done = before * part
            pieces.append(size // done)
        split += pieces
    array = ids.reshape(split)
    outside = [axis for axis in range(len(split)) if axis not in inside]
    size = math.prod(split[axis] for axis in inside)
    return _rows(array.transpose(*outside, *inside).reshape(-1, size))


def _rows(array: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in array.tolist())


def axes_of_groups(
    groups: Iterable[tuple[int, ...]], mesh_shape: Mapping[str, int]
) -> tuple[str, ...]:
    """Return the mesh axes over which groups of positions in `mesh.devices.flat` run, in order.

    () where every group is one device; one axis also where groups span a part of the axis;
    ("mixed",) where no product of axes gives the groups.
    """
    wanted = frozenset(frozenset(group) for group in groups)
    names, sizes = [*mesh_shape], [*mesh_shape.values()]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    if all(len(group) == 1 for group in wanted):
        return ()
    group_size = max(len(group) for group in wanted)
    wide = [axis for axis, size in enumerate(sizes) if size > 1]
    for count in range(1, len(wide) + 1):
        for chosen in combinations(wide, count):
            if math.prod(sizes[axis] for axis in chosen) != group_size:
                continue
            rest = [axis for axis in range(len(sizes)) if axis not in chosen]
            rows = ids.transpose(*rest, *chosen).reshape(-1, group_size).tolist()
            if frozenset(frozenset(row) for row in rows) == wanted:
                return tuple(names[axis] for axis in chosen)
    coordinates = (np.unravel_index(sorted(group), sizes) for group in wanted)
    differ = {axis for c in coordinates for axis, n in enumerate(c) if len(set(n.tolist())) > 1}
    return (names[differ.pop()],) if len(differ) == 1 else (MIXED,)


def axes_of_pairs(
    pairs: Iterable[tuple[int, ...]], mesh_shape: Mapping[str, int]
) -> tuple[str, ...]:
    """Return the mesh axes along which a permutation's senders and receivers differ."""
    sizes = list(mesh_shape.values())
    moved: set[int] = set()
    for source, target in pairs:
        coordinates = np.unravel_index([source, target], sizes)
        moved.update(axis for axis, (a, b) in enumerate(coordinates) if a != b)
    return tuple(name for axis, name in enumerate(mesh_shape) if axis in moved)
