import json
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import pytest

from bert_jax.config.mapping import build, diff, to_dict
from bert_jax.errors import UserError
from bert_jax.training.pretrain.config import FREE_FIELDS, PretrainConfig
from bert_jax.training.pretrain.sections import ProbeConfig, TrainingConfig


@dataclass(frozen=True)
class Inner:
    width: int = 3
    kind: Literal["round", "square"] = "round"


@dataclass(frozen=True)
class Outer:
    rate: float = 0.5
    name: str = "x"
    flag: bool = False
    limit: int | None = None
    sizes: tuple[int, ...] = (1,)
    pair: tuple[float, float] = (0.0, 1.0)
    inner: Inner = field(default_factory=Inner)
    many: tuple[Inner, ...] = ()


def test_build_takes_whole_numbers_for_floats_and_lists_for_tuples():
    built = build(
        Outer,
        {"rate": 2, "limit": None, "sizes": [4, 5], "pair": [1, 2], "many": [{"width": 9}]},
    )
    assert built == Outer(rate=2.0, sizes=(4, 5), pair=(1.0, 2.0), many=(Inner(width=9),))
    assert isinstance(built.rate, float)
    assert isinstance(built.pair[0], float)


def test_unknown_field_names_the_nearest():
    with pytest.raises(UserError, match=r"file\.py: unknown field inner\.widht; did you mean in"):
        build(Outer, {"inner": {"widht": 1}}, where="file.py")
    with pytest.raises(UserError, match=r"unknown field many\[0\]\.xyz; Known here: width, kind"):
        build(Outer, {"many": [{"xyz": 1}]})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rate": "0.1"}, r"rate is '0.1' \(str\); it must be a number"),
        ({"rate": True}, r"rate is True \(bool\); it must be a number"),
        ({"rate": float("nan")}, r"rate is nan .*finite"),
        ({"name": 3}, r"name is 3 \(int\); it must be text"),
        ({"name": "caf\udce9"}, r"name is 'caf\\udce9' \(str\); it must be text in UTF-8"),
        ({"flag": 1}, r"flag is 1 \(int\); it must be True or False"),
        ({"limit": 1.0}, r"limit is 1.0 \(float\); it must be a whole number, or None"),
        ({"inner": {"width": None}}, r"inner\.width is None"),
        ({"inner": {"width": True}}, r"inner\.width is True \(bool\); it must be a whole number"),
        ({"inner": {"kind": "squar"}}, r"inner\.kind is 'squar'.*nearest: 'square'"),
        ({"inner": 3}, r"inner is 3 \(int\); it must be a group of fields"),
        ({"sizes": 3}, r"sizes is 3 \(int\); it must be a list"),
        ({"sizes": "34"}, r"sizes is '34' \(str\); it must be a list"),
        ({"sizes": [1, "a"]}, r"sizes\[1\] is 'a'"),
        ({"pair": [1]}, r"pair is \[1\] \(list\); it must be a list of 2 values"),
        ({"many": [{"width": "a"}]}, r"many\[0\]\.width is 'a'"),
    ],
)
def test_wrong_types_name_field_value_and_wanted_type(given, message):
    with pytest.raises(UserError, match=message):
        build(Outer, given)


def test_round_trip_through_json():
    config = build(
        PretrainConfig,
        {
            "model": {"vocab_size": 100, "num_layers": 2},
            "training": {
                "num_steps": 10,
                "phases": [
                    {"length": 16, "batch_size": 8, "share": 0.7},
                    {"length": 32, "batch_size": 4, "share": 0.3},
                ],
            },
        },
    )
    again = build(PretrainConfig, json.loads(json.dumps(to_dict(config))))
    assert again == config
    assert diff(again, config) == []


def test_phases_cover_the_run():
    config = PretrainConfig()
    config = replace(
        config,
        training=build(
            TrainingConfig,
            {
                "num_steps": 7,
                "phases": [{"share": 0.5}, {"length": 512, "share": 0.25}, {"share": 0.25}],
            },
        ),
    )
    steps = [phase.num_steps for phase in config.phases]
    assert sum(steps) == 7
    assert min(steps) >= 1
    assert [phase.length for phase in config.phases] == [128, 512, 128]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"training": {"phases": [{"length": 513}]}}, r"phases\[0\]\.length 513 exceeds model"),
        ({"training": {"phases": [{"share": 0.5}]}}, r"shares sum to 0.5; they must sum to 1"),
        ({"training": {"phases": []}}, r"phases is empty"),
        ({"training": {"num_steps": 0}}, r"num_steps is 0; it must be in \[1, 2147483647\]"),
        (
            {"training": {"num_steps": 10**13}},
            r"is 10000000000000; it must be in \[1, 2147483647\]",
        ),
        (
            {"training": {"num_steps": 3, "phases": [{"share": 0.9}, {"share": 0.1}]}},
            r"phases\[1\]: a share of 0.1 of 3 steps rounds to 0",
        ),
        ({"model": {"hidden_dim": 100}}, r"hidden_dim 100 is not divisible"),
        ({"model": {"vocab_size": -1}}, r"vocab_size is -1"),
        (
            {
                "objective": {"name": "translation"},
                "data": {"pairing": "translation", "target_length": 1024},
            },
            r"data\.target_length 1024 exceeds model\.num_positions 512",
        ),
        ({"model": {"num_types": 1}}, r"num_types is 1, but with data.pairing 'nsp'"),
        ({"model": {"pooler": False}}, r"model.pooler is false, but data.pairing 'nsp' needs"),
        ({"checkpoint": {"keep": 0}}, r"checkpoint\.keep is 0; it must be at least 1"),
        ({"seed": -1}, r"seed is -1"),
        ({"objective": {"name": []}}, r"objective\.name is \[\]; it must be one of masked_lm"),
    ],
)
def test_contradictions_are_named(given, message):
    with pytest.raises(UserError, match=message):
        build(PretrainConfig, given)


def test_vocabulary_comes_from_the_corpus_unless_it_is_set():
    assert PretrainConfig().with_vocabulary(77).model.vocab_size == 77
    fixed = build(PretrainConfig, {"model": {"vocab_size": 50}})
    assert fixed.with_vocabulary(50) == fixed
    with pytest.raises(UserError, match="vocab_size is 50, but the tokenizer of the corpus has 77"):
        fixed.with_vocabulary(77)


def test_diff_names_what_differs_and_without_free_fields_what_may_not():
    old = PretrainConfig()
    new = build(
        PretrainConfig,
        {
            "checkpoint": {"keep": 9},
            "mesh": {"tensor": 2},
            "optimizer": {"learning_rate": 0.5},
            "training": {
                "log_every_steps": 3, "phases": [{"length": 64}],
                "probes": [{"recipe": "cola.py"}],
            },
        },
    )  # fmt: skip
    assert {name for name, _, _ in diff(old, new)} == {
        "checkpoint.keep",
        "mesh.tensor",
        "optimizer.learning_rate",
        "training.log_every_steps",
        "training.phases[0].length",
        "training.probes",
        *(f"training.probes[0].{each.name}" for each in fields(ProbeConfig)),
    }
    assert diff(old, new, FREE_FIELDS) == [
        ("training.phases[0].length", 128, 64),
        ("optimizer.learning_rate", 1e-4, 0.5),
    ]
