"""CoNLL-U in, labels and positions, scores by the official definition, and CoNLL-U out."""

import dataclasses
import importlib.metadata
import importlib.util
import io
import math
from pathlib import Path

import numpy as np
import pytest
from marian_files import write_tokenizer
from task_examples import TOKENIZER, opened, put

from bert_jax.config.mapping import build
from bert_jax.errors import UserError
from bert_jax.tasks.config import TaskConfig
from bert_jax.tasks.opening import open_task, restore_task
from bert_jax.tasks.parsing.trees import read_sentences
from bert_jax.tasks.rows import NO_LABEL
from bert_jax.tokenization.load import load_tokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / "parsing"


def config(dev: Path | str = GOLDEN / "dev.conllu", **fields) -> TaskConfig:
    section = {"train": f"{GOLDEN / 'train.conllu'}", "dev": f"{dev}", **fields}
    return build(TaskConfig, {"kind": "parsing", "max_length": 96, **section})


@pytest.fixture(scope="module")
def task():
    return opened(config())


def perfect(split, task, length: int = 96):
    """Outputs of a model that knows: scores of arcs, and relations of arcs by their number."""
    found, names = [], task.spec.labels
    for ids, (text,), tree in zip(split.rows.tokens, split.texts(), split.truth(), strict=True):
        values = np.zeros((length, length, 2), np.float32)
        values[len(ids) :] = np.nan  # padding is not read
        starts = np.cumsum([1, *map(len, text.split())])  # a token for each letter
        for position, head, relation in zip(starts, *tree, strict=False):
            at = starts[head - 1] if head else 0
            values[position, at] = 5.0, names.index(relation) if relation in names else 0
        found.append(values)
    return found


def random_outputs(split, task, seed: int = 0, share: float = 0.5):
    """Outputs of a model that knows some arcs."""
    random = np.random.default_rng(seed)
    found = perfect(split, task)
    for values in found:
        values[..., 0] += random.normal(size=values.shape[:2]) * 4 * share
        wrong = random.random(values.shape[:2]) < share / 2
        values[..., 1][wrong] = random.integers(0, task.num_outputs, wrong.sum())
    return found


def official(gold: str, system: str) -> dict[str, float]:
    """Score as CoNLL 2018 does, written from its definition: words are found by their characters.

    https://universaldependencies.org/conll18/evaluation.html
    """

    def words_of(text: str):
        found, characters = [], 0
        for block in text.strip().split("\n\n"):
            first = len(found)
            inside: tuple[int, int, int] | None = None  # of a token of several words
            for columns in (line.split("\t") for line in block.split("\n") if line[0] != "#"):
                number, form = columns[0], columns[1].replace(" ", "")
                if "." in number:
                    continue
                if "-" in number:
                    inside = (int(number.split("-")[1]), characters, characters + len(form))
                    characters += len(form)
                    continue
                if inside and int(number) <= inside[0]:
                    span = (*inside[1:], int(number))
                else:
                    span = (characters, characters + len(form), 0)
                    characters += len(form)
                head = int(columns[6])
                found.append((span, None if head == 0 else first + head - 1, columns[7]))
        return found

    ours, theirs = words_of(gold), words_of(system)
    known = {span: number for number, (span, _, _) in enumerate(theirs)}
    uas = las = 0
    for span, parent, relation in ours:
        _, guess, said = theirs[known[span]]
        same = (
            (guess is None)
            if parent is None
            else (guess is not None and theirs[guess][0] == ours[parent][0])
        )
        uas += same
        las += same and relation.split(":")[0] == said.split(":")[0]
    aligned = sum(span in known for span, _, _ in ours)
    assert aligned == len(ours) == len(theirs)
    return {"uas": 2 * uas / (len(ours) + len(theirs)), "las": 2 * las / (len(ours) + len(theirs))}


