"""Sentences with tags from files: layouts, document marks, and bad input."""

import json
from collections import Counter

import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.tasks.tagging.schemes import convert, detect_scheme, entities
from bert_jax.tasks.tagging.sources import (
    is_conllu,
    read_columns,
    read_conllu,
    read_token_lists,
    read_wikiann,
)


@pytest.fixture
def put(tmp_path):
    def write(text, name="a.txt"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def content(examples):
    return [(each.tokens, each.tags, each.origin.line) for each in examples]


CONLL = """-DOCSTART- -X- O O

EU NNP I-NP I-ORG
rejects VBZ I-VP O

Peter NNP I-NP I-PER

-DOCSTART- -X- O O

-DOCSTART-
Rare NNP I-NP O
"""


def test_columns(put):
    found = read_columns(put(CONLL))
    assert content(found) == [
        (("EU", "rejects"), ("I-ORG", "O"), 3),
        (("Peter",), ("I-PER",), 6),
        (("Rare",), ("O",), 11),
    ]
    assert [each.id for each in found] == ["0", "1", "2"]
    assert found[0].origin.path.endswith("a.txt")
    assert [each.tags for each in read_columns(put(CONLL), tag_column=2)] == [
        ("NNP", "VBZ"), ("NNP",), ("NNP",),
    ]  # fmt: skip
    assert read_columns(put(CONLL), tag_column=-2)[0].tags == ("I-NP", "I-VP")
    assert read_columns(put(CONLL), tag_column=None)[0].tags is None


def test_a_mark_between_sentences_ends_one(put):
    assert content(read_columns(put("a O\n-DOCSTART- O\nb O"))) == [
        (("a",), ("O",), 1), (("b",), ("O",), 3),
    ]  # fmt: skip


def test_tabs_hold_spaces_and_columns_in_any_order(put):
    found = read_columns(put("B-LOC\t3\tNew York\nO\t4\tis\n"), token_column=-1, tag_column=1)
    assert content(found) == [(("New York", "is"), ("B-LOC", "O"), 1)]


def test_text_is_not_changed(put):
    """Quotes, a no-break space, a line separator, a wide space; a mark and ends of lines."""
    words = ['"', "'", "10\xa0000", "a\u2028b", "c\u3000d", "\x85", "#", "|", "\u200b"]
    lines = "\r\n".join(f"{word}  O " for word in words)
    (found,) = read_columns(put(b"\xef\xbb\xbf" + f"{lines}\r\n \r\n".encode()))
    assert list(found.tokens) == words
    assert set(found.tags) == {"O"}
    (found,) = read_columns(put("10\xa0\n\u3000\n"), tag_column=None)
    assert found.tokens == ("10\xa0", "\u3000")


def test_comments(put):
    text = "# id 1\na O\n# id 2\n\n# id 3\n# O\n"
    assert content(read_columns(put(text), comment="# id")) == [
        (("a",), ("O",), 2), (("#",), ("O",), 6),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("a O\nb X O\nc O\n", {}, r"a\.txt, line 2: 3 columns \('b X O'\), where most .* have 2"),
        ("a O\n", {"tag_column": 4}, r"txt: there is no column 4 for the tags; lines have 2"),
        ("a O\n", {"token_column": -3}, "txt: there is no column -3 for the words"),
        ("a O\n", {"tag_column": 0}, "txt: there is no column 0 for the tags"),
        ("a\nb\n", {}, r"txt: words and tags are the same column, 1 of 1"),
        ("a O\n", {"token_column": -1, "tag_column": 2}, "words and tags are the same column, 2"),
        ("a\tO\n\tO\n", {}, r"line 2: the word \(column 1\) is empty"),
        ("a\tO\t1\nb\t\t1\n", {"tag_column": 2}, r"line 2: the tag \(column 2\) is empty"),
        ("\n \n-DOCSTART- O\n", {}, "no words"),
        ("en:a O\nb O\n", {"token_prefix": "en:"}, "line 2: the word is 'b'; expected 'en:' and"),
        ("en: O\n", {"token_prefix": "en:"}, "line 1: the word is 'en:'; expected 'en:' and"),
        (b"a O\n\xff O\n", {}, r"line 2, byte 1: 0xff is not UTF-8"),
        (b"", {}, "is empty"),
    ],
)
def test_bad_columns(put, text, options, expected):
    with pytest.raises(UserError, match=expected):
        read_columns(put(text), **options)


