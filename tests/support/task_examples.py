"""A vocabulary and small files, for the tests of tasks."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.tasks.config import TaskConfig
from bert_jax.tasks.opening import open_task
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS
from bert_jax.tokenization.wordpiece import WordPieceOptions, WordPieceTokenizer

_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
TOKENIZER = WordPieceTokenizer(
    [*SPECIAL_TOKENS, *_CHARACTERS, *(f"##{c}" for c in _CHARACTERS), *".,?"],
    WordPieceOptions(lowercase=True),
)
"""A token for each letter."""


def put(path: Path, *lines: str) -> str:
    """Writes lines into a file; gives its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return f"{path}"


def put_json(path: Path, *rows: Mapping[str, Any]) -> str:
    """Writes JSON lines."""
    return put(path, *(json.dumps(row) for row in rows))


def opened(config: TaskConfig, max_positions: int = 512) -> Any:
    """The task, with the vocabulary of letters."""
    return open_task(config, TOKENIZER, max_positions)


def pointing_at(labels: Iterable[int], classes: int) -> np.ndarray:
    """(N, classes) logits whose greatest is at the label."""
    return 4 * np.eye(classes, dtype=np.float32)[list(labels)]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
