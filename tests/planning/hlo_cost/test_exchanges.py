"""Exchanges between devices: which they are, over which axes, and what runs beside them."""

import pytest
from hlo_snippets import ENTRY, ONE, cycles, entry

from bert_jax.planning.hlo_cost.cost import Transfer
from bert_jax.planning.hlo_cost.hlo import parse_program
from bert_jax.planning.hlo_cost.hlo_text import axes_of_groups, axes_of_pairs, parse_groups


def test_asynchronous_pairs_count_once_and_share_the_work_beside_them():
    groups = "channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%sum"
    program = entry(
        f"%s = f32[16,128] all-reduce-start(%a), {groups}",
        f"%b = f32[16,128] negate(%a), {cycles(100)}",
        f"%t = f32[16,128] all-reduce-start(%b), {groups.replace('=1,', '=2,')}",
        f"%c = f32[16,128] negate(%b), {cycles(60)}",
        "%sd = f32[16,128] all-reduce-done(%s)",
        f"%d = f32[16,128] negate(%c), {cycles(7)}",
        "%td = f32[16,128] all-reduce-done(%t)",
        f"ROOT %u = f32[16,128] all-reduce(%d), {groups.replace('=1,', '=3,')}",
        data=2,
        fsdp=4,
    )
    found = [(c.name, c.asynchronous, c.overlapped_cycles) for c in program.collectives]
    assert found == [("s", True, 130), ("t", True, 37), ("u", False, 0)]
    assert {c.bytes for c in program.collectives} == {16 * 128 * 4}
    assert program.cycles == 167


def test_the_rings_of_a_collective_are_read():
    debug = "StrategyRing{colors:1 phases:1 cores:{4}}"
    (found,) = entry(
        "ROOT %r = f32[16,128] all-reduce(%a), channel_id=1, replica_groups=[2,4]<=[8], "
        'to_apply=%sum, backend_config={"collective_algorithm_config":{"strategy":"StrategyRing",'
        f'"debug":"{debug}"}}}}',
        data=2,
        fsdp=4,
    ).collectives
    assert found.colors == 1


def test_an_all_reduce_of_which_a_slice_is_kept_is_a_reduce_scatter():
    fused = """
%all-reduce-scatter.1 (p: f32[16,128]) -> f32[4,128] {
  %p = f32[16,128] parameter(0)
  %r = f32[16,128] all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum
  ROOT %k = f32[4,128] dynamic-slice(%r), dynamic_slice_sizes={4,128}
}
"""
    text = ENTRY.format(
        partitions=8,
        body="  ROOT %f = f32[4,128] fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1",
    ).replace("\nENTRY", fused + "\nENTRY")
    (found,) = parse_program(text, {"data": 2, "fsdp": 4, "tensor": 1}).collectives
    assert (found.kind, found.axes, found.bytes) == ("reduce-scatter", ("fsdp",), 16 * 128 * 4)


