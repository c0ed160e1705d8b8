"""Tasks of GLUE."""

from dataclasses import dataclass
from pathlib import PurePath
from typing import ClassVar

from bert_jax.errors import UserError
from bert_jax.tasks.glue import TASKS, glue_sources, glue_task
from bert_jax.tasks.kinds.fields import TaskConfig
from bert_jax.tasks.kinds.table import ProblemType
from bert_jax.tasks.skew import SkewConfig


@dataclass(frozen=True, kw_only=True)
class GlueConfig(SkewConfig, TaskConfig):
    """A task of GLUE."""

    FILES: ClassVar = "the directory of its TSV files, or say tfds"
    PATHS: ClassVar = ("test", "data")
    calibrate: ClassVar[bool] = False
    thresholds: ClassVar[str] = "half"

    kind: str = "glue"
    name: str = ""
    """Name of the task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli. A model of mnli
    predicts the diagnostic set ax."""
    data: str = ""
    """Directory of the task's TSV files, or the directory that holds all tasks; tfds: the data set
    that TensorFlow Datasets has prepared."""

    def __post_init__(self) -> None:
        """Refuse a task without training data, and options for classes with scores."""
        super().__post_init__()
        if self.name and "train" not in glue_task(self.name).files:
            raise UserError(
                f"task.name is {self.name!r}, which has no training data; fine-tune mnli and "
                f"predict {self.name!r} with it"
            )
        if self.problem_type == "regression":
            self.check_has_classes(f"task.name {self.name!r}")

    def source(self, field: str) -> str:
        """Return a field that must not be empty: "name" or "data"."""
        if field == "name" and not self.name:
            known = ", ".join(name for name in TASKS if name != "ax")
            raise UserError(f"task.name is empty; name one of {known}")
        return super().source(field)

    @property
    def problem_type(self) -> ProblemType:
        """Kind of prediction."""
        has_classes = not self.name or glue_task(self.name).labels
        return "single_label" if has_classes else "regression"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics of the leaderboard."""
        return glue_task(self.name).metrics if self.name else ()

    @property
    def sources(self) -> dict[str, str]:
        """Files that a run reads, or data sets as tfds:NAME, by the field that names them."""
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
