"""Parser of HLO text into computations, instructions with source lines, and groups of devices.

The text comes from `compiled.as_text()`: tables of source positions, then computations with one
instruction per line. Only the parts that the analysis needs are parsed; attributes stay text.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import combinations

import numpy as np

PACKAGE = "bert_jax"

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_START = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\](\{[^{}]*\})?")
_BITS = re.compile(r"[a-z]+(\d+)")
MIXED = "mixed"
"""Axis name for groups of devices that match no combination of mesh axes."""

_EXPLICIT = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=@?mesh\[([^\]]*)\](?:, ?device_ids=\((.*?)\)(?= ?\{))? ?\{([^}]*)\}"
)
_LIST = re.compile(r"\{([\d,]+)\}")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: str
    """Type as written, with layouts: `bf16[8,128]{1,0:T(8,128)S(1)}` or a tuple of types."""
    operands: tuple[str, ...]
    literal: str
    """Text in the parentheses, such as the value of a constant or the index of a parameter."""
    attributes: str

    def attribute(self, pattern: str) -> str | None:
        """Return the first group of `pattern` in the attributes; None if there is no match."""
        match = re.search(pattern, self.attributes)
        return match.group(1) if match else None

    def number(self, key: str) -> int | None:
        """Return the number at a key of the backend_config, such as "flops"; None if missing."""
        value = self.attribute(rf'"{key}":\s*"?(\d+)"?')
        return int(value) if value else None

    @property
    def calls(self) -> str | None:
        """Name of the computation that a fusion, call or async-start runs."""
        return self.attribute(r"\b(?:calls|to_apply)=%?([\w.\-]+)")

    @property
    def op_name(self) -> str:
        """Path of JAX names; empty if the compiler made the instruction."""
        return self.attribute(r'op_name="([^"]*)"') or ""


@dataclass
class Computation:
    """Instructions of a computation by name, in text order (if scheduled, in execution order)."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    def operand_shapes(self, instruction: Instruction) -> list[str]:
        """Return the types of the operands of `instruction`."""
        found = (self.instructions.get(name) for name in instruction.operands)
        return [operand.shape for operand in found if operand is not None]


@dataclass
class Module:
    """A parsed program."""

    computations: dict[str, Computation]
    entry: str
    num_partitions: int
    tables: dict[str, dict[int, str]]

    @cached_property
    def _frames(self) -> dict[int, tuple[int, int]]:
        """Map from stack frames to (location, parent), all as numbers; parent 0 means none."""
        frames = {
            number: (_int_of("file_location_id", row), _int_of("parent_frame_id", row))
            for number, row in self.tables.get("StackFrames", {}).items()
        }
        # If the outermost frame is its own parent, the text numbers all parents one too high.
        shift = 1 if any(number == parent for number, (_, parent) in frames.items()) else 0
        return {n: (location, parent - shift) for n, (location, parent) in frames.items()}

    def source(self, instruction: Instruction) -> str:
        """Return the innermost stack frame in this package, `model/encoder.py:9 Layer.f`, or ""."""
        number = _int_of("stack_frame_id", instruction.attributes)
        seen: set[int] = set()
        while number in self._frames and number not in seen:
            seen.add(number)
            location, number = self._frames[number]
            row = self.tables.get("FileLocations", {}).get(location, "")
            file = self.tables.get("FileNames", {}).get(_int_of("file_name_id", row), "").strip('"')
            _, inside, path = file.rpartition(f"/{PACKAGE}/")
            if inside:
                names = self.tables.get("FunctionNames", {})
                name = names.get(_int_of("function_name_id", row), "").strip('"')
                name = name.replace(".<locals>", "")
                return f"{path}:{_int_of('line', row)} {name}".strip()
        return ""


def _int_of(key: str, text: str) -> int:
    match = re.search(rf"\b{key}=(\d+)", text)
    return int(match.group(1)) if match else 0


def parse_text(text: str) -> Module:
    """Parse the text of a program; raise a ValueError if it has no ENTRY computation."""
    lines = iter(text.splitlines())
    module = Module({}, "", _int_of("num_partitions", next(lines, "")) or 1, {})
    table: dict[int, str] | None = None
    current: Computation | None = None
    pending = ""
    for line in lines:
        if current is not None:
            if _START.match(line) or line == "}" or line.startswith("}, "):
                if instruction := _parse_instruction(pending):
                    current.instructions[instruction.name] = instruction
                    if pending.lstrip().startswith("ROOT "):
                        current.root = instruction.name
                pending = line
                current = None if line.startswith("}") else current
            else:
                pending += line  # metadata of Pallas kernels spans several lines
        elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = module.tables.setdefault(line, {})
        elif table is not None and (row := re.match(r"(\d+) (.*)", line)):
            table[int(row.group(1))] = row.group(2)
        elif header := _HEADER.match(line):
            table, pending = None, ""
            current = Computation(header.group(2))
            module.computations[current.name] = current
            if header.group(1):
                module.entry = current.name
    if not module.entry:
        raise ValueError("no ENTRY computation: not the text of an HLO module")
    return module


