"""Sentences with dependency trees in CoNLL-U, search for the best tree, and counts of right arcs.

The format is defined at https://universaldependencies.org/format.html. The best tree is the maximum
spanning arborescence (Chu and Liu 1965, Edmonds 1967). Arcs are counted as in the CoNLL 2018 shared
task (Zeman et al. 2018, section 5): punctuation counts, and subtypes of relations are ignored.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int64

from bert_jax.errors import UserError
from bert_jax.tasks.examples import Origin, Problems, text_lines


class Tree(NamedTuple):
    """A dependency tree: each word's head (1 is the first word, 0 is the root) and relation."""

    heads: Sequence[int]
    relations: Sequence[str]


def right_arcs(gold: Tree, predicted: Tree) -> tuple[int, int]:
    """Count the words with the right head, and the words with the right head and relation."""
    heads = [a == b for a, b in zip(gold.heads, predicted.heads, strict=True)]
    words = zip(heads, gold.relations, predicted.relations, strict=True)
    both = [right and universal(a) == universal(b) for right, a, b in words]
    return sum(heads), sum(both)


def universal(relation: str) -> str:
    """Return a relation without its subtype, which follows a colon."""
    return relation.partition(":")[0]


def tree_fault(heads: Sequence[int]) -> str:
    """Explain why `heads` are not a tree with a single root; "" if they are."""
    if (roots := sum(head == 0 for head in heads)) != 1:
        return f"{roots} words have the head 0"
    cycle = find_cycle(np.array([0, *heads]))
    return f"the heads of words {', '.join(map(str, cycle))} form a cycle" if cycle else ""


def find_cycle(heads: Int64[np.ndarray, " n"]) -> list[int]:
    """Return the nodes of a cycle, ascending; [] if all nodes lead to node 0."""
    state = np.zeros(len(heads), int)  # number of the walk that first met each node; 0: none
    for start in range(1, len(heads)):
        node = start
        while node and not state[node]:
            state[node] = start
            node = int(heads[node])
        if node and state[node] == start:
            cycle = {node}
            while (node := int(heads[node])) not in cycle:
                cycle.add(node)
            return sorted(cycle)
    return []


def best_tree(scores: Float[np.ndarray, "n n1"]) -> Int64[np.ndarray, " n"]:
    """Return the heads of the single-rooted tree with the greatest sum of scores.

    Row i of `scores` has finite scores of the possible heads of word i + 1: column 0 is the root,
    column j is word j. A word's score as its own head is ignored. A head is 0 or a word's number.
    """
    count = len(scores)
    whole = np.zeros((count + 1, count + 1))
    whole[1:] = scores
    # A root arc costs more than all other arcs together, so the best tree has only one root arc.
    spread = (scores.max(axis=1) - scores.min(axis=1)).sum()
    whole[1:, 0] -= spread + 1.0
    np.fill_diagonal(whole, -np.inf)
    return _arborescence(whole)[1:]


def _arborescence(scores: Float[np.ndarray, "n n"]) -> Int64[np.ndarray, " n"]:
    """Return each node's best parent, with root 0; `scores[i, j]` scores j as the parent of i."""
    parents = scores.argmax(axis=1)
    parents[0] = 0
    if not (cycle := find_cycle(parents)):
        return parents
    inside = np.array(cycle)
    outside = np.setdiff1d(np.arange(len(scores)), inside)
    # The cycle becomes the last node of a smaller graph; an arc into the node replaces a cycle arc.
    entering = scores[np.ix_(inside, outside)] - scores[inside, parents[inside]][:, None]
    leaving = scores[np.ix_(outside, inside)]
    smaller = np.full((len(outside) + 1, len(outside) + 1), -np.inf)
    smaller[:-1, :-1] = scores[np.ix_(outside, outside)]
    smaller[-1, :-1] = entering.max(axis=0)
    smaller[:-1, -1] = leaving.max(axis=1)
    found = _arborescence(smaller)
    last = len(outside)
    for node, parent in enumerate(found[:-1].tolist()):
        if node:
            from_cycle = inside[leaving[node].argmax()]
            parents[outside[node]] = from_cycle if parent == last else outside[parent]
    entry = int(found[last])
    parents[inside[entering[:, entry].argmax()]] = outside[entry]
    return parents


_ID, _FORM, _HEAD, _RELATION, _GRAPH = 0, 1, 6, 7, 8
_COLUMNS = 10


