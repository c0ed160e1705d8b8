"""Texts and pairs of texts to rows of token ids."""

from collections.abc import Sequence

import numpy as np

from bert_jax.tasks.examples import TextExample
from bert_jax.tasks.problems import counted
from bert_jax.tasks.rows import Rows
from bert_jax.tokenization.tokenizer import Row, Tokenizer, make_row, num_special


def text_rows(
    examples: Sequence[TextExample],
    tokenizer: Tokenizer,
    max_length: int,
    labels: np.ndarray | None,
) -> tuple[Rows, tuple[str, ...]]:
    """Make rows of the examples of one file; see `cut_rows`.

    Returns:
        The rows, and a warning with the lines of what was cut.
    """
    rows, cut = cut_rows(examples, tokenizer, max_length, labels)
    if not cut:
        return rows, ()
    is_pair = examples[0].text_pair is not None
    room = max_length - num_special(tokenizer, is_pair)
    what = f"{'pairs of texts' if is_pair else 'texts'} of more than {room} tokens, cut there"
    lines = [examples[place].origin.line for place in cut]
    return rows, (counted(examples[0].origin.path, what, lines),)


def cut_rows(
    examples: Sequence[TextExample],
    tokenizer: Tokenizer,
    max_length: int,
    labels: np.ndarray | None,
) -> tuple[Rows, list[int]]:
    """Make rows of some examples.

    What is too long is cut at its end, of a pair the longer text first, as in BERT's
    `run_classifier.py`.

    Args:
        examples: texts or pairs.
        tokenizer: of the model.
        max_length: tokens in a row, special tokens included.
        labels: of the rows.

    Returns:
        The rows, and the positions of the examples that were cut.
    """
    firsts = tokenizer.encode_batch([example.text for example in examples])
    pairs = [example.text_pair for example in examples]
    seconds = iter(tokenizer.encode_batch([pair for pair in pairs if pair is not None]))
    rows: list[Row] = []
    long: list[int] = []
    for place, (example, first) in enumerate(zip(examples, firsts, strict=True)):
        second = None if example.text_pair is None else next(seconds)
        room = max_length - num_special(tokenizer, second is not None)
        whole = len(first)
        if second is None:
            rows.append(make_row(tokenizer, first[:room]))
        else:
            whole += len(second)
            a, b = pair_lengths(len(first), len(second), room)
            rows.append(make_row(tokenizer, first[:a], second[:b]))
        if whole > room:
            long.append(place)
    second_at = np.array([row.second_at for row in rows], np.int32)
    return Rows([row.ids for row in rows], second_at, labels), long


def pair_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """How much of two texts is kept: what does not fit is taken from the longer, token by token.

    Of two equally long ones the second loses a token.
    """
    if first + second <= room:
        return first, second
    kept = min(first, max(room - second, room - room // 2))
    return kept, room - kept