def test_permutes_run_over_the_axes_they_move_along():
    program = entry(
        "%s = (f32[16,128], f32[16,128]) collective-permute-start(%a), channel_id=1, "
        "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}",
        "ROOT %d = f32[16,128] collective-permute-done(%s)",
        data=2,
        fsdp=4,
    )
    (found,) = program.collectives
    assert (found.kind, found.axes, found.group_size) == ("collective-permute", ("fsdp",), 2)
    assert axes_of_pairs([(0, 4)], {"data": 2, "fsdp": 4}) == ("data",)
    assert axes_of_pairs([(0, 5)], {"data": 2, "fsdp": 4}) == ("data", "fsdp")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}", [(0, 1), (2, 3)]),
        ("{}", [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("[4,2]<=[8]", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("[2,4]<=[4,2]T(1,0)", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("[4,2]<=[2,2,2]T(1,0,2)", [(0, 1), (4, 5), (2, 3), (6, 7)]),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("mesh['a'=8] {'a':(2)4}", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("mesh['a'=8] {'a':(1)2}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", [(3, 2), (1, 0)]),
    ],
)
def test_replica_groups_in_every_syntax(text, expected):
    found = parse_groups(f"channel_id=7, replica_groups={text}, use_global_device_ids=true", 8)
    assert list(found) == expected


def test_groups_that_cannot_be_read_are_an_error():
    with pytest.raises(ValueError, match="no replica groups"):
        parse_groups("replica_groups=V3[something]", 8)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("[4,4]<=[16]", ("fsdp", "tensor")),
        ("[8,2]<=[16]", ("tensor",)),
        ("[4,4]<=[4,2,2]T(1,2,0)", ("data",)),
        ("[2,8]<=[8,2]T(1,0)", ("data", "fsdp")),
        ("[2,8]<=[4,2,2]T(1,0,2)", ("data", "tensor")),
        ("[1,16]<=[16]", ("data", "fsdp", "tensor")),
        ("[16,1]<=[16]", ()),
        ("[2,8]<=[16]", ("mixed",)),
        ("[8,2]<=[2,2,4]T(0,2,1)", ("data",)),  # pairs: half of the axis
    ],
)
def test_mesh_axes_of_groups(groups, axes):
    mesh_shape = {"data": 4, "fsdp": 2, "tensor": 2}
    assert axes_of_groups(parse_groups(f"replica_groups={groups}", 16), mesh_shape) == axes


def test_a_collective_on_a_sparse_core_runs_beside_the_work():
    # As in programs for tpu7x: the exchange stands two computations down, and gets its argument
    # between start and end.
    text = """HloModule m, is_scheduled=true, num_partitions=4

%deep (d: bf16[8]) -> bf16[32] {
  %d = bf16[8]{0} parameter(0)
  ROOT %g = bf16[32]{0} all-gather(%d), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
}

%outer (o: bf16[8]) -> bf16[32] {
  %o = bf16[8]{0} parameter(0)
  ROOT %c = bf16[32]{0} custom-call(%o), custom_call_target="x", called_computations={%deep}
}, execution_thread="sparsecore"

%fused (f: bf16[8]) -> bf16[8] {
  %f = bf16[8]{0} parameter(0)
  ROOT %n = bf16[8]{0} negate(%f)
}

ENTRY %main (a: bf16[8]) -> bf16[32] {
  %a = bf16[8]{0} parameter(0)
  %s = ((), (), s32[1]{0}) async-start(), async_execution_thread="sparsecore", calls=%outer
  %u = ((bf16[8]{0}), bf16[32]{0}, s32[1]{0}) async-update(%s, %a)
  %w = bf16[8]{0} fusion(%a), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"700"}
  %e = bf16[32]{0} async-done(%u)
  ROOT %r = bf16[32]{0} negate(%e), backend_config={"estimated_cycles":"90"}
}
"""
    (gather,) = parse_program(text, ONE | {"fsdp": 4}).collectives
    assert (gather.kind, gather.axes, gather.bytes) == ("all-gather", ("fsdp",), 64)
    assert gather.asynchronous
    assert gather.overlapped_cycles == 700  # without the 90 behind its end


def test_an_exchange_between_slices_ends_where_its_data_arrive():
    """Two at once share the work between their start and end; each has its own rendezvous."""

    def host(name: str) -> str:
        return (
            f'is_host_transfer=true, frontend_attributes={{_xla_host_transfer_rendezvous="{name}",'
            '_xla_megascale_transfer_type="ALL_REDUCE"}'
        )

    program = entry(
        "%token = token[] after-all()",
        f"%s1 = (f32[16,128], u32[], token[]) send(%a, %token), {host('one')}",
        f"%r1 = (f32[16,128], u32[], token[]) recv(%token), {host('one')}",
        f"%b = f32[16,128] negate(%a), {cycles(10)}",
        f"%s2 = (f32[16,128], u32[], token[]) send(%b, %token), {host('two')}",
        f"%r2 = (f32[16,128], u32[], token[]) recv(%token), {host('two')}",
        "%sd1 = token[] send-done(%s1)",
        f"%c = f32[16,128] negate(%b), {cycles(60)}",
        "%rd1 = (f32[16,128], token[]) recv-done(%r1)",
        f"%d = f32[16,128] negate(%c), {cycles(400)}",
        "%rd2 = (f32[16,128], token[]) recv-done(%r2)",
        f"ROOT %e = f32[16,128] negate(%d), {cycles(5000)}",
        data=2, fsdp=8,
    )  # fmt: skip
    found = [(c.name, c.kind, c.network, c.axes, c.overlapped_cycles) for c in program.collectives]
    assert found == [
        ("one", "all-reduce", "dcn", ("data",), 40),
        ("two", "all-reduce", "dcn", ("data",), 430),
    ]
    assert {(c.bytes, c.group_size, c.asynchronous) for c in program.collectives} == {
        (16 * 128 * 4, 2, True)
    }
    assert program.cycles == 5470


def test_a_send_to_the_host_is_no_exchange():
    program = entry(
        "%token = token[] after-all()",
        '%s = (f32[16,128], u32[], token[]) send(%a, %token), is_host_transfer=true, '
        'frontend_attributes={_xla_host_transfer_rendezvous="one"}',
        "%sd = token[] send-done(%s)",
        data=2, fsdp=8,
    )  # fmt: skip
    assert not program.collectives


def test_a_collective_inside_fusions_advances_only_in_those_that_carry_it():
    groups = "channel_id=7, replica_groups=[2,4]<=[8], use_global_device_ids=true"
    fused = ""
    for name, target in (("begin", "AsyncCollectiveStart"), ("step", ""),
                         ("end", "AsyncCollectiveDone")):  # fmt: skip
        marker = (
            f'  %m.{name} = f32[8] custom-call(%p.{name}), custom_call_target="{target}"\n'
            if target
            else ""
        )
        fused += (
            f"\n%{name} (p.{name}: f32[16,128]) -> f32[64,128] {{\n"
            f"  %p.{name} = f32[16,128] parameter(0)\n{marker}"
            f"  ROOT %g.{name} = f32[64,128] all-gather(%p.{name}), {groups}\n}}\n"
        )
    lines = [
        "  %f1 = f32[64,128] fusion(%a), kind=kCustom, calls=%begin",
        f"  %b = f32[16,128] negate(%a), {cycles(1000)}",
        f"  %f2 = f32[64,128] fusion(%a), kind=kCustom, calls=%step, {cycles(70)}",
        "  %f3 = f32[64,128] fusion(%a), kind=kCustom, calls=%end",
        f"  ROOT %f4 = f32[64,128] fusion(%a), kind=kCustom, calls=%step, {cycles(50)}",
    ]
    text = ENTRY.format(partitions=8, body="\n".join(lines)).replace("\nENTRY", fused + "\nENTRY")
    program = parse_program(text, ONE | {"data": 2, "fsdp": 4})
    found = [(c.name, c.asynchronous, c.overlapped_cycles) for c in program.collectives]
    # Outside of a pair of start and end the fusion is the collective itself.
    assert found == [("f1", True, 70), ("f4", False, 0)]
    assert program.cycles == 1070


def test_a_copy_beside_the_core_has_the_bytes_that_it_makes():
    """Not those of its operand, and the core waits for none."""
    program = entry(
        "%c = (f32[16,128]{1,0:T(8,128)S(1)}, f32[16,128]{1,0:T(8,128)}, u32[]) copy-start(%a)",
        "%s = ((f32[16,128]{1,0:T(8,128)}), f32[4,128]{1,0:T(4,128)S(1)}, s32[1]) slice-start(%a)",
        f"%b = f32[16,128] negate(%a), {cycles(100)}",
        "%d = f32[16,128] copy-done(%c)",
        "ROOT %t = f32[4,128] slice-done(%s)",
    )
    assert program.transfers == (Transfer(16 * 128 * 4, 1), Transfer(4 * 128 * 4, 1))
    assert [op.name for op in program.ops] == ["b"]


@pytest.mark.parametrize(
    ("called", "thread"), [("slice", ""), ("gather", ', async_execution_thread="sparsecore"')]
)
def test_a_slice_or_a_sparse_core_works_beside_the_core(called, thread):
    inner = f"""
%moved (p: f32[16,128]) -> f32[4,128] {{
  %p = f32[16,128] parameter(0)
  ROOT %k = f32[4,128]{{1,0:S(1)}} {called}(%p)
}}
"""
    lines = [
        "  %s = ((f32[16,128]), f32[4,128]{1,0:S(1)}, s32[]) async-start(%a), calls=%moved"
        + thread,
        f"  %b = f32[16,128] negate(%a), {cycles(100)}",
        "  ROOT %d = f32[4,128]{1,0:S(1)} async-done(%s)",
    ]
    text = ENTRY.format(partitions=8, body="\n".join(lines)).replace("\nENTRY", inner + "\nENTRY")
    program = parse_program(text, ONE)
    assert program.transfers == (Transfer(4 * 128 * 4, 1),)
    assert [op.name for op in program.ops] == ["b"]


def test_a_start_of_a_computation_that_the_text_lacks_is_read():
    program = entry(
        "%s = ((f32[16,128]), f32[4,128], s32[]) async-start(%a)",
        "ROOT %d = f32[4,128] async-done(%s)",
    )
    assert not program.transfers


def test_an_all_reduce_sends_sums_of_the_type_of_its_result():
    program = entry(
        f"%b = bf16[16,128] convert(%a), {cycles(100)}",
        "ROOT %s = f32[16,128] all-reduce(%b), channel_id=1, replica_groups=[2,4]<=[8], "
        "to_apply=%sum",
        data=2,
        fsdp=4,
    )
    assert [c.bytes for c in program.collectives] == [16 * 128 * 4]


def test_groups_of_one_device_send_nothing():
    one = "channel_id=1, replica_groups=[8,1]<=[8], use_global_device_ids=true, to_apply=%sum"
    program = entry(
        f"%s = f32[16,128] all-reduce-start(%a), {one}",
        "%d = f32[16,128] all-reduce-done(%s)",
        f"ROOT %u = f32[16,128] all-reduce(%d), {one}",
        data=2,
        fsdp=4,
    )
    assert not program.collectives
