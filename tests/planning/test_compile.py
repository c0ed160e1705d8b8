"""What is made of the compiler's answers, without a compiler."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from made_plans import made_plan
from small_run import TOKENIZER, VOCAB_SIZE, small_config, write_corpus

from bert_jax.artefacts.saved.model import Origin, SavedModel
from bert_jax.model.config import ModelConfig
from bert_jax.objectives.objective import num_params
from bert_jax.planning import compile as plan_compile
from bert_jax.planning.compile import (
    _needs_and_has,
    _read,
    _write,
    default_cache,
    usable_bytes,
    with_vocabulary,
)
from bert_jax.planning.topology import parse_topology
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.sections import PretrainModelConfig
from bert_jax.training.pretrain.settings import objective_of

GIB = 2**30
SIZES = [
    f"{name}_size_in_bytes" for name in ("argument", "output", "alias", "temp", "generated_code")
]


@pytest.mark.parametrize(
    ("message", "needs", "has"),
    [
        (  # as libtpu 0.0.51 says it
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. Ran "
            "out of memory in memory space hbm. Used 15.76G of 15.75G hbm. Exceeded hbm capacity "
            "by 16.03M.",
            15.76 * GIB, 15.75 * GIB,
        ),
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total "
            "memory required for HLO temporaries (99.69G) exceeds available HBM (15.75G). HLO "
            "module: jit_train_step.",
            99.69 * GIB, 15.75 * GIB,
        ),
        ("INTERNAL: Mosaic failed to compile", 0, 0),
    ],
)  # fmt: skip
def test_refusals(message, needs, has):
    assert _needs_and_has(message) == (int(needs), int(has))


@pytest.mark.parametrize(
    ("name", "gib"),
    [("v5e:1x1", 15.75), ("v5e:16x16", 15.75), ("tpu7x:2x2x1", 94.5)],  # of 16, and of 192 / 2
)
def test_usable_bytes_are_those_of_a_device_less_what_the_compiler_keeps(name, gib):
    assert usable_bytes(parse_topology(name)) == gib * GIB


def test_an_error_that_is_no_refusal_is_raised():
    class Lowered:
        def compile(self, compiler_options):
            raise RuntimeError("RESOURCE_EXHAUSTED: scoped vmem, by words that name no HBM")

    with pytest.raises(RuntimeError, match="scoped vmem"):
        plan_compile._compile(Lowered())


def test_a_program_that_jax_cannot_read_back_is_read_from_the_compilers_dump():
    class Compiled:
        def as_text(self):
            raise RuntimeError("async-update instruction should have 1 operands but sees 3")

        def memory_analysis(self):
            return SimpleNamespace(**dict.fromkeys(SIZES, 8))

    class Lowered:
        def compile(self, compiler_options):
            name = (
                jax.jit(lambda x: x).lower(1).compiler_ir().operation.attributes["sym_name"].value
            )
            assert re.search(compiler_options["xla_dump_hlo_module_re"], name)
            written = Path(compiler_options["xla_dump_to"])
            (written / f"module_0000.{name}.after_codegen.txt").write_text("HloModule x")
            return Compiled()

    assert plan_compile._compile(Lowered())["hlo"] == "HloModule x"


def test_answers_are_kept_and_damaged_ones_ignored(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "a.zst"
    assert _read(path) is None
    answer = {"refused": "", "seconds": 1.5, "memory": {"temp": 1}, "hlo": "HloModule x" * 1000}
    _write(path, answer)
    assert _read(path) == answer
    assert [p.name for p in path.parent.iterdir()] == ["a.zst"]
    path.write_bytes(path.read_bytes()[:-9])
    assert _read(path) is None
    monkeypatch.setattr(plan_compile, "_CACHE_BYTES", 0)
    _write(path.with_name("b.zst"), answer)
    assert list(path.parent.iterdir()) == [], "more than the cache may hold"
    blocked = tmp_path / "file"
    blocked.write_text("")
    _write(blocked / "c.zst", answer)  # no directory: no cache, and no error


def test_default_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "bert_jax" / "plan"


def test_where_the_vocabulary_is_from():
    config, said = with_vocabulary(PretrainConfig())
    assert config.model.vocab_size == 30522
    assert "assumed" in said
    given = dataclasses.replace(PretrainConfig(), model=PretrainModelConfig(vocab_size=500))
    config, said = with_vocabulary(given)
    assert config == given
    assert "500 tokens, as configured" in said


@pytest.fixture
def in_bucket(tmp_path, monkeypatch):
    """The path of a corpus in a bucket."""
    path, corpus = "gs://bucket/corpus", write_corpus(tmp_path)
    there = {path: {"train": None}, "gs://b/no": {}}
    monkeypatch.setattr(plan_compile, "store_openers", lambda name, data: there[name])
    monkeypatch.setattr(plan_compile, "open_corpus", lambda name, data: {path: corpus}[name])
    return path


def test_the_vocabulary_of_a_corpus_in_a_bucket(in_bucket):
    config, said = with_vocabulary(small_config(data={"corpus": in_bucket}))
    assert config.model.vocab_size == VOCAB_SIZE
    assert said == f"vocabulary: {VOCAB_SIZE} tokens, from the corpus"
    assert plan_compile._planned_step(config, 0).objective.baseline is None  # nothing is read
    _, said = with_vocabulary(small_config(data={"corpus": "gs://b/no"}))
    assert "assumed (no corpus" in said


def test_an_initial_model_with_more_rows_than_its_tokenizer_has_tokens(in_bucket, monkeypatch):
    """The run has a row for each token of the tokenizer, which is the corpus's."""
    model = SavedModel(
        ModelConfig(vocab_size=VOCAB_SIZE + 6, num_layers=3), {"encoder": {}}, None, TOKENIZER,
        Path("x"), 512, "x", Origin("huggingface"),
    )  # fmt: skip
    monkeypatch.setattr(plan_compile, "read_model", lambda directory: model)
    for given, source in (({}, "as configured"), ({"corpus": in_bucket}, "from the corpus")):
        config, said = with_vocabulary(small_config(init="x", data=given))
        assert (config.model.vocab_size, config.model.num_layers) == (VOCAB_SIZE, 3)
        assert source in said


