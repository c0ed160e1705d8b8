"""CSV, TSV and parquet as sources."""

import gzip

import pytest

from bert_jax.data.corpus.documents import ReadOptions
from bert_jax.data.corpus.kinds import tables
from bert_jax.data.corpus.sources import resolve_sources
from bert_jax.errors import UserError
from bert_jax.files.tfds import PreparedSplit


def read(path, **options):
    (source,) = resolve_sources([str(path)], ReadOptions(**options))
    return [(document.text, dict(document.fields)) for document in source.documents()]


def test_csv(tmp_path):
    data = 'lang,text\r\nde,"Ein ""Satz"", und\n\nein Absatz."\r\n\r\nen,One.\r\nen,\r\n'
    for name, content in (("a.csv", data.encode()), ("b.csv.gz", gzip.compress(data.encode()))):
        (tmp_path / name).write_bytes(content)
        assert read(tmp_path / name, keep=("lang", "date")) == [
            ('Ein "Satz", und\nein Absatz.', {"lang": "de"}), ("One.", {"lang": "en"}),
        ]  # fmt: skip


def test_tsv_keeps_quotes(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('body\tn\nsay "yes"\t1\n"two\t2\n')
    assert read(path, field="body") == [('say "yes"', {}), ('"two', {})]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.csv", "txt,n\na,1\n", r"line 1: no field 'text'; .*Did you mean 'txt'"),
        ("a.csv", "text,n\na,1\nb,2,3\n", "line 3: 3 fields where the header has 2; .* quotes"),
        ("a.tsv", "text\tn\na\n", "line 2: 1 fields where the header has 2; .* as two fields"),
        ("a.csv", 'text,n\na,1\n"b"x,2\n', "line 3: a stray quote"),
        ("a.csv", "", "line 1: no field 'text'; the fields present are none"),
        ("a.csv", "text\n", "holds no text"),
        ("a.tsv", "text\ttext\na\tb\n", "line 1: the header has 'text' 2 times; rename all"),
    ],
)
def test_bad_tables(tmp_path, name, data, message):
    (tmp_path / name).write_text(data)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


def test_a_kept_column_that_is_there_twice(tmp_path):
    (tmp_path / "a.csv").write_text("text,lang,n,n,lang\na,de,1,2,en\n")
    with pytest.raises(UserError, match=r"a\.csv, line 1: the header has 'lang' 2 times; rename"):
        read(tmp_path / "a.csv", keep=("lang",))


def test_a_field_too_long(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('text\n"' + "long\n" * 100 + '"\n')
    with pytest.raises(UserError, match="line 2: a stray quote or line end, or a field too long"):
        read(path, max_document_chars=100)


def test_fields_of_json_and_parquet(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.jsonl").write_text('{"text": "a", "lang": "de", "n": 1}\n{"text": "b"}\n')
    assert read(tmp_path / "a.jsonl", keep=("lang",)) == [("a", {"lang": "de"}), ("b", {})]
    pq.write_table(pa.table({"text": ["a", None], "lang": ["de", "en"]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", keep=("lang", "no")) == [("a", {"lang": "de"})]


def test_fields_of_bytes_become_text(tmp_path, monkeypatch):
    """TFDS and columns of some parquet files have bytes for texts."""
    examples = [{"text": b"a", "lang": "d\u00e9".encode(), "n": 1}, {"text": b"b", "lang": b"\xff"}]
    prepared = PreparedSplit({}, examples, "1.0.0")
    monkeypatch.setattr(tables, "open_tfds", lambda *_: prepared)
    found = [("a", {"lang": "d\u00e9", "n": 1}), ("b", {"lang": "\ufffd"})]
    assert read("tfds:made", keep=("lang", "n")) == found
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": ["a"], "lang": [b"de"]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", keep=("*",)) == [("a", {"lang": "de"})]


def test_parquet_columns_of_the_same_name(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = [pa.array([each]) for each in ("a", "de", "en", 1, 2)]
    names = ["text", "lang", "lang", "n", "n"]
    parquet.write_table(pa.Table.from_arrays(columns, names), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [("a", {})]
    for options in ({"keep": ("lang",)}, {"field": "lang"}):
        with pytest.raises(UserError, match=r"a\.parquet: the schema has 'lang' 2 times; rename"):
            read(tmp_path / "a.parquet", **options)