def test_bad_lines_are_counted(put):
    text = "".join("a b O\n" if line % 3 == 0 else "a O\n" for line in range(1, 28))
    with pytest.raises(UserError, match=r"9 lines are wrong:\n.*line 3: (.*\n)*.*and 4 more"):
        read_columns(put(text))
    with pytest.raises(UserError, match=r"none\.txt"):
        read_columns(put(text).with_name("none.txt"))


def test_wikiann(put):
    text = "en:R.H.\tB-ORG\nen::\tO\n\nen:en:\tO\n"
    assert content(read_wikiann(put(text))) == [
        (("R.H.", ":"), ("B-ORG", "O"), 1), (("en:",), ("O",), 4),
    ]  # fmt: skip
    (found,) = read_wikiann(put("zh-yue:香\tB-LOC\n"))
    assert found.tokens == ("香",)
    with pytest.raises(UserError, match=r"line 2: the word 'R\.H\.' has no language before it"):
        read_wikiann(put("\nR.H.\tB-ORG\n"))
    with pytest.raises(UserError, match="line 2: the word is 'de:R'; expected 'en:'"):
        read_wikiann(put("en:a\tO\nde:R\tO\n"))
    with pytest.raises(UserError, match="no words"):
        read_wikiann(put("\n\n"))


def test_wikiann_without_tags(put):
    for text in ("en:ann\nen:x\n", "en:ann\t?\nen:x\tB-\n", "ann\nx\n"):
        (found,) = read_wikiann(put(text), with_tags=False)
        assert (found.tokens, found.tags) == (("ann", "x"), None)


def conllu(*lines):
    return "".join("\t".join(line.split("|")) + "\n" for line in lines)


# Made by hand, in German and Chinese, with an empty node and an unknown tag of our own.
CONLLU = conllu(
    "# sent_id = 1",
    "# text = Sie geht zum Arzt.",
    "1|Sie|er|PRON|PPER|_|2|nsubj|_|_",
    "2|geht|gehen|VERB|VVFIN|Mood=Ind|0|root|_|_",
    "3-4|zum|_|_|_|_|_|_|_|_",
    "3|zu|zu|ADP|APPR|_|5|case|_|_",
    "4|dem|der|DET|ART|_|5|det|_|_",
    "5|Arzt|Arzt|NOUN|NN|_|2|obl|_|SpaceAfter=No",
    "5.1|geht|gehen|VERB|VVFIN|_|_|_|0:x|_",
    "6|.|.|PUNCT|$.|_|2|punct|_|_",
    "",
    "# text = #三 New York",
    "1|#三|三|NUM|_|_|3|nummod|_|_",
    "2|New York|New York|PROPN|NNP|_|0|root|_|_",
)


