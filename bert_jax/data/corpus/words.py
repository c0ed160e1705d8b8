"""Counts of words for training a tokenizer, from all text of the sources, on an engine."""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bert_jax.data.corpus.documents import ReadOptions, Source
from bert_jax.data.corpus.intake import DropReport
from bert_jax.data.corpus.sharded.engine import Engine, Task, plan_tasks
from bert_jax.terminal import progress_bar
from bert_jax.tokenization.training import MEMORY, CountedWords, count_words
from bert_jax.tokenization.wordpiece import WordPieceOptions

_TASK_BYTES = 64 << 20


def counted_texts(
    sources: Sequence[Source], options: WordPieceOptions, engine: Engine, *,
    memory: float = MEMORY, most_bad: float = ReadOptions.most_bad, progress: bool = True,
) -> Iterator[CountedWords]:  # fmt: skip
    """Count the words of all texts, for `train_wordpiece`; yield the counts of each task in order.

    Each process counts within `memory`. The result does not depend on the engine. Raise a UserError
    if a source cannot be read, or more than the share `most_bad` of the records is bad.
    """
    tasks, bad = plan_tasks(sources, _TASK_BYTES), DropReport()
    size = sum(task.size for task in tasks)
    found = engine.map(functools.partial(_count, options, memory), tasks)
    bar = progress_bar(of="counting words", unit="B", total=size, shown=progress)
    with bar, contextlib.closing(found):
        for task, (words, lost) in zip(tasks, found, strict=True):
            bad.merge(lost)
            bar.update(task.size)
            yield words
    bad.check(most_bad, size)


def _count(
    options: WordPieceOptions, memory: float, task: Task
) -> tuple[CountedWords, Mapping[str, Any]]:
    texts = (text for source in task.sources for text in source.texts())
    words, bad = count_words(texts, options, memory), DropReport()
    for source in task.sources:
        bad.merge(vars(source.bad))
    return words, vars(bad)
