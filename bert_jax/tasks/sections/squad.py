"""Configuration of questions about texts."""

from dataclasses import dataclass
from typing import Literal

from bert_jax.config.bounds import Bounded, Count
from bert_jax.errors import UserError
from bert_jax.tokenization.tokenizer import MAX_SPECIAL


@dataclass(frozen=True)
class WindowOptions(Bounded):
    """Lengths of the windows of a long context, in tokens; those of BERT's `run_squad.py`.

    Raises:
        UserError: a length below 1, or lengths with which windows leave tokens out.
    """

    max_length: Count = 384
    """Tokens of a whole row, special tokens included."""
    stride: Count = 128
    """Tokens from the beginning of a window to that of the next. (`transformers` calls the overlap
    by this name.)"""
    max_question: Count = 64
    """A longer question is cut behind so many tokens; that is counted."""

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


@dataclass(frozen=True)
class SquadConfig(Bounded, section="task.squad"):
    """Questions about texts, in SQuAD's JSON."""

    train: str = ""
    """The file to train on."""
    dev: str = ""
    """The file to choose the best checkpoint by."""
    test: str = ""
    """A file that is scored once, after training; empty: none."""
    misplaced: Literal["fail", "skip", "keep"] = "fail"
    """Answers that are not at their offset: fail, leave them out, or keep them for the scores
    alone. What is left out or kept is counted in a warning."""
    stride: int = 0
    """Tokens from one window of a long text to the next; 0: a third of max_length."""
    max_question: int = 64
    """A longer question is cut behind so many tokens; that is counted in a warning."""
    num_best: Count = 20
    """Candidates kept for each question."""
    max_answer_tokens: Count = 30
    """Longest answer."""
    rules: Literal["auto", "v1.1", "v2.0"] = "auto"
    """Rules of the scores; auto: 2.0 where a question of train or dev has no answer, else 1.1."""