@dataclass(frozen=True)
class Sentence:
    """A sentence of syntactic words, and the lines that it was read from."""

    id: str
    """Index of the sentence in the file."""
    words: tuple[str, ...]
    lines: tuple[str, ...]
    """Lines of the file: comments, words, ranges (`3-4`) and empty nodes (`5.1`)."""
    places: tuple[int, ...]
    """Position of each word's line in `lines`."""
    origin: Origin
    """File and line of the first word."""
    tree: Tree | None = None
    """Heads and relations, with subtypes; None if the file has no trees."""

    @property
    def texts(self) -> tuple[str]:
        """The words, joined by spaces."""
        return (" ".join(self.words),)

    @property
    def label(self) -> Tree | None:
        """The tree."""
        return self.tree

    def with_tree(self, tree: Tree) -> str:
        """Return the sentence in CoNLL-U with another tree.

        Everything else stays as read, except the graph of enhanced dependencies, which is left out.
        """
        lines = list(self.lines)
        for place, head, relation in zip(self.places, *tree, strict=True):
            columns = lines[place].split("\t")
            columns[_HEAD], columns[_RELATION], columns[_GRAPH] = f"{head}", relation, "_"
            lines[place] = "\t".join(columns)
        return "\n".join(lines) + "\n\n"


def read_sentences(path: str | Path, *, labelled: bool = True) -> list[Sentence]:
    """Read CoNLL-U: ten tab-separated columns, a blank line after each sentence.

    Ranges (`3-4`) and empty nodes (`5.1`) are skipped. If all heads are `_`, or not `labelled`,
    sentences have no trees. Raise a UserError if the file is missing, is not UTF-8 or has no words;
    a line does not have ten columns; ids are not 1, 2, ...; a word is empty; or heads and relations
    do not form a tree with one root. The message lists the first faults and counts all.
    """
    path = Path(path)
    problems = Problems(str(path), "lines")
    found: list[Sentence] = []
    for first, lines in _blocks(path):
        try:
            found.append(_sentence(path, f"{len(found)}", first, lines))
        except UserError as error:
            problems.add(error)
    problems.check()
    if not found:
        raise UserError(f"{path}: no words; expected a line of ten columns for each word")
    columns = [columns_of(each) for each in found]
    if not labelled or all(row[_HEAD] == "_" for rows in columns for row in rows):
        return found
    whole: list[Sentence] = []
    for sentence, rows in zip(found, columns, strict=True):
        try:
            whole.append(_with_labels(sentence, rows))
        except UserError as error:
            problems.add(error)
    problems.check()
    return whole


def _blocks(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield each block of non-blank lines, with the number of its first line, from 1."""
    block: list[str] = []
    for number, line in enumerate([*text_lines(path), ""], 1):
        if line.strip():
            block.append(line)
        elif block:
            if not all(each.startswith("#") for each in block):
                yield number - len(block), block
            block = []


def _sentence(path: Path, id: str, first: int, lines: Sequence[str]) -> Sentence:
    words: list[str] = []
    places: list[int] = []
    for place, line in enumerate(lines):
        if line.startswith("#") and not words:
            continue
        where, columns = f"{path}, line {first + place}", line.split("\t")
        if len(columns) != _COLUMNS:
            raise UserError(f"{where}: {len(columns)} columns separated by tabs; CoNLL-U has 10")
        number = columns[_ID]
        if re.fullmatch(r"\d+[-.]\d+", number, re.ASCII):
            continue
        if number != f"{len(words) + 1}":
            raise UserError(
                f"{where}: the id is {number[:40]!r}; it must be {len(words) + 1}, a range such as "
                "3-4, or an empty node such as 5.1"
            )
        if not columns[_FORM].strip():
            raise UserError(f"{where}: the word is empty; write _ where it is not known")
        words.append(columns[_FORM])
        places.append(place)
    if not words:
        raise UserError(f"{path}, line {first}: a sentence without words; remove it")
    origin = Origin(f"{path}", first + places[0])
    return Sentence(id, tuple(words), tuple(lines), tuple(places), origin)


def columns_of(sentence: Sentence) -> list[list[str]]:
    """Return the ten columns of each word."""
    return [sentence.lines[place].split("\t") for place in sentence.places]


def _with_labels(sentence: Sentence, rows: Sequence[Sequence[str]]) -> Sentence:
    heads: list[int] = []
    start = sentence.origin.line - sentence.places[0]
    for place, row in zip(sentence.places, rows, strict=True):
        where, head = f"{sentence.origin.path}, line {start + place}", row[_HEAD]
        if not re.fullmatch(r"\d{1,6}", head, re.ASCII) or int(head) > len(rows):
            raise UserError(
                f"{where}: the head is {head[:40]!r}; expected a number from 0 to {len(rows)}"
            )
        if row[_RELATION].strip() in ("", "_"):
            raise UserError(f"{where}: the relation is {row[_RELATION]!r}; expected a name")
        heads.append(int(head))
    if fault := tree_fault(heads):
        raise UserError(f"{sentence.origin}: {fault}; the heads must form a tree with one root")
    return replace(sentence, tree=Tree(heads, [row[_RELATION] for row in rows]))
