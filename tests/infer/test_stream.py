"""Lines in, lines out: order, what is skipped, files that are whole or not there. No model."""

import gzip
import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.infer import predictor, writers
from bert_jax.infer.predictor import Predictor, Prepared, answer_records, text_field
from bert_jax.infer.records import MAX_LINE_BYTES, Record, read_records
from bert_jax.infer.writers import KeptLines, check_out, json_line, lines, write_answers
from bert_jax.tasks.examples import Origin, TextExample
from bert_jax.tasks.rows import Batch, Rows


class _Ids:
    pad = 0


class _Model:
    max_length = 16

    class tokenizer:
        special_ids = _Ids()


class Shout(Predictor[TextExample]):
    """A verb that needs no model: the text in capitals; it refuses a "!"."""

    FIELDS = ("text", "text_b")
    width = None

    def __init__(self, width: int | None = None) -> None:
        self.model, self.width = _Model(), width

    def example(self, fields: Mapping[str, Any], origin: Origin) -> TextExample:
        return TextExample("", text_field(fields, "text", origin), None, None, origin)

    def prepare(self, examples: Sequence[Any]) -> Prepared[Any]:
        for example in examples:
            if "!" in example.text:
                raise UserError(f"{example.origin}: it shouts already")
        tokens = [np.arange(1 + len(each.text) % 9, dtype=np.int32) for each in examples]
        second_start = np.array([len(ids) for ids in tokens], np.int32)
        long = [place for place, each in enumerate(examples) if len(each.text) > 90]
        return Prepared(examples, Rows(tokens, second_start), cut=long, limit="texts are long")

    def forward(self, batch: Batch) -> Any:
        return batch["segment_ids"].sum(1)

    def answers(self, prepared: Prepared[Any], outputs: Sequence[Any]) -> list[Any]:
        pairs = zip(prepared.examples, outputs, strict=True)
        return [{"loud": each.text.upper(), "tokens": int(count)} for each, count in pairs]

    def lines(self, example: Any, answer: Any) -> list[str]:
        return [answer["loud"]]


def records_of(texts: Sequence[str]) -> list[Record]:
    return [Record(Origin("f", n), {"text": text}) for n, text in enumerate(texts, 1)]


def run(texts: Sequence[str], **options: Any) -> list[Record]:
    chunks = answer_records(Shout(), records_of(texts), say=lambda line: None, **options)
    return [each for chunk in chunks for each in chunk]


def test_order_is_kept_through_chunks_and_lengths(monkeypatch):
    monkeypatch.setattr(Predictor, "CHUNK", 7)
    texts = [f"{'x' * (n * 5 % 13)} {n}" for n in range(50)]
    found = run(texts)
    assert [each.answer["loud"] for each in found] == [text.upper() for text in texts]
    assert [each.answer["tokens"] for each in found] == [1 + len(text) % 9 for text in texts]


def test_a_chunk_holds_no_more_than_so_many_characters(monkeypatch):
    monkeypatch.setattr(predictor, "MAX_CHARS", 100)
    taken: list[int] = []

    def records():
        for n in range(40):
            taken.append(n)
            yield Record(Origin("f", n + 1), {"text": "x" * 60})

    chunks = answer_records(Shout(), records(), say=lambda line: None)
    assert len(next(chunks)) == 2
    assert len(taken) == 2  # the file is not read ahead


def test_on_fail_the_first_bad_record_ends_it():
    with pytest.raises(UserError, match="f, line 2: it shouts already"):
        run(["a", "b!", "c!"])


def test_on_skip_bad_records_keep_their_places():
    said: list[str] = []
    records = [*records_of(["a", "b!", "c"]), Record(Origin("f", 40), {}, "f, line 40: bad"),
               Record(Origin("f", 41), {"other": 1})]  # fmt: skip
    (chunk,) = answer_records(Shout(), records, on_error="skip", say=said.append)
    assert chunk == records
    first, second, third, fourth, fifth = chunk
    assert (first.answer["loud"], third.answer["loud"]) == ("A", "C")
    assert (second.answer, fourth.answer, fifth.answer) == (None, None, None)
    assert second.problem == "f, line 2: it shouts already"
    assert fourth.problem == "f, line 40: bad"
    assert "no field 'text'; the fields present are 'other'" in fifth.problem
    assert (first.problem, third.problem) == (None, None)
    assert len(said) == 3


def test_what_was_cut_is_counted_once_with_the_first_places(monkeypatch):
    monkeypatch.setattr(Predictor, "CHUNK", 3)
    said: list[str] = []
    texts = ["x" * (95 if n % 2 else 5) for n in range(20)]
    assert len(list(answer_records(Shout(), records_of(texts), say=said.append))) == 7
    assert said == [
        "Warning: 10 of 20 texts are long and were cut there (f, line 2; f, line 4; f, line 6; "
        "f, line 8; f, line 10; ...)"
    ]


