"""The nine tasks of GLUE and its diagnostic set: files, columns, labels, metrics, submissions.

Labels are in the order of TensorFlow Datasets and of the published checkpoints. The files of the
test sets have no labels; predictions for them are scored by the leaderboard, from the files that
`write_submission` makes.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

import numpy as np

from bert_jax.errors import UserError
from bert_jax.files.staging import replace_file
from bert_jax.tasks.examples import LabelSet
from bert_jax.tasks.tables.delimited import Column, TableFormat
from bert_jax.tasks.tables.files import read_rows
from bert_jax.tasks.tables.tables import TextColumns, TextData, read_texts

_SPLITS = {"train": "train.tsv", "dev": "dev.tsv", "test": "test.tsv"}
_MNLI_SPLITS = {
    "train": "train.tsv",
    "dev_matched": "dev_matched.tsv",
    "dev_mismatched": "dev_mismatched.tsv",
    "test_matched": "test_matched.tsv",
    "test_mismatched": "test_mismatched.tsv",
}
_DIGITS = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_NLI = ("entailment", "neutral", "contradiction")


@dataclass(frozen=True)
class GlueTask:
    """Definition of a GLUE task.

    Attributes:
        directory: of its files, in the official archives.
        text: column of the text; `text_pair` of the second one, None where there is one text.
        label: column of the label.
        labels: names of the classes; none where a score is predicted.
        written: the classes as the files and the leaderboard write them.
        metrics: what the leaderboard reports.
        files: name of the file of each split.
        submissions: the leaderboard's file for each test split, and its number of rows.
        tfds: names at TensorFlow Datasets: of the configuration, the text and the second text.
        id: column that numbers the rows of the test files.
        score_range: lowest and highest score.
    """

    directory: str
    text: str
    text_pair: str | None
    label: str
    labels: tuple[str, ...]
    written: tuple[str, ...]
    metrics: tuple[str, ...]
    submissions: Mapping[str, tuple[str, int]]
    tfds: tuple[str, str, str | None]
    files: Mapping[str, str] = field(default_factory=lambda: _SPLITS)
    id: str = "index"
    score_range: tuple[float, float] | None = None


TASKS: Mapping[str, GlueTask] = {
    "cola": GlueTask(
        "CoLA", "sentence", None, "is_acceptable", ("unacceptable", "acceptable"), _DIGITS,
        ("matthews",), {"test": ("CoLA.tsv", 1063)}, ("cola", "sentence", None),
    ),
    "sst2": GlueTask(
        "SST-2", "sentence", None, "label", ("negative", "positive"), _DIGITS,
        ("accuracy",), {"test": ("SST-2.tsv", 1821)}, ("sst2", "sentence", None),
    ),
    "mrpc": GlueTask(
        "MRPC", "#1 String", "#2 String", "Quality", ("not_equivalent", "equivalent"), _DIGITS,
        ("accuracy", "f1"), {"test": ("MRPC.tsv", 1725)}, ("mrpc", "sentence1", "sentence2"),
    ),
    "stsb": GlueTask(
        "STS-B", "sentence1", "sentence2", "score", (), (),
        ("pearson", "spearman"), {"test": ("STS-B.tsv", 1379)}, ("stsb", "sentence1", "sentence2"),
        score_range=(0.0, 5.0),
    ),
    "qqp": GlueTask(
        "QQP", "question1", "question2", "is_duplicate", ("not_duplicate", "duplicate"), _DIGITS,
        ("accuracy", "f1"), {"test": ("QQP.tsv", 390_965)}, ("qqp", "question1", "question2"),
        id="id",
    ),
    "mnli": GlueTask(
        "MNLI", "sentence1", "sentence2", "gold_label", _NLI, _NLI, ("accuracy",),
        {"test_matched": ("MNLI-m.tsv", 9796), "test_mismatched": ("MNLI-mm.tsv", 9847)},
        ("mnli", "premise", "hypothesis"), _MNLI_SPLITS,
    ),
    "qnli": GlueTask(
        "QNLI", "question", "sentence", "label", _ENTAILMENT, _ENTAILMENT,
        ("accuracy",), {"test": ("QNLI.tsv", 5463)}, ("qnli", "question", "sentence"),
    ),
    "rte": GlueTask(
        "RTE", "sentence1", "sentence2", "label", _ENTAILMENT, _ENTAILMENT,
        ("accuracy",), {"test": ("RTE.tsv", 3000)}, ("rte", "sentence1", "sentence2"),
    ),
    "wnli": GlueTask(
        "WNLI", "sentence1", "sentence2", "label", ("not_entailment", "entailment"), _DIGITS,
        ("accuracy",), {"test": ("WNLI.tsv", 146)}, ("wnli", "sentence1", "sentence2"),
    ),
    # Predicted by a model of MNLI.
    "ax": GlueTask(
        "diagnostic", "sentence1", "sentence2", "", _NLI, _NLI,
        ("matthews",), {"test": ("AX.tsv", 1104)}, ("ax", "premise", "hypothesis"),
        {"test": "diagnostic.tsv"},
    ),
}  # fmt: skip
"""The tasks by the names that TensorFlow Datasets gives them."""


def glue_task(name: str) -> GlueTask:
    """Return the task of a name.

    Raises:
        UserError: there is none; lists those that are.
    """
    if name not in TASKS:
        raise UserError(f"{name!r} is no task of GLUE; there are {', '.join(TASKS)}")
    return TASKS[name]


def read_glue(directory: str | PathLike[str], name: str, split: str) -> TextData:
    """Read a split from the official TSV files.

    They are written without quoting: quotes are text. CoLA has no header but in its test set. MRPC
    is read from train.tsv, dev.tsv and test.tsv or, where these are not there, from the corpus as
    Microsoft publishes it with GLUE's dev_ids.tsv. Rows of QQP that line ends have broken are
    skipped and counted, as elsewhere.

    Args:
        directory: the task's, or the one that holds all of them.
        name: of the task, see `TASKS`.
        split: see the task's `files`; labels are None in test splits. Examples have the numbers of
            the test files as ids, else their number from 0.

    Raises:
        UserError: no such task, split or file, or rows are wrong.
    """
    task = glue_task(name)
    _check_split(name, task, split)
    home = Path(directory)
    if (home / task.directory).is_dir():
        home = home / task.directory
    path = home / task.files[split]
    if name == "mrpc" and not path.is_file() and (home / "msr_paraphrase_train.txt").is_file():
        return _read_published_mrpc(home, task, split)
    if not path.is_file():
        there = sorted(entry.name for entry in home.iterdir())[:10] if home.is_dir() else []
        raise UserError(
            f"there is no {path}; {home} holds {', '.join(there) or 'nothing'}. Name the directory "
            f"with {task.files[split]} of {task.directory}, or the one above"
        )
    text: Column = task.text
    label: Column = task.label
    header = None
    if name == "cola" and split != "test":
        text, label, header = 4, 2, False
    table = TableFormat("tsv", header)
    if name == "qqp" and not split.startswith("test"):
        table = dataclasses.replace(table, ragged="skip")
    return _read(task, split, path, text, label, table)


def read_glue_tfds(name: str, split: str) -> TextData:
    """Read a split that TensorFlow Datasets has prepared, in the order it lies there.

    Args:
        name: of the task, see `TASKS`.
        split: as in `read_glue`.

    Raises:
        UserError: no such task or split, the data set is not prepared, or rows are wrong.
    """
    task = glue_task(name)
    _check_split(name, task, split)
    config, text, text_pair = task.tfds
    source = f"tfds:glue/{config}:{split.replace('dev', 'validation')}"
    test = split.startswith("test")
    columns = TextColumns(
        text,
        text_pair,
        None if test else "label",
        id="idx" if test else None,
        kind="class" if task.labels else "score",
        score_range=task.score_range,
        empty="keep",
    )
    return read_texts(source, columns, labels=LabelSet(task.labels) if task.labels else None)


def _check_split(name: str, task: GlueTask, split: str) -> None:
    if split not in task.files:
        raise UserError(f"{name} has no split {split!r}; it has {', '.join(task.files)}")


def _read(
    task: GlueTask, split: str, path: Path, text: Column, label: Column, table: TableFormat
) -> TextData:
    test = split.startswith("test")
    has_index = test and not path.name.startswith("msr_")
    columns = TextColumns(
        text,
        task.text_pair,
        None if test else label,
        id=task.id if has_index else None,
        kind="class" if task.labels else "score",
        score_range=task.score_range,
        empty="keep",
    )
    data = read_texts(path, columns, table, LabelSet(task.written) if task.labels else None)
    return dataclasses.replace(data, labels=LabelSet(task.labels) if task.labels else None)


def _read_published_mrpc(home: Path, task: GlueTask, split: str) -> TextData:
    """Train and dev are told apart by pairs of ids; the labels of test are not GLUE's to show."""
    table = TableFormat("tsv")
    path = home / f"msr_paraphrase_{'test' if split == 'test' else 'train'}.txt"
    data = _read(task, split, path, task.text, task.label, table)
    if split == "test":
        return data
    numbered = TableFormat("tsv", header=False)
    dev = {row.values for row in read_rows(f"{home / 'dev_ids.tsv'}", (1, 2), numbered)}
    names = ("#1 ID", "#2 ID")
    lines = {
        row.origin.line: row.values
        for row in read_rows(f"{path}", names, table)
        if row.values in dev
    }
    missing = dev - set(lines.values())
    if missing:
        raise UserError(
            f"{home / 'dev_ids.tsv'}: the pair {' '.join(min(missing))!r} is not in {path}, nor "
            f"are {len(missing) - 1} others; fetch both again"
        )
    chosen = [e for e in data.examples if (e.origin.line in lines) == (split == "dev")]
    examples = tuple(dataclasses.replace(e, id=f"{n}") for n, e in enumerate(chosen))
    return dataclasses.replace(data, examples=examples)


