"""The program's operations and loops, from golden TPU programs and from snippets."""

import importlib.util
import re
from pathlib import Path

import pytest
from hlo_snippets import ENTRY, ONE, cycles, entry

from bert_jax.planning.hlo_cost.hlo import SENTINEL, _split_slices, parse_program
from bert_jax.planning.hlo_cost.hlo_text import (
    parse_text,
    phase_of,
    shape_bytes,
)
from bert_jax.planning.hlo_cost.loops import Scope, trip_count

GOLDEN = Path(__file__).with_name("golden")


def read(name: str, **mesh_shape: int):
    return parse_program((GOLDEN / f"{name}.hlo").read_text(), ONE | mesh_shape)


def trips(text: str) -> int | None:
    """Of the one loop in ENTRY."""
    module = parse_text("HloModule m, is_scheduled=true\n\n" + text)
    entry = module.computations[module.entry]
    loop = next(i for i in entry.instructions.values() if i.opcode == "while")
    return trip_count(loop, Scope(module, entry, lambda _: None))


LOOP = """
%cond (p: (s32[], f32[8])) -> pred[] {{
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant({end})
  ROOT %c = pred[] compare(%i, %n), direction={direction}
}}

%body (q: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %q = (s32[], f32[8]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %k = s32[] constant({step})
  %next = s32[] {operation}(%j, %k)
  %x = f32[8] get-tuple-element(%q), index=1
  ROOT %t = (s32[], f32[8]) tuple(%next, %x)
}}

ENTRY %main (a: f32[8]) -> (s32[], f32[8]) {{
  %a = f32[8] parameter(0)
  %start = s32[]{{:T(128)}} constant({start})
  %init = (s32[], f32[8]) tuple(%start, %a)
  ROOT %w = (s32[], f32[8]) while(%init), condition=%cond, body=%body
}}
"""


@pytest.mark.parametrize(
    ("start", "end", "step", "direction", "operation", "expected"),
    [
        (0, 12, 1, "LT", "add", 12),
        (0, 12, 5, "LT", "add", 3),
        (1, 12, 1, "LE", "add", 12),
        (11, 0, 1, "GE", "subtract", 12),
        (11, -1, -1, "GT", "add", 12),
        (0, 24, 2, "NE", "add", 12),
        (3, 3, 1, "LT", "add", 0),
        (1, 1000, 2, "LT", "multiply", 10),
        (-9, 0, 2, "NE", "divide", 4),  # -4, -2, -1, 0: towards zero
        (0, 12, 0, "LT", "add", None),  # never ends
        (0, -1, 1, "NE", "add", None),  # ends after 2^32 - 1, longer than is followed
        (2**31 - 2, 0, 1, "GT", "add", 2),  # overflows, as the hardware does
    ],
)
def test_trip_counts(start, end, step, direction, operation, expected, monkeypatch):
    monkeypatch.setattr("bert_jax.planning.hlo_cost.loops.MAX_TRIPS", 100)
    text = LOOP.format(start=start, end=end, step=step, direction=direction, operation=operation)
    assert trips(text) == expected


@pytest.mark.parametrize("part", ["cond", "body"])
def test_a_loop_with_a_part_that_is_not_there_has_an_unknown_length(part):
    text = LOOP.format(start=0, end=12, step=1, direction="LT", operation="add")
    assert trips(text.replace(f"=%{part}", "=%elsewhere")) is None


def test_trip_count_through_fusions_copies_and_the_state():
    """The bound is an element of the state, condition and increment are fused."""
    text = """
%fused_compare (p0: s32[], p1: s32[]) -> pred[] {
  %p0 = s32[] parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %c = pred[] compare(%p1, %p0), direction=GT
}

%fused_add (p2: s32[]) -> s32[] {
  %p2 = s32[] parameter(0)
  %one = s32[] constant(1)
  ROOT %s = s32[] add(%one, %p2)
}

%wide.cond (p: (s32[], f32[8], s32[])) -> pred[] {
  %p = (s32[], f32[8], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=2
  ROOT %f = pred[] fusion(%i, %n), kind=kLoop, calls=%fused_compare
}

%wide.body (q: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %q = (s32[], f32[8], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %next = s32[] fusion(%j), kind=kLoop, calls=%fused_add
  %moved = s32[]{:T(128)S(6)} copy(%next)
  %x = f32[8] get-tuple-element(%q), index=1
  %m = s32[] get-tuple-element(%q), index=2
  %m2 = s32[] copy(%m)
  ROOT %t = (s32[], f32[8], s32[]) tuple(%moved, %x, %m2)
}

ENTRY %main (a: f32[8]) -> (s32[], f32[8], s32[]) {
  %a = f32[8] parameter(0)
  %zero = s32[] constant(0)
  %end = s32[] constant(7)
  %init = (s32[], f32[8], s32[]) tuple(%zero, %a, %end)
  ROOT %w = (s32[], f32[8], s32[]) while(%init), condition=%wide.cond, body=%wide.body
}
"""
    assert trips(text) == 7
    depends_on_data = text.replace("%end = s32[] constant(7)", "%end = s32[] parameter(1)")
    assert trips(depends_on_data) is None