def test_all_records_bad_and_none_at_all():
    assert [each.problem is None for each in run(["!", "!!"], on_error="skip")] == [False, False]
    assert run([]) == []


# What is read


def read(path: Path, content: bytes, **options: Any) -> list[Record]:
    path.write_bytes(content)
    return list(read_records(str(path), **options))


def test_plain_text_keeps_empty_lines_and_ends(tmp_path):
    found = read(tmp_path / "a.txt", "\ufeffone\r\n\nहिन्दी\n四".encode())
    assert [record.fields["text"] for record in found] == ["one", "", "हिन्दी", "四"]
    assert [record.origin.line for record in found] == [1, 2, 3, 4]


def test_json_lines_are_renamed_and_get_what_is_the_same_for_all(tmp_path):
    content = b'{"s": "a", "id": 3}\n\n{"s": "b", "text_b": "own"}\n'
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(content))
    found = list(read_records(str(path), names={"text": "s"}, more={"text_b": "all"}))
    assert [(r.origin.line, r.fields["text"], r.fields["text_b"]) for r in found] == [
        (1, "a", "all"), (3, "b", "own"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2: not JSON"),
        (b'["a"]', "is not an object such as"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"text": "\xff"}', "0xff is not UTF-8"),
        (b'{"text": "a\0"}', "line 2: a NUL byte"),
        (b'{"a": 1, "a": 2}', "occurs twice"),
        (b'{"a": NaN}', "not a valid JSON number"),
        (b'{"a": ' + b"[" * 50 + b"]" * 50 + b"}", "nested too deeply"),
        (b'{"text": "' + b"x" * MAX_LINE_BYTES + b'"}', "longer than 4,194,304 bytes"),
    ],
)
def test_a_bad_line_is_named_and_the_next_is_read(tmp_path, line, message):
    good = b'{"text": "a"}\n'
    first, bad, last = read(tmp_path / "a.jsonl", good + line + b"\n" + good)
    assert (first.problem, last.problem, last.origin.line) == (None, None, 3)
    assert bad.problem is not None
    assert bad.problem.startswith(f"{tmp_path / 'a.jsonl'}, line 2")
    assert message in bad.problem


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.gz", b"no gzip\n"), ("b.gz", gzip.compress(b"x\n" * 999, mtime=0)[:-9])],
)
def test_a_file_that_is_damaged_is_named(tmp_path, name, content):
    with pytest.raises(UserError, match=rf"{name} (is not a sound gzip|ends in the middle)"):
        read(tmp_path / name, content)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*nothing\.txt: No such file"):
        list(read_records(str(tmp_path / "nothing.txt")))


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b'{"text": "a"}\n', "a"), (b"plain {\n", "plain {"), (b" {\n", None)],
)
def test_standard_input_tells_its_format_by_its_first_line(monkeypatch, content, expected):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    (record,) = read_records("-")
    assert record.fields.get("text") == expected


# What is written


def answered(value: Any, line: int = 1, **fields: Any) -> Record:
    return Record(Origin("f", line), fields, answer=value)


def skipped(line: int = 2, **fields: Any) -> Record:
    return Record(Origin("f", line), fields, problem="bad")


def test_json_lines_have_ids_and_errors():
    records = [
        answered({"label": "ä"}, id=7), skipped(2, id="x"), skipped(3),
        answered(np.array([0.1, -2], np.float32)),
    ]  # fmt: skip
    assert [json.loads(json_line(Shout(), record)) for record in records] == [
        {"id": 7, "label": "ä"}, {"id": "x", "error": "bad", "line": 2},
        {"error": "bad", "line": 3}, {"embedding": [0.1, -2.0]},
    ]  # fmt: skip


def test_lines_for_people():
    assert lines(Shout(), answered({"loud": "A"}, text="a")) == "a\n    A\n"
    assert lines(Shout(), skipped(1)) == "f, line 1\n    skipped: bad\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_standard_output_has_each_chunk_at_once(capsys, as_json):
    def chunks():
        yield [answered({"loud": "A"}, text="a")]
        assert ('"loud": "A"' if as_json else "a\n    A\n") in capsys.readouterr().out
        yield [skipped()]

    write_answers(Shout(), chunks(), None, form="json" if as_json else "people")
    assert "bad" in capsys.readouterr().out


def test_vectors_of_skipped_records_are_nan_and_null(tmp_path):
    predictor = Shout(width=3)
    chunks = [[answered(np.full(3, n, np.float32), id=n), skipped()] for n in range(40)]
    for name in ("a.npy", "a.parquet", "a.jsonl"):
        if name == "a.parquet":
            pytest.importorskip("pyarrow")
        write_answers(predictor, chunks, tmp_path / name, form="json")
    expected = np.repeat(np.arange(40, dtype=np.float32), 2)[:, None] * np.ones(3, np.float32)
    expected[1::2] = np.nan
    found = np.load(tmp_path / "a.npy", allow_pickle=False)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.float32
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert table[2] == {"id": "1", "embedding": [1, 1, 1], "error": None}
    assert table[3] == {"id": None, "embedding": None, "error": "bad"}
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 80