def write_submission(
    directory: str | PathLike[str],
    name: str,
    split: str,
    ids: Sequence[str],
    predictions: Sequence[int] | Sequence[float] | np.ndarray,
) -> Path:
    """Write a file for the leaderboard: a header, then index and prediction.

    Args:
        directory: where to write it, under the name that the leaderboard knows.
        name: of the task, see `TASKS`.
        split: a test split.
        ids: of its examples, in any order.
        predictions: number of the class for each, or the score, which is cut to 0...5 and written
            with three digits.

    Returns:
        The file.

    Raises:
        UserError: not a test split, or not exactly one prediction for each of its rows.
    """
    task = glue_task(name)
    if split not in task.submissions:
        splits = ", ".join(task.submissions)
        raise UserError(f"{name} has no submission for {split!r}; predict {splits}")
    file, rows = task.submissions[split]
    if len(ids) != len(predictions) or len(ids) != rows:
        raise UserError(
            f"{file}: {len(predictions):,} predictions for {len(ids):,} examples; the leaderboard "
            f"wants {rows:,}, one for each row of {task.files[split]}"
        )
    numbers = np.asarray(predictions).tolist()
    found = {index: _written(file, task, number)
             for index, number in zip(ids, numbers, strict=True)}  # fmt: skip
    lacks = [f"{index}" for index in range(rows) if f"{index}" not in found]
    if lacks:
        raise UserError(
            f"{file}: there is no prediction for row {lacks[0]}, nor for {len(lacks) - 1:,} "
            f"others; the rows of {task.files[split]} have the numbers 0 to {rows - 1:,}"
        )
    lines = ["index\tprediction", *(f"{index}\t{found[f'{index}']}" for index in range(rows))]
    path = Path(directory) / file
    replace_file(path, ("\n".join(lines) + "\n").encode())
    return path


def _written(file: str, task: GlueTask, prediction: int | float) -> str:
    if task.score_range is not None:
        low, high = task.score_range
        if not math.isfinite(prediction):
            raise UserError(f"{file}: a prediction is {prediction}; scores are numbers")
        return f"{min(max(float(prediction), low), high):.3f}"
    if int(prediction) != prediction or not 0 <= prediction < len(task.written):
        raise UserError(
            f"{file}: a prediction is {prediction}; it is the number of a class, 0 to "
            f"{len(task.written) - 1} ({', '.join(task.labels)})"
        )
    return task.written[int(prediction)]
