"""Texts with labels from every kind of table, and what is said of bad ones."""

import csv
import dataclasses
import difflib
import itertools
import json
import pickle
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.errors import UserError, nearest
from bert_jax.tasks.config import TableConfig
from bert_jax.tasks.examples import LabelSet, MissingColumn, Origin
from bert_jax.tasks.text.tables import read_labelled, read_other_texts, read_texts

COLUMNS = TableConfig()
HARD = 'He said "no", \u2028 then left.\x85'  # str.splitlines would make three lines of it


def put(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def told(data) -> list:
    return [(e.text, e.label, e.origin.line) for e in data.examples]


# The same rows in every format


def test_csv(tmp_path):
    quoted = HARD.replace('"', '""')
    path = put(
        tmp_path / "a.csv", f'\ufefftext,label\r\n"{quoted}",no\r\n"two\nlines",yes\r\nc,no\n\r\n'
    )
    data = read_texts(path, COLUMNS)
    assert told(data) == [(HARD, 0, 2), ("two\nlines", 1, 3), ("c", 0, 5)]
    assert data.labels == LabelSet(("no", "yes"))
    assert data.examples[1].origin == Origin(str(path), 3)
    assert [e.id for e in data.examples] == ["0", "1", "2"]
    assert data.warnings == ()


def test_tsv_has_no_quoting(tmp_path):
    path = put(tmp_path / "a.tsv", f'text\tlabel\n" bare\tno\n{HARD}\tyes\n 5" disk " \tno\n')
    assert told(read_texts(path, COLUMNS)) == [
        ('" bare', 0, 2),
        (HARD, 1, 3),
        (' 5" disk " ', 0, 4),
    ]


def test_tsv_with_quoting(tmp_path):
    path = put(tmp_path / "a.tsv", 'text\tlabel\n"a ""b""\tc"\tno\nd\tyes\n')
    data = read_texts(path, TableConfig(quoting=True))
    assert told(data) == [('a "b"\tc', 0, 2), ("d", 1, 3)]


def test_json_lines(tmp_path):
    rows = [{"text": HARD, "label": 10}, {"label": 2, "more": [1], "text": "b"}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path = put(tmp_path / "a.jsonl", "\ufeff" + "\r\n\n".join(lines))
    data = read_texts(path, COLUMNS)
    assert told(data) == [(HARD, 1, 1), ("b", 0, 3)]
    assert data.labels == LabelSet(("2", "10"))  # as numbers sort


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    number = 1300  # several batches
    table = pa.table({
        "text": [f"t{i}" for i in range(number)],
        "label": pa.array([["a", "b"][i % 2] for i in range(number)]).dictionary_encode(),
        "gaps": pa.array([float(i % 3) for i in range(number)]),
        "many": [[i % 3, 3] for i in range(number)],
        "hole": [None if i in (7, 1299) else i / 2 for i in range(number)],
    })  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    data = read_texts(tmp_path / "a.parquet", COLUMNS)
    assert told(data) == [(f"t{i}", i % 2, i + 1) for i in range(number)]
    assert read_texts(tmp_path / "a.parquet", TableConfig(label="gaps")).labels == LabelSet(
        ("0", "1", "2")
    )
    many = read_texts(tmp_path / "a.parquet", TableConfig(label="many", problem_type="multi_label"))
    assert many.examples[4].label == (1, 3)
    with pytest.raises(UserError, match=r"2 rows without a label .* \(rows 8, 1300\)"):
        read_texts(tmp_path / "a.parquet", TableConfig(label="hole", problem_type="regression"))
    with pytest.raises(
        UserError, match=r"no column 'txt'; there are 'text', .*Did you mean 'text'"
    ):
        read_texts(tmp_path / "a.parquet", TableConfig(text="txt"))
    with pytest.raises(UserError, match=r"row 1: column 'gaps' holds 0\.0, not text"):
        read_texts(tmp_path / "a.parquet", TableConfig(text="gaps"))
    put(tmp_path / "b.parquet", (tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(UserError, match="not a sound parquet file"):
        read_texts(tmp_path / "b.parquet", COLUMNS)
    with pytest.raises(UserError, match="No such file"):
        read_texts(tmp_path / "c.parquet", COLUMNS)


def test_optional_packages_missing(tmp_path, monkeypatch):
    for name in ("pyarrow", "tensorflow_datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    for source in (tmp_path / "a.parquet", "tfds:glue/cola:train"):
        with pytest.raises(UserError, match=r"pip install 'bert_jax\[data\]'"):
            read_texts(source, COLUMNS)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory for the files of many examples."""
    return tmp_path_factory.mktemp("tables")


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


@settings(max_examples=30)
@given(rows=st.lists(st.tuples(texts, texts), min_size=1, max_size=6))
def test_texts_come_back_unchanged(home, rows):
    import csv
    import io

    columns = TableConfig(text="a", text_pair="b")
    put(home / "a.jsonl", "".join(json.dumps({"a": a, "b": b}) + "\n" for a, b in rows))
    found = read_texts(home / "a.jsonl", columns, labelled=False)
    assert [(e.text, e.text_pair) for e in found.examples] == rows
    out = io.StringIO(newline="")
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
    found = read_texts(put(home / "a.csv", out.getvalue()), columns, labelled=False)
    assert [(e.text, e.text_pair) for e in found.examples] == rows
    plain = [tuple("".join(c for c in t if c not in "\t\r\n") + "." for t in row) for row in rows]
    put(home / "a.tsv", "a\tb\n" + "".join(f"{a}\t{b}\n" for a, b in plain))
    found = read_texts(home / "a.tsv", columns, labelled=False)
    assert [(e.text, e.text_pair) for e in found.examples] == plain


@settings(max_examples=150)
@given(
    data=st.one_of(
        st.binary(max_size=60),
        st.text('ab"\t\n\r,;\u2028{}[]:01', max_size=60).map(str.encode),
    ),
    kind=st.sampled_from(["csv", "tsv", "jsonl"]),
    quoting=st.booleans(),
)
def test_any_bytes_are_read_or_refused(home, data, kind, quoting):
    path = put(home / f"a.{kind}", data)
    column = "a" if kind == "jsonl" else "1"
    fields = {} if kind == "jsonl" else {"header": False, "quoting": quoting}
    try:
        found = read_texts(path, TableConfig(text=column, label=column, **fields))
    except UserError as error:
        told = str(error)
    else:
        told = "".join(f"{e.origin}" for e in found.examples)
    assert str(path) in told


# Columns and headers


def test_header_is_not_guessed(tmp_path):
    path = put(tmp_path / "a.tsv", "good film\tpos\nbad film\tneg\n")
    numbers = TableConfig(text="1", label="2")
    with pytest.raises(UserError, match=r"header=False.* Line 1: 'good film', 'pos'"):
        read_texts(path, numbers)
    assert len(read_texts(path, dataclasses.replace(numbers, header=False)).examples) == 2
    with pytest.raises(
        UserError, match=r"'text'. Line 1 was read as the header: 'good film', 'pos'"
    ):
        read_texts(path, COLUMNS)
    with pytest.raises(UserError, match=r"without a header, .* 'text'. Line 1: 'good film', 'pos'"):
        read_texts(path, TableConfig(header=False))
    for wrong in ("0", "3"):
        with pytest.raises(UserError, match=rf"no column {wrong}; .* from 1 to 2"):
            read_texts(path, TableConfig(text=wrong, header=False), labelled=False)


@pytest.mark.parametrize(
    ("name", "header", "message"),
    [
        ("a.csv", "txt,label", "Did you mean 'txt'"),
        ("a.csv", "text;label", r"delimiter a semicolon \(delimiter=';'\)"),
        ("a.tsv", "text,label", "delimiter a comma"),
        ("a.tsv", '"text"\t"label"', "quoting=True"),
        ("a.csv", "text,text,label", "has 'text' 2 times"),
    ],
)
def test_missing_column(tmp_path, name, header, message):
    with pytest.raises(UserError, match=message):
        read_texts(put(tmp_path / name, f"{header}\nx,y\n"), COLUMNS)


def test_a_missing_column_keeps_its_message_on_the_way_from_a_worker():
    error = MissingColumn("en", "a.tsv: no column 'en'")
    error.add_note("in a worker")
    found = pickle.loads(pickle.dumps(error))
    assert (found.column, f"{found}") == ("en", "a.tsv: no column 'en'")
    assert found.__notes__ == ["in a worker"]


def test_a_name_that_is_a_number(tmp_path):
    path = put(tmp_path / "a.csv", "2,1\nx,y\n")
    found = read_texts(path, TableConfig(text="1", header=True), labelled=False)
    assert found.examples[0].text == "y"


def test_formats_by_name(tmp_path):
    path = put(tmp_path / "a.dat", "text,label\nx,1\ny,2\n")
    with pytest.raises(UserError, match=r"a\.dat: the name's suffix .* \(known: \.csv, "):
        read_texts(path, COLUMNS)
    assert len(read_texts(path, TableConfig(format="csv")).examples) == 2
    with pytest.raises(UserError, match="tfds:NAME:SPLIT needs the format 'tfds'"):
        read_texts(path, TableConfig(format="tfds"))
    with pytest.raises(UserError, match="delimiter is ';;'"):
        read_texts(path, TableConfig(format="csv", delimiter=";;"))
    lines = put(tmp_path / "a.jsonl", "{}")
    with pytest.raises(UserError, match="header works only with csv and tsv"):
        read_texts(lines, TableConfig(header=True))
    with pytest.raises(UserError, match="no column '1'"):
        read_texts(lines, TableConfig(text="1"))


# Bad rows


def test_stray_quotes_in_quoted_files(tmp_path):
    path = put(tmp_path / "a.csv", 'text,label\nfine,1\n"a" b,2\n')
    with pytest.raises(UserError, match=r"a\.csv, line 3: a stray quote .*quoting=False"):
        read_texts(path, COLUMNS)
    path = put(tmp_path / "b.csv", 'text,label\n"open,1\nb,2\n')
    with pytest.raises(UserError, match=r"b\.csv, line 2: a stray quote .* runs to line 3"):
        read_texts(path, COLUMNS)
    # The next quote closes it: three rows would become one, with the right number of fields.
    path = put(tmp_path / "c.tsv", 'text\tlabel\n" one\t1\ntwo\t2\nthree "\t1\n')
    with pytest.raises(UserError, match=r"c\.tsv, line 2: a quoted field runs to line 4"):
        read_texts(path, TableConfig(quoting=True))
    assert len(read_texts(path, COLUMNS).examples) == 3


def test_field_limit_is_put_back(tmp_path, request):
    request.addfinalizer(partial(csv.field_size_limit, csv.field_size_limit(before := 100_000)))
    long = "x" * (before + 1)
    path = put(tmp_path / "a.csv", f"text,label\n{long},1\ny,2\n")
    assert read_texts(path, COLUMNS).examples[0].text == long
    assert csv.field_size_limit() == before


def test_ragged_rows_are_all_reported(tmp_path):
    rows = ["text\tlabel", *["good\t1", "one", "a\tb\tc"] * 4, ""]
    path = put(tmp_path / "a.tsv", "\n".join(rows))
    with pytest.raises(UserError) as caught:
        read_texts(path, COLUMNS)
    lines = str(caught.value).split("\n")
    assert lines[0].endswith("8 rows are wrong:")
    assert "a.tsv, line 3: 1 field where the header has 2" in lines[1]
    assert len(lines) == 7
    assert lines[-1].strip() == "and 3 more"
    data = read_texts(path, TableConfig(ragged="skip"), LabelSet(("0", "1")))
    assert len(data.examples) == 4
    assert data.warnings == (
        f"{path}: 8 rows skipped for having more or fewer fields than the first "
        "(lines 3, 4, 6, 7, 9, ...)",
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", 'text,label\na, b,1\n', "line 2: 3 fields .* needs double quotes"),
        ("a.tsv", 'text\tlabel\n"a\tb"\t1\n', "line 2: 3 fields .* quoting=True"),
        ("a.csv", "text,label\n\nx,1\n", "line 2: 1 field"),
        ("a.csv", "", "is empty"),
        ("a.csv", "\n\n", "has no rows"),
        ("a.csv", "text,label\n", "has no examples"),
        ("a.csv", "text,label\rx,1\r", "end in carriage returns"),
        ("a.csv", b"text,label\nx\xe4,1\n", "line 2, byte 2: 0xe4 is not UTF-8"),
        ("a.csv", "text,label\nx\0,1\n", "line 2: a NUL byte"),
        ("a.json", '[{"text": "a", "label": "x"}, 5]', "a.json, object 2: a JSON int"),
        ("a.json", '[{"text": "a"}]', "a.json, object 1: no column 'label'"),
        ("a.jsonl", '{"text": "a", "label": 1}\n\n{"text"}\n', r"a\.jsonl, line 3: not JSON"),
        ("a.jsonl", '{"text": "a", "label": 1}\n3\n', "line 2: a JSON int"),
        ("a.jsonl", '{"text": "a", "lable": 1}\n', "line 1: no column 'label'.*mean 'lable'"),
        ("a.jsonl", '{"text": "\\u0000", "label": 1}\n', "line 1: .* NUL"),
        ("a.jsonl", '{"text": "\\ud800", "label": 1}\n', "line 1: .* surrogate"),
        ("a.jsonl", '{"text": 3, "label": 1}\n', "line 1: column 'text' holds 3, not text"),
        ("a.jsonl", '{"text": null, "label": 1}\n', "line 1: column 'text' holds nothing"),
        ("a.jsonl", '{"text": "a", "label": ["b"]}\n', "not a label. .*='multi_label'"),
        ("a.jsonl", '{"text": "a", "label": 1.5}\n', "not a label. .* problem_type='regression'"),
        ("a.csv", "text,label\nx, yes\ny,yes\n", "' yes' has blanks around it"),
        ("a.csv", "text,label\nx,\n", "line 2: column 'label' is empty"),
        ("a.csv", "text,label\nx,1\ny,1\n", "only the label '1'"),
        ("a.jsonl", '{"text":"a","label":1}\n{"text":"b","label":2}\n{"text":"c","label":null}\n',
         r"1 rows? without a label among others .*\(line 3\)"),
    ],
)  # fmt: skip
def test_bad_tables(tmp_path, name, text, message):
    with pytest.raises(UserError, match=message):
        read_texts(put(tmp_path / name, text), COLUMNS)


def test_empty_texts(tmp_path):
    path = put(tmp_path / "a.tsv", "text\tpair\tlabel\na\tb\t0\n \tb\t1\na\t\t1\nc\td\t1\n")
    with pytest.raises(UserError, match=r"(?s)2 rows are wrong:.*line 3: a text is empty.*line 4"):
        read_texts(path, TableConfig(text_pair="pair", empty="fail"))
    kept = read_texts(path, TableConfig(text_pair="pair"))
    assert [e.text for e in kept.examples] == ["a", " ", "a", "c"]
    assert kept.warnings == (f"{path}: 2 rows with an empty text kept (lines 3, 4)",)
    labels = LabelSet(("0", "1"))
    skipped = read_texts(path, TableConfig(text_pair="pair", empty="skip"), labels=labels)
    assert [(e.id, e.text) for e in skipped.examples] == [("0", "a"), ("3", "c")]
    assert "2 rows with an empty text skipped" in skipped.warnings[0]


def test_ids(tmp_path):
    path = put(tmp_path / "a.csv", "n,text\nx7,a\nx9,b\n")
    named = TableConfig(id="n")
    assert [e.id for e in read_texts(path, named, labelled=False).examples] == ["x7", "x9"]
    path = put(tmp_path / "b.csv", "n,text\nx7,a\nx7,b\n")
    with pytest.raises(UserError, match=r"b\.csv, line 3: the id 'x7' is also the id of line 2"):
        read_texts(path, named, labelled=False)
    path = put(tmp_path / "c.jsonl", '{"n": 7, "text": "a"}\n{"n": null, "text": "b"}\n')
    with pytest.raises(UserError, match=r"c\.jsonl, line 2: column 'n' is empty"):
        read_texts(path, named, labelled=False)


def test_an_id_and_a_group_may_be_spelled_none(tmp_path):
    path = put(tmp_path / "a.csv", "n,who,text\nNone,None,a\nx,,b\n")
    with pytest.raises(UserError, match=r"line 3: column 'who' is empty; expected a group") as told:
        read_texts(path, TableConfig(id="n", group="who"), labelled=False)
    assert "line 2" not in f"{told.value}"
    path.write_text("n,who,text\nNone,None,a\n")
    (found,) = read_texts(path, TableConfig(id="n", group="who"), labelled=False).examples
    assert (found.id, found.group) == ("None", "None")


# Labels


def test_labels_of_training_hold_for_dev(tmp_path):
    train = read_texts(put(tmp_path / "train.csv", "text,label\na,neg\nb,pos\n"), COLUMNS)
    dev = put(tmp_path / "dev.csv", "text,label\na,pos\nb,NEG\nc,positive\n")
    with pytest.raises(UserError) as caught:
        read_texts(dev, COLUMNS, labels=train.labels)
    text = str(caught.value)
    assert "line 3: the label 'NEG' is not known; labels: 'neg', 'pos'. Did you mean 'neg'" in text
    assert "line 4: the label 'positive' is not known" in text
    one = put(tmp_path / "one.csv", "text,label\na,pos\n")
    assert read_texts(one, COLUMNS, labels=train.labels).examples[0].label == 1


def test_label_sets():
    assert LabelSet.of(["10", "9", "9"]).names == ("9", "10")
    assert LabelSet.of(["10", "9", "b"]).names == ("10", "9", "b")
    with pytest.raises(UserError, match="'a' occurs twice"):
        LabelSet(("a", "b", "a"))
    with pytest.raises(UserError, match="label 1 has an empty name"):
        LabelSet(("a", ""))
    with pytest.raises(UserError, match="no labels"):
        LabelSet(())
    with pytest.raises(UserError, match=r"a\.parquet, row 4: .*'2', '3'\.$"):
        LabelSet(("2", "3")).id("23", Origin("a.parquet", 4))
    with pytest.raises(UserError, match=r"f\.csv, line 4: .* and 10 more\."):
        LabelSet(tuple(f"{i}" for i in range(30))).id("x", Origin("f.csv", 4))


def test_the_work_for_hints_is_bounded(tmp_path, monkeypatch):
    """Only what is shown is compared, and of long lists the beginning."""
    compared = []
    monkeypatch.setattr(difflib, "get_close_matches", lambda *a, **_: compared.append(a) or [])
    labels = LabelSet(tuple(f"label {n}" for n in range(3000)))
    wrong = put(tmp_path / "a.csv", "text,label\n" + "".join(f"a,lable {n}\n" for n in range(50)))
    with pytest.raises(UserError, match="50 rows are wrong"):
        read_texts(wrong, COLUMNS, labels=labels)
    assert 0 < len(compared) <= 5
    assert max(len(names) for _, names, *_ in compared) <= 1000
    compared.clear()
    lines = [json.dumps({"text": "a", "label": "b"}), *['{"text": "a", "lable": "b"}'] * 50]
    with pytest.raises(UserError, match="50 rows are wrong"):
        read_texts(put(tmp_path / "a.jsonl", "\n".join(lines)), COLUMNS)
    assert len(compared) <= 5


def test_nearest_is_bounded():
    assert nearest("lable", ["x", "label"]) == "label"
    assert nearest("lable", itertools.repeat("x")) is None
    assert nearest("ab" * 40, ["ab" * 40 + "c"]) is None


def test_texts_as_labels_are_refused(tmp_path):
    path = put(tmp_path / "a.csv", "text,label\n" + "".join(f"{i},{i}.5\n" for i in range(50)))
    with pytest.raises(
        UserError, match=r"50 different labels in 50 rows.*problem_type='regression'"
    ):
        read_texts(path, COLUMNS)


def test_scores(tmp_path):
    path = put(tmp_path / "a.csv", "text,label\na,2.6\nb, 5\nc,0\n")
    columns, limits = TableConfig(problem_type="regression"), (0.0, 5.0)
    data = read_texts(path, columns, score_range=limits)
    assert [e.label for e in data.examples] == [2.6, 5.0, 0.0]
    assert all(isinstance(e.label, float) for e in data.examples)
    assert data.labels is None
    for wrong in ("5.1", "-1", "nan", "inf"):
        path = put(tmp_path / "b.csv", f"text,label\na,{wrong}\n")
        with pytest.raises(UserError, match=f"line 2: .*'{wrong}', not a number between 0 and 5"):
            read_texts(path, columns, score_range=limits)
    for wrong in ("'3,5'", "x", "1_0", ""):
        with pytest.raises(UserError, match=r"line 2: .* not a number such as 3\.5"):
            read_texts(put(tmp_path / "b.csv", f'text,label\na,"{wrong}"\n'), columns)
    path = put(tmp_path / "b.csv", "text,label\na,-7\nb,inf\n")
    with pytest.raises(UserError, match=r"line 3: .*'inf', not a number that is finite"):
        read_texts(path, TableConfig(problem_type="regression"))


def test_several_labels(tmp_path):
    columns = TableConfig(problem_type="multi_label", separator=";")
    data = read_texts(put(tmp_path / "a.csv", "text,label\na,x; y\nb,\nc,z;x\n"), columns)
    assert data.labels == LabelSet(("x", "y", "z"))
    assert [e.label for e in data.examples] == [(0, 1), (), (0, 2)]
    for wrong, message in [
        ("x;x", "repeat a label"),
        ("x;;y", "is empty"),
        ("x;q", "'q' is not known"),
    ]:
        path = put(tmp_path / "b.csv", f"text,label\na,{wrong}\n")
        with pytest.raises(UserError, match=f"line 2: .*{message}"):
            read_texts(path, columns, labels=data.labels)
    many = LabelSet(tuple("abcdefghi"))
    data = read_texts(put(tmp_path / "a.csv", "text,label\na,i;b\n"), columns, labels=many)
    assert data.examples[0].label == (1, 8)
    rows = '{"text": "a", "label": ["y", "x"]}\n{"text": "b", "label": []}\n'
    data = read_texts(put(tmp_path / "a.jsonl", rows), columns, labels=LabelSet(("x", "y")))
    assert [e.label for e in data.examples] == [(0, 1), ()]


def test_columns_of_zeros_and_ones(tmp_path):
    columns = TableConfig(label_columns=("toxic", "rude"), problem_type="multi_label")
    path = put(tmp_path / "a.csv", "text,toxic,rude\na,1,0\nb,0,0\nc,1,1\n")
    data = read_texts(path, columns)
    assert data.labels == LabelSet(("toxic", "rude"))
    assert [e.label for e in data.examples] == [(0,), (), (0, 1)]
    turned = read_texts(path, columns, labels=LabelSet(("rude", "toxic")))
    assert [e.label for e in turned.examples] == [(1,), (), (0, 1)]
    with pytest.raises(UserError, match="they must be the same"):
        read_texts(path, columns, labels=LabelSet(("rude", "kind")))
    path = put(tmp_path / "a.csv", "text,toxic,rude\na,-1,0\n")
    with pytest.raises(UserError, match=r"line 2: column 'toxic' holds '-1'; it must be 0 or 1"):
        read_texts(path, columns)
    unlabelled = put(tmp_path / "b.csv", "text,toxic\na,1\n")
    with pytest.raises(UserError, match=r"b\.csv has no labels in column 'toxic, rude'; name"):
        read_labelled(f"{unlabelled}", columns, data.labels, read_other_texts)
    lines = put(tmp_path / "a.jsonl", '{"text": "a", "toxic": true, "rude": 0.0}\n')
    assert read_texts(lines, columns).examples[0].label == (0,)


# TensorFlow Datasets


@pytest.fixture
def tfds(tmp_path, monkeypatch):
    pytest.importorskip("array_record")
    tfds = pytest.importorskip("tensorflow_datasets")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
    return tfds


@pytest.mark.filterwarnings("ignore")  # of tensorflow-datasets
def test_tfds(tfds):
    class BertJaxLabelled(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            names = tfds.features.ClassLabel(names=["neg", "pos"])
            features = {
                "text": tfds.features.Text(),
                "label": names,
                "all": tfds.features.Sequence(names),
                "score": np.float32,
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, download):
            rows = [("good «film»", 1, [0, 1], 0.5), ("bad", 0, [], 2.0)]
            known = [{"text": t, "label": n, "all": a, "score": s} for t, n, a, s in rows]
            unknown = [{**row, "label": -1} for row in known]
            return {"train": enumerate(known), "test": enumerate(unknown)}

        def _generate_examples(self):
            raise NotImplementedError

    name = "tfds:bert_jax_labelled"
    with pytest.raises(UserError, match=r"not prepared: .*bert-jax tfds bert_jax_labelled"):
        read_texts(f"{name}:train", COLUMNS)
    BertJaxLabelled(file_format="array_record").download_and_prepare(file_format="array_record")
    data = read_texts(f"{name}:train", COLUMNS)
    assert {(e.text, e.label) for e in data.examples} == {("good «film»", 1), ("bad", 0)}
    assert data.labels == LabelSet(("neg", "pos"))
    assert data.examples[1].origin == Origin(f"{name}:train", 2)
    several = read_texts(f"{name}:train", TableConfig(label="all", problem_type="multi_label"))
    assert {e.label for e in several.examples} == {(0, 1), ()}
    scores = read_texts(f"{name}:train", TableConfig(label="score", problem_type="regression"))
    assert {e.label for e in scores.examples} == {0.5, 2.0}
    assert [e.label for e in read_texts(f"{name}:test", COLUMNS).examples] == [None, None]
    with pytest.raises(UserError, match=r"no column 'txt'; there are .*Did you mean 'text'"):
        read_texts(f"{name}:train", TableConfig(text="txt"))
    with pytest.raises(UserError, match="Unknown split"):
        read_texts(f"{name}:tset", COLUMNS)
    with pytest.raises(UserError, match="write tfds:NAME:SPLIT"):
        read_texts(name, COLUMNS)
    assert "tensorflow" not in sys.modules
