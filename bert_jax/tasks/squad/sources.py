"""SQuAD's JSON: questions about paragraphs, with answers that say where they stand.

Versions 1.1 and 2.0, and data sets in the same layout, XQuAD among them:

    {"version": "v2.0", "data": [{"title": "...", "paragraphs": [{"context": "...", "qas": [
        {"id": "...", "question": "...", "is_impossible": false,
         "answers": [{"text": "...", "answer_start": 12}]}]}]}]}

`answer_start` counts characters (code points). Fields that are not named here are not read,
`plausible_answers` among them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from bert_jax.errors import UserError
from bert_jax.tasks.examples import Answer, Origin, Question
from bert_jax.untrusted.json_file import read_json_object

MAX_BYTES = 512 << 20
"""Largest file that is read; the training part of SQuAD 2.0 has 42 MB."""
_SHOWN = 5

Misplaced = Literal["fail", "skip", "keep"]
"""Treatment of an answer that is not at its offset (see `read_squad`)."""

_Kind = TypeVar("_Kind", str, bool, list, dict)


@dataclass(frozen=True)
class SquadFile:
    """The questions of one file, in its order.

    Attributes:
        path: the file.
        version: as the file says; empty where it does not.
        questions: questions of one paragraph share one context string.
        misplaced: answers that are not at their offset.
        left_out: questions that were left out because of them.
        blank: questions without text; they are among `questions`.
        warnings: what was misplaced or blank, counted, with the first few ids.
    """

    path: str
    version: str
    questions: tuple[Question, ...]
    misplaced: int
    left_out: int
    blank: int
    warnings: tuple[str, ...]


def question_name(question: Question) -> str:
    """Names a question in messages: its file, its number there, its id."""
    return f"{question.origin.path}, question {question.origin.line} (id {question.id[:80]!r})"


def read_squad(path: str | Path, *, misplaced: Misplaced = "fail") -> SquadFile:
    """Read a file of questions.

    A question without `answers`, or with an empty list where `is_impossible` is not true, has
    `answers=None`: the file does not say, as SQuAD's test set does not.

    Args:
        path: the file.
        misplaced: what becomes of an answer that is not at its offset. `fail`: an error. `skip`:
            the answer is left out, and so is a question with no other one. `keep`: it stays; such a
            file can be scored, since scores look at the texts alone, and where a question has no
            answer at its place its windows have no target.

    Returns:
        The questions, and what was misplaced or blank.

    Raises:
        UserError: names what is wrong, where, and how often.
    """
    reader = _Reader(Path(path), misplaced)
    found = reader.read()
    if reader.problems:
        raise UserError(_listed(f"{path}", reader.problems, "thing", "to mend"))
    if misplaced == "fail" and reader.misplaced:
        remedy = ". Mend the offsets, or choose what becomes of them: misplaced=skip or keep"
        raise UserError(
            _listed(f"{path}", reader.misplaced, "answer", "not at the offset given") + remedy
        )
    if not found:
        why = " that can be used" if reader.misplaced else ""
        raise UserError(f"{path} has no question{why}; give a file with at least one")
    warnings = []
    if reader.misplaced:
        became = "left out" if misplaced == "skip" else "kept for scores alone"
        what = f"not at the offset given, {became}"
        warnings.append(_listed(f"{path}", reader.misplaced, "answer", what))
    if reader.blank:
        warnings.append(_listed(f"{path}", reader.blank, "question", "without text"))
    return SquadFile(
        path=f"{path}",
        version=reader.version,
        questions=tuple(found),
        misplaced=len(reader.misplaced),
        left_out=reader.left_out,
        blank=len(reader.blank),
        warnings=tuple(warnings),
    )


def _listed(path: str, items: list[str], noun: str, what: str) -> str:
    """Return a count, and the first few."""
    more = f"; and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    plural = noun if len(items) == 1 else f"{noun}s"
    return f"{path}: {len(items):,} {plural} {what}: {'; '.join(items[:_SHOWN])}{more}"


class _Reader:
    """Walks one file; collects what is wrong instead of stopping at it."""

    def __init__(self, path: Path, misplaced: Misplaced) -> None:
        self.path = path
        self.policy = misplaced
        self.problems: list[str] = []
        self.misplaced: list[str] = []
        self.blank: list[str] = []
        self.left_out = 0
        self.version = ""

    def read(self) -> list[Question]:
        top = read_json_object(self.path, max_bytes=MAX_BYTES)
        if not isinstance(top.get("data"), list):
            keys = ", ".join(repr(key[:40]) for key in list(top)[:6]) or "none"
            raise UserError(
                f"{self.path}: no list 'data' at the top level (keys: {keys}); SQuAD's layout is "
                '{"data": [{"paragraphs": [{"context": ..., "qas": [...]}]}]}'
            )
        version = top.get("version", "")
        self.version = version if isinstance(version, str) else ""
        found: list[Question] = []
        first: dict[str, int] = {}
        for number, (where, title, context, entry) in enumerate(self._entries(top), 1):
            question = self._question(number, where, title, context, entry)
            if question is None:
                continue
            if (earlier := first.setdefault(question.id, number)) != number:
                self.problems.append(
                    f"question {number}: the id {question.id[:80]!r} is that of question "
                    f"{earlier} too; an id names one question"
                )
            if (kept := self._kept(question)) is not None:
                found.append(kept)
        return found

    def _entries(self, top: dict[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
        """Where, title, context and entry of each question."""
        for a, article in enumerate(self._items(top, "data", "")):
            title = article.get("title", "")
            title = title if isinstance(title, str) else ""
            place = f"data[{a}]"
            for p, paragraph in enumerate(self._items(article, "paragraphs", place)):
                where = f"{place}.paragraphs[{p}]"
                context = self._member(paragraph, "context", str, where)
                if context is None:
                    continue
                if not context.strip():
                    self.problems.append(f"{where}: the context is empty")
                    continue
                for q, entry in enumerate(self._items(paragraph, "qas", where)):
                    yield f"{where}.qas[{q}]", title, context, entry

    def _items(self, owner: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
        """Return the objects of a list; what is none is a problem."""
        items = self._member(owner, key, list, where) or []
        inside = f"{where}.{key}" if where else key
        for i, item in enumerate(items):
            if not isinstance(item, dict):
                self.problems.append(f"{inside}[{i}] is {_kind(item)}, an object is needed")
        return [item for item in items if isinstance(item, dict)]

    def _member(
        self, owner: dict[str, Any], key: str, kind: type[_Kind], where: str
    ) -> _Kind | None:
        """Return a member that has to be there; None, and a problem, where it is not."""
        value = owner.get(key)
        if isinstance(value, kind):
            return value
        needed = {str: "a string", bool: "true or false", list: "a list", dict: "an object"}[kind]
        met = f"{key!r} is {_kind(value)}" if key in owner else f"{key!r} is missing"
        self.problems.append(f"{where}: {met}, {needed} is needed")
        return None

    def _question(
        self, number: int, where: str, title: str, context: str, entry: dict[str, Any]
    ) -> Question | None:
        id = self._member(entry, "id", str, where)
        text = self._member(entry, "question", str, where)
        if id is None or text is None:
            return None
        named = f"question {number} (id {id[:80]!r})"
        impossible = entry.get("is_impossible", False)
        if not isinstance(impossible, bool):
            self.problems.append(
                f"{named}: 'is_impossible' is {_kind(impossible)}, true or false is needed"
            )
            return None
        answers = self._answers(entry, named)
        if answers and impossible:
            self.problems.append(
                f"{named}: 'is_impossible' is true, and there are answers; drop one of the two"
            )
        return Question(
            id=id,
            question=text,
            context=context,
            answers=None if not answers and not impossible else answers,
            is_impossible=impossible,
            title=title,
            origin=Origin(f"{self.path}", number),
        )

    def _answers(self, entry: dict[str, Any], named: str) -> tuple[Answer, ...]:
        found = []
        for item in self._items(entry, "answers", named) if "answers" in entry else ():
            text = self._member(item, "text", str, f"{named}, answers")
            start = item.get("answer_start")
            if type(start) is not int:
                self.problems.append(
                    f"{named}, answers: 'answer_start' is {_kind(start)}, a number of characters "
                    "is needed"
                )
            elif text is not None and not text.strip():
                self.problems.append(
                    f"{named}: an answer is empty; for a question without answer give an empty "
                    "list and 'is_impossible': true"
                )
            elif text is not None:
                found.append(Answer(text, start))
        return tuple(found)

    def _kept(self, question: Question) -> Question | None:
        """Return the question without misplaced or blank answers, which are counted."""
        named = f"question {question.origin.line} (id {question.id[:80]!r})"
        if not question.question.strip():
            self.blank.append(named)
        answers = question.answers or ()
        right = tuple(answer for answer in answers if is_placed(answer, question))
        if len(right) == len(answers):
            return question
        self.misplaced += [
            f"{named}: {_whereabouts(answer, question)}"
            for answer in answers
            if not is_placed(answer, question)
        ]
        if self.policy != "skip":
            return question
        self.left_out += not right
        return replace(question, answers=right) if right else None


def is_placed(answer: Answer, question: Question) -> bool:
    """Whether the context has the answer's text at the answer's offset."""
    return answer.start >= 0 and question.context.startswith(answer.text, answer.start)


def _whereabouts(answer: Answer, question: Question) -> str:
    """Describe the text at an answer's offset, and where the answer is."""
    context, text, start = question.context, answer.text, answer.start
    shown = f"{text[:40]!r} is said to be at character {start}"
    if 0 <= start < len(context):
        shown += f", where the context has {context[start : start + min(len(text), 40)]!r}"
    else:
        shown += f", and the context has {len(context)}"
    places: list[str] = []
    at = context.find(text)
    while at >= 0 and len(places) < 3:
        places.append(f"{at}")
        at = context.find(text, at + 1)
    return shown + (f"; it is at {', '.join(places)}" if places else "; it is nowhere in it")


def _kind(value: Any) -> str:
    """Return a JSON value's kind, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"{value}".lower()
    if isinstance(value, int | float):
        return f"the number {value}"[:60]
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else "an object"
