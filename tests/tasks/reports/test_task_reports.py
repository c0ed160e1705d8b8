"""Reports of every kind of task on a file: what is counted, and what its mistakes are."""

import json
import math

import numpy as np
import pytest
from task_examples import opened, pointing_at, put

from bert_jax.errors import UserError
from bert_jax.tasks.config import (
    GlueConfig,
    SquadConfig,
    TableConfig,
    TaggingConfig,
)
from bert_jax.tasks.overlap import example_key, example_keys, overlap_warning
from bert_jax.tasks.reports.lines import report_figure, report_lines


def table(**fields):
    return opened(TableConfig(**fields))


def test_of_one_class(tmp_path):
    lines = ["text,label", *(f"text {n},{'abc'[n % 3]}" for n in range(12))]
    path = put(tmp_path / "a.csv", *lines)
    [dev] = table(train=path, dev=path).dev_splits()
    truth = np.arange(12) % 3
    guess = truth.copy()
    guess[[0, 5]] = 1, 0
    logits = pointing_at(guess, 3)
    logits[5] *= 2  # surer
    report = dev.report(logits)
    assert report["scores"] == dev.score(logits)
    assert report["examples"] == 12
    assert report["constant"] == dev.constant_score
    assert report["intervals"].keys() == {"accuracy"}  # by Wilson
    assert report["no_intervals"]["macro_f1"] == "only 2 units are wrong"
    for name, (low, high) in report["intervals"].items():
        assert low < report["scores"][name] < high
    rows = {row["label"]: row for row in report["classes"]}
    assert rows["a"] | {"label": ""} == {
        "label": "", "precision": 0.75, "recall": 0.75, "f1": 0.75, "support": 4, "predicted": 4,
    }  # fmt: skip
    assert report["macro"]["f1"] == pytest.approx(report["scores"]["macro_f1"])
    assert report["confusion"]["counts"] == [[3, 1, 0], [0, 4, 0], [1, 0, 3]]
    first, second = report["mistakes"]
    assert first == {
        "id": "5", "line": 7, "text": "text 5", "label": "c", "predicted": "a",
        "probability": pytest.approx(math.exp(8) / (math.exp(8) + 2), abs=1e-4),
    }  # fmt: skip
    assert (second["id"], second["predicted"]) == ("0", "b")
    assert second["probability"] < first["probability"]
    json.dumps(report, allow_nan=False)
    lost = np.full_like(logits, np.nan)
    assert dev.report(lost)["scores"] == dict.fromkeys(report["scores"])
    assert dev.grounds(lost) is None


def test_contradicted_labels_of_a_table(tmp_path):
    """Texts stay on one line, and pairs have two columns; other kinds of tasks have no table."""
    rows = ["one,x,a", '"two ""2""\tlines\n here",y,b', "three,z,a", "four,z,b", "five,z,b"]
    path = put(tmp_path / "a.csv", "text,pair,label", *rows)
    task = table(train=path, dev=path, text_pair="pair")
    train = task.train_split()
    logits = pointing_at(np.array([0, 0, 0, 1, 0]), 2)
    logits[4] *= 2  # surer
    head, *lines = (line.split("\t") for line in train.label_noise(logits, {}))
    assert head[:5] == ["line", "text", "text_pair", "label", "predicted"]
    assert [line[:5] for line in lines] == [
        ["7", "five", "z", "b", "a"], ["3", 'two "2" lines here', "y", "b", "a"],
    ]  # fmt: skip
    sure = math.exp(4) / (math.exp(4) + 1)
    assert [float(each) for each in lines[1][5:]] == pytest.approx([1 - sure, sure], abs=1e-4)
    path = put(tmp_path / "b.csv", "text,label", *(f"text {n},{n % 3}" for n in range(9)))
    scores = table(train=path, dev=path, problem_type="regression").train_split()
    assert scores.label_noise(np.zeros((9, 1)), {}) == []


def test_of_several_classes(tmp_path):
    path = put(tmp_path / "a.csv", "text,label", '1,"x,y"', "2,x", "3,y", "4,")
    [dev] = table(train=path, dev=path, problem_type="multi_label").dev_splits()
    logits = np.array([[3, -1], [3, 2], [-1, 3], [-3, -3]], np.float32)
    report = dev.report(logits)
    assert report["scores"] == dev.score(logits)
    assert [row["support"] for row in report["classes"]] == [2, 2]
    assert [row["predicted"] for row in report["classes"]] == [2, 2]
    said = [(m["id"], m["label"], m["predicted"]) for m in report["mistakes"]]
    assert said == [("1", "not y", "y"), ("0", "y", "not y")]
    assert dev.report(-np.where(np.array(dev._labels_of(dev._gold)), -4, 4))["mistakes"] == []


