"""The files that pages of docs/recipes begin with."""

import csv
import importlib.util
import json
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def files():
    """examples/files.py, which writes a tenth of the text and of the rows."""
    spec = importlib.util.spec_from_file_location("files", ROOT / "examples" / "files.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.TEXT_BYTES //= 10
    module.ROWS //= 10
    module.TEST_ROWS //= 10
    return module


@pytest.fixture(scope="module")
def my(files, tmp_path_factory):
    """The directory of the files."""
    directory = tmp_path_factory.mktemp("examples") / "my"
    files.main(directory)
    return directory


def test_the_script_names_the_files_that_it_writes(files, my):
    named = set(re.findall(r"\b\w+\.(?:txt|csv|fr|en|conll|json)\b", files.__doc__))
    assert {path.name for path in my.iterdir()} == named


def test_text_has_its_size_and_blank_lines_between_documents(files, my):
    text = (my / "text.txt").read_text("utf-8")
    assert files.TEXT_BYTES < len(text.encode()) < 1.5 * files.TEXT_BYTES
    assert len(text.split("\n\n")) > 50


def test_tables_have_the_columns_and_rows_that_the_pages_name(files, my):
    rows = []
    for name, count in (("labels", 60), ("test", 30)):
        with (my / f"{name}.csv").open(encoding="utf-8") as file:
            table = list(csv.DictReader(file))
        assert len(table) == count
        assert all(set(row) == {"text", "label"} for row in table)
        rows += table
    assert len({row["text"] for row in rows}) == 90  # no test row is a training row
    assert [sum(row["label"] == label for row in rows) for label in files.LABELS] == [30] * 3
    assert not any(row["label"] in row["text"].lower() for row in rows)


def test_pairs_of_numbers_have_as_many_lines_and_no_number_twice(my):
    lines = {name: (my / name).read_text("utf-8").splitlines() for name in ("train.fr", "test.fr")}
    assert [len(each) for each in lines.values()] == [20_000, 2_000]
    assert not set(lines["train.fr"]) & set(lines["test.fr"])
    for name, french in lines.items():
        english = (my / name.replace(".fr", ".en")).read_text("utf-8").splitlines()
        assert len(english) == len(french)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (7, "seven"),
        (21, "twenty-one"),
        (300, "three hundred"),
        (70_015, "seventy thousand fifteen"),
    ],
)
def test_numbers_are_spelled(files, number, words):
    assert files.english_words(number) == words


def test_each_line_of_tags_has_a_word_and_a_tag(my):
    parts = [
        (my / name).read_text("utf-8").split("\n\n") for name in ("tags.conll", "tags_test.conll")
    ]
    assert len(parts[0]) > 2 * len(parts[1]) > 4
    words = [
        line.split(" ") for part in parts for text in part for line in text.split("\n") if line
    ]
    assert {len(each) for each in words} == {2}
    assert {tag for _, tag in words} == {"O", "B-ARGUMENT", "B-TYPE", "B-NUMBER"}


def test_answers_stand_where_the_file_says_and_no_question_has_the_id_of_another(my):
    ids: set[str] = set()
    for name in ("questions.json", "questions_test.json"):
        (title,) = json.loads((my / name).read_text("utf-8"))["data"]
        asked = [(each["context"], qa) for each in title["paragraphs"] for qa in each["qas"]]
        assert len(asked) > 2
        assert len(ids | {qa["id"] for _, qa in asked}) == len(ids) + len(asked)
        ids |= {qa["id"] for _, qa in asked}
        for context, question in asked:
            (answer,) = question["answers"]
            assert context[answer["answer_start"] :].startswith(answer["text"])


def test_minimal_pairs_differ_and_six_phenomena_have_twelve_each():
    lines = (ROOT / "examples" / "minimal_pairs.jsonl").read_text("utf-8").splitlines()
    pairs = [json.loads(line) for line in lines]
    texts = [pair[name] for pair in pairs for name in ("sentence_good", "sentence_bad")]
    assert len(set(texts)) == len(texts)
    assert all(text[0].isupper() and text[-1] == "." for text in texts)
    assert sorted(Counter(pair["UID"] for pair in pairs).values()) == [12] * 6
