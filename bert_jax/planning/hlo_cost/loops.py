"""Numbers of iterations (trip counts) of `while` loops in HLO text.

Loops seldom state a trip count. XLA sinks, widens, unrolls and peels loops, and puts the increment
or the comparison into fusions, so pattern matching would miss some loops. This module therefore
interprets the few integers on which the condition depends, from their initial values until the
condition is false. Values that depend on data are None, as are trip counts that need such values.
"""

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from bert_jax.planning.hlo_cost.hlo_text import Computation, Instruction, Module

MAX_TRIPS = 4096
"""Limit on interpreted iterations. Longer loops, which no train step has, count as unknown."""

_MAX_DEPTH = 150


@dataclass(frozen=True)
class _Passed:
    """Placeholder for element `index` of a loop's state, to find elements that the body keeps."""

    index: int


def _divide(a: int, b: int) -> int | None:
    """Divide integers as XLA does, truncating towards zero."""
    return None if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    name.upper(): getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": _divide,
    "remainder": lambda a, b: None if b == 0 else a - b * _divide(a, b),
    "minimum": min, "maximum": max, "negate": operator.neg, "abs": abs,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "not": lambda a: not a if isinstance(a, bool) else ~a,
    "select": lambda condition, a, b: a if condition else b,
    "clamp": lambda low, x, high: min(max(low, x), high),
}  # fmt: skip
_SAME = {
    "copy", "bitcast", "bitcast-convert", "reshape", "convert", "copy-start", "copy-done",
    "optimization-barrier", "opt-barrier",
}  # fmt: skip


def _wrap(value: Any, shape: str) -> Any:
    """Wrap an integer to the range of its type: s32 and u32 overflow as in hardware."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    kind = re.match(r"([su])(\d+)", shape)
    if kind is None:
        return value
    bits = int(kind.group(2))
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind.group(1) == "s" and value >> (bits - 1) else value


@dataclass
class Scope:
    """A computation at one call site, where values of its parameters may be known."""

    module: Module
    computation: Computation
    argument: Callable[[int], Any]
    _known: dict[str, Any] = field(default_factory=dict)

    def value(self, name: str, depth: int = 0) -> Any:
        """Return an instruction's value: int, bool, function of a tuple index; None if unknown."""
        if name not in self._known:
            instruction = self.computation.instructions.get(name)
            if instruction is None or depth > _MAX_DEPTH:
                return None
            self._known[name] = _wrap(self._compute(instruction, depth + 1), instruction.shape)
        return self._known[name]

    def root(self, depth: int = 0) -> Any:
        """Return the value that the computation returns."""
        return self.value(self.computation.root, depth)

    def called(self, instruction: Instruction, name: str, depth: int = 0) -> "Scope":
        """Return the scope of computation `name`, called with the operands of `instruction`."""
        computation, operands = self.module.computations[name], instruction.operands
        return Scope(self.module, computation, lambda n: self.value(operands[n], depth))

    def _compute(self, instruction: Instruction, depth: int) -> Any:
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "parameter":
            return self.argument(int(instruction.literal))
        if opcode == "constant":
            return _literal(instruction.literal)
        if opcode in _SAME:
            return self.value(operands[0], depth)
        if opcode == "tuple":
            return lambda index: self.value(operands[index], depth)
        if opcode == "get-tuple-element":
            whole = self.value(operands[0], depth)
            index = int(instruction.attribute(r"\bindex=(\d+)") or 0)
            return whole(index) if callable(whole) else None
        if opcode in ("fusion", "call") and instruction.calls in self.module.computations:
            return self.called(instruction, instruction.calls, depth).root(depth)
        if opcode == "while":
            body = body_scope(instruction, self)
            return body and body.argument(0)
        if opcode == "compare":
            compute = _COMPARE[instruction.attribute(r"direction=(\w+)") or "EQ"]
        elif opcode in _ARITHMETIC:
            compute = _ARITHMETIC[opcode]
        else:
            return None
        values = [self.value(name, depth) for name in operands]
        return compute(*values) if all(isinstance(value, int) for value in values) else None


def _literal(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text.strip("{} "))
    except ValueError:
        return None


def _loop_parts(instruction: Instruction, module: Module) -> tuple[Computation, Computation] | None:
    condition = instruction.attribute(r"\bcondition=%?([\w.\-]+)")
    body = instruction.attribute(r"\bbody=%?([\w.\-]+)")
    if condition not in module.computations or body not in module.computations:
        return None
    return module.computations[condition], module.computations[body]


def body_scope(instruction: Instruction, scope: Scope) -> Scope | None:
    """Return the scope of a loop's body, with known values for state that no iteration changes."""
    parts = _loop_parts(instruction, scope.module)
    if parts is None:
        return None
    _, body = parts
    probe = Scope(scope.module, body, lambda _: _Passed)

    def element(index: int) -> Any:
        after = probe.root()
        unchanged = callable(after) and after(index) == _Passed(index)
        before = scope.value(instruction.operands[0])
        return before(index) if unchanged and callable(before) else None

    return Scope(scope.module, body, lambda _: element)


def trip_count(instruction: Instruction, scope: Scope) -> int | None:
    """Return the number of iterations of a `while` instruction, or None if it depends on data."""
    stated = instruction.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    if stated is not None:
        return int(stated)
    parts = _loop_parts(instruction, scope.module)
    initial = scope.value(instruction.operands[0]) if instruction.operands else None
    if parts is None or not callable(initial):
        return None
    condition, body = parts
    needed: set[int] = set()

    def run(computation: Computation, state: Callable[[int], Any]) -> Any:
        def element(index: int) -> Any:
            needed.add(index)
            return state(index)

        return Scope(scope.module, computation, lambda _: element).root()

    def after(indices: Iterable[int], state: Callable[[int], Any]) -> dict[int, Any]:
        root = run(body, state)
        return {i: root(i) if callable(root) else None for i in indices}

    # Find the elements of the state on which the condition depends, directly or through others.
    run(condition, initial)
    known = -1
    while known != len(needed):
        known = len(needed)
        after(tuple(needed), initial)
    state = {index: initial(index) for index in needed}
    for trips in range(MAX_TRIPS):
        going = run(condition, state.get)
        if not isinstance(going, int):
            return None
        if not going:
            return trips
        before, state = state, after(tuple(state), state.get)
        if before == state:
            return None
    return None