def test_conllu(put):
    path = put(CONLLU, "a.conllu")
    words = ("Sie", "geht", "zu", "dem", "Arzt", ".")
    assert content(read_conllu(path)) == [
        (words, ("PRON", "VERB", "ADP", "DET", "NOUN", "PUNCT"), 3),
        (("#三", "New York"), ("NUM", "PROPN"), 13),
    ]
    xpos = read_conllu(path, "xpos")
    assert xpos[0].tags == ("PPER", "VVFIN", "APPR", "ART", "NN", "$.")
    assert xpos[1].tags == ("", "NNP")  # _
    assert read_conllu(path, "deprel")[1].tags == ("nummod", "root")
    bare = put(conllu("1|a|_|_|_|_|_|_|_|_", "2|_|_|_|_|_|_|_|_|_"), "b.conllu")
    for found in (read_conllu(path, None)[1:], read_conllu(bare)):
        assert [each.tags for each in found] == [None]
    assert read_conllu(bare)[0].tokens == ("a", "_")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("2|a|DET", "line 2: 3 columns separated by tabs; CoNLL-U has 10"),
        ("x|a|_|DET|_|_|_|_|_|_", "line 2: the id is 'x'; it must be 2, a range such"),
        ("2||_|DET|_|_|_|_|_|_", "line 2: the word is empty"),
        ("2|a|_||_|_|_|_|_|_", r"line 1: the tag \(upos\) of word 2 is empty"),
    ],
)
def test_bad_conllu(put, line, expected):
    good = "1|a|_|DET|_|_|_|_|_|_"
    with pytest.raises(UserError, match=rf"a\.conllu, {expected}"):
        read_conllu(put(conllu(good, line), "a.conllu"))
    with pytest.raises(UserError, match="no words"):
        read_conllu(put("# text = nothing\n\n", "a.conllu"))


def test_comments_are_named(put):
    with pytest.raises(UserError, match=r"line 1: 5 columns \('# sent_id.*set comment='#'"):
        read_columns(put("# sent_id = 1 x\n" + "a DET\n" * 3))
    with pytest.raises(UserError, match=r"are the same column, 1 of 1.*set comment='#'"):
        read_columns(put("# sent_id = 1 x\n" + "a\tDET\n" * 3))


def test_conllu_is_known_by_its_columns(put):
    assert is_conllu(put(CONLLU))
    assert is_conllu(put("\n# a\n1-2\tzum" + "\t_" * 8 + "\n"))
    assert is_conllu(put(f"\ufeff{CONLLU}"))  # a byte order mark, as read_conllu skips it
    assert not is_conllu(put("a\tb" + "\t_" * 8 + "\n"))
    assert not is_conllu(put("1\tO\n"))
    assert not is_conllu(put("# a\n"))
    assert not is_conllu(put("").with_name("none"))


def rows(*each):
    return "".join(json.dumps(row) + "\n" for row in each)


def test_json_lines(put):
    some = rows({"tokens": ["a", " b"], "tags": ["B-X", "O"]}, {"tags": ["O"], "tokens": ["é"]})
    assert content(read_token_lists(put(some, "a.jsonl"))) == [
        (("a", " b"), ("B-X", "O"), 1), (("é",), ("O",), 2),
    ]  # fmt: skip
    assert read_token_lists(put(some, "a.jsonl"), tags=None)[1].tags is None
    numbers = put(rows({"words": ["a", "b"], "ner_tags": [1, 0]}), "b.jsonl")
    (found,) = read_token_lists(numbers, tokens="words", tags="ner_tags", tag_names=["O", "B-X"])
    assert found.tags == ("B-X", "O")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, r"2 words \('tokens'\) and 1 tags \('tags'\)"),
        ({"tokens": [], "tags": []}, "'tokens' is empty; expected at least one word"),
        ({"tokens": "a b", "tags": ["O"]}, r"'tokens' is 'a b'; expected a list"),
        ({"tokens": ["a", 1], "tags": ["O", "O"]}, "word 2 of 'tokens' is 1; expected text"),
        ({"tokens": ["a", ""], "tags": ["O", "O"]}, "word 2 of 'tokens' is ''; expected text"),
        ({"tokens": ["a"], "tags": [0]}, r"tag 1 of 'tags' is 0; .*give the names .*tag_names"),
        ({"tokens": ["a"], "tags": [None]}, "tag 1 of 'tags' is None; expected text"),
        ({"tokens": ["a"], "tags": None}, "'tags' is None; expected a list"),
        ({"tokens": ["a"]}, "no column 'tags'"),
    ],
)
def test_bad_rows(put, row, expected):
    good = {"tokens": ["a"], "tags": ["O"]}
    with pytest.raises(UserError, match=rf"^[^\n]*a\.jsonl, line 2: {expected}"):
        read_token_lists(put(rows(good, row, good), "a.jsonl"))