@pytest.mark.parametrize("name", ["a.jsonl", "a.npy", "a.parquet"])
def test_a_file_is_whole_or_not_there(tmp_path, name):
    predictor, out = Shout(width=3), tmp_path / "new" / name
    chunk = [answered(np.ones(3, np.float32))]
    if name == "a.parquet":
        pytest.importorskip("pyarrow")

    def interrupted():
        yield chunk
        raise KeyboardInterrupt

    def chunks():
        yield chunk
        assert out.read_text() == "before"

    with pytest.raises(KeyboardInterrupt):
        write_answers(predictor, interrupted(), out, form="json")
    assert list(out.parent.iterdir()) == []
    out.write_text("before")
    with pytest.raises(KeyboardInterrupt):
        write_answers(predictor, interrupted(), out, form="json")
    assert out.read_text() == "before"
    write_answers(predictor, chunks(), out, form="json")
    assert out.read_bytes()[:6] != b"before"
    if name == "a.jsonl":
        assert out.read_text() == '{"embedding": [1.0, 1.0, 1.0]}\n'
    assert [path.name for path in out.parent.iterdir()] == [name]


def test_a_rerun_that_is_stopped_keeps_the_lines_that_it_has_not_reached(tmp_path):
    out, saved = tmp_path / "a.jsonl", tmp_path / "a.jsonl.partial"
    records = [Record(Origin("a", number), {"text": f"{number}"}) for number in range(1, 7)]

    def stopped_after(number, error, again=()):
        """Answer that many records, then stop; return the numbers of the saved lines found."""
        kept, found = KeptLines(out, "model"), []

        def chunks():
            for record in kept.found(map(replace, again or records)):
                if record.origin.line > number:
                    raise error
                found.extend([record.origin.line] if record.line else [])
                record.answer = {"loud": record.fields["text"]}
                yield [record]

        with pytest.raises(type(error)):
            write_answers(Shout(), chunks(), kept, form="json")
        return found

    assert stopped_after(5, KeyboardInterrupt()) == []
    whole = saved.read_bytes()
    assert whole.count(b"\n") == 5
    for number, error in enumerate([UserError("no file"), KeyboardInterrupt(), UserError("bad")]):
        assert stopped_after(number, error) == [*range(1, number + 1)]
        assert saved.read_bytes() == whole
    # Lines after a record that has changed are answered anew, and no old line stays behind them.
    changed = [*records[:2], Record(Origin("a", 3), {"text": "long" * 9}), *records[3:]]
    assert stopped_after(4, KeyboardInterrupt(), changed) == [1, 2]
    assert [line[8:] for line in saved.read_bytes().splitlines()] == [
        b'{"loud": "1"}', b'{"loud": "2"}', b'{"loud": "%s"}' % (b"long" * 9), b'{"loud": "4"}',
    ]  # fmt: skip
    saved.unlink()
    assert stopped_after(0, UserError("no file")) == []
    assert not saved.exists()


def test_a_rerun_cuts_the_saved_lines_once(tmp_path, monkeypatch):
    """Each cut writes what is buffered, so a cut at every line was slow."""
    out, cuts = tmp_path / "a.jsonl", []
    records = [Record(Origin("a", number), {"text": f"{number}"}) for number in range(1, 7)]

    class Kept(io.BufferedRandom):
        def truncate(self, pos=None):
            cuts.append(self.tell())
            return super().truncate(pos)

    def chunks(kept):
        for record in kept.found(map(replace, records)):
            number = record.origin.line
            if number > 5:
                raise UserError("bad")
            record.answer = {"loud": f"{number}"}
            yield [record]

    for changed in (False, True):
        if changed:
            records[2] = Record(Origin("a", 3), {"text": "other"})
            opened = lambda path, mode: Kept(io.FileIO(path, mode))  # noqa: E731
            monkeypatch.setattr(writers, "open", opened, raising=False)
        kept = KeptLines(out, "model")
        with pytest.raises(UserError, match=r"bad\. 5 answers are kept"):
            write_answers(Shout(), chunks(kept), kept, form="json")
    whole = Path(f"{out}.partial").read_bytes()
    assert cuts == [len(b"".join(whole.splitlines(keepends=True)[:2]))]
    assert len(whole.splitlines()) == 5


def test_places_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(UserError, match="is a directory"):
        check_out(tmp_path / "a.jsonl", vectors=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="part of the path is a file"):
        write_answers(Shout(), [], tmp_path / "file" / "a.jsonl", form="json")
    with pytest.raises(UserError, match=r"\.npy is for vectors"):
        check_out(tmp_path / "a.npy", vectors=False)
    with pytest.raises(UserError, match="is for vectors"):
        check_out(tmp_path / "a.npy", vectors=False, plain=True)
