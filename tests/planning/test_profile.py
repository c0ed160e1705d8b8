"""Profiles: runs that write one, and traces of TPUs and GPUs, which are made here."""

import json
import re
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import small_finetuning
from jax.profiler import ProfileData
from small_run import fingerprint, small_config, write_corpus

import bert_jax
from bert_jax.artefacts.saved.runs import read_starts
from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh
from bert_jax.errors import UserError
from bert_jax.model import layers
from bert_jax.planning import profile
from bert_jax.planning.hlo_cost.hlo_text import parse_text
from bert_jax.planning.profile import Profile, times_by_line
from bert_jax.training.finetune.train import finetune
from bert_jax.training.pretrain.train import train
from bert_jax.training.run.goodput import Clock
from bert_jax.training.run.session import Session
from bert_jax.training.run_plan import RunPlan

PACKAGE = Path(bert_jax.__file__).parent
ROW = re.compile(r" *([\d.]+) +([\d.]+)%  (?: *([\d.]+)  )?(\S+?)(?::(\d+))?( .*)?")


def rows_of(lines: list[str]) -> list[re.Match[str]]:
    """The rows below the title, which are all of one form."""
    start = next(n for n, line in enumerate(lines) if line.endswith("source line")) + 1
    rows = [ROW.fullmatch(line) for line in lines[start:]]
    assert all(rows), lines
    return [row for row in rows if row]


def check_files(lines: list[str]) -> set[str]:
    """Every row names a line that is in a file of the package; the rows are the whole."""
    rows = rows_of(lines)
    for row in rows:
        if row[4] != "(compiler)" and not row[4].startswith("("):
            assert int(row[5]) <= len((PACKAGE / row[4]).read_text().splitlines())
    assert sum(float(row[2]) for row in rows) == pytest.approx(100, abs=0.05 * len(rows) + 0.1)
    times = [float(row[1]) for row in rows]
    assert times == sorted(times, reverse=True)
    return {row[4] for row in rows}


@pytest.mark.without_libtpu
def test_a_run_is_profiled_and_learns_the_same(tmp_path, reused_steps):
    corpus = write_corpus(tmp_path / "corpus")
    config = small_config(
        training__num_steps=5, training__phases=[{"length": 32, "batch_size": 16}],
        training__accumulation=1, training__log_every_steps=1, optimizer__warmup_steps=1,
        checkpoint__save_every_steps=5,
    )  # fmt: skip
    said: list[str] = []
    profiled, plain = tmp_path / "profiled", tmp_path / "plain"
    train(config, profiled, corpus=corpus, echo=said.append, profiler=Profile("3:4"))
    train(config, plain, corpus=corpus, echo=lambda line: None)
    assert fingerprint(profiled, config, corpus) == fingerprint(plain, config, corpus)
    assert not (plain / "profile").exists()
    (trace,) = (profiled / "profile").glob("plugins/profile/*/*.trace.json.gz")
    assert trace.stat().st_size > 1000
    lines = (profiled / "profile" / "lines.txt").read_text().splitlines()
    head = "profile of steps 3 to 4 on cpu: "
    assert lines[0].startswith(head)
    assert lines[0].endswith("bert-jax plan predicts TPUs only")
    begin = said.index(lines[0])
    assert said[begin : begin + 20] == lines[:20]
    assert said[begin + 20] not in lines
    assert str(profiled / "profile") in lines[1]
    assert {"model/layers.py", "objectives/losses.py"} <= check_files(lines)
    (start,) = read_starts(profiled / "goodput.json")
    assert start.seconds["profile"] > 0
    # A start after the steps traces nothing, and neither does a finished run.
    train(config, profiled, corpus=corpus, echo=said.append, profiler=Profile("2:3"))
    assert len(list((profiled / "profile").glob("plugins/profile/*"))) == 1


@pytest.mark.without_libtpu
def test_a_fine_tuning_is_profiled(tmp_path, monkeypatch):
    small_finetuning.compile_once(monkeypatch)
    files = small_finetuning.write_files(tmp_path / "files")
    config = small_finetuning.small_config(files, training__num_epochs=1.0)
    finetune(config, tmp_path / "w", echo=lambda line: None, profiler=Profile("2:6"))
    lines = (tmp_path / "w" / "profile" / "lines.txt").read_text().splitlines()
    assert lines[0].startswith("profile of steps 2 to 6 on cpu: ")
    assert {"model/encoder.py", "training/steps/step.py"} <= check_files(lines)


