"""CSV and TSV as sources."""

import gzip

import pytest

from bert_jax.data.corpus.documents import ReadOptions
from bert_jax.data.corpus.sources import resolve_sources
from bert_jax.errors import UserError


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
    ],
)
def test_bad_tables(tmp_path, name, data, message):
    (tmp_path / name).write_text(data)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


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
