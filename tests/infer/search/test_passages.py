"""Passages: where documents are cut, and which files are read."""

import json
import unicodedata

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from asked_models import TOKENIZER
from modern_files import KINDS, write_modern

from bert_jax.errors import UserError
from bert_jax.infer.search.passages import found_sources, passages
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS
from bert_jax.tokenization.wordpiece import WordPieceTokenizer


def cut(path, room):
    (source,), _ = found_sources([f"{path}"], "text")
    found = list(passages(source, TOKENIZER, room))
    assert all(len(TOKENIZER.encode(each["text"]).ids) <= room for each in found)
    assert all(each["source"] == f"{path}" for each in found)
    return found


def test_a_text_file_is_one_document_of_paragraphs(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("the cat\n\nthe dog sat .\nkim ran\n\na hill\n")
    assert [each["text"] for each in cut(path, 9)] == ["the cat\nthe dog sat .\nkim ran", "a hill"]
    found = [(each["id"], each["passage"]) for each in cut(path, 5)]
    assert found == [(f"{path}", 1), (f"{path}", 2), (f"{path}", 3)]
    assert [each["text"] for each in cut(path, 5)] == [
        "the cat",
        "the dog sat .",
        "kim ran\na hill",
    ]


def test_long_paragraphs_are_cut_at_sentences_and_long_sentences_at_words(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("The cat sat. The dog ran. A hill.\nthe cats met kim in rome under a mat")
    assert [each["text"] for each in cut(path, 8)] == [
        "The cat sat. The dog ran.", "A hill.", "the cats met kim in rome under", "a mat",
    ]  # fmt: skip
    text = "cats" * 5  # pieces of one word
    path.write_text(f"{text} the")
    assert "".join(each["text"] for each in cut(path, 3)).replace(" ", "") == f"{text}the"


@pytest.mark.parametrize(
    "text", ["กินข้าวที่บ้านดีกว่า", "re\u0301sume\u0301 cafe\u0301 de\u0301ja\u0300"]
)
@pytest.mark.parametrize("room", range(1, 7))
def test_marks_without_a_token_stay_with_their_character(tmp_path, room, text):
    """The tokenizer drops accents and vowel signs; the end of a part must not lose them."""
    letters = sorted({each for each in text if unicodedata.category(each)[0] == "L"})
    tokenizer = WordPieceTokenizer([*SPECIAL_TOKENS, *letters, *(f"##{each}" for each in letters)])
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    (source,), _ = found_sources([f"{path}"], "text")
    found = [each["text"] for each in passages(source, tokenizer, room)]
    assert all(len(tokenizer.encode(each).ids) <= room for each in found)
    assert "".join(found).replace(" ", "") == text.replace(" ", "")
    assert all(unicodedata.category(each[0])[0] == "L" for each in found)


@pytest.mark.parametrize("room", range(3, 30))
def test_hard_wrapped_text_is_divided_where_sentences_end(tmp_path, room):
    """Each passage but those of a sentence that is too long ends with a sentence."""
    path = tmp_path / "a.txt"
    wrapped = (
        "The cat sat on\na mat. The dog\nran. Kim met\nlee.\nWho ran under the hill ?\nA hill."
    )
    path.write_text(wrapped)
    found = [each["text"] for each in cut(path, room)]
    assert " ".join(found).split() == wrapped.split()  # nothing is lost or put elsewhere
    sentences = [7, 4, 4, 6, 3]
    if room >= max(sentences):
        assert all(text[-1] in ".?" for text in found)
    assert "\n".join(found) == wrapped or room < 24


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("room", [7, 32])
def test_no_passage_is_longer_where_line_ends_are_tokens(kind, room, tmp_path):
    tokenizer = load_tokenizer(write_modern(tmp_path / "tokenizer", kind))
    rows = [f"Row {n}." for n in range(30)]
    texts = ["\n\n".join(rows), "\n".join(rows), " ".join(rows), "row of words " * 30]
    for text in texts:
        (tmp_path / "a.txt").write_text(text)
        (source,), _ = found_sources([f"{tmp_path / 'a.txt'}"], "text")
        found = [each["text"] for each in passages(source, tokenizer, room)]
        assert all(len(tokenizer.encode(each).ids) <= room for each in found)
        assert " ".join(found).split() == text.split()


def test_rows_are_documents_of_their_own_with_their_ids(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"id": "x", "text": "the cat"}, {"text": "the dog"}, {"id": 7, "text": "a . b . c ."}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [(each["id"], each["passage"], each["text"]) for each in cut(path, 4)]
    assert found == [
        ("x", 1, "the cat"), (f"{path}:2", 1, "the dog"), ("7", 1, "a . b ."), ("7", 2, "c ."),
    ]  # fmt: skip


def test_rows_of_a_table_are_documents_of_their_own_with_their_ids(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id,text,year\nx,the cat,1\n,the dog,2\n7,a . b .,3\n")
    found = [(each["id"], each["text"], each["year"]) for each in cut(path, 9)]
    assert found == [
        ("x", "the cat", "1"), (f"{path}:2", "the dog", "2"),
        ("7", "a . b .", "3"),
    ]  # fmt: skip
    path = tmp_path / "a.parquet"
    table = pa.table({"id": [1], "year": [[2, 3]], "text": ["the cat"]})
    pq.write_table(table, path)
    assert [(each["id"], each["year"]) for each in cut(path, 9)] == [("1", [2, 3])]
    path = tmp_path / "a.csv"
    path.write_text("score,text\n1,the cat\n")
    with pytest.raises(UserError, match=r"a\.csv: rename the column 'score'"):
        cut(path, 9)


def test_a_table_has_each_column_once(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id,text,tag,tag\nx,the cat,1,2\n")
    with pytest.raises(UserError, match=r"a\.csv, line 1: the header has 'tag' 2 times; rename"):
        cut(path, 9)


def test_directories_are_read_without_what_no_reader_knows(tmp_path):
    for name in ("b.txt", "a.md", "c.png", ".hidden.txt", "empty.txt", "deep/d.jsonl.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if "empty" in name else "the cat")
    sources, passed = found_sources([f"{tmp_path}"], "text")
    names = [source.name.removeprefix(f"{tmp_path}/") for source in sources]
    assert (names, passed) == (["a.md", "b.txt", "deep/d.jsonl.gz"], 2)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match=r"nothing has no files named \*\.txt"):
        found_sources([f"{tmp_path / 'nothing'}"], "text")
