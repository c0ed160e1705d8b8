"""Names of TPU slices, and what is said of wrong ones."""

import importlib.util
import os
import sys

import pytest

from bert_jax.errors import UserError
from bert_jax.planning import topology
from bert_jax.planning.topology import parse_topology, quiet


@pytest.mark.parametrize(
    ("name", "chips", "devices"),
    [
        ("v5e:1x1", 1, 1),
        ("v5e:16x16", 256, 256),
        ("v4:2x2x1", 4, 4),
        ("v5p:4x4x8", 128, 128),
        ("v6e:8x16", 128, 128),
        ("tpu7x:2x2x1", 4, 8),
        ("v5e:16x16,slices=2", 512, 512),
        ("v5p:16x16x24", 6144, 6144),
    ],
)
def test_names(name, chips, devices):
    parsed = parse_topology(name)
    assert (parsed.num_chips, parsed.num_devices, parsed.name) == (chips, devices, name)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("v5e", ["CHIP:AxB", "v5e:16x16"]),
        ("v5e:16", ["not offered", "v5e:4x4"]),
        ("v5e:3x3", ["not offered", "v5e:2x4", "v5e:4x4"]),
        ("v5e:16x32", ["up to 16x16", "v5e:16x16"]),
        ("v5p:4x4", ["3-D", "v5p:4x4x4"]),
        ("v5p:8x4x4", ["ascending", "v5p:4x4x8"]),
        ("v4:0x4x4", ["not offered"]),
        ("v7x:2x2x1", ["did you mean tpu7x?"]),
        ("v5litepod:4x4", ["did you mean v5e?"]),
        ("H100:1x1", ["no chip 'H100'", "v4, v5e, v5p, v6e, tpu7x"]),
        ("v5e:4x4,slices=0", ["slices is 0"]),
        ("v5e:4x4*2", ["slices=N"]),
    ],
)
def test_wrong_names(name, parts):
    with pytest.raises(UserError) as caught:
        parse_topology(name)
    for part in ["--topology", *parts]:
        assert part in str(caught.value)


def test_every_near_name_exists():
    for name in ("v5e:3x3", "v5e:1x9", "v5p:4x4", "v4:99x1x1", "tpu7x:3x3x3"):
        with pytest.raises(UserError) as caught:
            parse_topology(name)
        for near in str(caught.value).split("near it: ")[1].split(", "):
            parse_topology(near)


def test_without_libtpu(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in topology._ENVIRONMENT:
        monkeypatch.setenv(name, "")  # so that the variable is gone again after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    with pytest.raises(UserError, match=r"pip install 'bert_jax\[plan\]'"):
        topology.prepare_environment()
    assert os.environ["TPU_SKIP_MDS_QUERY"] == "1"  # set before anything is loaded
    assert os.environ["JAX_PLATFORMS"] == "cuda,cpu"  # child processes may use the GPU


def test_quiet_drops_what_libraries_write(capfd):
    with quiet():
        os.write(2, b"from C++")
    print("ours", file=sys.stderr)
    assert capfd.readouterr().err == "ours\n"
