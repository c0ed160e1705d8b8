"""Multiple choice: each choice gets a score, and the highest wins (Zellers et al. 2018)."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import softmax

from bert_jax.tasks.config import ChoiceConfig, TableConfig
from bert_jax.tasks.examples import Data, LabelSet, Origin, TextExample, counted
from bert_jax.tasks.long_texts import text_rows
from bert_jax.tasks.overlap import example_key
from bert_jax.tasks.reports.intervals import Grounds, means
from bert_jax.tasks.rows import Rows
from bert_jax.tasks.task import Examined, HeadKind, LabelSpec, Outputs, Split, SplitScores, Task
from bert_jax.tasks.text.tables import as_text, read_labelled, read_other_texts
from bert_jax.tokenization.tokenizer import Tokenizer


def read_choices(
    source: str, config: ChoiceConfig, read: Any = read_labelled, **options: Any
) -> Data[TextExample]:
    """Read texts with choices. `read` is the function in `text.tables` that reads the table."""
    columns = [*filter(None, [config.beginning]), *config.choices]

    def choices(origin: Origin, values: Sequence[Any]) -> list[str]:
        texts = [as_text(origin, *each) for each in zip(columns, values, strict=True)]
        begin = texts[: -len(config.choices)]
        return [" ".join(filter(None, (*begin, each))) for each in texts[len(begin) :]]

    table = TableConfig(text=config.text, label=config.label, id=config.id, format=config.format)
    return read(source, table, LabelSet(config.names), more=columns, texts_of=choices, **options)


def grouped_rows(
    groups: Sequence[tuple[TextExample, Sequence[str]]], tokenizer: Tokenizer, length: int
) -> tuple[Rows, list[Origin]]:
    """Encode each example's text with each of its other texts as a row of at most `length` tokens.

    Smaller groups are padded with empty rows. The second value has the origins of cut examples.
    """
    pairs = [replace(each, text_pair=text) for each, texts in groups for text in texts]
    found = text_rows(pairs, tokenizer, length, None)
    made = iter(zip(found.rows.tokens, found.rows.second_start, strict=True))
    size = max(2, *(len(texts) for _, texts in groups))  # `Rows` has no groups of one
    rows = [
        next(made) if number < len(texts) else (np.zeros(0, np.int32), 0)
        for _, texts in groups
        for number in range(size)
    ]
    tokens, starts = zip(*rows, strict=True)
    cut = dict.fromkeys(pairs[number].origin for number in found.long)
    return Rows(tokens, np.array(starts, np.int32), group=size), [*cut]


class ChoiceSplit(Split):
    """Examples of one file, each a text with its choices."""

    _task: "ChoiceTask"

    def __init__(self, task: "ChoiceTask", data: Data[TextExample]) -> None:
        self._task = task
        groups = [(each, each.more) for each in data.examples]
        rows, cut = grouped_rows(groups, task.tokenizer, length := task.config.length)
        what = f"texts of more than {length} tokens together with one of their choices, cut there"
        labels = None if data.truth is None else np.array(data.truth, np.int32)
        super().__init__(data, replace(rows, labels=labels), ["accuracy"], counted(what, cut))

    def _best_constant(self, gold: list[int]) -> float:
        return float(np.bincount(gold).max() / len(gold))

    def group_keys(self) -> list[Sequence[Hashable]]:
        """Return a single list with one key per example: a hash of the text without its choices."""
        return [[example_key([example.text]) for example in self._examples]]

    def _examine(self, outputs: Outputs, scores: SplitScores) -> Examined:
        hits = self._logits(outputs).argmax(axis=1) == np.array(self._gold)
        return Examined(Grounds(means(["accuracy"], hits[:, None]), self.units, hits))

    def _entries(self, outputs: Outputs, scores: SplitScores) -> Iterable[dict[str, Any]]:
        names, found = self._task.config.names, softmax(self._logits(outputs), axis=1)
        for example, shares in zip(self._examples, found, strict=True):
            best = int(shares.argmax())
            listed = dict(zip(names, np.round(shares, 6).tolist(), strict=True))
            yield {"label": names[best], "choice": example.more[best], "probabilities": listed}

    def _logits(self, outputs: Outputs) -> np.ndarray:
        return self._stacked(outputs, len(self._examples), self.rows.group)


class ChoiceTask(Task[ChoiceConfig]):
    """A multiple-choice task, configured by `kind: choice`."""

    SPLIT = ChoiceSplit
    objective: HeadKind = "choice"

    @classmethod
    def _read(cls, config: ChoiceConfig) -> tuple[LabelSpec, Sequence[Data[TextExample]]]:
        return LabelSpec(), [read_choices(config.source(name), config) for name in ("train", "dev")]

    def _read_other(self, source: str, labelled: bool) -> Data[TextExample]:
        return read_choices(source, self.config, read_other_texts, labelled=labelled)
