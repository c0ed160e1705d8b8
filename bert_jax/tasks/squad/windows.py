"""Rows of tokens from questions and contexts: [CLS] question [SEP] part of context [SEP].

A context that does not fit is cut into overlapping windows, as in BERT's `run_squad.py`. Each
window begins `stride` tokens after the previous one, and the last reaches the end, so no part of a
context is lost. A token in several windows is scored in only one of them: the window that
maximises min(tokens to its left, tokens to its right), so that the token is far from both ends.
"""

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32
from scipy.special import softmax

from bert_jax.errors import UserError, first_few
from bert_jax.tasks.config import WindowOptions
from bert_jax.tasks.examples import Question
from bert_jax.tasks.squad.metrics import best_scores
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
    answer, or the window lacks a part of the answer. None means that the answer is unknown."""


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
    Raise a UserError if a context has no token that could be part of an answer.
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
            own, most = spans[begin:end], best[begin:end] == w
            windows.append(Window(number, row.ids, row.second_start, own, most, target))
    reasons = {
        f"longer than {options.max_question} tokens, cut there": cut,
        "without a target: no answer is at its offset, or the answer has no token": unplaced,
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
    best, found = np.full(num_tokens, -1.0), np.zeros(num_tokens, int)
    for number, begin in enumerate(begins):
        at = np.arange(begin, end := min(begin + room, num_tokens))
        score = np.minimum(at - begin, end - 1 - at) + 0.01 * (end - begin)
        better = at[score > best[at]]
        best[better], found[better] = score[better - begin], number
    return found


class Candidate(NamedTuple):
    """A possible answer."""

    text: str
    """`context[start:end]`; empty for "no answer"."""
    start: int
    end: int
    start_logit: float
    """Start logit of the first token or, for "no answer", of [CLS]."""
    end_logit: float
    """End logit of the last token or, for "no answer", of [CLS]."""

    @property
    def score(self) -> float:
        """Sum of the two logits."""
        return self.start_logit + self.end_logit


@dataclass(frozen=True)
class Prediction:
    """A model's answer to the question `id`."""

    id: str
    candidates: tuple[Candidate, ...]
    """Candidates with different texts, best first; at least one."""
    null: Candidate
    """Candidate "no answer". Each window scores "no answer" at its [CLS]; the lowest of these
    scores counts, because a question has an answer if any window contains one."""

    @property
    def null_odds(self) -> float:
        """Score of "no answer" minus the best candidate's score."""
        return self.null.score - self.candidates[0].score

    def text(self, threshold: float | None) -> str:
        """Return the best text, or "" if `null_odds` exceeds `threshold` (None: never exceeded)."""
        if threshold is not None and self.null_odds > threshold:
            return ""
        return self.candidates[0].text

    def shares(self, *, with_null: bool) -> list[tuple[Candidate, float]]:
        """Return candidates, best first, with probabilities; `with_null` adds "no answer"."""
        found = [*self.candidates, *([self.null] if with_null else [])]
        found.sort(key=lambda candidate: -candidate.score)
        shares = softmax([candidate.score for candidate in found])
        return list(zip(found, shares.tolist(), strict=True))


def find_answers(
    questions: Sequence[Question],
    windows: Sequence[Window],
    start_logits: Sequence[np.ndarray] | np.ndarray,
    end_logits: Sequence[np.ndarray] | np.ndarray,
    *,
    num_best: int = 20,
    max_answer_tokens: int = 30,
) -> list[Prediction]:
    """Return the best candidates of each question, in the order of the questions.

    A run of at most `max_answer_tokens` tokens is scored only in the window with the most context
    for its first token, if the whole run is there. (BERT's `run_squad.py`, which combines only a
    window's best starts and ends, can miss a candidate, but never finds one with a higher score.)

    Windows may be in any order. Each has finite start and end logits; entries after the window's
    tokens are padding. Each question needs a window, and gets at most `num_best` candidates.
    """
    rows: list[list[_Row]] = [[] for _ in questions]
    for window, starts, ends in zip(windows, start_logits, end_logits, strict=True):
        n = len(window.ids)
        logits = np.array([starts[:n], ends[:n]], np.float64)
        rows[window.question].append(_Row(window, *logits))
    found = []
    for question, own in zip(questions, rows, strict=True):
        null = min((Candidate("", 0, 0, float(row.starts[0]), float(row.ends[0])) for row in own),
                   key=lambda candidate: candidate.score)  # fmt: skip
        best = _candidates(question.context, own, num_best, max_answer_tokens)
        found.append(Prediction(question.id, best, null))
    return found


class _Row(NamedTuple):
    window: Window
    starts: np.ndarray  # (n,)
    ends: np.ndarray  # (n,)


