"""Files that the verbs read: each format as what it is, pipes as they fill."""

import gzip
import json
import lzma
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from test_stream import Shout

from bert_jax.cli.verbs.answering import check_files
from bert_jax.cli.verbs.groups import Asking
from bert_jax.cli.verbs.inference import Embed, Tag
from bert_jax.errors import UserError
from bert_jax.infer.predictor import answer_records
from bert_jax.infer.records import PAUSE, Record, read_records
from bert_jax.tasks.tables import TableFormat

ROWS = [
    {"id": "7", "text": 'the "cat", sat', "text_b": "a\tdog"},
    {"id": "8", "text": "猫", "text_b": ""},
]
SECONDS = 60
"""The longest wait for what must come at once."""


def csv_of(delimiter: str = ",") -> str:
    quoted = [['"' + row[name].replace('"', '""') + '"' for name in row] for row in ROWS]
    return "".join(delimiter.join(row) + "\n" for row in [list(ROWS[0]), *quoted])


def write_parquet(path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path)


LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CONTENT = {
    ".csv": csv_of(), ".jsonl": LINES, ".ndjson": LINES, ".json": json.dumps(ROWS, indent=2),
    ".tsv": "id\ttext\ttext_b\n" + "".join("\t".join(each.values()) + "\n" for each in ROWS)
    .replace("a\tdog", "a dog"),
}  # fmt: skip
COMPRESS = {
    "": bytes, ".gz": gzip.compress, ".xz": lzma.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}  # fmt: skip


def read(path: Path, **options: Any) -> list[Record]:
    return list(read_records(str(path), fields=("text", "text_b"), **options))


def asked(verb: type[Asking] = Tag, **options: Any) -> Asking:
    return verb(model="m", **options)


def texts(records: list[Record]) -> list[Any]:
    return [record.fields.get("text") for record in records]