def test_of_scores(tmp_path):
    values = np.linspace(0, 5, 30)
    path = put(tmp_path / "a.csv", "text,label", *(f"t {n},{v}" for n, v in enumerate(values)))
    task = table(train=path, dev=path, problem_type="regression")
    [dev] = task.dev_splits()
    errors = np.where(np.arange(30) == 7, 3.0, 0.5 * (-1) ** np.arange(30))
    logits = ((values + errors - task.spec.mean) / task.spec.deviation)[:, None]
    report = dev.report(logits)
    residuals = report["residuals"]
    assert residuals["mean"] == pytest.approx(errors.mean(), abs=1e-6)
    assert residuals["root_mean_square"] == pytest.approx(np.sqrt((errors**2).mean()))
    assert residuals["quantiles"]["0.5"] == pytest.approx(np.median(errors), abs=1e-6)
    assert report["mistakes"][0] | {"text": ""} == {
        "id": "7", "line": 9, "text": "", "label": pytest.approx(values[7]),
        "predicted": pytest.approx(values[7] + 3, abs=1e-4), "error": 3.0,
    }  # fmt: skip
    for name, at in (("pearson", 0), ("spearman", 0)):
        low, high = report["intervals"][name]
        assert low < report["scores"][name] < high, at
    assert len(report["points"]) == 30
    assert any("root mean square" in line for line in report_lines("dev", report))


def test_of_small_scores(tmp_path):
    """Their digits are not rounded away."""
    values = 1e-7 * np.arange(30)
    path = put(tmp_path / "a.csv", "text,label", *(f"t {n},{v}" for n, v in enumerate(values)))
    task = table(train=path, dev=path, problem_type="regression")
    [dev] = task.dev_splits()
    predicted = values + 5e-7 * (np.arange(30) == 7)
    report = dev.report(((predicted - task.spec.mean) / task.spec.deviation)[:, None])
    np.testing.assert_allclose(report["points"], np.stack([values, predicted], 1), atol=1e-14)
    first = report["mistakes"][0]
    assert (first["id"], first["predicted"]) == ("7", pytest.approx(1.2e-6))


WORDS = [
    ["John", "Smith", "lives", "in", "New", "York"], ["Rome", "is", "old"], ["Ann", "sleeps"],
]  # fmt: skip
GOLD = [["B-PER", "I-PER", "O", "O", "B-LOC", "I-LOC"], ["B-LOC", "O", "O"], ["B-PER", "O"]]
RAW = [["B-PER", "I-PER", "O", "O", "I-LOC", "I-LOC"], ["B-PER", "O", "O"], ["O", "O"]]
"""The second entity begins with I: one to the CoNLL script, none to the strict reading."""


def tagging(tmp_path, **fields):
    lines = [f"{w} {t}" for words, tags in zip(WORDS, GOLD, strict=True)
             for w, t in [*zip(words, tags, strict=True), ("", "")]]  # fmt: skip
    path = put(tmp_path / "a.txt", *(line.strip() for line in lines))
    return opened(TaggingConfig(train=path, dev=path, **fields))


def tag_logits(task, split, tags):
    """Logits that give each word its tag."""
    names = task.spec.labels
    return [
        pointing_at([0 if word < 0 else names.index(tags[window.example][word])
                     for word in window.words.tolist()], len(names))
        for window in split._windows.windows
    ]  # fmt: skip


def test_of_entities(tmp_path):
    task = tagging(tmp_path)
    [dev] = task.dev_splits()
    report = dev.report(tag_logits(task, dev, RAW))
    rows = {row["label"]: (row["precision"], row["recall"]) for row in report["classes"]}
    assert rows == {"LOC": (1.0, 0.5), "PER": (0.5, 0.5)}
    assert report["micro"]["f1"] == report["scores"]["f1"] == pytest.approx(4 / 7)
    strict = {
        row["label"]: (row["predicted"], row["recall"]) for row in report["strict"]["classes"]
    }
    assert strict == {"LOC": (0, 0.0), "PER": (2, 0.5)}
    assert report["confusion"]["labels"] == ["LOC", "PER", "no entity"]
    assert report["confusion"]["counts"] == [[1, 1, 0], [0, 1, 1], [0, 0, 0]]
    assert {(m["word"], m["label"], m["predicted"]) for m in report["mistakes"]} == {
        ("Rome", "B-LOC", "B-PER"), ("Ann", "B-PER", "O"),
    }  # fmt: skip
    assert report["no_intervals"].keys() == report["scores"].keys()
    assert any("strict" in line for line in report_lines("dev", report))


