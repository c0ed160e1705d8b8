"""Division of documents into passages that are not too long for the model."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bert_jax.data.corpus.documents import NO_FIELDS, ReadOptions, Source
from bert_jax.data.corpus.kinds.text import FileSource
from bert_jax.data.corpus.sentences import split_fast
from bert_jax.data.corpus.sources import resolve_sources
from bert_jax.errors import UserError
from bert_jax.files.untrusted.compressed import plain_suffix
from bert_jax.tokenization.tokenizer import Tokenizer

READ_SUFFIXES = (
    ".txt", ".text", ".md", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".tab", ".parquet",
)  # fmt: skip
"""Suffixes of the files that are read in a directory. Other files are skipped."""
TABLE = "passages"
"""Name of the table of an index."""
Passage = Mapping[str, Any]
"""Row of an index: id (of the document), passage (its number in the document, from 1), source (name
of the file or other source), text, and the further fields of the document."""
_RESERVED = {
    "passage", "source", "text", "vector", "score", "_score", "_distance", "_relevance_score",
    "_rowid",
}  # fmt: skip
"""Columns that an index has, or that LanceDB adds to its results."""


def found_sources(names: Sequence[str], field: str) -> tuple[list[Source], int]:
    """Return the sources for files, directories and other names (see `corpus.sources`).

    The second value counts the files in directories that are skipped because they are empty or have
    another suffix, except hidden files and indexes. `field` names the field of JSON lines and
    tables with the text. Raise a UserError if there is no file to read, or a source is unknown.
    """
    files: list[str | Source] = []
    passed = 0
    for name in names:
        if not Path(name).is_dir():
            files.append(name)
            continue
        found = sorted(Path(name).rglob("*"))
        indexes = {path.parent for path in found if path.name == f"{TABLE}.lance"}
        for path in found:
            hidden = any(part.startswith(".") for part in path.relative_to(name).parts)
            if hidden or not indexes.isdisjoint(path.parents) or not path.is_file():
                continue
            if plain_suffix(path.name) in READ_SUFFIXES and path.stat().st_size:
                files.append(f"{path}")
            else:
                passed += 1
    if names and not files:
        raise UserError(f"{names[0]} has no files named *{', *'.join(READ_SUFFIXES)}")
    return resolve_sources(files, ReadOptions(field=field, keep=("*",))), passed


def passages(source: Source, tokenizer: Tokenizer, room: int) -> Iterator[Passage]:
    """Divide the documents of a source into passages of at most `room` tokens.

    A passage takes as many texts as fit; blank lines separate the texts of a file. A text of more
    than `room` tokens is divided at line ends where a sentence ends, then between sentences, then
    at other line ends, then between words. A text file is one document. In JSON lines and tables,
    each line or row is a document of one text, with its id in the field `id`. Raise a UserError if
    the source cannot be read, or a field has the name of a column of the index.
    """
    for id, texts, fields in _documents(source):
        pieces = (piece for text in texts for piece in _pieces([("\n", text)], tokenizer, room))
        for number, text in enumerate(_packed(pieces, room), 1):
            yield {"id": id, "passage": number, "source": source.name, "text": text, **fields}


def _documents(source: Source) -> Iterator[tuple[str, Iterable[str], Mapping[str, Any]]]:
    if isinstance(source, FileSource) and source.is_prose:
        yield source.name, source.texts(), NO_FIELDS
        return
    for document in source.documents():
        fields = dict(document.fields)
        own = fields.pop("id", None)
        for name in fields.keys() & _RESERVED:
            raise UserError(f"{source.name}: rename the column {name!r}; an index has its own")
        id = f"{source.name}:{document.number}" if own in (None, "") else f"{own}"
        yield id, [document.text], fields


_Piece = tuple[str, str, int]
"""A part of a document that is not divided: separator from the previous part, text, tokens."""


def _packed(pieces: Iterable[_Piece], room: int) -> Iterator[str]:
    text, size = "", 0
    for before, piece, count in pieces:
        if text and size + count > room:
            yield text
            text, size = "", 0
        text = f"{text}{before}{piece}" if text else piece
        size += count
    if text:
        yield text


def _pieces(
    texts: Sequence[tuple[str, str]], tokenizer: Tokenizer, room: int, level: int = 0
) -> Iterator[_Piece]:
    """Divide long texts by `_WAYS[level]`, then by later ways; `texts` are (separator, text)."""
    counts = [len(ids) for ids in tokenizer.encode_batch([text for _, text in texts])]
    short = [a + b for (a, b), count in zip(texts, counts, strict=True) if count <= room]
    # In byte-level BPE, a separator is a token, too.
    with_separators = map(len, tokenizer.encode_batch(short))
    for (before, text), count in zip(texts, counts, strict=True):
        if count <= room:
            yield before, text, max(count, next(with_separators))
        elif level < len(_WAYS):
            starts = _WAYS[level](text)
            parts = [text[a:b] for a, b in pairwise([*starts, len(text)])]
            befores = (before, *(part[len(part.rstrip()) :][:1] for part in parts))
            yield from _pieces(
                [*zip(befores, map(str.rstrip, parts), strict=False)], tokenizer, room, level + 1
            )
        else:
            for part, count in _cut(text, tokenizer, room):
                yield before, part, count
                before = " "


def _sentence_starts(text: str) -> list[int]:
    flat, starts, end = text.replace("\n", " "), [], 0
    for sentence in split_fast(flat):
        starts.append(flat.index(sentence, end))
        end = starts[-1] + len(sentence)
    return starts


def _paragraph_starts(text: str) -> list[int]:
    return [start for start in _sentence_starts(text) if start == 0 or text[start - 1] == "\n"]


def _line_starts(text: str) -> list[int]:
    return [match.start() for match in re.finditer("^", text, re.MULTILINE)]


_WAYS = (_paragraph_starts, _sentence_starts, _line_starts)
"""Functions that find the positions at which a long text is divided, best first."""


def _cut(sentence: str, tokenizer: Tokenizer, room: int) -> Iterator[tuple[str, int]]:
    """Cut a sentence between words into parts of at most `room` tokens; also cut longer words."""
    encoding = tokenizer.encode(sentence)
    whole = ~tokenizer.continues_word[encoding.ids]
    begin, most = 0, room
    while begin < len(encoding.ids):
        end = min(begin + most, len(encoding.ids))
        if end < len(encoding.ids):
            words = begin + 1 + whole[begin + 1 : end + 1].nonzero()[0]
            end = int(words[-1]) if len(words) else end
        # A part ends where the next begins: characters between two tokens may have no token.
        after = encoding.offsets[end, 0] if end < len(encoding.ids) else len(sentence)
        text = sentence[encoding.offsets[begin, 0] if begin else 0 : after].strip()
        count = len(tokenizer.encode(text).ids)  # may be larger than inside the sentence
        if count > room and most > 1:
            most -= 1
            continue
        if text:
            yield text, count
        begin, most = end, room
