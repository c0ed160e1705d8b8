"""Questions, a file of them, and a vocabulary, for the tests of span QA."""

import functools
import json
from pathlib import Path
from typing import Any

from bert_jax.tasks.examples import Answer, Data, Origin, Question
from bert_jax.tasks.squad.sources import read_squad
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS
from bert_jax.tokenization.wordpiece import WordPieceOptions, WordPieceTokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
UNCASED = WordPieceTokenizer(
    [*SPECIAL_TOKENS, *LETTERS, *(f"##{c}" for c in LETTERS), *".,?", "कु", "##क", "क"],
    WordPieceOptions(lowercase=True),
)
"""A token for each letter."""


@functools.cache
def real_file(path: Path) -> Data[Question]:
    """A file read once for all tests."""
    return read_squad(path)


def question(
    context: str,
    *answers: str | Answer,
    id: str = "q",
    text: str = "who ?",
    unknown: bool = False,
    number: int = 1,
) -> Question:
    """A question; answers given as text are at their first place in the context."""
    placed = [a if isinstance(a, Answer) else Answer(a, context.index(a)) for a in answers]
    return Question(
        id=id,
        question=text,
        context=context,
        answers=None if unknown else tuple(placed),
        origin=Origin("file.json", number),
    )


def squad_file(directory: Path, *entries: dict[str, Any], context: str = "The cat sat.") -> Path:
    """A file with one paragraph."""
    path = directory / "squad.json"
    paragraph = {"context": context, "qas": list(entries)}
    content = {"version": "v2.0", "data": [{"title": "Cats", "paragraphs": [paragraph]}]}
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return path


def entry(id: str = "1", **fields: Any) -> dict[str, Any]:
    """A question as the file has it; a field given as None is left out."""
    whole = {
        "id": id,
        "question": "Who sat?",
        "answers": [{"text": "cat", "answer_start": 4}],
        **fields,
    }
    return {key: value for key, value in whole.items() if value is not None}
