"""Texts and pairs of texts to rows: [CLS] text [SEP], or [CLS] text [SEP] second text [SEP]."""

from collections.abc import Sequence

import numpy as np

from bert_jax.data.tokenizer import Tokenizer
from bert_jax.finetune.rows import Rows
from bert_jax.tasks.examples import TextExample
from bert_jax.tasks.problems import counted


def text_rows(
    examples: Sequence[TextExample],
    tokenizer: Tokenizer,
    max_length: int,
    labels: np.ndarray | None,
) -> tuple[Rows, tuple[str, ...]]:
    """The rows of some examples.

    What is too long is cut at its end, of a pair the longer text first, as in BERT's
    `run_classifier.py`.

    Args:
        examples: of one file, texts or pairs.
        tokenizer: of the model.
        max_length: tokens in a row, special tokens included.
        labels: of the rows.

    Returns:
        The rows, and a warning with the lines of what was cut.
    """
    special = tokenizer.special_ids
    firsts = tokenizer.encode_batch([example.text for example in examples])
    pairs = [example.text_pair for example in examples]
    seconds = iter(tokenizer.encode_batch([pair for pair in pairs if pair is not None]))
    cls, sep = np.array([special.cls], np.int32), np.array([special.sep], np.int32)
    tokens: list[np.ndarray] = []
    second_at: list[int] = []
    long: list[int] = []
    for example, first in zip(examples, firsts, strict=True):
        if example.text_pair is None:
            a, b = min(len(first), max_length - 2), 0
            row = np.concatenate([cls, first[:a], sep])
            second_at.append(len(row))
            whole = len(first)
        else:
            second = next(seconds)
            a, b = pair_lengths(len(first), len(second), max_length - 3)
            row = np.concatenate([cls, first[:a], sep, second[:b], sep])
            second_at.append(a + 2)
            whole = len(first) + len(second)
        if a + b < whole:
            long.append(example.origin.line)
        tokens.append(row)
    warnings: tuple[str, ...] = ()
    if long:
        what = "texts" if pairs[0] is None else "pairs of texts"
        room = max_length - (2 if pairs[0] is None else 3)
        path = examples[0].origin.path
        warnings = (counted(path, f"{what} of more than {room} tokens, cut there", long),)
    return Rows(tokens, np.array(second_at, np.int32), labels), warnings


def pair_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """How much of two texts is kept: what does not fit is taken from the longer, token by token.

    Of two equally long ones the second loses a token.
    """
    if first + second <= room:
        return first, second
    kept = min(first, max(room - second, room - room // 2))
    return kept, room - kept