@pytest.mark.parity
def test_strict_entities_are_those_of_seqeval(tmp_path):
    from seqeval.metrics import classification_report
    from seqeval.scheme import IOB2

    task = tagging(tmp_path)
    [dev] = task.dev_splits()
    random = np.random.default_rng(0)
    for _ in range(10):
        raw = [random.choice(task.spec.labels, len(tags)).tolist() for tags in GOLD]
        report = dev.report(tag_logits(task, dev, raw))
        for mode, found in (("strict", report["strict"]), (None, report)):
            more = {"mode": mode, "scheme": IOB2} if mode else {}
            expected = classification_report(GOLD, raw, output_dict=True, zero_division=0, **more)
            for row in found["classes"]:
                if row["label"] in expected:
                    wanted = expected[row["label"]]
                    assert row["f1"] == pytest.approx(wanted["f1-score"])
                    assert row["support"] == wanted["support"]
            assert found["macro"]["f1"] == pytest.approx(expected["macro avg"]["f1-score"])
            assert found["micro"]["f1"] == pytest.approx(expected["micro avg"]["f1-score"])


def test_of_plain_tags(tmp_path):
    task = tagging(tmp_path, scheme="plain")
    [dev] = task.dev_splits()
    report = dev.report(tag_logits(task, dev, RAW))
    assert report["scores"] == {"accuracy": pytest.approx(8 / 11)}
    rows = {row["label"]: row["support"] for row in report["classes"]}
    assert rows == {"B-LOC": 2, "B-PER": 2, "I-LOC": 1, "I-PER": 1, "O": 5}
    other = put(tmp_path / "b.txt", "Paris B-XYZ", "is O")
    split = task.open_split(other)
    found = split.report(tag_logits(task, split, [["B-LOC", "O"]]))
    assert found["classes"][-1] == {
        "label": "not learned", "precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 1,
        "predicted": 0,
    }  # fmt: skip


def test_of_answers(tmp_path):
    asked = [("what colour", "red"), ("how many", "12"), ("who is it", "a b c d"), ("what", "")]
    paragraphs = [
        {"context": f"x {answer or 'y'} z", "qas": [{
            "id": f"{n}", "question": question, "is_impossible": not answer,
            "answers": [{"text": answer, "answer_start": 2}] if answer else []}]}
        for n, (question, answer) in enumerate(asked)
    ]  # fmt: skip
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"data": [{"title": "", "paragraphs": paragraphs}]}))
    task = opened(SquadConfig(train=f"{path}", dev=f"{path}"), 384)
    [dev] = task.dev_splits()
    outputs = []
    for window in dev._windows:
        logits = np.zeros((len(window.ids), 2), np.float32)
        question = window.question
        if question < 2:  # right
            logits[window.target[0], 0] = logits[window.target[1], 1] = 9
        elif question == 2:  # wrong, and sure
            logits[window.context_at] = 9
        else:
            logits[0] = 9
        outputs.append(logits)
    report = dev.report(outputs)
    assert report["scores"] == dev.score(outputs)
    assert report["scores"]["exact"] == 75.0
    groups = {
        (row["by"], row["group"]): (row["questions"], row["exact"]) for row in report["groups"]
    }
    assert groups == {
        ("question", "what"): (2, 100.0), ("question", "how"): (1, 100.0),
        ("question", "who"): (1, 0.0), ("answer", "1 word"): (1, 100.0),
        ("answer", "with digits"): (1, 100.0), ("answer", "4 words or more"): (1, 0.0),
        ("answer", "no answer"): (1, 100.0),
    }  # fmt: skip
    [mistake] = report["mistakes"]
    assert (mistake["id"], mistake["label"], mistake["predicted"]) == ("2", ["a b c d"], "x")
    assert mistake["probability"] > 0.9
    assert report["units"][0] == "paragraphs"
    assert "f1" in report["no_intervals"]
    assert report["intervals"].keys() == {"exact"}  # by Wilson
    assert any("how" in line for line in report_lines("dev", report))


def test_units_are_groups_and_documents(tmp_path):
    """Of dev and other files, too; a file without the column has rows."""
    rows = [f"text {n},{'ab'[n % 2]},g{n // 4}" for n in range(80)]
    path = put(tmp_path / "a.csv", "text,label,who", *rows)
    plain = put(tmp_path / "b.csv", "text,label", *(row[: row.rindex(",")] for row in rows))
    task = table(train=path, dev=path, group="who")
    [dev] = task.dev_splits()
    guess = np.arange(80) % 2
    guess[::8] = 1  # a row of each second group is wrong
    assert dev.report(pointing_at(guess, 2))["units"] == ["groups", 20]
    assert "95%, over 20 groups" in "\n".join(
        report_lines("dev", dev.report(pointing_at(guess, 2)))
    )
    assert task.open_split(path).unit_names[0] == "groups"
    assert task.open_split(plain).report(pointing_at(guess, 2))["units"] == ["examples", 80]
    shared = put(
        tmp_path / "c.csv", "text,label", *(f"text {n // 4},{'ab'[n % 2]}" for n in range(80))
    )
    [dev] = table(train=path, dev=shared).dev_splits()
    assert "dev: 80 rows share 20 texts; set task.group" in "\n".join(dev.warnings)


