"""Cutting of documents into passages that are not too long for the model."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bert_jax.data.corpus.documents import ReadOptions, Source
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


class Passage(NamedTuple):
    """A text that has a vector in an index."""

    id: str
    """Id of the document. The second passage of a document has #2 after the id, and so on."""
    source: str
    """Name of the file or other source."""
    text: str


def found_sources(names: Sequence[str], field: str) -> tuple[list[Source], int]:
    """Return the sources for files, directories and other names (see `corpus.sources`).

    The second value counts files in directories that are skipped as empty or for their suffix, but
    not hidden files. `field` names the field of JSON lines and tables that holds the text.

    Raises:
        UserError: There is no file to read, or a source is unknown.
    """
    files: list[str | Source] = []
    passed = 0
    for name in names:
        if not Path(name).is_dir():
            files.append(name)
            continue
        for path in sorted(Path(name).rglob("*")):
            parts = path.relative_to(name).parts
            if not path.is_file() or any(part.startswith(".") for part in parts):
                continue
            if plain_suffix(path.name) in READ_SUFFIXES and path.stat().st_size:
                files.append(f"{path}")
            else:
                passed += 1
    if names and not files:
        raise UserError(f"{names[0]} has no files named *{', *'.join(READ_SUFFIXES)}")
    return resolve_sources(files, ReadOptions(field=field, keep=("id",))), passed


def passages(source: Source, tokenizer: Tokenizer, room: int) -> Iterator[Passage]:
    """Cut the documents of a source into passages of at most `room` tokens.

    Each passage takes as many paragraphs as fit. A paragraph of more than `room` tokens is cut
    between sentences, and such a sentence between words. A text file is one document. In JSON lines
    and tables, each line or row is a document with its id in the field `id`.
    """
    for id, texts in _documents(source):
        pieces = (piece for text in texts for piece in _pieces(text, tokenizer, room))
        for number, text in enumerate(_packed(pieces, room), 1):
            yield Passage(id if number == 1 else f"{id}#{number}", source.name, text)


def _documents(source: Source) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the id and the texts of each document."""
    if isinstance(source, FileSource) and source.is_prose:
        yield source.name, source.texts()
        return
    for document in source.documents():
        own = document.fields.get("id")
        yield f"{source.name}:{document.number}" if own in (None, "") else f"{own}", [document.text]


class _Piece(NamedTuple):
    """A part of a document that is not divided between passages."""

    text: str
    size: int
    """Number of tokens."""
    before: str
    """Separator from the previous piece."""


def _packed(pieces: Iterable[_Piece], room: int) -> Iterator[str]:
    """Join pieces into texts of at most `room` tokens."""
    text, size = "", 0
    for piece in pieces:
        if text and size + piece.size > room:
            yield text
            text, size = "", 0
        text = f"{text}{piece.before}{piece.text}" if text else piece.text
        size += piece.size
    if text:
        yield text


def _pieces(text: str, tokenizer: Tokenizer, room: int) -> Iterator[_Piece]:
    paragraphs = text.split("\n")
    lengths = [len(ids) for ids in tokenizer.encode_batch(paragraphs)]
    for paragraph, length in zip(paragraphs, lengths, strict=True):
        if length <= room:
            yield _Piece(paragraph, length, "\n")
            continue
        sentences = split_fast(paragraph)
        before = "\n"
        for sentence, ids in zip(sentences, tokenizer.encode_batch(sentences), strict=True):
            whole = [(sentence, len(ids))]
            parts = _cut(sentence, tokenizer, room) if len(ids) > room else whole
            for part, size in parts:
                yield _Piece(part, size, before)
                before = " "


def _cut(sentence: str, tokenizer: Tokenizer, room: int) -> Iterator[tuple[str, int]]:
    """Cut a sentence between words into parts of at most `room` tokens; also cut longer words."""
    encoding = tokenizer.encode(sentence)
    whole = ~tokenizer.continues_word[encoding.ids]
    begin = 0
    while begin < len(encoding.ids):
        end = min(begin + room, len(encoding.ids))
        if end < len(encoding.ids):
            words = begin + 1 + whole[begin + 1 : end + 1].nonzero()[0]
            end = int(words[-1]) if len(words) else end
        text = sentence[encoding.offsets[begin, 0] : encoding.offsets[end - 1, 1]].strip()
        if text:
            yield text, end - begin
        begin = end