def test_a_loop_as_long_as_its_outer_loop_has_run_is_unknown():
    """What the outer loop changes must not be taken for its initial value."""
    text = """HloModule m, is_scheduled=true

%inner.cond (p: (s32[], s32[])) -> pred[] {
  %p = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

%inner.body (q: (s32[], s32[])) -> (s32[], s32[]) {
  %q = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%j, %one)
  %m = s32[] get-tuple-element(%q), index=1
  ROOT %t = (s32[], s32[]) tuple(%next, %m)
}

%outer.cond (p2: (s32[], s32[])) -> pred[] {
  %p2 = (s32[], s32[]) parameter(0)
  %i2 = s32[] get-tuple-element(%p2), index=0
  %five = s32[] constant(5)
  ROOT %c2 = pred[] compare(%i2, %five), direction=LT
}

%outer.body (q2: (s32[], s32[])) -> (s32[], s32[]) {
  %q2 = (s32[], s32[]) parameter(0)
  %j2 = s32[] get-tuple-element(%q2), index=0
  %nine = s32[] get-tuple-element(%q2), index=1
  %zero = s32[] constant(0)
  %init = (s32[], s32[]) tuple(%zero, %BOUND)
  %w = (s32[], s32[]) while(%init), condition=%inner.cond, body=%inner.body
  %one2 = s32[] constant(1)
  %next2 = s32[] add(%j2, %one2)
  ROOT %t2 = (s32[], s32[]) tuple(%next2, %nine)
}

ENTRY %main () -> (s32[], s32[]) {
  %start = s32[] constant(3)
  %end = s32[] constant(9)
  %first = (s32[], s32[]) tuple(%start, %end)
  ROOT %v = (s32[], s32[]) while(%first), condition=%outer.cond, body=%outer.body
}
"""
    changing = parse_program(text.replace("%BOUND", "%j2"), ONE)
    assert [loop.trips for loop in changing.loops] == [2, None]
    constant = parse_program(text.replace("%BOUND", "%nine"), ONE)
    assert [(loop.trips, loop.runs) for loop in constant.loops] == [(2, 1), (9, 2)]


def test_scans_of_known_lengths():
    """lax.scan of 5, 6 reversed, 3 x 4 nested, 8 unrolled by 2; fori_loop over an argument."""
    program = read("scans")
    assert [(loop.trips, loop.runs) for loop in program.loops] == [
        (5, 1),
        (6, 1),
        (3, 1),
        (4, 3),
        (4, 1),
        (None, 1),
    ]
    assert [loop.trips for loop in program.unknown_loops] == [None]
    assert {op.runs for op in program.ops} == {1, 3, 4, 5, 6, 12}
    inner = next(op for op in program.ops if op.runs == 12 and op.cycles)
    assert inner.source.endswith("scans.layer")


def test_a_loop_costs_its_body_times_its_trips():
    program = read("scans")
    per_loop = {loop.trips * loop.runs: loop.cycles for loop in program.loops if loop.trips}
    for runs in (5, 6, 12):
        cycles = sum(op.cycles or 0 for op in program.ops if op.runs == runs)
        assert cycles == per_loop[runs] > 0


def test_sharded_program_has_gathers_beside_the_work_and_one_reduction_a_layer():
    program = read("sharded", data=2, fsdp=4)
    layer = 1024 * 1024 * 2
    assert {c.runs for c in program.collectives} == {6}
    gathers = [c for c in program.collectives if c.kind == "all-gather"]
    assert {(c.axes, c.group_size, c.bytes) for c in gathers} == {(("fsdp",), 4, layer)}
    assert [c.asynchronous for c in gathers].count(True) == 3
    assert all((c.overlapped_cycles > 0) == c.asynchronous for c in gathers)
    # Only the fusions that carry a gather move it on: not all that lies between start and end.
    assert sorted(c.overlapped_cycles for c in gathers) == [0, 5170, 12632, 17802]
    (reduction,) = (c for c in program.collectives if c.kind == "all-reduce")
    assert (reduction.axes, reduction.bytes) == (("data", "fsdp"), 2 * layer)
    assert reduction.phase == "backward"
    assert reduction.source == "model/make_golden_hlo.py:71 sharded.loss.layer"


