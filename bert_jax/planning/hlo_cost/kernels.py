"""Work of a Pallas kernel, counted from the kernel's program.

XLA estimates no cycles for a Pallas call, and a kernel's own `cost_estimate` is optional: splash
attention has none. But the call contains the kernel's Mosaic program (MLIR). This module counts the
matrix products and vector operations of that program, over all steps of the grid.
"""

import base64
import binascii
import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

LANES, SUBLANES = 128, 8


@dataclass(frozen=True)
class Work:
    """Work of one call, over all steps of its grid; each branch (`pl.when`) counts as taken."""

    steps: int
    """Number of steps of the grid."""
    products: tuple[tuple[int, int, int, int, bool], ...]
    """Matrix products: (rows, contracted size, columns, number of runs, whether float32)."""
    vector: int
    """Number of 32-bit elementwise operations, with arrays padded to registers of 8 x 128."""
    transcendentals: int
    """Number of exponentials, logarithms, divisions and similar operations, also padded."""
    exact: bool
    """Whether all loop lengths are known; a loop of unknown length is counted as one iteration."""

    @property
    def num_products(self) -> int:
        """Number of matrix products in all steps."""
        return sum(times for *_, times, _ in self.products)

    def mxu_flops(self, side: int) -> int:
        """Count the FLOPs of products, padded to systolic arrays of `side` x `side`."""
        # float32 at full precision takes six passes.
        return sum(
            2 * m * _up(k, side) * _up(n, side) * times * (6 if full else 1)
            for m, k, n, times, full in self.products
        )


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


_VECTOR = re.compile(r"vector<((?:\d+x)*)([a-z]+\d+)>")
_TRANSCENDENTAL = {
    "exp", "exp2", "log", "log1p", "rsqrt", "sqrt", "tanh", "erf", "sin", "cos", "powf", "divf",
    "reciprocal",
}  # fmt: skip
_FREE = {  # renamed registers, moves between memory and registers (own issue slots), and control
    "constant", "shape_cast", "broadcast", "load", "store", "vector_store", "vector_load",
    "strided_load", "strided_store", "extract_strided_slice", "extract", "bitcast", "yield",
    "return", "matmul", "iota", "memref_slice", "memref_squeeze", "memref_bitcast",
    "reinterpret_cast", "assume_multiple", "if", "for", "while", "condition",
}  # fmt: skip
_INTEGERS: dict[str, Callable[[int, int], int]] = {
    "addi": operator.add, "subi": operator.sub, "muli": operator.mul,
}  # fmt: skip


@lru_cache(maxsize=256)
def work_of(body: str) -> Work | None:
    """Count a kernel's work from its Mosaic bytecode in base64; None if it cannot be read."""
    if not body:  # an operation of XLA
        return None
    from jax._src.lib import tpu  # type: ignore[attr-defined]
    from jaxlib.mlir import ir

    context = ir.Context()
    context.allow_unregistered_dialects = True
    tpu.register_dialect(context)
    try:
        with context:
            module = ir.Module.parse(base64.b64decode(body, validate=True))
            functions = [op.operation for op in module.body.operations]
            main = next((op for op in functions if "iteration_bounds" in op.attributes), None)
            return _count(main or functions[0])
    except (ir.MLIRError, binascii.Error, ValueError, IndexError):
        return None


def _count(function: Any) -> Work:
    attributes = function.attributes
    bounds = str(attributes["iteration_bounds"]) if "iteration_bounds" in attributes else ""
    steps = math.prod(map(int, re.findall(r"\d+", bounds.partition(":")[2])))
    products: list[tuple[int, int, int, int, bool]] = []
    vector = transcendentals = 0
    exact = True
    for operation, times, known in _operations(function, steps):
        exact &= known
        name = operation.name.rpartition(".")[2]
        if name == "matmul":
            products.append((*_product(operation), times, "fp32" in str(operation.attributes)))
        elif name not in _FREE:
            values = [*operation.results, *operation.operands]
            elements = max((_padded(str(value.type)) for value in values), default=0)
            if name in _TRANSCENDENTAL:
                transcendentals += times * elements
            else:
                vector += times * elements
    return Work(steps, tuple(products), vector, transcendentals, exact)


def _operations(operation: Any, times: int) -> Iterator[tuple[Any, int, bool]]:
    """Yield (operation, number of runs, whether that number is known), including nested regions."""
    for region in operation.regions:
        for block in region.blocks:
            for child in block.operations:
                inner, known = times, True
                if child.operation.name.endswith("scf.for"):
                    trips = _trips(child.operation)
                    inner, known = times * (trips or 1), trips is not None
                elif child.operation.name.endswith("scf.while"):
                    known = False
                yield child.operation, times, known
                yield from _operations(child.operation, inner)


def _trips(loop: Any) -> int | None:
    low, high, step = (_integer(value) for value in list(loop.operands)[:3])
    if low is None or high is None or not step:
        return None
    return max(0, -(-(high - low) // step))


def _integer(value: Any) -> int | None:
    """Return the value of an integer computed from constants; None for any other value."""
    owner = value.owner
    if not hasattr(owner, "operands"):
        return None  # the argument of a block
    name = owner.name.rpartition(".")[2]
    if name == "constant":
        number = re.match(r"-?\d+", str(owner.attributes["value"]))
        return int(number.group()) if number else None
    inputs = [_integer(operand) for operand in owner.operands]
    if name in ("index_cast", "extsi", "trunci") and len(inputs) == 1:
        return inputs[0]
    if name in _INTEGERS and len(inputs) == 2 and None not in inputs:
        return _INTEGERS[name](*inputs)  # type: ignore[arg-type]
    return None


def _dims(type_text: str) -> list[int]:
    match = _VECTOR.match(type_text)
    return [int(size) for size in match.group(1).split("x") if size] if match else []


def _product(operation: Any) -> tuple[int, int, int]:
    """Return a matrix product's sizes: (rows of all batches, contraction, columns)."""
    left = _dims(str(operation.operands[0].type))
    result = _dims(str(operation.results[0].type))
    columns = result[-1]
    rows = math.prod(result) // columns
    return rows, math.prod(left) // rows, columns


def _padded(type_text: str) -> int:
    """Count the elements of a vector type, with the last two dimensions padded to registers."""
    dims = _dims(type_text)
    if not dims:
        return 0
    dims = [1, *dims] if len(dims) == 1 else dims
    return math.prod(dims[:-2]) * _up(dims[-2], SUBLANES) * _up(dims[-1], LANES)