def mesh_of_one() -> Any:
    return make_mesh(MeshConfig(), jax.devices()[:1])


class ShortPlan(RunPlan):
    """The parts of a plan that a profile reads."""

    num_steps = 0

    def __init__(self, num_steps: int, mesh: Any):
        vars(self).update(mesh=mesh)
        type(self).num_steps = num_steps


class Listener(Session):
    """The parts of a session that a profile uses."""

    def __init__(self, directory: Path, said: list[str]):
        self.work: Any = SimpleNamespace(local=directory, name="w")
        self.out: Any = SimpleNamespace(say=said.append)
        self.clock, self.alive = Clock(), lambda what: None


@pytest.mark.without_libtpu
def test_a_run_that_ends_early_has_a_profile_of_its_steps(tmp_path):
    def train_step(x):
        return layers.gelu(x @ x)

    step, x, said, waits = jax.jit(train_step), jnp.ones((256, 256)), [], []
    step(x)
    trace = Profile("2:9")(ShortPlan(9, mesh_of_one()))
    for number in (1, 2, 3, None, None):
        trace(number, Listener(tmp_path, said), partial(waits.append, number))
        x = step(x).block_until_ready()
    assert said[0].startswith("profile of steps 2 to 3 on cpu: ")
    assert check_files(said) == {"model/layers.py", "(compiler)"}
    assert waits == [1, None]
    assert [line.partition(":")[0] for line in said].count("all lines") == 1


@pytest.mark.without_libtpu
def test_a_trace_that_cannot_be_read_is_said_and_the_run_goes_on(tmp_path, monkeypatch):
    said: list[str] = []
    trace = Profile("2:2")(ShortPlan(2, mesh_of_one()))
    trace(1, Listener(tmp_path, said), lambda: None)
    monkeypatch.setattr(profile, "times_by_line", lambda *_: 1 / 0)
    trace(2, Listener(tmp_path, said), lambda: None)
    assert said == ["Warning: no table of the profile: ZeroDivisionError: division by zero"]
    assert not (tmp_path / "profile" / "lines.txt").exists()


@pytest.mark.parametrize(("continued_from", "warns"), [(0, False), (18, False), (19, True)])
def test_a_start_after_the_step_before_the_first_warns_once(
    tmp_path, monkeypatch, continued_from, warns
):
    """Steps count from the beginning of the run, not of the start."""
    monkeypatch.setattr(profile.xla_client, "pjrt_plugin_loaded", lambda name: False)
    begun: list[Path] = []
    monkeypatch.setattr(profile.jax.profiler, "start_trace", lambda path, **_: begun.append(path))
    trace, said = Profile("20:25")(ShortPlan(30, mesh_of_one())), list[str]()
    for step in range(continued_from + 1, 23):
        trace(step, Listener(tmp_path, said), lambda: None)
    assert len(begun) == 1 - warns
    warning = (
        "Warning: --profile=20:25 traces nothing: this start continues after step 19, and FIRST "
        "must be at least 2 steps later"
    )
    assert said == [warning] * warns


@pytest.mark.parametrize("given", ["5", "6:3", "1:3", "0:0", "a:b", "2:", "2:3:4", "-2:3", "2.5:3"])
def test_ranges_that_are_refused(given):
    with pytest.raises(
        UserError, match=re.escape(f"--profile is {given!r}; give FIRST:LAST, FIRST at least 2")
    ):
        Profile(given)


def test_a_profile_after_the_last_step_is_refused(monkeypatch):
    monkeypatch.setattr(profile.xla_client, "pjrt_plugin_loaded", lambda name: False)
    with pytest.raises(UserError, match="--profile ends at 13; end at most at step 12"):
        Profile("3:13")(ShortPlan(12, mesh_of_one()))


def test_libtpu_without_a_tpu_is_refused(monkeypatch):
    plan, loaded = ShortPlan(12, mesh_of_one()), ["tpu"]
    monkeypatch.setattr(profile.xla_client, "pjrt_plugin_loaded", loaded.__contains__)
    with pytest.raises(UserError, match="set JAX_PLATFORMS=cpu or cuda"):
        Profile("3:4")(plan)
    loaded.clear()
    assert callable(Profile("3:4")(plan))


