"""Sentences of words with tags: CoNLL column files, CoNLL-U, WikiANN, JSON lines, parquet, TFDS.

Tags come as the file has them; `tag_schemes.convert` makes one scheme of them. A file says where a
document begins with a line `-DOCSTART-`, which is no sentence. Where it has none of them nothing
says that two sentences belong together, and each is a document of its own.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from bert_jax.errors import UserError
from bert_jax.tasks.examples import Origin, TaggedExample
from bert_jax.tasks.problems import MissingColumn, Problems
from bert_jax.tasks.tables.delimited import TableFormat
from bert_jax.tasks.tables.files import read_rows
from bert_jax.untrusted.whole_file import read_text

MAX_BYTES = 512 << 20
DOCUMENT_MARK = "-DOCSTART-"
_COMMENT = "; if lines with # are comments, say comment='#'"


def read_columns(
    path: str | Path,
    *,
    token_column: int = 1,
    tag_column: int | None = -1,
    token_prefix: str = "",
    comment: str | None = None,
) -> list[TaggedExample]:
    """Read a file with one word a line: columns apart by tabs or spaces, sentences by blank lines.

    A file whose first word line has a tab is apart by single tabs, so that a word may hold spaces,
    another by runs of spaces. Quotes mean nothing, and no other character separates: the
    no-break space is part of a word.

    Args:
        path: the file, UTF-8.
        token_column: of the word, from 1; from -1 backwards.
        tag_column: of the tag, likewise; None reads no tags.
        token_prefix: each word must begin with it, and it is taken off.
        comment: lines that begin with it are passed over, such as `# ` (never where it may be a
            word: CoNLL-2003 has `#` among its words).

    Returns:
        The sentences in the order of the file; ids are their numbers.

    Raises:
        UserError: no such file or not UTF-8; no words; columns that are not there; and, all in one
            message, lines with another number of columns than most, with an empty word or tag, or
            without the prefix.
    """
    path = Path(path)
    problems = Problems(str(path), "lines")
    sentences = list(_sentences(path, comment))
    widths = Counter(len(columns) for each in sentences for _, columns in each or ())
    if not widths:
        raise UserError(
            f"{path}: no words; a line for each word is needed, word and tag in columns"
        )
    ((usual, _),) = widths.most_common(1)
    is_comment = next(each for each in sentences if each)[0][1][0].startswith("#")
    token_place = _place(path, token_column, usual, "words")
    tag_place = None if tag_column is None else _place(path, tag_column, usual, "tags")
    if tag_place is not None and token_place == tag_place:
        raise MissingColumn(
            f"{tag_column}",
            f"{path}: words and tags are the same column, {token_place + 1} of {usual}; words come "
            f"from column {token_column}, tags from {tag_column} (-1 is the last)"
            + (_COMMENT if is_comment else ""),
        )
    found: list[TaggedExample] = []
    marks = document = opened = 0
    for sentence in sentences:
        if sentence is None:
            marks += 1
            document += opened < len(found)
            opened = len(found)
            continue
        words: list[str] = []
        tags: list[str] = []
        for line, columns in sentence:
            wrong = ""
            if len(columns) != usual:
                start = " ".join(columns)[:40]
                wrong = f"{len(columns)} columns ({start!r}), where most lines have {usual}"
                wrong += _COMMENT if start.startswith("#") else ""
            elif not (word := columns[token_place]):
                wrong = f"the word (column {token_place + 1}) is empty"
            elif token_prefix and word.removeprefix(token_prefix) in ("", word):
                wrong = f"the word {word[:40]!r} is not {token_prefix!r} and a word after it"
            else:
                words.append(word.removeprefix(token_prefix))
                if tag_place is not None and not columns[tag_place]:
                    wrong = f"the tag (column {tag_place + 1}) is empty"
                elif tag_place is not None:
                    tags.append(columns[tag_place])
            if wrong:
                problems.add(f"{path}, line {line}: {wrong}")
        labels = None if tag_place is None else tuple(tags)
        origin = Origin(str(path), sentence[0][0])
        found.append(TaggedExample(f"{len(found)}", tuple(words), labels, document, origin))
    problems.check()
    if not marks:
        found = [replace(example, document=number) for number, example in enumerate(found)]
    return found


def is_conllu(path: str | Path) -> bool:
    """Whether the first line that is no comment is CoNLL-U's; False where there is no file."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = itertools.islice(file, 1000)
            first = next((line for line in lines if line[0] not in "#\n"), "")
    except OSError:
        return False
    return re.fullmatch(r"[01][-.\d]*(\t[^\t]+){5}\t(\d+|_)(\t[^\t]+){3}", first) is not None


