"""Dependency parsing: a head and a relation for each word, in CoNLL-U."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from bert_jax.errors import UserError
from bert_jax.tasks.config import ParsingConfig
from bert_jax.tasks.examples import Data, LabelSet, counted, file_name, listed
from bert_jax.tasks.parsing.trees import (
    Sentence,
    Tree,
    best_tree,
    read_sentences,
    right_arcs,
    universal,
)
from bert_jax.tasks.reports.classes import class_rows
from bert_jax.tasks.reports.intervals import Grounds
from bert_jax.tasks.rows import NO_LABEL, Rows
from bert_jax.tasks.task import Examined, HeadKind, LabelSpec, Outputs, Split, SplitScores, Task
from bert_jax.tokenization.tokenizer import make_row

_UNREAD = "dep"  # relation of words that did not fit into a row, if the model knows "dep"


class ParsingSplit(Split):
    """Sentences of one file, their rows and their scores."""

    _task: "ParsingTask"
    PER_TOKEN = True
    LABELS = "trees"

    def __init__(self, task: "ParsingTask", data: Data[Sentence]) -> None:
        self._task, sentences = task, data.examples
        rows, self._positions, cut = parsing_rows(sentences, task)
        met = {name for each in sentences if each.tree for name in each.tree.relations}
        if strange := sorted(met - set(task.spec.labels)):
            cut = (
                f"{data.name}: relations that the model does not know count as misses: "
                f"{listed(strange)}",
                *cut,
            )
        super().__init__(data, rows, task.metrics, cut)

    def _best_constant(self, gold: list[Tree]) -> float:
        """Return the best score if all heads are the root, or at one fixed offset from the word."""
        counts = Counter(
            (head and head - word, universal(relation) if self._task.metric == "las" else "")
            for tree in gold
            for word, (head, relation) in enumerate(zip(*tree, strict=True), 1)
        )
        return max(counts.values()) / counts.total()

    def _examine(self, outputs: Outputs, scores: SplitScores) -> Examined:
        """Return data for intervals, and precision and recall by relation (as in CoNLL 2018)."""
        trees = self._trees(outputs)
        pairs = zip(self._gold, trees, strict=True)
        # By sentence: words, right heads, right heads with the right relation.
        each = np.array([(len(gold.heads), *right_arcs(gold, tree)) for gold, tree in pairs], float)

        def score(w: np.ndarray) -> dict[str, np.ndarray]:
            words, heads, both = (w @ each).T
            return {"las": both / words, "uas": heads / words}

        def details() -> dict[str, Any]:
            gold, said, right = Counter[str](), Counter[str](), Counter[str]()
            for truth, guess in zip(self._gold, trees, strict=True):
                names = [[universal(name) for name in tree.relations] for tree in (truth, guess)]
                gold.update(names[0])
                said.update(names[1])
                for a, b, ours, theirs in zip(truth.heads, guess.heads, *names, strict=True):
                    right[ours] += a == b and ours == theirs
            found = sorted(gold.keys() | said.keys())
            counts = ([each[name] for name in found] for each in (right, said, gold))
            return {"classes": class_rows(found, *counts)}

        return Examined(Grounds(score, self.units, each[:, 2] / each[:, 0]), details)

    def _prediction_files(self, outputs: Outputs, scores: SplitScores) -> Iterator[tuple[str, str]]:
        pairs = zip(self._examples, self._trees(outputs), strict=True)
        yield "predictions.conllu", "".join(each.with_tree(tree) for each, tree in pairs)

    def _trees(self, outputs: Outputs) -> list[Tree]:
        """Return each sentence's best tree, given its outputs (L, L, 2); see `objectives.task`."""
        names, found = self._task.spec.labels, []
        unread = _UNREAD if _UNREAD in names else names[0]
        rows = zip(self._examples, self._positions, outputs, strict=True)
        for sentence, positions, values in rows:
            at = np.array([0, *positions])
            arcs, relations = np.moveaxis(np.asarray(values)[np.ix_(positions, at)], -1, 0)
            heads = best_tree(arcs.astype(np.float64))
            numbers = relations[np.arange(len(heads)), heads].astype(int)
            rest = range(len(heads), len(sentence.words))
            said = [*(names[number] for number in numbers), *[unread] * len(rest)]
            found.append(Tree([*heads.tolist(), *rest], said))
        return found


