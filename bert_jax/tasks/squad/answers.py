"""Answers from start and end logits: candidates, the threshold for "no answer", and files.

A candidate is a run of context tokens. Its score is the start logit of its first token plus the end
logit of its last token. Its text is not decoded from tokens, but is a slice of the context, from
the first character of the first token to the last character of the last token.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.special import softmax

from bert_jax.tasks.examples import Question
from bert_jax.tasks.squad.metrics import best_scores
from bert_jax.tasks.squad.windows import Window


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
        """Return "" if `threshold` is not None but below `null_odds`, else the best candidate."""
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

    Windows may be in any order. Each has a row of start logits and a row of end logits; entries
    after the window's tokens are padding. Each question needs a window, and all logits are finite.
    A question has at most `num_best` candidates.
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
    """Return the best runs of tokens, at most one for each text."""
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
            found[text] = Candidate(
                text, start, end, float(starts[token]), float(ends[token + more])
            )
            if len(found) == num_best:
                break
    return tuple(found.values())


def _scores(row: _Row, max_tokens: int) -> np.ndarray:
    """Return scores (c, max_tokens) of runs of tokens i to i + j, with -inf for forbidden runs."""
    window = row.window
    c = len(window.spans)
    inside = slice(window.context_at, window.context_at + c)
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
    the same F1. Two rules differ from the script, which can report an F1 that its threshold does
    not reach: questions with equal odds are either all answered or all unanswered, and if it is
    best to answer no question, the threshold is just below the lowest odds (0 in the script).

    Raises:
        UserError: a question has no known answers.
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
    probability among these candidates. With a threshold, "no answer" (the text "") is a candidate
    too, and null_odds.json is written for the option `--na-prob-file` of the script for 2.0.

    `threshold` (see `Prediction.text`) is None for data in which every question has an answer.
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