def test_program_of_two_slices_reduces_in_steps():
    program = read("slices", data=8)
    assert program.devices_per_slice == 4
    big = [(c.kind, c.network, c.axes, c.group_size) for c in program.collectives if c.bytes > 2000]
    assert big == [
        ("reduce-scatter", "ici", ("data",), 4),
        ("all-reduce", "dcn", ("data",), 2),
        ("all-gather", "ici", ("data",), 4),
    ]
    between = next(c for c in program.collectives if c.network == "dcn")
    assert between.asynchronous
    assert between.bytes == 512 * 512 * 2 // 4


def test_kernels_keep_their_name_and_metadata_of_several_lines():
    program = read("kernel")
    (kernel,) = (op for op in program.ops if op.kind == "pallas")
    assert kernel.name.startswith("splash_mha_fwd")
    assert kernel.cycles is None
    assert kernel.flops is None
    assert kernel.kernel
    assert kernel.bytes >= 4 * 2 * 4 * 256 * 64 * 2


def test_sentinels_are_listed_without_cycles():
    program = entry(
        f"%b = f32[16,128] negate(%a), {cycles(2**63 - 1)}",
        f"%c = f32[16,128] negate(%b), {cycles(SENTINEL)}",
        f"ROOT %d = f32[16,128] negate(%c), {cycles(100)}",
    )
    assert [op.cycles for op in program.ops] == [None, None, 100]
    assert program.cycles == 100


def test_a_kernel_has_what_it_states_and_only_what_lies_in_hbm_counts_there():
    stated = '"flops":"70","transcendentals":"9","bytes_accessed":"333"'
    program = entry(
        '%k = f32[16,128]{1,0:T(8,128)S(1)} custom-call(%a), custom_call_target="tpu_custom_call", '
        f'backend_config={{"body":"TUzv","cost_estimate":{{{stated}}},"kernel_name":"mine"}}, '
        'metadata={op_name="jit(f)/jvp()/call"}',
        f"%g = f32[4,128] fusion(%k, %a), kind=kLoop, {cycles(5)}, "
        'metadata={op_name="jit(f)/gather"}',
        f'ROOT %n = f32[16,128] custom-call(%a), custom_call_target="TopK", {cycles(7)}, '
        'backend_config={"bytes_accessed":"333","flops":"70"}',
    )
    kernel, gather, other = program.ops
    assert (kernel.name, kernel.kind, kernel.cycles, kernel.phase) == (
        "mine", "pallas", None, "forward",
    )  # fmt: skip
    assert (kernel.bytes, kernel.flops, kernel.kernel) == (333, 70, "TUzv")
    whole, part = 16 * 128 * 4, 4 * 128 * 4
    assert kernel.hbm_bytes == whole  # its result is in the core's own memory
    # A gather reads of its table what it returns.
    assert (gather.bytes, gather.hbm_bytes) == (part + part + whole, part + whole)
    assert (other.name, other.kind, other.flops, other.kernel) == ("n", "xla", None, "")
    assert other.bytes == 2 * whole
    assert program.cycles == 12


@pytest.mark.parametrize(
    ("mesh", "partitions", "inside", "across"),
    [
        ({"data": 4, "fsdp": 8}, 32, {"data": 4, "fsdp": 8}, {}),
        ({"data": 4, "fsdp": 8}, 8, {"data": 1, "fsdp": 8}, {"data": 4}),
        ({"data": 6, "fsdp": 8}, 16, {"data": 2, "fsdp": 8}, {"data": 3}),
        ({"data": 2, "fsdp": 4, "tensor": 2}, 4, {"data": 1, "fsdp": 2, "tensor": 2},
         {"data": 2, "fsdp": 2}),
        ({"data": 1, "fsdp": 1}, 4, {"data": 1, "fsdp": 1}, {}),
    ],
)  # fmt: skip
def test_slices_lie_along_the_outermost_axes(mesh, partitions, inside, across):
    assert _split_slices(mesh, partitions) == (inside, across)