class ParsingTask(Task[ParsingConfig]):
    """A dependency-parsing task, configured by `kind: parsing`."""

    SPLIT = ParsingSplit
    objective: HeadKind = "arcs"

    @classmethod
    def _read(cls, config: ParsingConfig) -> tuple[LabelSpec, Sequence[Data[Sentence]]]:
        train, dev = (read_sentences(config.source(name)) for name in ("train", "dev"))
        for name, sentences in ((config.train, train), (config.dev, dev)):
            if sentences[0].tree is None:
                raise UserError(f"{name}: all heads are _; name a file with trees")
        met = {name for each in train if each.tree for name in each.tree.relations}
        labels = LabelSet(config.labels) if config.labels else LabelSet.of(met)
        if lacks := sorted(met - set(labels.names)):
            raise UserError(
                f"task.labels lacks relations of {config.train}: {listed(lacks)}; add them"
            )
        return LabelSpec(labels.names), [Data("train", train), Data("dev", dev)]

    def _read_other(self, source: str, labelled: bool) -> Data[Sentence]:
        return Data(file_name(source), read_sentences(source, labelled=labelled))


def parsing_rows(
    sentences: Sequence[Sentence], task: ParsingTask
) -> tuple[Rows, list[np.ndarray], tuple[str, ...]]:
    """Return rows of sentences, the position of each word, and warnings about cut sentences.

    A word's position is the position of its first sub-word; the root's position is 0. A sentence
    longer than a row is cut; the words after the cut have no position.
    """
    relations = {name: number for number, name in enumerate(task.spec.labels)}
    tokenizer, room = task.tokenizer, task.config.length - 2
    if not tokenizer.special_ids.opens:
        raise UserError(
            "task.kind is 'parsing', but the tokenizer has no [CLS] for the root; set another init"
        )
    words = list(dict.fromkeys(word for each in sentences for word in each.words))
    unknown = np.array([tokenizer.special_ids.unk], np.int32)
    encoded = zip(words, tokenizer.encode_words(words), strict=True)
    pieces = {word: ids if len(ids) else unknown for word, ids in encoded}
    read: list[np.ndarray] = []
    tokens: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for sentence in sentences:
        parts = [pieces[word] for word in sentence.words]
        firsts = np.cumsum([0, *map(len, parts[:-1])])
        row = make_row(tokenizer, np.concatenate(parts)[:room]).ids
        positions = 1 + firsts[firsts < room]
        tokens.append(row)
        read.append(positions)
        labels.append(_labels(sentence, positions, relations, len(row)))
    lengths = np.array([len(ids) for ids in tokens], np.int32)
    known = all(sentence.tree is not None for sentence in sentences)
    what = (
        f"sentences of more than {room} sub-words, cut there: each word after the cut is "
        "attached to the word before it"
    )
    pairs = zip(sentences, read, strict=True)
    cut = counted(what, [each.origin for each, mine in pairs if len(mine) < len(each.words)])
    return Rows(tokens, lengths, labels if known else None), read, cut


def _labels(
    sentence: Sentence, positions: np.ndarray, relations: Mapping[str, int], length: int
) -> Int32[np.ndarray, " n"]:
    """Encode each word's arc: (head's position) * (number of relations) + (relation's index)."""
    found = np.full(length, NO_LABEL, np.int32)
    if sentence.tree is None:
        return found
    at = [0, *positions.tolist()]
    for position, head, relation in zip(positions.tolist(), *sentence.tree, strict=False):
        if head < len(at) and relation in relations:
            found[position] = at[head] * len(relations) + relations[relation]
    return found
