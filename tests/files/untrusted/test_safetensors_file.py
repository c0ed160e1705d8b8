"""safetensors: what the library writes is read, what it lets through is not."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from bounded_child import run_bounded

from bert_jax.errors import UserError
from bert_jax.files.untrusted import safetensors_file
from bert_jax.files.untrusted.safetensors_file import DTYPES, read_safetensors

IMPORTS = "from bert_jax.files.untrusted.safetensors_file import read_safetensors"


def put(path: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def entry(first: int, last: int, shape: Any = None, dtype: str = "U8") -> dict[str, Any]:
    shape = [last - first] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 5)])
def test_reads_every_dtype_wherever_it_lies(tmp_path, dtype, shape):
    kind = DTYPES[dtype]
    right = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind)
    after = 1 + right.nbytes  # not aligned
    header = {
        "__metadata__": {"format": "pt"},
        "b.weight": entry(1, after, list(shape), dtype),
        "a": entry(0, 1),
    }
    file = read_safetensors(put(tmp_path / "a", header, b"\7" + right.tobytes()))
    assert sorted(file) == ["a", "b.weight"]
    found = file["b.weight"]
    assert (found.dtype, found.shape) == (kind, shape)
    np.testing.assert_array_equal(found, right)
    assert file["a"].tolist() == [7]


def test_arrays_are_views_that_cannot_be_written(tmp_path):
    with open(tmp_path / "big", "wb") as file:
        raw = json.dumps({"a": entry(0, 1 << 36, dtype="BF16", shape=[1 << 15, 1 << 20])}).encode()
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + (1 << 36))  # sparse: 64 GB
    array = read_safetensors(tmp_path / "big")["a"]
    assert array.dtype == ml_dtypes.bfloat16
    assert array[-1, -1] == 0
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1


def test_empty_file_of_tensors(tmp_path):
    assert read_safetensors(put(tmp_path / "a", b"{}   ")) == {}


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, 6, "invalid offset for tensor `b`"),
        ({"a": entry(0, 4), "b": entry(6, 8)}, 8, "invalid offset for tensor `b`"),
        ({"a": entry(2, 4)}, 4, "invalid offset for tensor `a`"),
        ({"a": entry(0, 4)}, 5, "file not fully covered"),
        ({"a": entry(0, 4)}, 3, "file not fully covered"),
        ({"a": entry(0, 1 << 62)}, 3, "overflow"),
        ({"a": entry(4, 0, shape=[4])}, 4, "invalid offset for tensor `a`"),
        ({"a": entry(-4, 0)}, 4, "expected usize"),
        ({"a": entry(0, 4, shape=[1], dtype="F16")}, 4, "invalid shape, data type, or offset"),
        # 2^32 * 2^32 is 0 in 64 bits.
        ({"a": entry(0, 0, shape=[1 << 32, 1 << 32])}, 0, "larger than any memory"),
        ({"a": entry(0, 4, shape=[(1 << 62) + 1, 4])}, 4, "larger than any memory"),
        ({"a": entry(0, 0, shape=[0, 1 << 62, 1 << 62])}, 0, "larger than any memory"),
        ({"a": entry(0, 0, shape=[0, 1 << 64])}, 0, "larger than any memory"),
        ({"a": entry(0, 1, shape=[True])}, 1, "boolean `true`, expected usize"),
        ({"a": entry(0, 1, shape=[1.0])}, 1, "floating point `1.0`, expected usize"),
        ({"a": entry(0, 1, shape=[-1, -1])}, 1, "integer `-1`, expected usize"),
        ({"a": entry(0, 1, shape=[1] * 33)}, 1, "up to 32"),
        ({"a": entry(0, 1, shape=7)}, 1, "the shape is 7"),
        ({"a": entry(0, 1, dtype="F4")}, 1, "the dtype is 'F4'"),
        ({"a": entry(0, 1) | {"dtype": ["U8"]}}, 1, "the dtype is"),
        ({"a": entry(0, 1) | {"data_offsets": [0]}}, 1, "expected a tuple of size 2"),
        ({"a": entry(0, 1) | {"more": 1}}, 1, "an object with dtype, shape and data_offsets"),
        ({"a": [1]}, 1, "an object with dtype"),
        ({"__metadata__": {"a": 1}}, 0, "expected a string"),
        ({"__metadata__": []}, 0, "expected a map"),
        (b"[]", 0, "begins with"),
        (b" {}", 0, "begins with"),
        (b"{\xff}", 0, "not UTF-8"),
        (b"{", 0, "not JSON"),
        (b'{"a":' * 10_000, 0, "nested too deeply; the limit is 3"),
    ],
)
def test_headers_that_do_not_fit_their_data(tmp_path, header, size, message):
    told = refused(put(tmp_path / "a", header, bytes(size)))
    assert re.search(message, told), told


@pytest.mark.parametrize(
    "name",
    [
        "../../x", "a/../b", "..", "a\\..\\b", "/etc/passwd", "\\\\host\\x", "C:\\x", "c:x", "a//b",
        "./a", "a\0b", "a\nb", "\x1b[2J", "\u2028", "x" * 513, "", "\ud800",
    ],
)  # fmt: skip
def test_names(tmp_path, name):
    assert "name" in refused(put(tmp_path / "a", {name: entry(0, 1)}, b"x"))


def test_names_that_models_have(tmp_path):
    names = ["bert.encoder.layer.0.attention.self.query.weight", "params/layers/0", "a b:c", "é",
             "x" * 512]  # fmt: skip
    header = {name: entry(i, i + 1) for i, name in enumerate(names)}
    assert list(read_safetensors(put(tmp_path / "a", header, b"x" * 5))) == names


def test_duplicate_keys(tmp_path):
    one, two = json.dumps(entry(0, 1)), json.dumps(entry(1, 2))
    told = refused(put(tmp_path / "a", f'{{"w": {one}, "w": {two}}}'.encode(), b"xy"))
    assert "'w' occurs twice" in told
    told = refused(put(tmp_path / "a", b'{"w": {"dtype": "U8", "dtype": "I8"}}', b"x"))
    assert "'dtype' occurs twice" in told


@pytest.mark.parametrize("length", [3, 1 << 20, 10_000_001, 1 << 40, (1 << 64) - 1])
def test_header_longer_than_the_file(tmp_path, length):
    (tmp_path / "a").write_bytes(length.to_bytes(8, "little") + b"{}")
    told = refused(tmp_path / "a")
    assert re.search(r"is cut off: a header of|the limit is 10,000,000", told)


def test_short_and_missing_files(tmp_path):
    for size in range(8):
        (tmp_path / "a").write_bytes(bytes(size))
        assert f"has {size} bytes" in refused(tmp_path / "a")
    assert "no such file" in refused(tmp_path / "b")
    assert "no such file" in refused(tmp_path)


def test_header_bombs_in_bounded_memory(tmp_path):
    padded = put(tmp_path / "spaces", b"{}" + b" " * 90_000_000)
    (tmp_path / "sparse").write_bytes((1 << 37).to_bytes(8, "little"))
    with open(tmp_path / "sparse", "r+b") as file:
        file.truncate(1 << 38)
    empty = ",".join(
        f'"{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(1_000_000)
    )
    million = put(tmp_path / "million", f"{{{empty}}}".encode())
    for path in (padded, million):
        told = run_bounded("read_safetensors(sys.argv[1])", path, imports=IMPORTS, extra=256 << 20)
        assert "the limit is 10,000,000" in told
    told = run_bounded(
        "read_safetensors(sys.argv[1])", tmp_path / "sparse", imports=IMPORTS,
        extra=(256 << 20) + (1 << 38),
    )  # fmt: skip
    assert "the limit is 10,000,000" in told


def test_padding_and_number_of_tensors(tmp_path, monkeypatch):
    assert "spaces in a row" in refused(put(tmp_path / "a", b"{" + b" " * 5000 + b"}"))
    assert "spaces in a row" in refused(put(tmp_path / "a", b"{}" + b"\n" * 5000))
    monkeypatch.setattr(safetensors_file, "MAX_TENSORS", 3)
    header = {str(i): entry(0, 0) for i in range(4)}
    assert "4 tensors; the limit is 3" in refused(put(tmp_path / "a", header))
    assert (
        len(read_safetensors(put(tmp_path / "a", dict(itertools.islice(header.items(), 3))))) == 3
    )


def test_bool_bytes(tmp_path):
    path = put(tmp_path / "a", {"a": entry(0, 2, dtype="BOOL")}, b"\1\2")
    assert "BOOL tensor 'a' has a byte other than 0 or 1" in refused(path)