def test_no_rows(put):
    with pytest.raises(UserError, match="no rows"):
        read_token_lists(put("\n\n", "a.jsonl"))


def test_tag_without_name(put):
    path = put(rows({"tokens": ["a"], "tags": [2]}, {"tokens": ["a"], "tags": [-1]}), "a.jsonl")
    with pytest.raises(UserError, match=r"2 rows are wrong:\n.*tag 1 of 'tags' is 2; .* 0 to 1"):
        read_token_lists(path, tag_names=["O", "B-X"])
    with pytest.raises(UserError, match=r"tag 1 of 'tags' is True; expected text"):
        read_token_lists(
            put(rows({"tokens": ["a"], "tags": [True]}), "b.jsonl"), tag_names=["O", "B-X"]
        )


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({"tokens": [["a", "b"], ["c"]], "ner": [[0, 1], [0]]})
    pq.write_table(table, tmp_path / "a.parquet")
    found = read_token_lists(tmp_path / "a.parquet", tags="ner", tag_names=["O", "B-X"])
    assert content(found) == [(("a", "b"), ("O", "B-X"), 1), (("c",), ("O",), 2)]


@pytest.mark.filterwarnings("ignore")  # of tensorflow-datasets
def test_tfds(tmp_path, monkeypatch):
    pytest.importorskip("array_record")
    tfds = pytest.importorskip("tensorflow_datasets")
    some = [{"tokens": ["Zoë", "is"], "ner": ["B-PER", "O"]}, {"tokens": ["Paris"], "ner": ["O"]}]

    class BertJaxTagged(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            names = tfds.features.ClassLabel(names=["O", "B-PER"])
            features = {
                "tokens": tfds.features.Sequence(tfds.features.Text()),
                "ner": tfds.features.Sequence(names),
                "id": np.int32,
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, download):
            return {"train": enumerate({**each, "id": 1} for each in some)}

        def _generate_examples(self):
            raise NotImplementedError

    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
    BertJaxTagged(file_format="array_record").download_and_prepare(file_format="array_record")
    found = read_token_lists("tfds:bert_jax_tagged:train", tags="ner")
    assert sorted((each.tokens, each.tags) for each in found) == [
        (("Paris",), ("O",)), (("Zoë", "is"), ("B-PER", "O")),
    ]  # fmt: skip
    with pytest.raises(UserError, match="no column 'tags'"):
        read_token_lists("tfds:bert_jax_tagged:train")


# Sentences, words, scheme and entities: the published figures of CoNLL-2003 and of
# NCBI disease, WikiANN's own counts.
REAL = {
    "conll2003/eng.testa": (
        3250, 51362, "iob1", {"PER": 1842, "LOC": 1837, "ORG": 1341, "MISC": 922},
    ),
    "ncbi-disease/devel.tsv": (923, 23969, "iob2", {"Disease": 787}),
    "wikiann-en/dev": (10000, 80536, "iob2", {"LOC": 4834, "ORG": 4677, "PER": 4635}),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_real_files(real_data, name):
    read = read_wikiann if "wikiann" in name else read_columns
    found = read(real_data / "ner" / name)
    sentences, words, scheme, counts = REAL[name]
    assert len(found) == sentences
    assert sum(len(each.tokens) for each in found) == words
    assert detect_scheme(found) == scheme
    kinds = [entity.type for each in found for entity in entities(each.tags)]
    assert Counter(kinds) == counts
    sound = convert(found)
    assert [entities(each.tags) for each in sound] == [entities(each.tags) for each in found]
    assert convert(sound) == sound
