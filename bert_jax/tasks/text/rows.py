"""Texts and pairs of texts to rows of token ids."""

from collections.abc import Sequence

import numpy as np

from bert_jax.tasks.examples import TextExample
from bert_jax.tasks.problems import counted
from bert_jax.tasks.rows import Rows
from bert_jax.tokenization.tokenizer import Tokenizer, TokenRow, make_row, num_special


def text_rows(
    examples: Sequence[TextExample],
    tokenizer: Tokenizer,
    max_length: int,
    labels: np.ndarray | None,
) -> tuple[Rows, tuple[str, ...]]:
    """Return the rows of the examples of one file, and a warning with the lines that were cut."""
    rows, cut = cut_rows(examples, tokenizer, max_length, labels)
    if not cut:
        return rows, ()
    is_pair = examples[0].text_pair is not None
    room = max_length - num_special(tokenizer, is_pair)
    what = f"{'pairs of texts' if is_pair else 'texts'} of more than {room} tokens, cut there"
    lines = [examples[number].origin.line for number in cut]
    return rows, (counted(examples[0].origin.path, what, lines),)


def cut_rows(
    examples: Sequence[TextExample],
    tokenizer: Tokenizer,
    max_length: int,
    labels: np.ndarray | None,
) -> tuple[Rows, list[int]]:
    """Return rows of at most `max_length` tokens, and the positions of the examples that were cut.

    A long text is cut at its end, of a pair the longer text first, as in BERT's
    `run_classifier.py`.
    """
    firsts = tokenizer.encode_batch([example.text for example in examples])
    pairs = [example.text_pair for example in examples]
    seconds = iter(tokenizer.encode_batch([pair for pair in pairs if pair is not None]))
    rows: list[TokenRow] = []
    long: list[int] = []
    for number, (pair, first) in enumerate(zip(pairs, firsts, strict=True)):
        room = max_length - num_special(tokenizer, pair is not None)
        whole = len(first)
        if pair is None:
            rows.append(make_row(tokenizer, first[:room]))
        else:
            second = next(seconds)
            whole += len(second)
            a, b = pair_lengths(len(first), len(second), room)
            rows.append(make_row(tokenizer, first[:a], second[:b]))
        if whole > room:
            long.append(number)
    second_start = np.array([row.second_start for row in rows], np.int32)
    return Rows([row.ids for row in rows], second_start, labels), long


def pair_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how much of two texts is kept: the longer loses tokens, of equal ones the second."""
    if first + second <= room:
        return first, second
    kept = min(first, max(room - second, room - room // 2))
    return kept, room - kept
