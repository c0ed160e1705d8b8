"""Sentences of words with tags: CoNLL column files, CoNLL-U, WikiANN, JSON lines, parquet, TFDS.

Tags are returned as they are in the file; `schemes.convert` converts them to one scheme. A line
`-DOCSTART-` marks the beginning of a document and is not a sentence.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from bert_jax.errors import UserError
from bert_jax.tasks.examples import MissingColumn, Origin, Problems, TaggedExample, text_lines
from bert_jax.tasks.parsing.trees import columns_of, read_sentences
from bert_jax.tasks.tables import TableFormat, read_rows

_DOCUMENT = ("-DOCSTART-", "# newdoc")
_COMMENT = "; if lines with # are comments, set comment='#'"


def read_columns(
    path: str | Path,
    *,
    token_column: int = 1,
    tag_column: int | None = -1,
    token_prefix: str = "",
    comment: str = "",
) -> list[TaggedExample]:
    """Read one word per line, with columns separated by tabs or spaces; blank lines end sentences.

    If the line of the first word has a tab, single tabs separate columns, and words may have
    spaces; else runs of spaces separate columns. Quotes and no-break spaces belong to words.

    Columns count from 1, or backwards from -1. If `tag_column` is None, no tags are read. Each word
    must begin with `token_prefix`, which is removed. Lines that begin with `comment` (if set) are
    skipped, so no word may begin with it; in CoNLL-2003, some words begin with `#`. Raise a
    UserError if the file is missing, is not UTF-8, has no words, or lacks a requested column; or a
    line has more or fewer columns than most lines, an empty word or tag, or a word without
    `token_prefix` (the message counts such lines).
    """
    path = Path(path)
    problems = Problems(str(path), "lines")
    sentences = list(_sentences(path, comment))
    widths = Counter(len(columns) for each in sentences for _, columns in each.lines)
    if not widths:
        raise UserError(
            f"{path}: no words; expected a line for each word, with word and tag in columns"
        )
    ((usual, _),) = widths.most_common(1)
    token_at = _position(path, token_column, usual, "words")
    tag_at = None if tag_column is None else _position(path, tag_column, usual, "tags")
    if token_at == tag_at:
        is_comment = sentences[0].lines[0][1][0].startswith("#")
        raise MissingColumn(
            f"{tag_column}",
            f"{path}: words and tags are the same column, {token_at + 1} of {usual}; words come "
            f"from column {token_column}, tags from {tag_column} (-1 is the last)"
            + (_COMMENT if is_comment else ""),
        )
    found: list[TaggedExample] = []
    for sentence in sentences:
        words: list[str] = []
        tags: list[str] = []
        for line, columns in sentence.lines:
            wrong = ""
            if len(columns) != usual:
                start = " ".join(columns)[:40]
                wrong = f"{len(columns)} columns ({start!r}), where most lines have {usual}"
                wrong += _COMMENT if start.startswith("#") else ""
            elif not (word := columns[token_at]):
                wrong = f"the word (column {token_at + 1}) is empty"
            elif token_prefix and word.removeprefix(token_prefix) in ("", word):
                wrong = f"the word is {word[:40]!r}; expected {token_prefix!r} and a word after it"
            elif tag_at is not None and not columns[tag_at]:
                wrong = f"the tag (column {tag_at + 1}) is empty"
            else:
                words.append(word.removeprefix(token_prefix))
                tags.append("" if tag_at is None else columns[tag_at])
            if wrong:
                problems.add(f"{path}, line {line}: {wrong}")
        origin = Origin(str(path), sentence.lines[0][0])
        labels = None if tag_at is None else tuple(tags)
        id = f"{len(found)}"
        found.append(TaggedExample(id, tuple(words), labels, origin, sentence.document))
    problems.check()
    return found


def is_conllu(path: str | Path) -> bool:
    """Return true if the first line after comments is CoNLL-U; false if there is no such file."""
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            lines = itertools.islice(file, 1000)
            first = next((line for line in lines if line[0] not in "#\n"), "")
    except OSError:
        return False
    return re.fullmatch(r"[01][-.\d]*(\t[^\t]+){5}\t(\d+|_)(\t[^\t]+){3}", first) is not None


def read_conllu(
    path: str | Path, column: Literal["upos", "xpos", "deprel"] | None = "upos"
) -> list[TaggedExample]:
    """Read tags from CoNLL-U, see `read_sentences`.

    `_` means that a word has no tag. If no word has a tag, or `column` is None, the sentences have
    no tags. Raise a UserError if `read_sentences` finds a fault, or a tag is empty.
    """
    tag_at = {"upos": 3, "xpos": 4, "deprel": 7, None: 1}[column]
    found: list[TaggedExample] = []
    document = 0
    for sentence in read_sentences(path, labelled=False):
        tags = [columns[tag_at] for columns in columns_of(sentence)]
        if "" in tags:
            told = f"the tag ({column}) of word {tags.index('') + 1} is empty; write _ for no tag"
            raise UserError(f"{sentence.origin}: {told}")
        document += sum(line.startswith(_DOCUMENT) for line in sentence.lines)
        known = tuple("" if tag == "_" else tag for tag in tags)
        found.append(TaggedExample(sentence.id, sentence.words, known, sentence.origin, document))
    if column is None or not any(any(example.tags or ()) for example in found):
        return [replace(example, tags=None) for example in found]
    return found


def read_wikiann(path: str | Path, *, with_tags: bool = True) -> list[TaggedExample]:
    """Read WikiANN: lines of word, tab and tag. Remove the language before a word (`en:Paris`).

    If `with_tags` is false, words without a language are accepted too. Raise a UserError if words
    have no language or different languages, or `read_columns` finds a fault.
    """
    path = Path(path)
    if (sentence := next(_sentences(path, ""), None)) is None:
        raise UserError(f"{path}: no words; WikiANN has lines such as 'en:Paris', tab, 'B-LOC'")
    line, columns = sentence.lines[0]
    language = re.match(r"[a-z][a-z-]*:", columns[0])
    if language is None and with_tags:
        message = (
            f"{path}, line {line}: the word {columns[0][:40]!r} has no language before it, unlike "
            "'en:Paris'; to read a file without languages, set the format to columns"
        )
        raise MissingColumn("-1", message) if len(columns) == 1 else UserError(message)
    return read_columns(
        path,
        tag_column=-1 if with_tags else None,
        token_prefix=language.group() if language else "",
    )


def read_token_lists(
    name: str | Path,
    tokens: str = "tokens",
    tags: str | None = "tags",
    tag_names: Sequence[str] = (),
) -> list[TaggedExample]:
    """Read sentences as rows of two lists: JSON lines, parquet, or `tfds:conll2003:train`.

    `tags` is the column of tags (`ner` in TFDS conll2003); None means that no tags are read. If
    tags are integer ids, `tag_names` are the tags 0, 1, ...; TFDS knows the names itself. Raise a
    UserError if the file cannot be read or lacks a column; or a row has no words, an empty word,
    lists of different lengths, or a tag that is not text or has no name.
    """
    name = str(name)
    problems = Problems(name)
    columns = [tokens] if tags is None else [tokens, tags]
    found: list[TaggedExample] = []
    for row in read_rows(name, columns, TableFormat()):
        if row.problem:
            problems.add(row.problem)
            continue
        try:
            words = _words(row.values[0], tokens)
            labels = None if tags is None else _tags(row.values[1], tags, tag_names)
            if labels is not None and len(labels) != len(words):
                raise UserError(
                    f"{len(words)} words ({tokens!r}) and {len(labels)} tags ({tags!r}); expected "
                    "one tag for each word"
                )
        except UserError as error:
            problems.add(f"{row.origin}: {error}")
            continue
        found.append(TaggedExample(f"{len(found)}", words, labels, row.origin))
    problems.check()
    if not found:
        raise UserError(f"{name}: no rows; expected a row for each sentence")
    return found


class _Sentence(NamedTuple):
    """Lines of a sentence: the number and the columns of each line."""

    lines: list[tuple[int, list[str]]]
    document: int
    """Number of `-DOCSTART-` lines in the file before the sentence's first line."""