@pytest.mark.parametrize("suffix", [*CONTENT, ".parquet"])
def test_a_table_is_read_as_what_it_is(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        write_parquet(path)
    else:
        path.write_text(CONTENT[suffix])
    expected = [dict(row) for row in ROWS]
    if suffix == ".tsv":
        expected[0]["text_b"] = "a dog"
    assert [record.fields for record in read(path)] == expected


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("kind", [".csv", ".json", ".jsonl", ".txt"])
def test_compressed_files_are_read(tmp_path, kind, compression):
    content = CONTENT.get(kind, "\n".join(row["text"] for row in ROWS))
    path = tmp_path / f"a{kind}{compression}"
    path.write_bytes(COMPRESS[compression](content.encode()))
    assert texts(read(path)) == [row["text"] for row in ROWS]
    if compression:
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(UserError, match=r"ends in the middle|not a sound"):
            read(path)


def test_json_lines_may_be_named_json(tmp_path):
    (tmp_path / "a.json").write_text(LINES)
    assert texts(read(tmp_path / "a.json")) == [row["text"] for row in ROWS]


def test_columns_are_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("sentence;number\na,b;3\nc;\n")
    table = TableFormat(delimiter=";")
    found = read(path, names={"text": "sentence"}, more={"text_b": "all"}, table=table)
    assert [record.fields for record in found] == [
        {"text": "a,b", "text_b": "all"}, {"text": "c", "text_b": "all"},
    ]  # fmt: skip
    path.write_text("a,text\nb,id\n")
    for column, second in (("1", ["a", "b"]), ("2", ["text", "id"])):
        found = read(path, names={"text": column}, table=TableFormat(header=False))
        assert texts(found) == second


def test_a_named_field_that_a_line_lacks_is_a_problem(tmp_path):
    """The line's own field `text` does not take its place."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"review": "a", "text": "b"}\n{"text": "c"}\n{"review": "d"}\n')
    first, second, third = read(path, names={"text": "review"})
    assert (first.fields["text"], third.fields["text"]) == ("a", "d")
    assert second.problem == f"{path}, line 2: no field 'review'; the fields are 'text'"
    (typo, *_) = read(path, names={"text": "reviw"})
    assert "no field 'reviw'; the fields are 'review', 'text'" in typo.problem


@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_a_null_is_a_field_that_is_not_there(tmp_path, form):
    """In JSON lines, it took the place of the value for all lines."""
    rows = [{"text": "a", "text_b": None}, {"text": "b", "text_b": "c"}]
    lines = "\n".join(map(json.dumps, rows))
    (tmp_path / f"a.{form}").write_text(json.dumps(rows) if form == "json" else lines)
    found = read(tmp_path / f"a.{form}", more={"text_b": "all"})
    assert [record.fields["text_b"] for record in found] == ["all", "c"]
    found = read(tmp_path / f"a.{form}", more={"text_b": "all"}, names={"text_b": "text_b"})
    assert [record.fields["text_b"] for record in found] == ["all", "c"]


def test_a_row_that_cannot_be_told_apart_keeps_its_place(tmp_path):
    (tmp_path / "a.csv").write_text("text,n\na,1\nb\nc,3\n")
    first, bad, last = read(tmp_path / "a.csv")
    assert (first.problem, last.problem) == (None, None)
    assert bad.problem is not None
    assert "a.csv, line 3: 1 field where the header has 2" in bad.problem
    (tmp_path / "a.json").write_text('[{"text": "a"}, 5, {"text": "b"}]')
    first, bad, last = read(tmp_path / "a.json")
    assert (first.fields, last.fields) == ({"text": "a"}, {"text": "b"})
    assert bad.problem is not None
    assert "a.json, object 2: a JSON int" in bad.problem


@pytest.mark.parametrize(
    ("name", "content", "options", "parts"),
    [
        ("a.csv", "Text,n\na,1\n", {}, ["no column 'text'", "'Text'", "--columns text=NAME"]),
        ("a.csv", "text\na\n", {"names": {"text_b": "x"}}, ["no column 'x'", "--columns text_b="]),
        ("a.csv", "text;n\na;1\n", {}, ["Is the delimiter a semicolon (delimiter=';')"]),
        ("a.json", '[{"txt": "a"}]', {}, ["no column 'text'", "mean 'txt'"]),
        ("a.parquet", "no parquet", {}, ["is not a sound parquet file"]),
        ("a.csv", "", {}, ["a.csv is empty"]),
        ("b.csv.gz", "text\n", {}, ["not a sound gzip file"]),
        ("a.xlsx", "PK", {}, ["the suffix .xlsx is unknown", ".csv", ".parquet", "--format=text|"]),
        ("a.pdf.gz", "", {}, ["the suffix .pdf is unknown"]),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path, name, content, options, parts):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as caught:
        read(tmp_path / name, **options)
    for part in (name, *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input": ("a.md",)}, r"a\.md: the suffix \.md is unknown"),
        ({"input": ("-",), "format": "csv"}, "standard input must be text or jsonl"),
        ({"out": Path("v.npz"), "verb": Embed}, r"v\.npz: unknown suffix; .* \.npy or \.parquet"),
        ({"out": Path("v.npy")}, r"\.npy is for vectors; .* \.jsonl or \.ndjson"),
        ({"out": Path("v")}, "v: unknown suffix"),
        ({"columns": ("header=no",)}, "--columns has 'header=no'; write .* header=False"),
        ({"columns": ("delimiter",)}, "--columns has 'delimiter'"),
    ],
)
def test_what_no_verb_can_do_is_refused_at_once(options, message):
    with pytest.raises(UserError, match=message):
        check_files(asked(**options))


def test_how_a_table_is_written_is_taken():
    columns = ("delimiter=\\t,header=False", "quoting=True")
    found = check_files(asked(input=("x/1", "y.TXT", "log.1"), columns=columns))
    assert found == TableFormat(header=False, quoting=True, delimiter="\t")


# Pipes


@pytest.fixture
def pipe(monkeypatch) -> Iterator[Callable[[bytes], object]]:
    """Standard input is a pipe; writes to it."""
    ends = os.pipe()
    with os.fdopen(ends[0]) as stdin, os.fdopen(ends[1], "wb", buffering=0) as into:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield lambda data: into.write(data) if data else into.close()


def in_time(call: Callable[[], Any]) -> Any:
    """What a call returns that must not wait for ever."""
    found: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=lambda: found.put(call()), daemon=True).start()
    return found.get(timeout=SECONDS)


def test_a_pipe_that_stays_open_is_answered(pipe):
    chunks = answer_records(Shout(), read_records("-"), say=lambda line: None)
    pipe(b"a\nb\nhalf")
    first = in_time(lambda: next(chunks))
    assert [each.answer["loud"] for each in first] == ["A", "B"]
    pipe(b" a line\n")
    (second,) = in_time(lambda: next(chunks))
    assert second.answer["loud"] == "HALF A LINE"
    pipe(b"last")
    pipe(b"")
    (third,) = in_time(lambda: next(chunks))
    assert third.answer["loud"] == "LAST"
    assert in_time(lambda: next(chunks, None)) is None


def test_a_fast_pipe_is_read_in_order_and_in_large_chunks(pipe):
    lines = [f"line {n}" for n in range(5_000)]
    writing = threading.Thread(target=lambda: (pipe("\n".join(lines).encode()), pipe(b"")))
    writing.start()
    found = list(read_records("-"))
    writing.join()
    assert [record.fields["text"] for record in found if record is not PAUSE] == lines


def test_a_long_line_of_a_pipe_is_named(pipe, monkeypatch):
    monkeypatch.setattr("bert_jax.infer.records.MAX_LINE_BYTES", 100)
    pipe(b"x" * 150)
    records = read_records("-")
    assert in_time(lambda: next(records)) is PAUSE
    pipe(b"x" * 150 + b"\nshort\r\n")
    assert "longer than 100 bytes" in in_time(lambda: next(records)).problem
    assert in_time(lambda: next(records)).fields == {"text": "short"}
    pipe(b"")
