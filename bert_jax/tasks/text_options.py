"""Options of texts with labels beside their data: long texts, and what is fitted on dev data."""

from dataclasses import dataclass
from typing import Literal

from bert_jax.config.bounds import Natural
from bert_jax.errors import UserError
from bert_jax.tasks.long_texts import LongTexts
from bert_jax.tasks.skew import SkewConfig


@dataclass(frozen=True, kw_only=True)
class TextConfig(SkewConfig):
    """Treatment of texts, of their classes and of the predictions."""

    long: Literal["cut", "head_tail", "windows"] = "cut"
    """Texts of more than task.max_length tokens. cut: their beginning is read. head_tail: their
    beginning, a quarter of the row, and their end (Sun et al. 2019). windows: all of them, in rows
    that overlap; of a pair, rows have a part of the longer text and all of the other, up to half a
    row. Each window learns the label of its text, and those of a text weigh as much as one row."""
    window_pooling: Literal["mean", "max", "first_last"] = "mean"
    """Logits of a text in windows: the mean, the highest of each class, or the mean of the first
    and the last window's (long=windows)."""
    window_stride: Natural = 0
    """Tokens from one window to the next, a window at most; 0: half a window (long=windows)."""
    calibrate: bool = False
    """Whether logits are divided by the temperature with the least log loss on the dev data, so
    that probabilities are shares of right answers (Guo et al. 2017). Classes stay as they are."""
    thresholds: Literal["half", "tuned"] = "half"
    """Least probability of a label (kind=classes). tuned: each label's is that of its highest F1 on
    the dev data."""

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        if self.long != "windows" and (self.window_stride or self.window_pooling != "mean"):
            raise UserError(
                f"{self.SECTION}.window_pooling or window_stride is set, but long is "
                f"{self.long!r}; set long to 'windows', or leave them out"
            )

    def check_kind(self, kind: str) -> None:
        """Refuse options that a kind of table does not have.

        Raises:
            UserError: names the first field that is set.
        """
        if kind == "score":
            self.check_has_classes(f"{self.SECTION}.kind 'score'")
            if self.calibrate:
                raise UserError(
                    f"{self.SECTION}.calibrate is set, but kind 'score' has no probabilities; "
                    "leave it out"
                )
            if self.window_pooling == "max":
                raise UserError(
                    f"{self.SECTION}.window_pooling is 'max', the highest logit of each class, but "
                    "kind 'score' has no classes; choose mean or first_last"
                )
        if self.thresholds != "half" and kind != "classes":
            raise UserError(
                f"{self.SECTION}.thresholds are for several labels a row (kind='classes'), not "
                f"{kind!r}; leave them out"
            )

    @property
    def long_texts(self) -> LongTexts:
        """Treatment of texts with more tokens than a row."""
        return LongTexts(self.long, self.window_pooling, self.window_stride)

    @property
    def fits(self) -> dict[str, bool]:
        """Options of `tasks.text.decisions.Decisions.fitted`."""
        return {"calibrate": self.calibrate, "tune": self.thresholds == "tuned"}
