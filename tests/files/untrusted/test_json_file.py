"""JSON from elsewhere: what is not sound or too large is refused, with file and line."""

import json
import os
from pathlib import Path

import pytest
from bounded_child import run_bounded
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.errors import UserError
from bert_jax.files.untrusted import json_file
from bert_jax.files.untrusted.json_file import parse_json, read_json, read_json_object

IMPORTS = "from pathlib import Path; from bert_jax.files.untrusted.json_file import read_json"
READ = "read_json(Path(sys.argv[1]), max_bytes=64 << 20)"


def put(directory: Path, content: bytes | str) -> Path:
    path = directory / "a.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_reads_what_json_reads(tmp_path):
    value = {"a": [1, -2.5e3, "\U0001f389", 'ä\n"[{\\', None, True], "b": {"c": {}}}
    for text in (json.dumps(value), json.dumps(value, indent=2, ensure_ascii=False)):
        assert read_json(put(tmp_path, text), max_bytes=1000) == value
        assert read_json_object(put(tmp_path, "\ufeff" + text), max_bytes=1000) == value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1,\n "a": 2}', "the key 'a' occurs twice"),
        (b'{"a": NaN}', "NaN is not a valid JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a valid JSON number"),
        (b'{"a": 1e999}', "1e999 is not a valid JSON number"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not JSON .*digits"),
        (b'{"a": 1,\n"b"', "line 2: not JSON"),
        (b'{"a":\n "\xff"}', "line 2, byte 3: 0xff is not UTF-8"),
        (b'\xef\xbb\xbf{"a":\n "\xff"}', "line 2, byte 3: 0xff is not UTF-8"),
        (b'{"a":\n\n "\0"}', "line 3: a NUL byte"),
        (b'{"a": "\\ud800 x"}', "not valid Unicode text"),
        (b'{"a": {"\\uDFFF": 1}}', "not valid Unicode text"),
        (b"[1]", "top level is a list"),
        (b"", "is empty"),
        (b"\xff\xfe{\0}\0", "NUL byte|not UTF-8"),
    ],
)
def test_refused(tmp_path, content, message):
    path = put(tmp_path, content)
    with pytest.raises(UserError, match=message) as caught:
        read_json_object(path, max_bytes=10_000)
    assert str(path) in str(caught.value)


def test_nan_on_request():
    found = parse_json(b"[NaN, 1e999, -Infinity]", where="here", allow_nan=True)
    assert str(found) == "[nan, inf, -inf]"


@pytest.mark.parametrize("unit", ["[", '{"a":', '[{"a":'])
def test_ten_thousand_levels(tmp_path, unit):
    closing = unit.replace('"a":', "").replace("[", "]").replace("{", "}")[::-1]
    path = put(tmp_path, "\n" + unit * 10_000 + "1" + closing * 10_000)
    with pytest.raises(UserError, match="line 2: JSON nested too deeply; the limit is 64 levels"):
        read_json(path, max_bytes=1 << 20)


def test_depth_is_counted_by_structure_not_by_text(tmp_path):
    value: object = ["[{" * 500 + '\\"[[', '"' * 7 + "]]"] * 40
    for _ in range(63):
        value = [value]
    path = put(tmp_path, json.dumps(value))
    assert read_json(path, max_bytes=1 << 20) == value
    with pytest.raises(UserError, match="limit is 63"):
        parse_json(path.read_bytes(), where="here", max_depth=63)


def test_depth_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(json_file, "_BLOCK", 7)
    path = put(tmp_path, "[[],\n" * 65 + "1" + "]" * 65)
    with pytest.raises(UserError, match="line 64: JSON nested"):
        read_json(path, max_bytes=1 << 20)
    assert parse_json(path.read_bytes(), where="here", max_depth=66)


def test_too_large(tmp_path):
    path = put(tmp_path, b"[]")
    with open(path, "r+b") as file:
        file.truncate(1 << 40)  # sparse
    told = run_bounded(READ, path, imports=IMPORTS, extra=256 << 20)
    assert "larger than 67,108,864 bytes" in told


def test_many_values_in_bounded_memory(tmp_path):
    # json.loads would take 70 bytes for each 3.
    path = put(tmp_path, "[" + "[]," * 15_000_000 + "[]]")
    told = run_bounded(READ, path, imports=IMPORTS, extra=512 << 20)
    assert "values; the limit is 8,000,000" in told


def test_a_corpus_of_a_million_sources_can_be_read():
    """It was built to its end, and then called damaged."""
    source = '{"name": "a", "bytes": 1, "sha256": "b", "documents": 1, "changed": ""}'
    found = parse_json(f"[{','.join([source] * 1_000_000)}]".encode(), where="corpus.json")
    assert len(found) == 1_000_000


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="not a regular file"):
        read_json(tmp_path / "pipe", max_bytes=100)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_json(tmp_path / "nothing", max_bytes=100)
    with pytest.raises(UserError, match=r"cannot be read|not a regular file"):
        read_json(tmp_path, max_bytes=100)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda part: st.lists(part) | st.dictionaries(st.text(), part),
)  # fmt: skip


@settings(max_examples=100)
@given(value=_VALUES, depth=st.integers(0, 5))
def test_refuses_exactly_what_is_too_deep(value, depth):
    def levels(part: object) -> int:
        if isinstance(part, dict):
            part = list(part.values())
        return 1 + max(map(levels, part), default=0) if isinstance(part, list) else 0

    raw = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    try:
        raw.decode()
    except UnicodeDecodeError:
        return
    if "\\u0000" not in repr(raw) and levels(value) > depth:
        with pytest.raises(UserError, match="nested too deeply"):
            parse_json(raw, where="here", max_depth=depth)
    elif levels(value) <= depth:
        assert parse_json(raw, where="here", max_depth=depth) == value
