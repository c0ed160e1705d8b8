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
from bert_jax.tasks.examples import MAX_BYTES, Answer, Data, Origin, Question, file_name

Misplaced = Literal["fail", "skip", "keep"]
"""Treatment of an answer that is not at its offset (see `read_squad`)."""

_Kind = TypeVar("_Kind", str, bool, list, int)
_KINDS = {str: "a string", bool: "true or false", list: "a list", int: "a number of characters"}


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
    leave them out, and questions with no other answer. `keep`: use them for scoring, which needs no
    offsets; training leaves out questions without an answer at its offset. Raise a UserError if the
    file is unreadable, has no questions or has faults (the message counts all).
    """
    found: list[Question] = []
    first: dict[str, int] = {}
    problems: list[str] = []
    apart: list[str] = []
    blank: list[str] = []
    for number, (where, context, entry) in enumerate(_entries(path), 1):
        try:
            question = _question(where, context, entry, Origin(f"{path}", number))
            if (earlier := first.setdefault(question.id, number)) != number:
                raise UserError(
                    f"question {number}: the id {question.id[:80]!r} is also the id of question "
                    f"{earlier}; expected a different id for each question"
                )
        except UserError as error:
            problems.append(str(error))
            continue
        named = _number_and_id(question)
        if not question.question.strip():
            blank.append(named)
        answers = question.answers or ()
        wrong = [answer for answer in answers if not is_placed(answer, question)]
        apart += [f"{named}: {_whereabouts(answer, question)}" for answer in wrong]
        if wrong and misplaced == "skip":
            right = tuple(answer for answer in answers if answer not in wrong)
            if not right:
                continue
            question = replace(question, answers=right)
        found.append(question)
    if problems:
        raise UserError(_listed(path, problems, "thing", "to fix"))
    if misplaced == "fail" and apart:
        remedy = ". Fix the offsets, or set misplaced to skip or keep"
        raise UserError(_listed(path, apart, "answer", "not at the offset given") + remedy)
    if not found:
        why = " that can be used" if apart else ""
        raise UserError(f"{path} has no question{why}; give a file with at least one")
    became = "left out" if misplaced == "skip" else "kept only for scores"
    warnings = [
        _listed(path, apart, "answer", f"not at the offset given, {became}"),
        _listed(path, blank, "question", "without text"),
    ]
    return Data(file_name(f"{path}"), found, warnings=tuple(filter(None, warnings)))


def _listed(path: str | Path, items: list[str], noun: str, what: str) -> str:
    """Return a message with the number of items and the first few; "" if there are none."""
    plural = noun if len(items) == 1 else f"{noun}s"
    return f"{path}: {len(items):,} {plural} {what}: {first_few(items)}" if items else ""


def _entries(path: str | Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each question's place in the file, its context and its JSON object."""
    top = read_json_object(Path(path), max_bytes=MAX_BYTES)
    if not isinstance(top.get("data"), list):
        keys = ", ".join(repr(key[:40]) for key in list(top)[:6]) or "none"
        raise UserError(
            f"{path}: no list 'data' at the top level (keys: {keys}); SQuAD's layout is "
            '{"data": [{"paragraphs": [{"context": ..., "qas": [...]}]}]}'
        )
    try:
        for where, article in _objects(top, "data", ""):
            for inner, paragraph in _objects(article, "paragraphs", where):
                context = _member(paragraph, "context", str, inner)
                if not context.strip():
                    raise UserError(f"{inner}: the context is empty")
                for innermost, entry in _objects(paragraph, "qas", inner):
                    yield innermost, context, entry
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _objects(owner: dict[str, Any], key: str, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object in the list `owner[key]`, with its place."""
    inside = f"{where}.{key}" if where else key
    for i, item in enumerate(_member(owner, key, list, where)):
        if not isinstance(item, dict):
            raise UserError(f"{inside}[{i}] is {short(item)}; expected an object")
        yield f"{inside}[{i}]", item


def _member(owner: dict[str, Any], key: str, kind: type[_Kind], where: str) -> _Kind:
    """Return a required value; raise a UserError if it is missing or of another type."""
    value = owner.get(key)
    if type(value) is not kind:
        raise UserError(f"{where}: {key!r} is {short(value)}; expected {_KINDS[kind]}")
    return value


def _question(where: str, context: str, entry: dict[str, Any], origin: Origin) -> Question:
    id, text = _member(entry, "id", str, where), _member(entry, "question", str, where)
    question = Question(id, text, context, None, origin)
    named = _number_and_id(question)
    impossible = _member({"is_impossible": False, **entry}, "is_impossible", bool, named)
    answers = []
    for _, item in _objects({"answers": [], **entry}, "answers", named):
        inside = f"{named}, answers"
        answered = _member(item, "text", str, inside)
        answers.append(Answer(answered, _member(item, "answer_start", int, inside)))
        if not answered.strip():
            raise UserError(
                f"{named}: an answer is empty; for a question without answer give an empty list "
                "and 'is_impossible': true"
            )
    if answers and impossible:
        raise UserError(
            f"{named}: 'is_impossible' is true, but there are answers; drop one of the two"
        )
    return replace(question, answers=tuple(answers) if answers or impossible else None)


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
