"""Questions about texts."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from typing_extensions import override

from bert_jax.config.bounds import Bounded, Count, Natural
from bert_jax.errors import UserError
from bert_jax.tasks.kinds.fields import FileTaskConfig
from bert_jax.tokenization.tokenizer import MAX_SPECIAL


@dataclass(frozen=True, kw_only=True)
class SquadConfig(FileTaskConfig):
    """Questions about texts, in SQuAD's JSON."""

    LENGTH: ClassVar = 384
    FILES: ClassVar = "a file in SQuAD's JSON"

    kind: str = "squad"
    misplaced: Literal["fail", "skip", "keep"] = "fail"
    """Treatment of answers that are not at their offset: fail, skip them, or keep them only for the
    scores. A warning counts the answers skipped or kept."""
    stride: Natural = 0
    """Tokens from one window of a long text to the next; 0: a third of max_length."""
    max_question: Count = 64
    """Largest number of tokens in a question; longer questions are cut and counted in a warning."""
    num_best: Count = 20
    """Number of candidates kept for each question."""
    max_answer_tokens: Count = 30
    """Largest number of tokens in an answer."""
    rules: Literal["auto", "v1.1", "v2.0"] = "auto"
    """Scoring rules; auto: 2.0 where a question of train or dev has no answer, else 1.1."""

    def __post_init__(self) -> None:
        """Refuse windows that leave tokens out."""
        super().__post_init__()
        _ = self.windows  # refuses its own errors

    @property
    def windows(self) -> "WindowOptions":
        """Lengths of the windows of questions and contexts."""
        try:
            return WindowOptions(self.length, self.stride or self.length // 3, self.max_question)
        except UserError as error:
            raise UserError(f"task: {error}") from None

    @override
    def fitted(self, max_positions: int) -> "SquadConfig":
        if self.max_length or self.length <= max_positions:
            return self
        question = self.max_question
        if question == SquadConfig.max_question:
            question = min(question, max_positions // 4)
        return replace(self, max_length=max_positions, max_question=question)


@dataclass(frozen=True)
class WindowOptions(Bounded):
    """Lengths of the windows of a long context, in tokens; the defaults are `run_squad.py`'s.

    Raises:
        UserError: a length below 1, or lengths with which windows leave tokens out.
    """

    max_length: Count = 384
    """Tokens of a whole row, special tokens included."""
    stride: Count = 128
    """Tokens from the start of a window to the start of the next. (`transformers` uses this name
    for the overlap.)"""
    max_question: Count = 64
    """Largest number of tokens in a question; longer questions are cut and counted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        room = self.max_length - self.max_question - MAX_SPECIAL
        if room < self.stride:
            raise UserError(
                f"max_length {self.max_length} leaves {max(room, 0)} tokens for the context beside "
                f"a question of {self.max_question} and special tokens ({MAX_SPECIAL}), and stride "
                f"{self.stride} would leave tokens between windows out. Let max_length be at least "
                f"{self.max_question + MAX_SPECIAL + self.stride}, or lower stride or max_question"
            )