def read_conllu(
    path: str | Path, column: Literal["upos", "xpos", "deprel"] | None = "upos"
) -> list[TaggedExample]:
    """CoNLL-U: ten columns apart by tabs, the word in the second, comments behind `#`.

    The words are the syntactic ones: lines of a range (`3-4  zum`), which repeat the words after
    them as they are written, and empty nodes (`5.1`) are passed over. A tag `_` is none; where
    there are no others, the sentences have no tags.

    Args:
        path: the file, UTF-8.
        column: of the tag; None reads no tags.

    Raises:
        UserError: no such file or not UTF-8; no words; and, all in one message, lines without ten
            columns, with an empty word or tag, or with an id that is none.
    """
    path = Path(path)
    problems = Problems(str(path), "lines")
    place = {"upos": 3, "xpos": 4, "deprel": 7}.get(column or "")
    found: list[TaggedExample] = []
    for sentence in _sentences(path, "#"):
        words: list[tuple[str, str]] = []
        for line, columns in sentence or ():
            number = columns[0]
            if len(columns) != 10:
                wrong = f"{len(columns)} columns apart by tabs; CoNLL-U has 10"
            elif not re.fullmatch(r"\d+([-.]\d+)?", number, re.ASCII):
                wrong = f"the id is {number[:40]!r}; it must be a number, a range or an empty node"
            elif number.isdigit() and not (columns[1] and columns[place or 1]):
                wrong = f"the word or its tag ({column}) is empty; write _ where there is none"
            else:
                if number.isdigit():
                    words.append((columns[1], columns[place or 1]))
                continue
            problems.add(f"{path}, line {line}: {wrong}")
        if sentence and words:
            tokens, tags = zip(*words, strict=True)
            tags = tuple("" if tag == "_" else tag for tag in tags)
            origin = Origin(str(path), sentence[0][0])
            found.append(TaggedExample(f"{len(found)}", tokens, tags, len(found), origin))
    problems.check()
    if not found:
        raise UserError(f"{path}: no words; a line of ten columns for each word is needed")
    if place is None or not any(any(example.tags or ()) for example in found):
        return [replace(example, tags=None) for example in found]
    return found


def read_wikiann(path: str | Path, *, with_tags: bool = True) -> list[TaggedExample]:
    """WikiANN: word TAB tag, each word behind its language as in `en:Paris`, which is taken off.

    Without tags, words without a language are read, too.

    Raises:
        UserError: the first word has no language, another is of another one; see `read_columns`.
    """
    path = Path(path)
    sentence = next((each for each in _sentences(path, None) if each), None)
    if sentence is None:
        raise UserError(f"{path}: no words; WikiANN has lines such as 'en:Paris', tab, 'B-LOC'")
    line, columns = sentence[0]
    language = re.match(r"[a-z][a-z-]*:", columns[0])
    if language is None and not with_tags:
        return read_columns(path, tag_column=None)
    if language is None:
        message = (
            f"{path}, line {line}: the word {columns[0][:40]!r} has no language before it, as in "
            "'en:Paris'; read a file without them as columns"
        )
        raise MissingColumn("-1", message) if len(columns) == 1 else UserError(message)
    tag_column = -1 if with_tags else None
    return read_columns(path, tag_column=tag_column, token_prefix=language.group())