def udeval():
    """The script that Universal Dependencies keeps, of the package udtools."""
    path = importlib.metadata.distribution("udtools").locate_file("udtools/udeval.py")
    spec = importlib.util.spec_from_file_location("udeval", str(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_words_are_the_syntactic_ones():
    train = read_sentences(GOLDEN / "train.conllu")
    assert len(train) == 24
    seventh = train[7]
    assert seventh.words == ("They", "do", "n't", "like", "the", "rain", ".")
    assert seventh.tree.heads == [4, 4, 4, 0, 6, 4, 4]
    assert seventh.tree.relations[0] == "nsubj"
    assert "2-3\tdon't" in seventh.lines[3]
    dev = read_sentences(GOLDEN / "dev.conllu")
    assert dev[-1].words == ("Anna", "likes", "tea", "and", "Ben", "coffee", ".")
    assert dev[-1].tree.relations[5] == "orphan"
    text = (GOLDEN / "dev.conllu").read_text()
    assert "".join(each.with_tree(each.tree) for each in dev) == text


def test_a_label_is_the_position_of_the_head_and_the_relation(task):
    split = task.train_split()
    sentence = read_sentences(GOLDEN / "train.conllu")[4]  # The house was built by an old man .
    starts = np.cumsum([1, *map(len, sentence.words)])  # a token for each letter
    labels = split.rows.labels[4]
    assert len(labels) == len(split.rows.tokens[4]) == starts[-1] + 1
    assert np.flatnonzero(labels != NO_LABEL).tolist() == starts[:-1].tolist()
    names = task.spec.labels
    for number, (head, relation) in enumerate(zip(*sentence.tree, strict=True)):
        at, known = divmod(int(labels[starts[number]]), len(names))
        assert at == (starts[head - 1] if head else 0)
        assert names[known] == relation


def test_scores_are_those_of_the_definition(task, tmp_path):
    split = task.dev_splits()[0]
    gold = (GOLDEN / "dev.conllu").read_text()
    assert split.score(perfect(split, task)) == {"las": 72 / 73, "uas": 1.0}  # orphan is unknown
    seen = set()
    for seed in range(4):
        outputs = random_outputs(split, task, seed, 0.2 + 0.2 * seed)
        (path,) = split.write_predictions(outputs, tmp_path / f"{seed}", {})
        assert path.name == "predictions.conllu"
        scores = split.score(outputs)
        assert scores == pytest.approx(official(gold, path.read_text()), abs=1e-12)
        seen.add(scores["las"])
    assert len(seen) == 4
    assert 0.2 < min(seen) < max(seen) < 0.95


@pytest.mark.parity
def test_scores_are_those_of_the_official_script(task, tmp_path):
    script = udeval()
    split = task.dev_splits()[0]
    for seed in range(4):
        outputs = random_outputs(split, task, seed, 0.2 + 0.2 * seed)
        (path,) = split.write_predictions(outputs, tmp_path / f"{seed}", {})
        texts = [each.read_text() for each in (GOLDEN / "dev.conllu", path)]
        found = script.evaluate(*(script.load_conllu(io.StringIO(text), "", {}) for text in texts))
        expected = {"uas": found["UAS"].f1, "las": found["LAS"].f1}
        assert split.score(outputs) == pytest.approx(expected, abs=1e-12)


def test_predictions_keep_all_but_the_tree(task, tmp_path):
    """Comments, ranges, empty nodes, tags; enhanced graphs are left out. Labels are not needed."""
    source = GOLDEN / "dev.conllu"
    lines = source.read_text().split("\n")
    rows = [line.split("\t") for line in lines]
    for row in rows:
        if len(row) == 10 and row[0].isdigit():
            row[6], row[7], row[8] = "_", "_", "4:dep"
    path = tmp_path / "raw.conllu"
    path.write_text("\n".join(map("\t".join, rows)))
    restored = restore_task(task.describe(), TOKENIZER)
    split = restored.open_split(str(path))
    assert split.rows.labels is None
    assert math.isnan(split.constant_score)
    with pytest.raises(UserError, match=r"raw.conllu has no trees"):
        split.score(random_outputs(task.dev_splits()[0], task))
    outputs = perfect(task.dev_splits()[0], task)
    (written,) = split.write_predictions(outputs, tmp_path / "out", {})
    relation = task.spec.labels[0]  # of an arc whose relation is not known: number 0
    expected = source.read_text().replace("orphan", relation)
    assert written.read_text() == expected
    again = restored.open_split(str(written))
    assert again.score(outputs)["uas"] == 1.0


def test_a_sentence_longer_than_a_row_is_cut(tmp_path):
    words = ["abcdefghij", *["k"] * 9]
    rows = [f"{n}\t{word}" + "\t_" * 4 + f"\t{n - 1}\tdep\t_\t_" for n, word in enumerate(words, 1)]
    path = put(tmp_path / "long.conllu", *rows, "")
    found = opened(
        build(TaskConfig, {"kind": "parsing", "max_length": 16, "train": path, "dev": path})
    )  # fmt: skip
    split = found.dev_splits()[0]
    assert split.rows.lengths.tolist() == [16]
    (labels,) = split.rows.labels
    assert np.flatnonzero(labels != NO_LABEL).tolist() == [1, 11, 12, 13, 14]  # not at [SEP]
    (warning,) = split.warnings
    assert "1 sentences of more than 14 sub-words, cut there" in warning
    outputs = [np.zeros((16, 16, 2), np.float32)]
    for before, after in ((0, 1), (1, 11), (11, 12), (12, 13), (13, 14)):
        outputs[0][after, before, 0] = 9
    assert split.score(outputs) == {"las": 1.0, "uas": 1.0}  # a chain, as words behind the cut are


def test_a_word_whose_head_is_cut_off_has_no_label(tmp_path):
    rows = [
        f"{n}\t{word}" + "\t_" * 4 + f"\t{head}\tdep\t_\t_"
        for n, (word, head) in enumerate([("ab", 0), ("cd", 4), ("ef", 1), ("gh", 1)], 1)
    ]
    path = put(tmp_path / "long.conllu", *rows, "")
    section = {"train": path, "dev": path, "labels": ("dep",)}
    found = opened(
        build(TaskConfig, {"kind": "parsing", "max_length": 8, **section})
    )  # fmt: skip
    (labels,) = found.dev_splits()[0].rows.labels
    assert np.flatnonzero(labels != NO_LABEL).tolist() == [1, 5]
    assert labels[[1, 5]].tolist() == [0, 1]


def test_a_word_without_a_token_has_the_unknown_one(tmp_path):
    rows = [f"{n}\t{word}" + "\t_" * 4 + f"\t{n - 1}\tdep\t_\t_"
            for n, word in enumerate(["ab", "\u200b", "c"], 1)]  # fmt: skip
    path = put(tmp_path / "a.conllu", *rows, "")
    found = opened(build(TaskConfig, {"kind": "parsing", "train": path, "dev": path}))
    (tokens,) = found.dev_splits()[0].rows.tokens
    assert tokens[3] == TOKENIZER.special_ids.unk
    assert len(tokens) == 6


def test_the_best_constant_arc(task):
    """det is the most frequent relation of one distance: to the next word."""
    split = task.train_split()
    sentences = read_sentences(GOLDEN / "train.conllu")
    arcs = [
        (h - n, r)
        for s in sentences
        for n, (h, r) in enumerate(zip(*s.tree), 1)  # noqa: B905
    ]
    roots = len(sentences)
    most = max(roots, arcs.count((1, "det")), arcs.count((1, "nsubj")))
    assert split.constant_score == pytest.approx(most / len(arcs))
    report = split.report(perfect(split, task))
    assert report["scores"] == {"las": 1.0, "uas": 1.0}
    by_name = {row["label"]: row for row in report["classes"]}
    assert by_name["det"]["support"] == sum(r == "det" for _, r in arcs)
    assert by_name["nsubj"]["f1"] == 1.0
    assert report["no_intervals"]["las"] == "only 0 units are wrong"


ROWS = ["1\ta\t_\t_\t_\t_\t2\tdet\t_\t_", "2\tb\t_\t_\t_\t_\t0\troot\t_\t_"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROWS[0], "2 b 0 root"], r"line 2: 1 columns separated by tabs; CoNLL-U has 10"),
        ([ROWS[1], ROWS[0]], r"line 1: the id is '2'; it must be 1, a range"),
        ([ROWS[0].replace("\ta\t", "\t \t"), ROWS[1]], "line 1: the word is empty"),
        ([ROWS[0].replace("\t2\t", "\t3\t"), ROWS[1]], "line 1: the head is '3'; expected a numb"),
        ([ROWS[0].replace("\t2\t", "\t_\t"), ROWS[1]], "line 1: the head is '_'"),
        ([ROWS[0].replace("det", "_"), ROWS[1]], "line 1: the relation is '_'"),
        ([ROWS[0].replace("\t2\t", "\t0\t"), ROWS[1]], "line 1: 2 words have the head 0"),
        (["# text = a", "1-2\tab" + "\t_" * 8], "line 1: a sentence without words"),
        (["# only a comment"], "no words; expected a line of ten columns"),
    ],
)
def test_bad_files(tmp_path, rows, message):
    path = put(tmp_path / "a.conllu", *rows, "")
    with pytest.raises(UserError, match=message):
        read_sentences(path)


def test_what_is_refused(tmp_path):
    bare = put(tmp_path / "bare.conllu", "1\ta" + "\t_" * 8, "")
    with pytest.raises(UserError, match=r"bare.conllu: all heads are _; name a file with trees"):
        opened(config(bare))
    with pytest.raises(UserError, match=r"task.labels lacks relations of .*: 'acl:relcl'"):
        opened(config(labels=["root", "dep"]))
    base = config()
    assert opened(dataclasses.replace(base, metric="uas")).metric == "uas"
    with pytest.raises(UserError, match=r"task.metric is 'f1'; the metrics of this task are las"):
        opened(dataclasses.replace(base, metric="f1"))
    with pytest.raises(UserError, match=r"task.dev is empty; set it to a second file"):
        opened(config(""))


def test_a_tokenizer_without_cls_is_refused(tmp_path):
    """No token would stand for the root."""
    pytest.importorskip("sentencepiece")
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "marian"))
    with pytest.raises(
        UserError, match=r"task\.kind is 'parsing', .* has no \[CLS\].* another init"
    ):
        open_task(config(), tokenizer, 512)