def _candidates(
    context: str, rows: Sequence[_Row], num_best: int, max_tokens: int
) -> tuple[Candidate, ...]:
    scores = np.concatenate([_scores(row, max_tokens).ravel() for row in rows])
    sizes = [len(row.window.spans) * max_tokens for row in rows]
    begins = np.concatenate([[0], np.cumsum(sizes)])
    found: dict[str, Candidate] = {}
    for at in _best_first(scores, 8 * num_best):
        r = int(np.searchsorted(begins, at, side="right")) - 1
        first, more = divmod(int(at - begins[r]), max_tokens)
        window, starts, ends = rows[r]
        start, end = int(window.spans[first, 0]), int(window.spans[first + more, 1])
        text = context[start:end]
        if text and text not in found:
            token = window.context_at + first
            logits = float(starts[token]), float(ends[token + more])
            found[text] = Candidate(text, start, end, *logits)
            if len(found) == num_best:
                break
    return tuple(found.values())


def _scores(row: _Row, max_tokens: int) -> np.ndarray:
    """Return scores (c, max_tokens) of runs of tokens i to i + j, with -inf for forbidden runs."""
    window = row.window
    inside = slice(window.context_at, window.context_at + len(window.spans))
    starts = np.where(window.has_most_context, row.starts[inside], -np.inf)
    ends = np.concatenate([row.ends[inside], np.full(max_tokens - 1, -np.inf)])
    return starts[:, None] + np.lib.stride_tricks.sliding_window_view(ends, max_tokens)


def _best_first(scores: np.ndarray, few: int) -> Iterator[int]:
    """Yield the positions of all scores above -inf, highest score first; ties keep their order.

    The first `few` positions are found without sorting all scores.
    """
    limit = np.partition(scores, -few)[-few] if few < len(scores) else -np.inf
    for chosen in (scores >= limit, scores < limit):
        at = np.flatnonzero(chosen & (scores > -np.inf))
        yield from at[np.argsort(-scores[at], kind="stable")]


def best_threshold(questions: Sequence[Question], predictions: Sequence[Prediction]) -> float:
    """Return the threshold of `null_odds` with the best F1 under the rules of version 2.0.

    As in SQuAD's script, the threshold is the `null_odds` of a question, the lowest if several give
    the same F1. Two rules differ, because the script can report an F1 that its threshold does not
    reach. Questions with equal odds are all answered or all unanswered. If it is best to answer no
    question, the threshold is just below the lowest odds (0 in the script). Raise a UserError if a
    question has no known answers.
    """
    empty, gain = 0.0, np.zeros(len(questions))
    for i, (question, prediction) in enumerate(zip(questions, predictions, strict=True)):
        without = best_scores("", question)[1]
        gain[i] = best_scores(prediction.text(None), question)[1] - without
        empty += without
    odds = np.array([prediction.null_odds for prediction in predictions])
    order = np.argsort(odds, kind="stable")
    odds = odds[order]
    totals = empty + np.cumsum(gain[order])
    totals[:-1][odds[:-1] == odds[1:]] = -np.inf  # no threshold separates equal odds
    best = int(totals.argmax())
    if totals[best] <= empty:
        return float(np.nextafter(odds[0], -np.inf))
    return float(odds[best])


def answer_files(
    predictions: Sequence[Prediction], threshold: float | None = None
) -> Iterator[tuple[str, str]]:
    """Yield names and contents of predictions.json, nbest.json and null_odds.json.

    predictions.json maps question ids to texts, for SQuAD's scripts and leaderboard. nbest.json
    lists each question's candidates, best first: text, start and end in the context, logits, and
    probability among these candidates. With a `threshold` (see `Prediction.text`), "no answer" (the
    text "") is a candidate too, and null_odds.json is written for the option `--na-prob-file` of
    the script for 2.0. `threshold` is None for data in which every question has an answer.
    """
    files: dict[str, Mapping[str, Any]] = {
        "predictions.json": {each.id: each.text(threshold) for each in predictions},
        "nbest.json": {each.id: _listed(each, threshold is not None) for each in predictions},
    }
    if threshold is not None:
        files["null_odds.json"] = {each.id: each.null_odds for each in predictions}
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
    for name, content in files.items():  # with `indent`, json.dumps takes 20 times as long
        rows = (f"{encode(id)}: {encode(value)}" for id, value in content.items())
        yield name, "{\n" + ",\n".join(rows) + "\n}\n"


def _listed(prediction: Prediction, with_null: bool) -> list[dict[str, Any]]:
    shares = prediction.shares(with_null=with_null)
    return [{**candidate._asdict(), "probability": share} for candidate, share in shares]