def test_documents_of_a_tag_file(tmp_path):
    lines = ["-DOCSTART- O", "", "Ann B-PER", "", "ran O", "", "-DOCSTART- O", "", "Rome B-LOC", ""]
    path = put(tmp_path / "a.conll", *lines)
    dev = opened(TaggingConfig(train=path, dev=path)).dev_splits()[0]
    assert dev.unit_names == ("documents", [1, 1, 2])


def test_data_are_told_apart(tmp_path):
    one = put(tmp_path / "a.csv", "text,label", "good,yes", "bad,no", "so so,no")
    task = table(train=one, dev=one)
    [dev] = task.dev_splits()
    assert dev.fingerprint == task.train_split().fingerprint
    for lines in (["good,no", "bad,no", "so so,no"], ["good,yes", "bad!,no", "so so,no"],
                  ["good,yes", "bad,no"]):  # fmt: skip
        other = task.open_split(put(tmp_path / "b.csv", "text,label", *lines))
        assert other.fingerprint != dev.fingerprint


def test_texts_in_common():
    train = [("A good  film",), ("bad", "worse"), ("so so",)]
    known = example_keys(train)
    assert known.dtype == np.uint64
    assert overlap_warning("dev", [("other",), ("bad",), ("worse", "bad")], known) == ""
    said = overlap_warning("dev", [("x",), ("a GOOD film",), ("Bad", "worse")], known)
    assert said.startswith("dev: 2 of 3 examples have the texts of training examples")
    assert "'a GOOD film'" in said
    assert example_key(["a"]) == example_key(["a", ""]) != example_key(["a", "b"])


def test_test_data(tmp_path, monkeypatch):
    train = put(tmp_path / "a.csv", "text,label", *(f"text {n},{'ab'[n % 2]}" for n in range(20)))
    test = put(tmp_path / "b.csv", "text,label", "new,a", "newer,b")
    assert table(train=train).test_splits() == []
    [split] = table(train=train, test=test).test_splits()
    assert (split.name, len(split.rows)) == ("test", 2)
    bare = put(tmp_path / "c.csv", "text", "new", "newer")
    with pytest.raises(UserError, match=r"task.test is .*c.csv', which has no labels"):
        table(train=train, test=bare).test_splits()
    config = TableConfig(train="a.csv", test="tfds:x:y")
    monkeypatch.chdir(tmp_path)
    located = config.located()
    assert located.train == train
    assert located.test == "tfds:x:y"
    assert located.located() == located
    assert located.dev_sources == {}
    assert located.sources == {"task.train": train, "task.test": "tfds:x:y"}
    glue = GlueConfig(name="mnli", data="x", test="dev_mismatched").located()
    assert glue == GlueConfig(name="mnli", data=f"{tmp_path / 'x'}", test="dev_mismatched")
    assert [*glue.dev_sources] == ["dev_matched", "dev_mismatched"]


@pytest.mark.parametrize("kind", ["single_label", "multi_label"])
def test_calibration_of_a_file_by_the_temperature_of_another(tmp_path, kind):
    path = put(tmp_path / "a.csv", "text,label", *(f"text {n},{'abc'[n % 3]}" for n in range(30)))
    [dev] = table(train=path, dev=path, problem_type=kind, calibrate=True).dev_splits()
    guess = np.where(np.arange(30) % 5, np.arange(30) % 3, 0)  # too sure
    logits = 3 * pointing_at(guess, 3) - 5 * (kind == "multi_label")
    report = dev.report(logits)
    found = report["calibration"]
    assert found["temperature"] == report["scores"]["temperature"] > 1.5
    assert found["after"]["ece"] == report["scores"]["ece"] < found["before"]["ece"]
    assert report["intervals"].keys() < report["scores"].keys()
    sure = max(each["probability"] for each in report["mistakes"])
    assert sure == pytest.approx(max(found["after"]["confidence"]), abs=0.05)
    lines = "\n".join(report_lines("dev", report))
    assert f"{found['before']['ece']:.4f} as trained, {found['after']['ece']:.4f}" in lines
    axes = report_figure("calibration", report).axes
    heights = [[bar.get_height() for bar in axis.patches] for axis in axes]
    shown = [[a for n, a in zip(found[part]["counts"], found[part]["accuracy"], strict=True) if n]
             for part in ("before", "after")]  # fmt: skip
    assert heights == [*shown, found["before"]["counts"], found["after"]["counts"]]
    other = dev.report(logits, {"temperature": 2.0})
    assert other["calibration"]["temperature"] == other["scores"]["temperature"] == 2
    json.dumps(report, allow_nan=False)