def read_token_lists(
    name: str | Path,
    *,
    tokens: str = "tokens",
    tags: str | None = "tags",
    tag_names: Sequence[str] | None = None,
) -> list[TaggedExample]:
    """Sentences as rows of two lists: JSON lines, parquet, or `tfds:conll2003:train`.

    Args:
        name: the file, told by its suffix, or the prepared data set.
        tokens: the column of the words.
        tags: the column of the tags, `ner` in TFDS conll2003; None reads none.
        tag_names: where the file has numbers for tags, what they stand for, in their order. TFDS
            knows the names itself.

    Raises:
        UserError: the file cannot be read or lacks a column; a row without words, with an empty
            word, with lists of different length, or with a tag that is not text or has no name:
            all in one message.
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
                    f"{len(words)} words ({tokens!r}) and {len(labels)} tags ({tags!r}); each "
                    "word has one tag"
                )
        except UserError as error:
            problems.add(f"{row.origin}: {error}")
            continue
        found.append(TaggedExample(f"{len(found)}", words, labels, len(found), row.origin))
    problems.check()
    if not found:
        raise UserError(f"{name}: no rows; a row for each sentence is needed")
    return found


Line = tuple[int, list[str]]


def _sentences(path: Path, comment: str | None) -> Iterator[list[Line] | None]:
    """Numbered lines of columns, a list for each sentence; None where a document begins."""
    text = read_text(path, max_bytes=MAX_BYTES).replace("\r\n", "\n").replace("\r", "\n")
    sentence: list[Line] = []
    tabs: bool | None = None
    for number, line in enumerate(text.split("\n"), 1):
        if comment and line.startswith(comment):
            continue
        line = line.rstrip(" \t")
        is_mark = line.startswith(DOCUMENT_MARK)
        if line and not is_mark:
            if tabs is None:
                tabs = "\t" in line
            sentence.append(
                (number, line.split("\t") if tabs else [part for part in line.split(" ") if part])
            )
            continue
        if sentence:
            yield sentence
            sentence = []
        if is_mark:
            yield None
    if sentence:
        yield sentence


def _place(path: Path, number: int, width: int, what: str) -> int:
    """Position of a column that is counted from 1 or from -1."""
    if not (1 <= number <= width or -width <= number <= -1):
        raise MissingColumn(
            f"{number}",
            f"{path}: there is no column {number} for the {what}; lines have {width}, which count "
            "from 1, or from -1 backwards",
        )
    return number - 1 if number > 0 else width + number


def _words(value: object, column: str) -> tuple[str, ...]:
    words = _list(value, column)
    if not words:
        raise UserError(f"{column!r} is empty; a sentence has words")
    for place, word in enumerate(words, 1):
        if not isinstance(word, str) or not word:
            raise UserError(f"word {place} of {column!r} is {_shown(word)}; a word is text")
    return words


def _tags(value: object, column: str, names: Sequence[str] | None) -> tuple[str, ...]:
    tags = []
    for place, tag in enumerate(_list(value, column), 1):
        if names is not None and isinstance(tag, int) and not isinstance(tag, bool):
            if not 0 <= tag < len(names):
                raise UserError(
                    f"tag {place} of {column!r} is {tag}; names are given for 0 to {len(names) - 1}"
                )
            tag = names[tag]
        if not isinstance(tag, str) or not tag:
            numbers = "; give the names of numbers (tag_names)" if isinstance(tag, int) else ""
            raise UserError(f"tag {place} of {column!r} is {_shown(tag)}; a tag is text{numbers}")
        tags.append(tag)
    return tuple(tags)


def _list(value: object, column: str) -> tuple:
    if not isinstance(value, list | tuple):
        raise UserError(f"{column!r} is {_shown(value)}; a list with an entry a word is needed")
    return tuple(value)


def _shown(value: object) -> str:
    return repr(value)[:60]