def _sentences(path: Path, comment: str) -> Iterator[_Sentence]:
    lines: list[tuple[int, list[str]]] = []
    tabs: bool | None = None
    documents = document = 0
    for number, line in enumerate([*text_lines(path), ""], 1):
        documents += line.startswith(_DOCUMENT)
        if comment and line.startswith(comment):
            continue
        line = line.rstrip(" \t")
        if line and not line.startswith("-DOCSTART-"):
            if tabs is None:
                tabs = "\t" in line
            document = document if lines else documents
            columns = line.split("\t") if tabs else [part for part in line.split(" ") if part]
            lines.append((number, columns))
        elif lines:
            yield _Sentence(lines, document)
            lines = []


def _position(path: Path, number: int, width: int, what: str) -> int:
    """Return the index, from 0, of a column whose `number` counts from 1, or backwards from -1."""
    if not (1 <= number <= width or -width <= number <= -1):
        raise MissingColumn(
            f"{number}",
            f"{path}: there is no column {number} for the {what}; lines have {width} columns, "
            "counted from 1, or backwards from -1",
        )
    return number - 1 if number > 0 else width + number


def _words(value: object, column: str) -> tuple[str, ...]:
    if not (words := _list(value, column)):
        raise UserError(f"{column!r} is empty; expected at least one word")
    for number, word in enumerate(words, 1):
        if not isinstance(word, str) or not word:
            raise UserError(f"word {number} of {column!r} is {word!r:.60}; expected text")
    return words


def _tags(value: object, column: str, names: Sequence[str]) -> tuple[str, ...]:
    tags = []
    for number, tag in enumerate(_list(value, column), 1):
        if names and isinstance(tag, int) and not isinstance(tag, bool):
            if not 0 <= tag < len(names):
                known = f"names are given for 0 to {len(names) - 1}"
                raise UserError(f"tag {number} of {column!r} is {tag}; {known}")
            tag = names[tag]
        if not isinstance(tag, str) or not tag:
            hint = "; give the names of numbers (tag_names)" if isinstance(tag, int) else ""
            raise UserError(f"tag {number} of {column!r} is {tag!r:.60}; expected text{hint}")
        tags.append(tag)
    return tuple(tags)


def _list(value: object, column: str) -> tuple:
    if not isinstance(value, list | tuple):
        raise UserError(f"{column!r} is {value!r:.60}; expected a list with an entry for each word")
    return tuple(value)