def _parse_instruction(line: str) -> Instruction | None:
    start = _START.match(line)
    if start is None:
        return None
    begin = start.end()
    end = _closing(line, begin) + 1 if line[begin] == "(" else line.find(" ", begin)
    if end < 0:
        return None
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        return None
    close = _closing(line, opcode.end() - 1)
    inner = line[opcode.end() : close]
    return Instruction(
        name=start.group(2), opcode=opcode.group(1), shape=line[begin:end],
        operands=() if opcode.group(1) == "constant" else tuple(_OPERAND.findall(inner)),
        literal=inner, attributes=line[close + 1 :],
    )  # fmt: skip


def _closing(line: str, start: int) -> int:
    depth = 0
    for match in re.finditer(r"[()]", line[start:]):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return start + match.start()
    return len(line)


def arrays(shape: str) -> Iterator[tuple[int, str]]:
    """Yield (bytes without padding, layout) of each array in a type. HLO tokens have 0 bytes."""
    for dtype, dims, layout in _ARRAY.findall(shape):
        bits = _BITS.match(dtype)
        size = 8 if dtype == "pred" else int(bits.group(1)) if bits else 0
        yield (size * math.prod(_numbers(dims)) + 7) // 8, layout


def shape_bytes(shape: str) -> int:
    """Add up the bytes of all arrays in a type."""
    return sum(size for size, _ in arrays(shape))


def phase_of(op_name: str) -> str:
    """Return the phase of a train step to which a path of JAX names belongs (see `Op.phase`)."""
    if "rematted_computation" in op_name:
        return "recomputed"
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else ""


def hbm_bytes(shape: str) -> int:
    """Add up the bytes of arrays in HBM; arrays elsewhere have a memory space in their layout."""
    return sum(size for size, layout in arrays(shape) if "S(" not in layout)


def started_shape(shape: str) -> str:
    """Return element 1 of a tuple type. For a -start operation, it is as large as the result."""
    first = _closing(shape, 1) if shape.startswith("((") else 0
    elements = shape[first:].split(", ")
    return elements[1] if len(elements) > 1 else shape


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _iota(dims: str, permutation: str | None) -> np.ndarray:
    """Return 0, 1, 2, … as an array of shape `dims`, transposed by `permutation` if given."""
    sizes = _numbers(dims)
    array = np.arange(math.prod(sizes)).reshape(sizes)
    return array.transpose(_numbers(permutation)) if permutation else array


@lru_cache(maxsize=4096)
def parse_groups(attributes: str, num_partitions: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of devices in the attributes of a collective.

    The formats are `{{0,1},{2,3}}`, `[2,4]<=[4,2]T(1,0)`, `mesh['a'=2,'b'=4] {'b'}` (in XLA since
    2025) and `source_target_pairs`, whose pairs count as groups. An empty list means all devices.
    Raise a ValueError if the groups have none of these formats.
    """
    if match := _MESH.search(attributes):
        return _mesh_groups(*match.groups())
    if match := _IOTA.search(attributes):
        shape, dims, permutation = match.groups()
        return _rows(_iota(dims, permutation).reshape(_numbers(shape)))
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
    # 'a':(2)4 is a part of axis 'a': its size is 4, after a part of size 2.
    parts = re.findall(r"'?\"?([\w.]+)'?\"?(?::\((\d+)\)(\d+))?", chosen)
    split: list[int] = []
    inside: list[int] = []
    for name, size in sizes.items():
        done = 1
        mine = ((int(before or 1), int(part or size)) for n, before, part in parts if n == name)
        for before, part in sorted(mine):
            split += [before // done, part]
            inside.append(len(split) - 1)
            done = before * part
        split.append(size // done)
    array = ids.reshape(split)
    outside = [axis for axis in range(len(split)) if axis not in inside]
    size = math.prod(split[axis] for axis in inside)
    return _rows(array.transpose(*outside, *inside).reshape(-1, size))


def _rows(array: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in array.tolist())


def axes_of_groups(
    groups: Iterable[tuple[int, ...]], mesh_shape: Mapping[str, int]
) -> tuple[str, ...]:
    """Return the mesh axes, in mesh order, that groups of devices span.

    Devices are indices in `mesh.devices.flat`. The result is () if every group is one device, and
    ("mixed",) if the groups match neither a combination of full axes nor a part of one axis.
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
    """Return the mesh axes along which at least one (source, target) pair communicates."""
    sizes = list(mesh_shape.values())
    moved: set[int] = set()
    for source, target in pairs:
        coordinates = np.unravel_index([source, target], sizes)
        moved.update(axis for axis, (a, b) in enumerate(coordinates) if a != b)
    return tuple(name for axis, name in enumerate(mesh_shape) if axis in moved)
