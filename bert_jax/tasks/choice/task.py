"""Multiple choice: one score for each choice; the highest wins (Zellers et al. 2018)."""

import json
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import softmax

from bert_jax.errors import UserError
from bert_jax.tasks.choice.sources import (
    ChoiceExample,
    read_choices,
    read_other_choices,
)
from bert_jax.tasks.config import ChoiceConfig
from bert_jax.tasks.examples import TextExample
from bert_jax.tasks.overlap import example_key
from bert_jax.tasks.problems import counted
from bert_jax.tasks.reports.intervals import Grounds, means
from bert_jax.tasks.task import Examined, HeadKind, LabelSpec, Outputs, Split, Task
from bert_jax.tasks.text.rows import text_rows
from bert_jax.tokenization.tokenizer import Tokenizer


class ChoiceTask(Task[ChoiceConfig]):
    """A multiple-choice task, configured by kind choice."""

    objective: HeadKind = "choice"
    num_outputs = 1

    def __init__(self, config: ChoiceConfig, spec: LabelSpec, tokenizer: Tokenizer) -> None:
        super().__init__(config, spec, tokenizer)
        self.metric = config.choose_metric(["accuracy"])

    @classmethod
    def open(cls, config: ChoiceConfig, tokenizer: Tokenizer) -> Task:
        """Read training and dev data."""
        train, dev = (read_choices(config.source(name), config) for name in ("train", "dev"))
        task = cls(config, LabelSpec(), tokenizer)
        return task._with_splits(ChoiceSplit(task, "train", train), [ChoiceSplit(task, "dev", dev)])

    def open_split(self, source: str, *, labelled: bool = True) -> "ChoiceSplit":
        """Read another file; see `Task.open_split`."""
        found, notes = read_other_choices(source, self.config, labelled=labelled)
        name = source if source.startswith("tfds:") else Path(source).name
        return ChoiceSplit(self, name, found, notes)


class ChoiceSplit(Split):
    """Texts of one file with their choices."""

    def __init__(
        self,
        task: ChoiceTask,
        name: str,
        examples: Sequence[ChoiceExample],
        notes: tuple[str, ...] = (),
    ) -> None:
        self._task = task
        self._examples = examples
        labels = [each.label for each in examples]
        self._labels = None if None in labels else np.array(labels, np.int32)
        group, length = len(task.config.choices), task.config.length
        pairs = [
            TextExample(each.id, each.text, choice, None, each.origin)
            for each in examples
            for choice in each.choices
        ]
        found = text_rows(pairs, task.tokenizer, length, None)
        lines = [
            examples[number].origin.line for number in sorted({row // group for row in found.long})
        ]
        what = f"texts of which a choice makes more than {length} tokens, cut there"
        warnings = (counted(examples[0].origin.path, what, lines),) if lines else ()
        rows = replace(found.rows, labels=self._labels, group=group)
        super().__init__(name, rows, [*notes, *warnings], ["accuracy"])

    @cached_property
    def constant_score(self) -> float:
        """Accuracy of always picking the most frequent right choice; NaN without labels."""
        if self._labels is None:
            return math.nan
        return float(np.bincount(self._labels).max() / len(self._labels))

    def texts(self) -> list[tuple[str, ...]]:
        """Return the text and the choices of each example."""
        return [(each.text, *each.choices) for each in self._examples]

    def truth(self) -> Sequence[Any]:
        """Return the number of each example's right choice, None where the example has no label."""
        return [each.label for each in self._examples]

    def group_keys(self) -> list[Sequence[Hashable]]:
        """Return the text of each example, without its choices."""
        return [[example_key([example.text]) for example in self._examples]]

    def select(self, examples: Sequence[int]) -> tuple[Split, np.ndarray]:
        """Return a split of some examples, and their rows; see `Split.select`."""
        some = [self._examples[number] for number in examples]
        return ChoiceSplit(self._task, self.name, some), np.array(examples, int)

    def _score(self, outputs: Outputs, saved: Mapping[str, float] | None) -> dict[str, float]:
        del saved
        return {"accuracy": float(self._hits(outputs).mean())}

    def _examine(self, outputs: Outputs, scores: Mapping[str, float]) -> Examined:
        """Return the data for the interval of the accuracy."""
        del scores
        hits = self._hits(outputs)
        return Examined(Grounds(means(["accuracy"], hits[:, None]), self.units, hits), {})

    def _prediction_files(
        self, outputs: Outputs, scores: Mapping[str, float]
    ) -> Iterator[tuple[str, str]]:
        """Yield predictions.jsonl: each example's choice, its text, and all probabilities."""
        del scores
        names, shares = self._task.config.names, softmax(self._logits(outputs), axis=1)
        lines = []
        for example, mine in zip(self._examples, shares, strict=True):
            best = int(mine.argmax())
            listed = dict(zip(names, np.round(mine, 6).tolist(), strict=True))
            entry = {"id": example.id, "label": names[best], "choice": example.choices[best]}
            lines.append(json.dumps({**entry, "probabilities": listed}, ensure_ascii=False))
        yield "predictions.jsonl", "\n".join(lines) + "\n"

    def _hits(self, outputs: Outputs) -> np.ndarray:
        if self._labels is None:
            raise UserError(f"{self.name} has no labels, so it cannot be scored; predict it")
        hits: np.ndarray = self._logits(outputs).argmax(axis=1) == self._labels
        return hits

    def _is_finite(self, outputs: Outputs) -> bool:
        return bool(np.isfinite(self._logits(outputs)).all())

    def _logits(self, outputs: Outputs) -> np.ndarray:
        logits = np.asarray(outputs, np.float64)
        expected = (len(self._examples), self.rows.group)
        if logits.shape != expected:
            raise ValueError(f"{self.name}: outputs {logits.shape}, {expected} are needed")
        return logits
