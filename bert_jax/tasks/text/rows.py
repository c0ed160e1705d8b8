"""Rows of token ids from texts and pairs of texts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int64

from bert_jax.tasks.examples import TextExample
from bert_jax.tasks.long_texts import CUT, LongTexts, covered
from bert_jax.tasks.problems import counted
from bert_jax.tasks.rows import Rows
from bert_jax.tokenization.tokenizer import Tokenizer, make_row, num_special


@dataclass(frozen=True, eq=False)
class TextRows:
    """Rows of the examples of one file.

    Args:
        rows: one or more for each example, in their order; the rows of an example weigh 1 together.
        owners: number of the example of each row.
        long: numbers of the examples that did not fit a row.
        num_tokens: tokens of the long examples, special tokens excluded.
        left_out: tokens of the long examples that are in no row.
    """

    rows: Rows
    owners: Int64[np.ndarray, " R"]
    long: Sequence[int] = ()
    num_tokens: int = 0
    left_out: int = 0

    def warnings(
        self, examples: Sequence[TextExample], room: int, long: LongTexts
    ) -> tuple[str, ...]:
        """Return a warning with the lines of the long examples, and their treatment."""
        if not self.long:
            return ()
        is_pair = examples[0].text_pair is not None
        what = f"{'pairs of texts' if is_pair else 'texts'} of more than {room} tokens, "
        share = f"{self.left_out:,} of their {self.num_tokens:,} tokens are left out"
        if long.how == "cut":
            what += "cut there"
        elif long.how == "head_tail":
            what += f"read at both ends; {share}"
        else:
            added = len(self.rows) - len(examples) + len(self.long)
            what += f"read in {added:,} windows" + (f"; {share}" if self.left_out else "")
        lines = [examples[number].origin.line for number in self.long]
        return (counted(examples[0].origin.path, what, lines),)


@dataclass
class _Rows:
    """Rows under construction."""

    tokens: list[np.ndarray] = field(default_factory=list)
    second_start: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)


def text_rows(
    examples: Sequence[TextExample],
    tokenizer: Tokenizer,
    max_length: int,
    labels: np.ndarray | None,
    long: LongTexts = CUT,
) -> TextRows:
    """Return rows of at most `max_length` tokens.

    In a pair that is cut, the longer text loses tokens first, as in BERT's `run_classifier.py`.
    Windows of a pair go over the longer text; every window has the other text, up to half a row.
    """
    firsts = tokenizer.encode_batch([example.text for example in examples])
    pairs = [example.text_pair for example in examples]
    seconds = iter(tokenizer.encode_batch([pair for pair in pairs if pair is not None]))
    found = _Rows()
    cut: list[int] = []
    num_tokens = left_out = 0
    for number, (pair, first) in enumerate(zip(pairs, firsts, strict=True)):
        texts = [first] if pair is None else [first, next(seconds)]
        room = max_length - num_special(tokenizer, pair is not None)
        lengths = [len(text) for text in texts]
        rows = [[[(0, length)] for length in lengths]]
        if sum(lengths) > room:
            rows = long.parts(lengths, room)
            cut.append(number)
            num_tokens += sum(lengths)
            left_out += sum(lengths) - covered(rows)
        for parts in rows:
            ids = [
                np.concatenate([text[start:end] for start, end in spans])
                for text, spans in zip(texts, parts, strict=True)
            ]
            row = make_row(tokenizer, *ids)
            found.tokens.append(row.ids)
            found.second_start.append(row.second_start)
            found.owners.append(number)
    owners: np.ndarray = np.array(found.owners, np.int64)
    several = len(owners) > len(examples)
    rows_of = np.bincount(owners, minlength=len(examples))
    return TextRows(
        Rows(
            found.tokens,
            np.array(found.second_start, np.int32),
            labels[owners] if several and labels is not None else labels,
            weights=(1 / rows_of[owners]).astype(np.float32) if several else None,
        ),
        owners, cut, num_tokens, left_out,
    )  # fmt: skip
