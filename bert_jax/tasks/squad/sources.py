"""SQuAD's JSON: questions about paragraphs, with answers and their offsets.

Versions 1.1 and 2.0, and data sets in the same layout, XQuAD among them:

    {"version": "v2.0", "data": [{"title": "...", "paragraphs": [{"context": "...", "qas": [
        {"id": "...", "question": "...", "is_impossible": false,
         "answers": [{"text": "...", "answer_start": 12}]}]}]}]}

`answer_start` counts characters (code points). Other fields (`plausible_answers`) are ignored.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from bert_jax.errors import UserError, first_few
from bert_jax.files.untrusted.json_file import read_json_object, short
from bert_jax.tasks.examples import Answer, Data, Origin, Question, file_name

MAX_BYTES = 512 << 20
"""Largest file that is read, in bytes; the training file of SQuAD 2.0 has 42 MB."""

Misplaced = Literal["fail", "skip", "keep"]
"""Treatment of an answer that is not at its offset (see `read_squad`)."""

_Kind = TypeVar("_Kind", str, bool, list)


def question_name(question: Question) -> str:
    """Name a question for messages, by its file, number and id."""
    return f"{question.origin.path}, {_number_and_id(question)}"


def _number_and_id(question: Question) -> str:
    return f"question {question.origin.line} (id {question.id[:80]!r})"


def read_squad(path: str | Path, *, misplaced: Misplaced = "fail") -> Data[Question]:
    """Read a file of questions; the questions of one paragraph share one context string.

    If `is_impossible` is true, the question has no answer (`answers=()`). Otherwise, a question
    that lists no answers has `answers=None`: they are unknown, as in SQuAD's test set.

    `misplaced` says what happens to answers that are not at their offset. `fail`: an error. `skip`:
    leave them out, and also questions with no other answer. `keep`: use them for scoring, which
    needs no offsets; training leaves out questions without an answer at its offset. Raise a
    UserError if the file cannot be read, has no questions, or has faults; the message counts the
    faults and names the first few with their places.
    """
    reader = _Reader(Path(path), misplaced)
    found = reader.read()
    if reader.problems:
        raise UserError(_listed(path, reader.problems, "thing", "to fix"))
    if misplaced == "fail" and reader.misplaced:
        remedy = ". Fix the offsets, or set misplaced to skip or keep"
        raise UserError(
            _listed(path, reader.misplaced, "answer", "not at the offset given") + remedy
        )
    if not found:
        why = " that can be used" if reader.misplaced else ""
        raise UserError(f"{path} has no question{why}; give a file with at least one")
    became = "left out" if misplaced == "skip" else "kept only for scores"
    warnings = [
        _listed(path, reader.misplaced, "answer", f"not at the offset given, {became}"),
        _listed(path, reader.blank, "question", "without text"),
    ]
    return Data(file_name(f"{path}"), found, warnings=tuple(filter(None, warnings)))


def _listed(path: str | Path, items: list[str], noun: str, what: str) -> str:
    """Return a message with the number of items and the first few; "" if there are none."""
    plural = noun if len(items) == 1 else f"{noun}s"
    return f"{path}: {len(items):,} {plural} {what}: {first_few(items)}" if items else ""


class _Reader:
    """Reader of one file, which collects faults instead of stopping at the first."""

    def __init__(self, path: Path, misplaced: Misplaced) -> None:
        self.path = path
        self.policy = misplaced
        self.problems: list[str] = []
        self.misplaced: list[str] = []
        self.blank: list[str] = []

    def read(self) -> list[Question]:
        top = read_json_object(self.path, max_bytes=MAX_BYTES)
        if not isinstance(top.get("data"), list):
            keys = ", ".join(repr(key[:40]) for key in list(top)[:6]) or "none"
            raise UserError(
                f"{self.path}: no list 'data' at the top level (keys: {keys}); SQuAD's layout is "
                '{"data": [{"paragraphs": [{"context": ..., "qas": [...]}]}]}'
            )
        found: list[Question] = []
        first: dict[str, int] = {}
        for number, (where, context, entry) in enumerate(self._entries(top), 1):
            question = self._question(number, where, context, entry)
            if question is None:
                continue
            if (earlier := first.setdefault(question.id, number)) != number:
                self.problems.append(
                    f"question {number}: the id {question.id[:80]!r} is also the id of question "
                    f"{earlier}; expected a different id for each question"
                )
            named = _number_and_id(question)
            if not question.question.strip():
                self.blank.append(named)
            answers = question.answers or ()
            wrong = [answer for answer in answers if not is_placed(answer, question)]
            self.misplaced += [f"{named}: {_whereabouts(answer, question)}" for answer in wrong]
            if wrong and self.policy == "skip":
                right = tuple(answer for answer in answers if answer not in wrong)
                if not right:
                    continue
                question = replace(question, answers=right)
            found.append(question)
        return found

    def _entries(self, top: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield each question's path in the file, its context and its JSON object."""
        for where, article in self._items(top, "data", ""):
            for inner, paragraph in self._items(article, "paragraphs", where):
                context = self._member(paragraph, "context", str, inner)
                if context is None:
                    continue
                if not context.strip():
                    self.problems.append(f"{inner}: the context is empty")
                    continue
                for innermost, entry in self._items(paragraph, "qas", inner):
                    yield innermost, context, entry

    def _items(
        self, owner: dict[str, Any], key: str, where: str
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each object in `owner[key]` with its path; anything else is added as a problem."""
        inside = f"{where}.{key}" if where else key
        for i, item in enumerate(self._member(owner, key, list, where) or []):
            if isinstance(item, dict):
                yield f"{inside}[{i}]", item
            else:
                self.problems.append(f"{inside}[{i}] is {short(item)}; expected an object")

    def _member(
        self, owner: dict[str, Any], key: str, kind: type[_Kind], where: str
    ) -> _Kind | None:
        """Return a required value; add a problem and return None if it is missing or wrong."""
        value = owner.get(key)
        if isinstance(value, kind):
            return value
        needed = {str: "a string", bool: "true or false", list: "a list"}[kind]
        self.problems.append(f"{where}: {key!r} is {short(value)}; expected {needed}")
        return None

    def _question(
        self, number: int, where: str, context: str, entry: dict[str, Any]
    ) -> Question | None:
        id = self._member(entry, "id", str, where)
        text = self._member(entry, "question", str, where)
        if id is None or text is None:
            return None
        named = f"question {number} (id {id[:80]!r})"
        impossible = self._member({"is_impossible": False, **entry}, "is_impossible", bool, named)
        if impossible is None:
            return None
        answers = tuple(self._answers(entry, named)) if "answers" in entry else ()
        if answers and impossible:
            self.problems.append(
                f"{named}: 'is_impossible' is true, but there are answers; drop one of the two"
            )
        known = answers if answers or impossible else None
        return Question(id, text, context, known, Origin(f"{self.path}", number))

    def _answers(self, entry: dict[str, Any], named: str) -> Iterator[Answer]:
        for _, item in self._items(entry, "answers", named):
            text = self._member(item, "text", str, f"{named}, answers")
            start = item.get("answer_start")
            if type(start) is not int:
                self.problems.append(
                    f"{named}, answers: 'answer_start' is {short(start)}; expected a number of "
                    "characters"
                )
            elif text is not None and not text.strip():
                self.problems.append(
                    f"{named}: an answer is empty; for a question without answer give an empty "
                    "list and 'is_impossible': true"
                )
            elif text is not None:
                yield Answer(text, start)


def is_placed(answer: Answer, question: Question) -> bool:
    """Return true if the context has the answer's text at the answer's offset."""
    return answer.start >= 0 and question.context.startswith(answer.text, answer.start)


def _whereabouts(answer: Answer, question: Question) -> str:
    """Describe the context at the answer's offset, and where the answer's text really occurs."""
    context, text, start = question.context, answer.text, answer.start
    said = f"{text[:40]!r} is said to be at character {start}"
    if 0 <= start < len(context):
        said += f", where the context has {context[start : start + min(len(text), 40)]!r}"
    else:
        said += f", but the context has {len(context)} characters"
    starts: list[str] = []
    at = context.find(text)
    while at >= 0 and len(starts) < 3:
        starts.append(f"{at}")
        at = context.find(text, at + 1)
    return said + (f"; it is at {', '.join(starts)}" if starts else "; the context lacks it")
