"""Text in archives: WARC and WET files of web crawls, and dumps of Wikipedia."""

import contextlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from typing_extensions import override

from bert_jax.data.corpus.documents import Source, paragraphs
from bert_jax.data.corpus.kinds.text import FileSource
from bert_jax.errors import UserError
from bert_jax.tokenization.tokenizer import replace_surrogates

_HEADERS = {
    "url": "WARC-Target-URI",
    "date": "WARC-Date",
    "lang": "WARC-Identified-Content-Language",
}
"""Fields of a document of a web archive, and the headers that they come from."""
_NO_PROSE = {"ref", "references", "table", "gallery", "math", "timeline", "score"}
_ARTICLES, _FILES, _CATEGORIES = "0", "6", "14"
"""Numbers of MediaWiki's namespaces."""


class _Archive(FileSource):
    """A file that is read from its beginning, record by record."""

    def _stream(self) -> io.BufferedReader:
        """Return the plain content as a file."""
        return io.BufferedReader(_Blocks(self._content()), 1 << 16)

    @override
    def divided(self, size: int) -> Sequence[Source]:
        return [self]

    def _missing(self, package: str) -> UserError:
        return UserError(
            f"{self.name}: reading such a file needs {package}: pip install 'bert_jax[corpora]'."
        )


class WarcSource(_Archive):
    """The records of a WARC file that are plain text, such as those of a WET file."""

    @override
    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        try:
            from warcio.archiveiterator import ArchiveIterator
            from warcio.exceptions import ArchiveLoadFailed
        except ImportError as error:
            raise self._missing("warcio") from error
        number = 0
        try:
            for number, record in enumerate(ArchiveIterator(self._stream()), 1):
                headers = record.rec_headers
                kind = headers.get_header("Content-Type") or ""
                if record.rec_type == "response" and record.http_headers is not None:
                    kind = record.http_headers.get_header("Content-Type") or ""
                elif record.rec_type not in ("conversion", "resource"):
                    continue
                if not kind.lower().startswith("text/plain"):
                    continue
                if record.length is not None and record.length > self.options.max_document_chars:
                    raise UserError(
                        f"{self.name}, record {number}: {record.length:,} bytes, more than the "
                        f"limit of {self.options.max_document_chars:,} (max_document_chars)."
                    )
                content = record.content_stream().read()
                if record.rec_type != "response" and len(content) < record.length:
                    raise ArchiveLoadFailed(
                        f"{len(content)} of {record.length} bytes are there; the file is cut off"
                    )
                text = content.decode("utf-8", "replace").replace("\0", " ")
                found = {name: headers.get_header(header) for name, header in _HEADERS.items()}
                yield paragraphs(text), {k: value for k, value in found.items() if value}
        except ArchiveLoadFailed as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{self.name} is not a sound WARC file: {reason} (near record {number + 1}). Fetch "
                "it again."
            ) from error


class WikipediaSource(_Archive):
    """The articles of a dump of Wikipedia, or of another wiki of MediaWiki; without markup."""

    @override
    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        try:
            import mwparserfromhell  # noqa: F401
        except ImportError as error:
            raise self._missing("mwparserfromhell") from error
        left_out = re.compile("(?!)")
        try:
            events = ElementTree.iterparse(self._stream(), events=("start", "end"))
            _, root = next(events)
            if _name(root) != "mediawiki":
                raise UserError(
                    f"{self.name} is no dump of MediaWiki: its root is <{_name(root)}>. Of XML "
                    "only such dumps are read."
                )
            for event, element in events:
                if event == "start":
                    continue
                if _name(element) == "namespaces":
                    names = [
                        re.escape(each.text)
                        for each in element
                        if each.text and each.get("key") in (_FILES, _CATEGORIES)
                    ]
                    left_out = re.compile(
                        rf"\s*:?\s*({'|'.join(['File', 'Image', 'Category', *names])})\s*:", re.I
                    )
                elif _name(element) == "page":
                    found = _article(element)
                    root.clear()
                    if found is not None:
                        title, number, text = found
                        yield _plain(text, left_out), {"title": title, "id": number}
        except ElementTree.ParseError as error:
            raise UserError(
                f"{self.name} is not a sound XML file: {error}. Fetch it again."
            ) from error


class _Blocks(io.RawIOBase):
    """Blocks of bytes as a file."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, memoryview(b"")

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = memoryview(next(self._blocks, b""))
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _article(page: ElementTree.Element) -> tuple[str, str, str] | None:
    """Return title, number and wikitext of a page; None for what is no article."""
    found: dict[str, str] = {}
    for element in page.iter():
        name = _name(element)
        if name == "redirect":
            return None
        found.setdefault(name, element.text or "")  # the first <id> is the page's
    if found.get("ns", _ARTICLES) != _ARTICLES or not found.get("text"):
        return None
    return found.get("title", ""), found.get("id", ""), found["text"]


def _plain(wikitext: str, left_out: re.Pattern[str]) -> str:
    """Return the running text of an article: no tables, references, pictures or categories."""
    import mwparserfromhell

    code = mwparserfromhell.parse(wikitext)
    links = [each for each in code.filter_wikilinks() if left_out.match(str(each.title))]
    tags = [each for each in code.filter_tags() if str(each.tag).lower() in _NO_PROSE]
    for node in (*links, *tags):
        with contextlib.suppress(ValueError):  # it went with one around it
            code.remove(node)
    return paragraphs(replace_surrogates(code.strip_code().replace("\0", " ")))
