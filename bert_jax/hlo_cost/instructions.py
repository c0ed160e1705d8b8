"""One instruction of a program: its phase, bytes and stated cost."""

from bert_jax.hlo_cost.hlo_text import Instruction, arrays

COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "optimization-barrier", "opt-barrier", "add-dependency", "async-update", "recv",
}  # fmt: skip
"""Instructions that cost the core nothing: names for values, and ends of what started before."""
TRANSFERS = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")
FREE_CALLS = {
    "AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast",
    "GatherScatterIndicesBitpacked", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape",
    "MoveToHost", "MoveToDevice",
}  # fmt: skip
"""Markers of the compiler: no code is generated for them."""


def touched_by(instruction: Instruction, shapes: list[str]) -> list[str]:
    """Shapes (result, then operands) of what is read and written: a gather reads what it gives."""
    gathers = instruction.opcode in ("gather", "fusion") and instruction.op_name.endswith("/gather")
    return [shapes[0], shapes[0], *shapes[2:]] if gathers else shapes


def phase_of(op_name: str) -> str:
    """Return the part of a train step to which a JAX name path belongs."""
    if "rematted_computation" in op_name or "checkpoint/" in op_name:
        return "recomputed"
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else ""


def hbm_bytes(shape: str) -> int:
    """Add up the arrays of a type without a memory space in their layout (S(1) is VMEM)."""
    return sum(size for size, layout in arrays(shape) if "S(" not in layout)


def started_shape(shape: str) -> str:
    """Element 1 of a tuple type, which is what a -start operation writes."""
    depth, start = 0, 0
    parts = []
    for position, char in enumerate(shape):
        if char in "([{":
            depth += 1
            start = position + 1 if depth == 1 else start
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                parts.append(shape[start:position])
        elif char == "," and depth == 1:
            parts.append(shape[start:position])
            start = position + 1
    return parts[1] if len(parts) > 1 else shape


def stated_number(instruction: Instruction, key: str) -> int | None:
    """Return a number of a Pallas kernel's cost_estimate."""
    value = instruction.attribute(rf'"{key}":\s*"?(\d+)"?')
    return int(value) if value else None


def kernel_name(instruction: Instruction) -> str:
    """Name of a Pallas kernel, or of the instruction where the kernel has none."""
    return instruction.attribute(r"kernel_name\W+([\w.\-]+)") or instruction.name
