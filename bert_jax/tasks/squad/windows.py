"""Rows of tokens from questions and contexts: [CLS] question [SEP] part of context [SEP].

A context that does not fit is cut into overlapping windows, as in BERT's `run_squad.py`. Each
window begins `stride` tokens after the previous one, and the last reaches the end, so no part of a
context is lost. A token in several windows is scored in only one of them: the window that
maximises min(tokens to its left, tokens to its right), so that the token is far from both ends.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32

from bert_jax.errors import UserError, first_few
from bert_jax.tasks.config import WindowOptions
from bert_jax.tasks.examples import Question
from bert_jax.tasks.squad.sources import is_placed, question_name
from bert_jax.tokenization.tokenizer import Encoding, Tokenizer, make_row, num_special


@dataclass(frozen=True, eq=False)
class Window:
    """A row of n tokens, c of them from the context."""

    question: int
    """Index of the window's question."""
    ids: Int32[np.ndarray, " n"]
    """[CLS] question [SEP] context [SEP]."""
    context_at: int
    """Position in `ids` where the context begins."""
    spans: Int32[np.ndarray, "c 2"]
    """Characters [start, end) of the context that each context token covers."""
    has_most_context: Bool[np.ndarray, " c"]
    """Whether this window scores the token, as exactly one window does (see `most_context`)."""
    target: tuple[int, int] | None
    """Positions in `ids` of the answer's first and last token. Both are 0 ([CLS]) if there is no
    answer or the window does not contain all of it. None means that the answer is unknown."""


@dataclass(frozen=True, eq=False)
class SquadWindows:
    """Windows of all questions, in the order of the questions."""

    windows: tuple[Window, ...]
    """Windows in order, at least one per question, from the start of its context to the end."""
    cut_questions: tuple[int, ...]
    """Indices of the questions that were cut to `max_question` tokens."""
    warnings: tuple[str, ...]
    """Warnings about cut questions and questions without a target: how many, and the first few."""


def build_windows(
    questions: Sequence[Question], tokenizer: Tokenizer, options: WindowOptions | None = None
) -> SquadWindows:
    """Cut questions and contexts into windows.

    The target is the shortest run of tokens that covers the first answer placed at its offset.

    Raises:
        UserError: a context has no token that could be part of an answer.
    """
    options = options or WindowOptions()
    contexts: dict[str, Encoding] = {}  # questions of one paragraph share its context
    windows: list[Window] = []
    cut: list[int] = []
    unplaced: list[int] = []  # no answer is at its offset, or the answer has no token
    for number, question in enumerate(questions):
        if question.context not in contexts:
            contexts[question.context] = encode_context(tokenizer, question.context)
        ids, spans = contexts[question.context]
        if not (spans[:, 0] < spans[:, 1]).any():
            raise UserError(
                f"{question_name(question)}: the context {question.context[:40]!r} has no token in "
                "the model's vocabulary; expected a context with words"
            )
        asked = tokenizer.encode(question.question).ids
        if len(asked) > options.max_question:
            cut.append(number)
            asked = asked[: options.max_question]
        answer: tuple[int, int] | None = None
        known = question.answers is not None and not question.answers
        if placed := next((a for a in question.answers or () if is_placed(a, question)), None):
            answer = token_range(spans, placed.start, placed.start + len(placed.text))
            known = answer is not None
        if not known and question.answers:
            unplaced.append(number)
        room = options.max_length - len(asked) - num_special(tokenizer, pair=True)
        begins = window_begins(len(ids), room, options.stride)
        best = most_context(len(ids), begins, room)
        for w, begin in enumerate(begins):
            end = min(begin + room, len(ids))
            row = make_row(tokenizer, asked, ids[begin:end])
            target = (0, 0) if known else None
            if answer is not None and begin <= answer[0] and answer[1] < end:
                shift = row.second_start - begin
                target = (answer[0] + shift, answer[1] + shift)
            most = best[begin:end] == w
            windows.append(
                Window(number, row.ids, row.second_start, spans[begin:end], most, target)
            )
    reasons = {
        f"longer than {options.max_question} tokens, cut there": cut,
        "without a target, because no answer is at its offset or it has no token": unplaced,
    }
    warnings = tuple(
        f"{len(found):,} {'question is' if len(found) == 1 else 'questions are'} {what}: "
        + first_few([question_name(questions[i]) for i in found])
        for what, found in reasons.items()
        if found
    )
    return SquadWindows(tuple(windows), tuple(cut), warnings)


def encode_context(tokenizer: Tokenizer, context: str) -> Encoding:
    """Encode a context; a token's span includes combining marks after its last character.

    Normalisation drops accents and vowel signs, so the tokenizer's spans end before them. Without
    this correction, an answer, which is a slice of the context, would lack such a mark at its end.
    """
    ids, spans = tokenizer.encode(context)
    spans = spans.copy()
    following = np.append(spans[1:, 0], len(context))
    for i in np.flatnonzero((spans[:, 1] < following) & (spans[:, 0] < spans[:, 1])):
        end, limit = int(spans[i, 1]), int(following[i])
        while end < limit and unicodedata.category(context[end])[0] == "M":
            end += 1
        spans[i, 1] = end
    return Encoding(ids, spans)


def token_range(spans: Int32[np.ndarray, "n 2"], start: int, end: int) -> tuple[int, int] | None:
    """Find the first and last token of the shortest run that covers characters [start, end).

    Return None if no token covers any of them. Starts and ends of `spans` must not decrease.
    """
    first = int(np.searchsorted(spans[:, 1], start, side="right"))
    last = int(np.searchsorted(spans[:, 0], end, side="left")) - 1
    return (first, last) if first <= last else None


def window_begins(num_tokens: int, room: int, stride: int) -> list[int]:
    """Return the starts of windows of `room` tokens, up to the first that reaches the end."""
    return list(range(0, max(num_tokens - room, 0) + stride, stride))


def most_context(num_tokens: int, begins: Sequence[int], room: int) -> np.ndarray:
    """Return the index of the window that scores each token, an array (num_tokens,).

    The chosen window is the one with the largest sum of min(tokens to the left, tokens to the
    right) and a hundredth of the window's length. The first window wins ties.
    """
    at = np.arange(num_tokens)
    first = np.array(begins)[:, None]
    end = np.minimum(first + room, num_tokens)
    context = np.minimum(at - first, end - 1 - at)
    return np.where(context >= 0, context + 0.01 * (end - first), -1.0).argmax(axis=0)
