"""Sources in parts: together they are the whole, whatever the size of a part."""

import gzip
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_texts import make_text

from bert_jax.data.corpus.documents import ReadOptions
from bert_jax.data.corpus.kinds import text as text_module
from bert_jax.data.corpus.sharded.engine import plan_tasks
from bert_jax.data.corpus.sources import resolve_sources
from bert_jax.errors import UserError

TEXT = make_text(40)
DOCUMENTS = TEXT.split("\n\n")


def write(path: Path) -> None:
    """Writes the documents in the format of the suffix."""
    if path.suffix == ".jsonl":
        lines = [json.dumps({"text": each, "lang": "de"}) for each in DOCUMENTS]
        path.write_text("\n".join(lines) + "\n")
    elif path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": DOCUMENTS}), path, row_group_size=3)
    else:
        end = {"lf": "\n", "crlf": "\r\n", "cr": "\r"}[path.stem]
        path.write_bytes(TEXT.replace("\n", end).encode())


@pytest.mark.parametrize("name", ["lf.txt", "crlf.txt", "cr.txt", "a.jsonl", "a.parquet"])
def test_parts_are_the_whole(tmp_path, name):
    path = tmp_path / name
    write(path)
    (source,) = resolve_sources([str(path)])
    for size in (1, 150, 1000, path.stat().st_size // 2, path.stat().st_size):
        parts = source.divided(size)
        texts = [text for part in parts for text in part.texts()]
        assert texts == DOCUMENTS, size
        if size <= 1000:
            assert len(parts) > 3
        if name != "a.parquet":
            assert sum(part.size for part in parts) == source.size
            for part in parts:
                assert part.bytes_read == part.size


@pytest.mark.parametrize("name", ["lf.txt", "a.jsonl", "a.parquet", "b.txt.gz"])
def test_a_head(tmp_path, name):
    path = tmp_path / name
    if name == "b.txt.gz":
        path.write_bytes(gzip.compress(TEXT.encode()))
    else:
        write(path)
    (source,) = resolve_sources([str(path)])
    head = source.head(source.size // 10)
    texts = list(head.texts())
    assert texts == DOCUMENTS[: len(texts)]
    if name == "b.txt.gz":  # less than what is decompressed at once
        assert head.bytes_read == source.size
        return
    assert 0 < len(texts) < 20
    read = sum(map(len, texts)) / sum(map(len, DOCUMENTS))
    assert head.bytes_read / source.size == pytest.approx(read, rel=0.5)


def test_lines_as_documents_are_cut_at_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {n}\n" for n in range(100)))
    (source,) = resolve_sources([str(path)], ReadOptions(line_documents=True))
    parts = source.divided(100)
    assert len(parts) == 8
    assert [text for part in parts for text in part.texts()] == [f"line {n}" for n in range(100)]


def test_what_is_read_from_its_beginning_is_one_part(tmp_path):
    for name, data in (
        ("a.txt.gz", gzip.compress(TEXT.encode())),
        ("a.csv", b"text\n" + b'"a\n\nb"\n' * 100),
    ):
        (tmp_path / name).write_bytes(data)
        (source,) = resolve_sources([str(tmp_path / name)])
        assert source.divided(10) == [source]


def test_one_large_document_is_not_cut(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("word " * 10_000 + "\n\nsmall")
    (source,) = resolve_sources([str(path)])
    assert [len(list(part.texts())) for part in source.divided(1000)] == [1, 1]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_cut_many_blocks_away_is_found_and_no_block_is_searched_twice(tmp_path, monkeypatch, end):
    path, blank = tmp_path / "a.txt", f"{end}{' ' * 60}{end}"
    documents = [f"{'word ' * number}{end}a line" for number in (40, 3, 90, 61)]
    data = f"{blank.join(documents)}{2 * end}last".encode()
    path.write_bytes(data)
    (source,) = resolve_sources([str(path)])
    ends, sizes = text_module._BLANK_LINE, []

    def search(seen: bytes, *where: int):
        sizes.append(len(seen))
        return ends.search(seen, *where)

    monkeypatch.setattr(text_module, "_CUT_BLOCK", 50)
    monkeypatch.setattr(text_module, "_BLANK_LINE", SimpleNamespace(search=search))
    for position in range(len(data)):
        found = ends.search(data, position, len(data) - 1)
        wanted = found.end() if found else len(data)
        assert source._cut(io.BytesIO(data), position, len(data)) == wanted
    assert max(sizes) <= 50 + text_module._LONGEST_BLANK


def test_errors_in_a_part_name_the_line_of_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"text {n}"}) for n in range(50)]
    lines[40] = "no json"
    path.write_text("\n".join(lines))
    (source,) = resolve_sources([str(path)])
    with pytest.raises(UserError, match=r"a\.jsonl, line 41: not JSON"):
        [text for part in source.divided(100) for text in part.texts()]
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine\n\n" * 50 + b"caf\xe9\n")
    (source,) = resolve_sources([str(path)])
    with pytest.raises(UserError, match=r"a\.txt, line 101: not UTF-8: .* byte 4 of the line"):
        [text for part in source.divided(100) for text in part.texts()]


def test_small_files_share_a_task_and_large_ones_have_several(tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text("a word\n\n" * (10 if number < 5 else 200))
    sources = resolve_sources([str(tmp_path / "*.txt")])
    (task,) = plan_tasks(sources, 1001)
    assert task.sources == tuple(sources)
    tasks = plan_tasks(sources, 400)
    assert [task.name for task in tasks] == [f"{n:05d}" for n in range(5)]
    assert [len(task.sources) for task in tasks] == [3, 3, 1, 1, 1]
    assert sum(task.size for task in tasks) == sum(source.size for source in sources)
    with pytest.raises(UserError, match="a shard of 0 bytes"):
        plan_tasks(sources, 0)


def test_a_source_that_changes(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo\n\nthree")
    (source,) = resolve_sources([str(path)])
    texts = source.texts()
    next(texts)
    path.write_text("one\n\ntwo\n\nthree and more")
    with pytest.raises(UserError, match=r"a\.txt changed while .* had 15 bytes and now has 24"):
        list(texts)
    with pytest.raises(UserError, match="rerun the command"):
        list(source.texts())


@pytest.mark.parametrize(("sizes", "expected"), [((100, 99), 1), ((100, 100), 2), ((200,), 2)])
def test_less_than_two_shards_is_one_task(tmp_path, sizes, expected):
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.txt").write_text("a\n\n" * (size // 3) + "b" * (size % 3))
    tasks = plan_tasks(resolve_sources([str(tmp_path / "*.txt")]), shard_bytes=100)
    assert [task.number for task in tasks] == [*range(expected)]
    assert sum(source.size for task in tasks for source in task.sources) == sum(sizes)
