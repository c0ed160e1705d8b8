"""The nine tasks of GLUE and its diagnostic set: files, columns, labels, metrics, submissions.

Labels have the same order as in TensorFlow Datasets and in the published checkpoints. Test files
have no labels. The leaderboard scores predictions in the files that `submission_file` makes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import ClassVar

import numpy as np

from bert_jax.errors import UserError
from bert_jax.tasks.fields import ProblemType, TaskConfig
from bert_jax.tasks.skew import SkewConfig

_SPLITS = {split: f"{split}.tsv" for split in ("train", "dev", "test")}
_MNLI_SPLITS = {
    split: f"{split}.tsv"
    for split in ("train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched")
}
_DIGITS = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_NLI = ("entailment", "neutral", "contradiction")


@dataclass(frozen=True)
class GlueTask:
    """Definition of a GLUE task."""

    directory: str
    """Directory of the task's files in the official archives."""
    text: str
    """Column of the text."""
    text_pair: str
    """Column of the second text; empty if the task has single texts."""
    label: str
    labels: tuple[str, ...]
    """Names of the classes; () if scores are predicted."""
    written: tuple[str, ...]
    """Names of the classes as they are written in the files and for the leaderboard."""
    metrics: tuple[str, ...]
    """Metrics that the leaderboard reports."""
    submissions: Mapping[str, tuple[str, int]]
    """Name of the file to submit for each test split, and number of rows that it must have."""
    tfds: tuple[str, str, str]
    """Names in TensorFlow Datasets: the configuration, and the columns of both texts."""
    files: Mapping[str, str] = field(default_factory=lambda: _SPLITS)
    """File of each split."""
    id: str = "index"
    """Column of the row index in the test files."""
    score_range: tuple[float, float] | None = None
    """Lowest and highest score; None if classes are predicted."""


TASKS: Mapping[str, GlueTask] = {
    "cola": GlueTask(
        "CoLA", "sentence", "", "is_acceptable", ("unacceptable", "acceptable"), _DIGITS,
        ("matthews",), {"test": ("CoLA.tsv", 1063)}, ("cola", "sentence", ""),
    ),
    "sst2": GlueTask(
        "SST-2", "sentence", "", "label", ("negative", "positive"), _DIGITS,
        ("accuracy",), {"test": ("SST-2.tsv", 1821)}, ("sst2", "sentence", ""),
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
    # The diagnostic set, predicted by a model that was trained on MNLI.
    "ax": GlueTask(
        "diagnostic", "sentence1", "sentence2", "", _NLI, _NLI,
        ("matthews",), {"test": ("AX.tsv", 1104)}, ("ax", "premise", "hypothesis"),
        {"test": "diagnostic.tsv"},
    ),
}  # fmt: skip
"""Tasks by their names in TensorFlow Datasets."""


def glue_task(name: str) -> GlueTask:
    """Look up a task by name. The `UserError` for an unknown name lists the tasks."""
    if name not in TASKS:
        raise UserError(f"{name!r} is not a GLUE task; expected one of {', '.join(TASKS)}")
    return TASKS[name]


def glue_sources(name: str, data: str) -> list[str]:
    """List the sources of a run on a task: training and dev files, or a data set as tfds:NAME."""
    task = glue_task(name)
    if data == "tfds":
        return [f"tfds:glue/{task.tfds[0]}"]
    inside = Path(data) / task.directory
    home = inside if inside.is_dir() else Path(data)
    files = [home / file for split, file in task.files.items() if not split.startswith("test")]
    published = [home / "msr_paraphrase_train.txt", home / "dev_ids.tsv"]
    there = [f"{path}" for path in (*files, *published) if path.is_file()]
    return there or [f"{path}" for path in files]


def submission_file(
    name: str,
    split: str,
    ids: Sequence[str],
    predictions: Sequence[int] | Sequence[float] | np.ndarray,
) -> tuple[str, str]:
    """Return the name and the content of the file to submit to the leaderboard.

    After a header, each line has a row's index and its prediction. `predictions[i]`, for row
    `ids[i]`, is a class index, written as a name, or a score, clipped to 0...5 (three decimals).
    Raise a UserError if the task is unknown, `split` is not a test split, or a row of the split
    does not have exactly one prediction.
    """
    task = glue_task(name)
    if split not in task.submissions:
        splits = ", ".join(task.submissions)
        raise UserError(f"{name} has no submission for {split!r}; predict on {splits}")
    file, rows = task.submissions[split]
    if len(ids) != len(predictions) or len(ids) != rows:
        raise UserError(
            f"{file}: {len(predictions):,} predictions for {len(ids):,} examples; the leaderboard "
            f"expects {rows:,}, one for each row of {task.files[split]}"
        )
    if task.score_range is None:
        written = [task.written[int(number)] for number in predictions]
    else:
        written = [f"{score:.3f}" for score in np.clip(predictions, *task.score_range)]
    found = dict(zip(ids, written, strict=True))
    if lacks := [f"{index}" for index in range(rows) if f"{index}" not in found]:
        raise UserError(
            f"{file}: there is no prediction for row {lacks[0]} and {len(lacks) - 1:,} other rows; "
            f"the rows of {task.files[split]} are numbered 0 to {rows - 1:,}"
        )
    lines = ["index\tprediction", *(f"{index}\t{found[f'{index}']}" for index in range(rows))]
    return file, "\n".join(lines) + "\n"


@dataclass(frozen=True, kw_only=True)
class GlueConfig(SkewConfig, TaskConfig):
    """Settings of the task kind `glue`: a task of GLUE."""

    FILES: ClassVar = "the directory of the task's TSV files, or tfds"
    PATHS: ClassVar = ("test", "data")
    calibrate: ClassVar[bool] = False
    thresholds: ClassVar[str] = "half"

    kind: str = "glue"
    name: str = ""
    """Name of the task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli. A model trained on
    mnli can also predict the diagnostic set ax."""
    data: str = ""
    """Directory of the task's TSV files, or the directory that holds all tasks. tfds means the data
    set prepared by TensorFlow Datasets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name and "train" not in glue_task(self.name).files:
            raise UserError(
                f"task.name is {self.name!r}, which has no training data; fine-tune on mnli, and "
                f"predict {self.name!r} with that model"
            )
        if self.problem_type == "regression":
            self.check_has_classes(f"task.name {self.name!r}")

    def source(self, field: str) -> str:
        """Return the value of the field "name" or "data". Raise a UserError if it is empty."""
        if field == "name" and not self.name:
            known = ", ".join(name for name in TASKS if name != "ax")
            raise UserError(f"task.name is empty; set it to one of {known}")
        return super().source(field)

    @property
    def problem_type(self) -> ProblemType:
        """Kind of prediction: one label or, for stsb, a number."""
        return "single_label" if not self.name or glue_task(self.name).labels else "regression"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics of the leaderboard."""
        return glue_task(self.name).metrics if self.name else ()

    @property
    def sources(self) -> dict[str, str]:
        """Files or data sets (tfds:NAME) that a run reads, by configuration field."""
        names = glue_sources(self.name, self.data)
        return {f"task.data/{PurePath(name).name}": name for name in names}

    @property
    def dev_sources(self) -> dict[str, str]:
        """Dev data by the name of the split."""
        splits = () if self.folds else glue_task(self.name).files
        return {split: split for split in splits if split.startswith("dev")}

    def _is_name(self, source: str) -> bool:
        splits = glue_task(self.name).files if self.name else ()
        return source in ("tfds", *splits) or super()._is_name(source)
