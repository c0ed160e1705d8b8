"""Conversion of texts that belong together to rows of token ids."""

from collections.abc import Iterable

import numpy as np

from bert_jax.tasks.config import EmbeddingTaskConfig
from bert_jax.tasks.embedding.sources import GroupData, TextGroup, numbered, text_key
from bert_jax.tasks.problems import counted
from bert_jax.tasks.rows import Rows
from bert_jax.tokenization.tokenizer import Tokenizer, make_row, num_special

_NO_ROW = np.zeros(0, np.int32)


def group_rows(
    data: GroupData, config: EmbeddingTaskConfig, tokenizer: Tokenizer, *, twice: bool = False
) -> tuple[Rows, list[str]]:
    """Return the rows of the texts of one file, and warnings of texts that were cut.

    All groups have as many rows as the largest group; empty rows stand for missing texts. Texts
    begin with the prefix of queries or documents, and are cut at their end.

    Args:
        data: Texts.
        config: The task: prefixes and lengths.
        tokenizer: Tokenizer of the model.
        twice: Whether a group holds its single text twice (kind texts).
    """
    is_pair = len(data.groups[0].texts) > 1
    limits = {"query": config.query_length, "document": config.length}
    prefixes = {"query": config.query_prefix, "document": config.document_prefix}
    found: dict[tuple[str, str], np.ndarray] = {}
    cut: set[tuple[str, str]] = set()
    for side in ("query", "document"):
        different = list(dict.fromkeys(_of_side(data.groups, side, is_pair)))
        room = limits[side] - num_special(tokenizer, pair=False)
        encoded = tokenizer.encode_batch([prefixes[side] + text for text in different])
        for text, ids in zip(different, encoded, strict=True):
            found[side, text] = make_row(tokenizer, ids[:room]).ids
            if len(ids) > room:
                cut.add((side, text))
    groups = [group.texts for group in data.groups]
    if twice and data.kind == "texts":
        groups = [(text, text) for (text,) in groups]
    size = max(map(len, groups))
    numbers = numbered(data.groups)
    number_of = {text: numbers[text_key(text)] for texts in groups for text in dict.fromkeys(texts)}
    tokens: list[np.ndarray] = []
    text_ids: list[int] = []
    for texts in groups:
        for place, text in enumerate(texts):
            tokens.append(found["query" if is_pair and place == 0 else "document", text])
            text_ids.append(number_of[text])
        tokens += [_NO_ROW] * (size - len(texts))
        text_ids += [-1] * (size - len(texts))
    labels = None
    if data.groups[0].label is not None:
        dtype = np.int32 if data.kind == "classes" else np.float32
        labels = np.array([group.label for group in data.groups], dtype)
    rows = Rows(
        tokens, np.array([len(ids) for ids in tokens], np.int32), labels, size,
        np.array(text_ids, np.int32),
    )  # fmt: skip
    return rows, list(_warnings(data, limits, cut, is_pair))


def _of_side(groups: Iterable[TextGroup], side: str, is_pair: bool) -> Iterable[str]:
    for group in groups:
        if side == "query":
            yield from group.texts[:1] if is_pair else ()
        else:
            yield from group.texts[1:] if is_pair else group.texts


def _warnings(
    data: GroupData, limits: dict[str, int], cut: set[tuple[str, str]], is_pair: bool
) -> Iterable[str]:
    """Yield a warning for each side, query or document, whose texts were cut."""
    for side, limit in limits.items():
        lines = [
            group.origin.line
            for group in data.groups
            if any((side, text) in cut for text in _of_side([group], side, is_pair))
        ]
        if lines:
            what = {"query": "queries", "document": "documents" if is_pair else "texts"}[side]
            what = f"rows with {what} of more than {limit} tokens, cut there"
            yield counted(data.groups[0].origin.path, what, lines)
