"""Lengths of the windows of a long context."""

from dataclasses import dataclass

from bert_jax.errors import UserError
from bert_jax.tokenization.tokenizer import MAX_SPECIAL


@dataclass(frozen=True)
class WindowOptions:
    """Lengths in tokens; the defaults are those of BERT's `run_squad.py`.

    Attributes:
        max_length: of a whole row, special tokens included.
        stride: from the beginning of a window to that of the next. (`transformers` calls the
            overlap by this name.)
        max_question: a longer question is cut behind so many tokens; that is counted.

    Raises:
        UserError: a length below 1, or lengths with which windows leave tokens out.
    """

    max_length: int = 384
    stride: int = 128
    max_question: int = 64

    def __post_init__(self) -> None:
        for name in ("max_length", "stride", "max_question"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; 1 is the least")
        room = self.max_length - self.max_question - MAX_SPECIAL
        if room < self.stride:
            raise UserError(
                f"max_length {self.max_length} leaves {max(room, 0)} tokens for the context beside "
                f"a question of {self.max_question} and special tokens ({MAX_SPECIAL}), and stride "
                f"{self.stride} would leave tokens between windows out. Let max_length be at least "
                f"{self.max_question + MAX_SPECIAL + self.stride}, or lower stride or max_question"
            )
