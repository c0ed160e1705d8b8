"""Dependency parsing: a head and a relation for each word, in CoNLL-U."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.errors import UserError
from bert_jax.tasks.config import ParsingConfig
from bert_jax.tasks.examples import LabelSet, listed
from bert_jax.tasks.parsing.rows import ParsingRows
from bert_jax.tasks.parsing.sources import Sentence, read_sentences
from bert_jax.tasks.parsing.trees import Tree, best_tree, right_arcs, universal
from bert_jax.tasks.reports.classes import class_rows
from bert_jax.tasks.reports.intervals import Grounds
from bert_jax.tasks.task import Examined, HeadKind, LabelSpec, Outputs, Split, Task
from bert_jax.tokenization.tokenizer import Tokenizer

_METRICS = ("las", "uas")
_UNREAD = "dep"  # relation of words that did not fit into a row, where the model knows it


class ParsingTask(Task[ParsingConfig]):
    """A dependency-parsing task, configured by kind parsing."""

    objective: HeadKind = "arcs"

    def __init__(self, config: ParsingConfig, spec: LabelSpec, tokenizer: Tokenizer) -> None:
        super().__init__(config, spec, tokenizer)
        self.numbers = {name: number for number, name in enumerate(spec.labels)}
        self.num_outputs = len(spec.labels)
        self.metric = config.choose_metric(_METRICS)

    @classmethod
    def open(cls, config: ParsingConfig, tokenizer: Tokenizer) -> Task:
        """Read training and dev data."""
        train, dev = (read_sentences(config.source(name)) for name in ("train", "dev"))
        for name, sentences in ((config.train, train), (config.dev, dev)):
            if sentences[0].heads is None:
                raise UserError(f"{name}: all heads are _; a file with trees is needed")
        met = {relation for each in train for relation in each.relations or ()}
        labels = LabelSet(config.labels) if config.labels else LabelSet.of(met)
        if lacks := sorted(met - set(labels.names)):
            raise UserError(
                f"task.labels lacks relations of {config.train}: {listed(lacks)}; add them"
            )
        task = cls(config, LabelSpec(labels.names), tokenizer)
        return task._with_splits(
            ParsingSplit(task, "train", train), [ParsingSplit(task, "dev", dev)]
        )

    def open_split(self, source: str, *, labelled: bool = True) -> "ParsingSplit":
        """Read another file; see `Task.open_split`."""
        return ParsingSplit(self, Path(source).name, read_sentences(source, labelled=labelled))


class ParsingSplit(Split):
    """Sentences of one file."""

    def __init__(self, task: ParsingTask, name: str, sentences: Sequence[Sentence]) -> None:
        self._task = task
        self._sentences = sentences
        self._read = ParsingRows(sentences, task.tokenizer, task.numbers, task.config.length)
        met = {relation for each in sentences for relation in each.relations or ()}
        strange = sorted(met - set(task.numbers))
        note = f"{name}: relations that the model does not know count as misses: {listed(strange)}"
        notes = (note,) if strange else ()
        super().__init__(name, self._read.rows, [*notes, *self._read.warnings], _METRICS)

    @cached_property
    def constant_score(self) -> float:
        """Score of the best constant arc: to the root or to a word at a fixed distance."""
        if self._gold is None:
            return math.nan
        counts = Counter(
            (head and head - word, universal(relation) if self._task.metric == "las" else "")
            for tree in self._gold
            for word, (head, relation) in enumerate(zip(*tree, strict=True), 1)
        )
        return max(counts.values()) / counts.total()

    def texts(self) -> list[tuple[str, ...]]:
        """Return each sentence as its words, joined by spaces."""
        return [(" ".join(each.words),) for each in self._sentences]

    def truth(self) -> Sequence[Any]:
        """Return the heads and relations of each sentence, None for a sentence without a tree."""
        if self._gold is None:
            return [None] * len(self._sentences)
        return [[list(tree.heads), list(tree.relations)] for tree in self._gold]

    def select(self, examples: Sequence[int]) -> tuple[Split, np.ndarray]:
        """Return a split of some sentences, and their rows; see `Split.select`."""
        some = [self._sentences[number] for number in examples]
        return ParsingSplit(self._task, self.name, some), np.array(examples, int)

    def _score(self, outputs: Outputs, saved: Mapping[str, float] | None) -> dict[str, float]:
        """Score the trees as the script of the CoNLL 2018 shared task does."""
        del saved
        words, heads, both = self._counts(self._trees(outputs)).sum(axis=0).tolist()
        return {"las": both / words, "uas": heads / words}

    def _examine(self, outputs: Outputs, scores: Mapping[str, float]) -> Examined:
        """Return the data for intervals, and precision and recall by relation."""
        del scores
        assert self._gold is not None  # of `_score`
        trees = self._trees(outputs)
        each = self._counts(trees).astype(float)

        def score(w: np.ndarray) -> dict[str, np.ndarray]:
            words, heads, both = (w @ each).T
            return {"las": both / words, "uas": heads / words}

        gold, said, right = Counter[str](), Counter[str](), Counter[str]()
        for truth, guess in zip(self._gold, trees, strict=True):
            names = [[universal(name) for name in tree.relations] for tree in (truth, guess)]
            gold.update(names[0])
            said.update(names[1])
            for a, b, ours, theirs in zip(truth.heads, guess.heads, *names, strict=True):
                right[ours] += a == b and ours == theirs
        found = sorted(gold.keys() | said.keys())
        counts = (np.array([each[name] for name in found]) for each in (right, said, gold))
        return Examined(
            Grounds(score, self.units, each[:, 2] / each[:, 0]),
            {"classes": class_rows(found, *counts)},
        )

    def _prediction_files(
        self, outputs: Outputs, scores: Mapping[str, float]
    ) -> Iterator[tuple[str, str]]:
        """Yield predictions.conllu: the sentences that were read, with the predicted trees."""
        del scores
        pairs = zip(self._sentences, self._trees(outputs), strict=True)
        yield "predictions.conllu", "".join(each.with_tree(*tree) for each, tree in pairs)

    @cached_property
    def _gold(self) -> list[Tree] | None:
        trees = [
            Tree(each.heads, each.relations)
            for each in self._sentences
            if each.heads is not None and each.relations is not None
        ]
        return trees if len(trees) == len(self._sentences) else None

    def _counts(self, trees: Sequence[Tree]) -> np.ndarray:
        """Count words, right heads, and right heads with right relations by sentence, (N, 3)."""
        if self._gold is None:
            raise UserError(f"{self.name} has no trees, so it cannot be scored; predict it")
        pairs = zip(self._gold, trees, strict=True)
        return np.array([(len(gold.heads), *right_arcs(gold, tree)) for gold, tree in pairs])

    def _trees(self, outputs: Outputs) -> list[Tree]:
        """Return the best tree of each sentence from outputs (L, L, 2); see `objectives.task`."""
        names, found = self._task.spec.labels, []
        unread = _UNREAD if _UNREAD in names else names[0]
        for sentence, positions, values in zip(
            self._sentences, self._read.positions, outputs, strict=True
        ):
            at = np.array([0, *positions])
            arcs, relations = np.moveaxis(np.asarray(values)[np.ix_(positions, at)], -1, 0)
            heads = best_tree(arcs.astype(np.float64))
            numbers = relations[np.arange(len(heads)), heads].astype(int)
            rest = range(len(heads), len(sentence.words))
            said = [*(names[number] for number in numbers), *[unread] * len(rest)]
            found.append(Tree([*heads.tolist(), *rest], said))
        return found