def space(plane: str, lines: dict[str, list[tuple[str, int, int, dict[str, Any]]]]) -> str:
    """The text of a trace with one plane; an event is (name, start in ns, ns, statistics)."""
    names: dict[str, int] = {}
    stats: dict[str, int] = {}
    text = ""
    for line, events in lines.items():
        text += f"lines {{ name: {json.dumps(line)} timestamp_ns: 0 "
        for name, start, ns, own in events:
            number = names.setdefault(name, len(names) + 1)
            text += f"events {{ metadata_id: {number} "
            text += f"offset_ps: {start * 1000} duration_ps: {ns * 1000} "
            for key, value in own.items():
                kind = "int64_value" if isinstance(value, int) else "str_value"
                number = stats.setdefault(key, len(stats) + 1)
                text += f"stats {{ metadata_id: {number} {kind}: {json.dumps(value)} }} "
            text += "} "
        text += "} "
    for field, known in (("event_metadata", names), ("stat_metadata", stats)):
        for name, n in known.items():
            text += f"{field} {{ key: {n} value {{ id: {n} name: {json.dumps(name)} }} }} "
    return f"planes {{ name: {json.dumps(plane)} {text} }}"


STEP = """HloModule jit_train_step, is_scheduled=true

FileNames
1 "/x/bert_jax/model/layers.py"

FunctionNames
1 "Affine.__call__"

FileLocations
1 {{file_name_id=1 function_name_id=1 line={line} end_line=9 column=1 end_column=2}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}

%body (q: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %q = (s32[], f32[8]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%j, %one)
  %y = f32[8] get-tuple-element(%q), index=1
  %inner.1 = f32[8] negate(%y), metadata={{op_name="jit(train_step)/jvp()/neg" stack_frame_id=1}}, backend_config={{"estimated_cycles":"3000000"}}
  ROOT %t = (s32[], f32[8]) tuple(%next, %inner.1)
}}

%cond (p: (s32[], f32[8])) -> pred[] {{
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(2)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (a: f32[8]) -> (s32[], f32[8]) {{
  %a = f32[8] parameter(0)
  %{outer} = f32[8] exponential(%a), metadata={{op_name="jit(train_step)/transpose(jvp())/exp" stack_frame_id=1}}, backend_config={{"estimated_cycles":"1500000"}}
  %zero = s32[] constant(0)
  %init = (s32[], f32[8]) tuple(%zero, %{outer})
  ROOT %while.1 = (s32[], f32[8]) while(%init), condition=%cond, body=%body
}}
"""  # noqa: E501

TPU = space(
    "/device:TPU:0",
    {
        "XLA Modules": [
            ("jit_train_step(77)", 1_000_000, 9_000_000, {}),
            ("jit_eval_step(5)", 10_000_000, 5_000_000, {}),
        ],
        "XLA Ops": [
            ("%exp.1 = f32[8]{0} exponential(f32[8]{0} %a)", 1_000_000, 2_000_000, {}),
            ("%while.1 = (s32[], f32[8]) while(%init)", 3_000_000, 6_000_000, {}),
            ("%inner.1 = f32[8]{0} negate(f32[8]{0} %y)", 3_000_000, 2_500_000, {}),
            ("%inner.1 = f32[8]{0} negate(f32[8]{0} %y)", 6_000_000, 2_500_000, {}),
            ("%late.1 = f32[8]{0} negate(f32[8]{0} %y)", 9_000_000, 500_000, {}),
            ("%exp.1 = f32[8]{0} exponential(f32[8]{0} %a)", 10_000_000, 4_000_000, {}),
        ],
        "Steps": [("1", 1_000_000, 9_000_000, {})],
    },
)  # fmt: skip


def test_operations_of_a_tpu_count_once_and_only_in_the_train_step():
    program = parse_text(STEP.format(line=7, outer="exp.1"))
    found = times_by_line(ProfileData.from_text_proto(TPU), "tpu", [program])
    assert found == [
        Counter({
            "model/layers.py:7 Affine.__call__ [forward]": 5_000_000,
            "model/layers.py:7 Affine.__call__ [backward]": 2_000_000,
            "(late.1)": 500_000,
        })
    ]  # fmt: skip


