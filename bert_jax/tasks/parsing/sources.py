"""Sentences with dependency trees, in CoNLL-U (https://universaldependencies.org/format.html)."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bert_jax.errors import UserError
from bert_jax.tasks.examples import Origin
from bert_jax.tasks.parsing.trees import Tree, tree_fault
from bert_jax.tasks.problems import Problems, text_lines

_ID, _FORM, _HEAD, _RELATION, _GRAPH = 0, 1, 6, 7, 8
_COLUMNS = 10


@dataclass(frozen=True)
class Sentence:
    """A sentence of syntactic words, and the lines that it was read from."""

    id: str
    """Number of the sentence in the file, from 0."""
    words: tuple[str, ...]
    lines: tuple[str, ...]
    """Lines of the file: comments, words, ranges (`3-4`) and empty nodes (`5.1`)."""
    places: tuple[int, ...]
    """Number of each word's line among `lines`."""
    origin: Origin
    """Place of the first word."""
    tree: Tree | None = None
    """Heads and relations, with subtypes; None where the file has no trees."""

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

        Everything else stays as it was read, except the graph of enhanced dependencies, which is
        left out.
        """
        lines = list(self.lines)
        for place, head, relation in zip(self.places, *tree, strict=True):
            columns = lines[place].split("\t")
            columns[_HEAD], columns[_RELATION], columns[_GRAPH] = f"{head}", relation, "_"
            lines[place] = "\t".join(columns)
        return "\n".join(lines) + "\n\n"


def read_sentences(path: str | Path, *, labelled: bool = True) -> list[Sentence]:
    """Read CoNLL-U: ten tab-separated columns, a blank line after each sentence.

    Lines of a range, which repeat the words after them as they are written, and empty nodes are
    skipped. Where all heads are `_`, or unless `labelled`, the sentences have no trees.

    Raises:
        UserError: no such file or not UTF-8; no words; and, all in one message, lines without ten
            columns, ids that do not count from 1, words without text, and heads or relations that
            make no tree with a single root.
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
        raise UserError(f"{path}: no words; a line of ten columns for each word is needed")
    columns = [_columns(each) for each in found]
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
    """Yield the number of the first line, from 1, and the lines of each block without blank."""
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
            raise UserError(f"{where}: {len(columns)} columns apart by tabs; CoNLL-U has 10")
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
        raise UserError(f"{path}, line {first}: a sentence without words; take it out")
    origin = Origin(f"{path}", first + places[0])
    return Sentence(id, tuple(words), tuple(lines), tuple(places), origin)


def _columns(sentence: Sentence) -> list[list[str]]:
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
            raise UserError(f"{where}: the relation is {row[_RELATION]!r}; a name is needed")
        heads.append(int(head))
    if fault := tree_fault(heads):
        raise UserError(f"{sentence.origin}: {fault}; a sentence is a tree with one root")
    return replace(sentence, tree=Tree(heads, [row[_RELATION] for row in rows]))