@pytest.mark.parametrize(
    ("message", "needs", "on_top"),
    [
        ("Used 30.00G of 15.75G hbm", 30 * GIB, False),
        ("HLO temporaries (99.00G) exceeds available HBM (15.75G)", 99 * GIB, True),
    ],
)
def test_a_refused_step_needs_what_the_compiler_says_with_its_arguments(
    monkeypatch, message, needs, on_top
):
    lowered = []

    def refuse(program):
        lowered.append(program.as_text())
        return {"refused": message, "seconds": 1.0, "memory": None, "hlo": ""}

    monkeypatch.setattr(plan_compile, "devices", lambda topology: jax.devices()[:4])
    monkeypatch.setattr(plan_compile, "_compile", refuse)
    config = small_config(model__vocab_size=500, mesh={"fsdp": 4}, training__accumulation=2)
    plan = plan_compile.compile_step(config, 0, parse_topology("v5e:2x2"), cache=None)
    whole = 4 * num_params(objective_of(config))
    assert whole / 4 < plan.memory.parameters < whole / 3  # most of them lie in four parts
    assert 2 * plan.memory.parameters <= plan.memory.optimizer < 2.1 * plan.memory.parameters
    assert plan.rows_per_chip == plan.rows / 2 / 4
    arguments = plan.memory.parameters + plan.memory.optimizer + plan.memory.batch
    assert plan.needs == plan.peak == needs + on_top * arguments
    assert plan.memory.temporaries == plan.needs - arguments
    assert "bf16" in lowered[0]  # what model.dtype=auto is on the chips that are planned for


def test_the_memory_of_a_step_that_fits_is_what_the_compiler_says(monkeypatch):
    """Results that take the place of arguments count once."""
    sizes = {"argument": 10**9, "output": 700, "alias": 500, "temp": 40, "code": 3}
    answer = {"refused": "", "seconds": 1.0, "memory": sizes, "hlo": ""}
    for name, value in (
        ("devices", jax.devices()[:4]), ("_compile", answer), ("parse_program", None),
        ("estimate", None),
    ):  # fmt: skip
        monkeypatch.setattr(plan_compile, name, lambda *_, value=value: value)
    config = small_config(model__vocab_size=500, mesh={"fsdp": 4})
    memory = plan_compile.compile_step(config, 0, parse_topology("v5e:2x2"), cache=None).memory
    assert memory.temporaries == 40
    assert memory.peak == 10**9 + 700 - 500 + 40 + 3


def test_an_answer_is_kept_for_one_program_slice_mesh_and_set_of_flags(monkeypatch):
    devices = np.array(jax.devices()[:4])

    def key(program="a", name="v5e:2x2", shape=4, order=(0, 1, 2, 3)):
        mesh = SimpleNamespace(shape={"fsdp": shape}, devices=devices[list(order)])
        return plan_compile._key(program, parse_topology(name), mesh)

    keys = [key(), key("b"), key(name="v5e:2x4"), key(shape=2), key(order=(1, 0, 2, 3))]
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_flag")
    assert len({*keys, key()}) == 6
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    assert key() == keys[0]


@pytest.mark.parametrize("size", [60, 103, 104])
def test_assumed_special_ids_are_in_the_vocabulary(size):
    step = plan_compile._planned_step(small_config(model__vocab_size=size), 0)
    assert max(dataclasses.astuple(step.objective.special_ids)) < size


def test_exchanges_come_with_the_most_bytes_first():
    config, _ = with_vocabulary(PretrainConfig())
    plan = made_plan(config, 0, parse_topology("v5e:4x4"))
    one = plan.program.collectives[0]
    others = [
        dataclasses.replace(one, kind=kind, bytes=size)
        for kind, size in (("all-gather", 1), ("reduce-scatter", 2 * one.bytes))
    ]
    program = dataclasses.replace(plan.program, collectives=(others[0], one, others[1]))
    found = dataclasses.replace(plan, program=program).exchanges
    assert [each.kind for each in found] == ["reduce-scatter", "all-reduce", "all-gather"]