def test_the_prediction_stands_beside_the_time_of_a_tpu(tmp_path, monkeypatch):
    module = SimpleNamespace(
        name="jit_train_step", to_string=lambda: STEP.format(line=7, outer="exp.1")
    )
    loaded = [SimpleNamespace(hlo_modules=lambda: [module])]
    device = SimpleNamespace(
        platform="tpu", device_kind="TPU v5 lite", coords=(0, 0, 0),
        client=SimpleNamespace(live_executables=lambda: loaded),
    )  # fmt: skip
    mesh = SimpleNamespace(shape={"data": 1, "fsdp": 1, "tensor": 1}, local_devices=[device])
    monkeypatch.setattr(profile.xla_client, "pjrt_plugin_loaded", lambda name: False)
    monkeypatch.setattr(profile.jax, "devices", lambda: [device])
    monkeypatch.setattr(profile.jax.profiler, "start_trace", lambda path, **_: None)

    def stop_trace() -> None:
        path = tmp_path / "profile" / "plugins" / "profile" / "now" / "x.xplane.pb"
        path.parent.mkdir(parents=True)
        path.write_bytes(ProfileData.text_proto_to_serialized_xspace(TPU))

    monkeypatch.setattr(profile.jax.profiler, "stop_trace", stop_trace)
    said: list[str] = []
    trace = Profile("3:3")(ShortPlan(3, mesh))
    for number in (2, 3):
        trace(number, Listener(tmp_path, said), lambda: None)
    # 1.5 million cycles at 1.5 GHz before the loop, and twice 3 million in it: 1 and 4 ms.
    assert said[0].endswith("on TPU v5 lite: 7.50 ms a step in operations; "
                            "bert-jax plan predicts 5.00 ms")  # fmt: skip
    found = [(row[1], row[2], row[3], row[4], (row[6] or "").strip()) for row in rows_of(said)]
    assert found == [
        ("5.000", "66.7", "4.000", "model/layers.py", "Affine.__call__ [forward]"),
        ("2.000", "26.7", "1.000", "model/layers.py", "Affine.__call__ [backward]"),
        ("0.500", "6.7", "0.000", "(late.1)", ""),
    ]


def test_kernels_of_a_gpu_belong_to_the_program_that_ran_them():
    def of(program: int, operation: str) -> dict[str, Any]:
        return {"hlo_module": "jit_train_step", "program_id": program, "hlo_op": operation}

    text = space(
        "/device:GPU:0",
        {
            "Stream #13(Compute)": [
                ("exp_1", 0, 100, of(1, "exp.1")), ("inner_1", 100, 10, of(1, "inner.1")),
                ("exp_2", 200, 1000, of(2, "exp.2")), ("inner_1", 300, 20, of(2, "inner.1")),
                ("gemm", 400, 7, {}), ("eval", 500, 9, {"hlo_module": "jit_eval_step"}),
            ],
            "XLA Ops": [("exp.1", 0, 100, of(1, "exp.1"))],
        },
    )  # fmt: skip
    programs = [
        parse_text(STEP.format(line=line, outer=outer))
        for line, outer in ((7, "exp.1"), (8, "exp.2"))
    ]
    first, second = times_by_line(ProfileData.from_text_proto(text), "gpu", programs)
    assert second == {
        "model/layers.py:8 Affine.__call__ [backward]": 1000,
        "model/layers.py:8 Affine.__call__ [forward]": 20,
    }
    assert first == {
        "model/layers.py:7 Affine.__call__ [backward]": 100,
        "model/layers.py:7 Affine.__call__ [forward]": 10,
        "(gemm)": 7,
    }


def test_kernels_of_a_cuda_graph_count_under_their_instructions():
    run = {"hlo_module": "jit_train_step", "program_id": 1, "hlo_op": "command_buffer_129"}
    kernels = [
        ("exp_1", 0, 100, run), ("inner_1", 100, 10, run),
        ("nvjet_sm90_tst_128x256", 110, 7, run), ("attention_forward", 120, 5, run),
    ]  # fmt: skip
    text = space("/device:GPU:0", {"Stream #13(Compute)": kernels})
    program = parse_text(STEP.format(line=7, outer="exp.1"))
    (found,) = times_by_line(ProfileData.from_text_proto(text), "gpu", [program])
    assert found == {
        "model/layers.py:7 Affine.__call__ [backward]": 100,
        "model/layers.py:7 Affine.__call__ [forward]": 10,
        "(nvjet_sm90_tst_128x256)": 7,
        "(attention_forward)": 5,
    }