def test_sources_are_of_the_innermost_frame_in_the_package():
    op = entry(
        '%b = f32[16,128] negate(%a), metadata={op_name="jit(f)/neg" stack_frame_id=3}',
    ).ops[0]
    assert op.source == "model/encoder.py:123 Layer.__call__"
    unknown = entry("ROOT %b = f32[16,128] negate(%a), metadata={stack_frame_id=9}").ops[0]
    assert unknown.source == ""


@pytest.mark.parametrize("lengths", [(10, 70), (70, 10)])
@pytest.mark.parametrize(
    "form",
    ["branch_computations={%b0, %b1}", "true_computation=%b0, false_computation=%b1"],
)
def test_conditional_counts_its_longest_branch(lengths, form):
    """With its exchange; that of the other branch does not take place."""
    branches = ""
    for number, length in enumerate(lengths):
        name, groups = f"b{number}", "[2,4]<=[8]" if length == 70 else "[4,2]<=[2,4]T(1,0)"
        branches += (
            f"\n%{name} (p.{name}: f32[16,128]) -> f32[16,128] {{\n"
            f"  %p.{name} = f32[16,128] parameter(0)\n"
            f"  %n.{name} = f32[16,128] negate(%p.{name}), {cycles(length)}\n"
            f"  ROOT %r.{name} = f32[16,128] all-reduce(%n.{name}), channel_id=1, "
            f"replica_groups={groups}, use_global_device_ids=true, to_apply=%sum\n}}\n"
        )
    text = ENTRY.format(
        partitions=8,
        body=f"  %i = s32[] constant(0)\n  ROOT %b = f32[16,128] conditional(%i, %a, %a), {form}",
    )
    text = text.replace("\nENTRY", branches + "\nENTRY")
    program = parse_program(text, ONE | {"data": 2, "fsdp": 4})
    assert program.cycles == 70
    assert [op.cycles for op in program.ops] == [70]
    assert [each.axes for each in program.collectives] == [("fsdp",)]


def test_shapes():
    assert shape_bytes("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}") == 2048
    assert shape_bytes("(f32[2], (pred[3]{0}, s4[3]), u32[]{:S(2)}, token[])") == 8 + 3 + 2 + 4


def test_phases():
    assert phase_of("jit(f)/transpose(jvp())/dot_general") == "backward"
    assert phase_of("jit(f)/transpose(jvp())/checkpoint/dot_general") == "backward"
    assert phase_of("jit(f)/jvp()/dot_general") == "forward"
    assert phase_of("jit(f)/transpose(jvp())/checkpoint/rematted_computation/dot") == "recomputed"
    assert phase_of("jit(f)/add") == ""


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse_text("not a program")


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_the_compiler_still_writes_what_is_read_here(tmp_path):
    """Compiles the loops again, with the libtpu that is installed."""
    import subprocess
    import sys

    script = Path(__file__).with_name("make_golden_hlo.py")
    code = (
        f"import sys; sys.path.insert(0, {str(script.parent)!r}); import make_golden_hlo as m; "
        f"open({str(tmp_path / 'scans.hlo')!r}, 'w')"
        ".write(m.scans(m.mesh_of('v5e:2x2', (1, 1, 1))))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    text = (tmp_path / "scans.hlo").read_text()
    program = parse_program(text, ONE)
    lengths = [loop.trips * loop.runs for loop in program.loops if loop.trips is not None]
    assert sorted(lengths) == [3, 4, 5, 6, 12]
    assert len(program.unknown_loops) == 1
    assert program.cycles > 10_000
    assert re.search(r'"estimated_cycles":"\d+"', text)


def test_an_operation_without_an_estimate_counts_unless_it_is_scalar():
    program = entry(
        "%i = s32[] parameter(1)",
        "%j = s32[] negate(%i)",
        "%k = s64[] convert(%i)",
        "%x = f32[3] broadcast(%i)",
        f"%y = f32[] negate(%i), {cycles(SENTINEL - 1)}",
        f"%n = f32[16,128] negate(%a), {cycles(-1)}",
        '%m = f32[16,128] custom-call(%a), custom_call_target="MoveToHost"',
        "ROOT %c = f32[16,128] copy(%a)",
    )
    assert [(op.name, op.kind, op.cycles) for op in program.ops] == [
        ("x", "xla", None), ("y", "xla", SENTINEL - 1), ("n", "xla", None), ("c", "copy", None),
    ]  # fmt: skip
