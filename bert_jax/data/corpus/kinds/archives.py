"""Sources of text in archives: WARC and WET files from web crawls, and dumps of Wikipedia."""

import contextlib
import io
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any
from xml.etree import ElementTree

from typing_extensions import override

from bert_jax.data.corpus.documents import paragraphs
from bert_jax.data.corpus.kinds.text import FileSource
from bert_jax.errors import UserError, needs_package

_HEADERS = {
    "url": "WARC-Target-URI",
    "date": "WARC-Date",
    "lang": "WARC-Identified-Content-Language",
}
"""WARC header from which each field of a document is read."""
_ARTICLES, _FILES, _CATEGORIES = "0", "6", "14"
"""Numbers of MediaWiki's namespaces."""
_MOST_HEADERS, _MOST_PAGE, _MOST_ELEMENTS = 1 << 20, 4 << 20, 10_000
"""Limits: bytes of a WARC record's headers; bytes of a wiki page, twice MediaWiki's own limit; and
XML elements of a wiki page."""


class _Archive(FileSource):
    """A file that can only be read from its beginning, record by record."""

    has_cuts = False
    has_records = True

    def _needs(self, package: str) -> contextlib.AbstractContextManager[None]:
        said = f"reading this file needs {package}: pip install 'bert_jax[corpora]'."
        return needs_package(f"{self.name}: {said}")


class WarcSource(_Archive):
    """Plain-text records of a WARC or WET file; others, such as HTML pages, are skipped."""

    @override
    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        with self._needs("warcio"):
            from warcio.archiveiterator import ArchiveIterator
            from warcio.bufferedreaders import BufferedReader, ChunkedDataReader
            from warcio.exceptions import ArchiveLoadFailed
        stream, number, most = _Blocks(self._content()), 0, self.options.max_document_chars
        records = ArchiveIterator(stream, no_record_parse=True, verify_http=False)
        records.reader = BufferedReader(stream)  # warcio's own reader decompresses without a limit
        stream.allow(_MOST_HEADERS, f"{self.name}, record 1: headers")
        try:
            for number, record in enumerate(records, 1):
                where, headers, content = f"{self.name}, record {number}", record.rec_headers, None
                size = headers.get_header("Content-Length") or ""
                if not re.fullmatch("[0-9]{1,18}", size):
                    raise ArchiveLoadFailed(f"Content-Length is {size!r:.40}, not a byte count")
                kind, form, content = headers.get_header("Content-Type"), "", record.raw_stream
                if record.rec_type == "response":
                    stream.allow(_MOST_HEADERS, f"{where}: headers")
                    url = headers.get_header("WARC-Target-URI") or ""
                    http = records.loader.load_http_headers("response", url, content, int(size))
                    if http is not None:
                        kind = http.get_header("Content-Type")
                        form = (http.get_header("Content-Encoding") or "").lower()
                        if http.get_header("Transfer-Encoding") == "chunked":
                            content = ChunkedDataReader(content)
                elif record.rec_type not in ("conversion", "resource"):
                    kind = ""
                after = f"{self.name}, record {number + 1}: headers"
                stream.allow(int(size) + _MOST_HEADERS, after)
                if not (kind or "").lower().startswith("text/plain") or form not in _FORMS:
                    continue
                data = b"" if int(size) > most else _unpacked(content.read(most), form, most)
                if max(int(size), len(data)) > most:
                    raise UserError(
                        f"{where}: more bytes than the limit of {most:,} (max_document_chars)."
                    )
                if record.rec_type != "response" and len(data) < int(size):
                    raise ArchiveLoadFailed(
                        f"the record has only {len(data)} of {size} bytes; the file is cut off"
                    )
                text = data.decode("utf-8", "replace").replace("\0", " ")
                found = {name: headers.get_header(header) for name, header in _HEADERS.items()}
                yield paragraphs(text), {k: value for k, value in found.items() if value}
        except (ArchiveLoadFailed, EOFError) as error:
            reason = " ".join(str(error).split())[:200] or "it ends inside a response's headers"
            raise UserError(
                f"{self.name} is not a valid WARC file: {reason} (near record {number + 1}). Fetch "
                "it again."
            ) from error


class WikipediaSource(_Archive):
    """Articles of a dump of Wikipedia or of another MediaWiki wiki, with the markup removed."""

    @override
    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        with self._needs("mwparserfromhell"):
            from bert_jax.data.corpus.kinds.wikitext import SECONDS, plain
        left_out, elements, number = {"file", "image", "category"}, 0, 1
        stream = _Blocks(self._content())
        stream.allow(_MOST_PAGE, f"{self.name}, page 1")
        try:
            events = ElementTree.iterparse(stream, events=("start", "end"))
            _, root = next(events)
            if _name(root) != "mediawiki":
                raise UserError(
                    f"{self.name} is not a dump of MediaWiki: its root is <{_name(root):.40}>. "
                    "Other XML files cannot be read."
                )
            for event, element in events:
                if event == "start":
                    elements += 1
                    if elements > _MOST_ELEMENTS:
                        raise UserError(
                            f"{self.name}, page {number}: more than {_MOST_ELEMENTS:,} elements. "
                            "Only dumps with one revision of each page are read."
                        )
                elif _name(element) == "namespaces":
                    left_out |= {
                        each.text.casefold()
                        for each in element
                        if each.text and each.get("key") in (_FILES, _CATEGORIES)
                    }
                elif _name(element) == "page":
                    found = _article(element)
                    root.clear()
                    elements, number = 0, number + 1
                    stream.allow(_MOST_PAGE, f"{self.name}, page {number}")
                    if found is None:
                        continue
                    title, id_, markup = found
                    text = plain(markup, left_out) if len(markup) <= _MOST_PAGE else None
                    if text is None:
                        raise UserError(
                            f"{self.name}, page {number - 1}, {title!r:.200}: the page takes over "
                            f"{SECONDS} s to parse or has over {_MOST_PAGE:,} characters. Remove "
                            "it from the dump."
                        )
                    yield text, {"title": title, "id": id_}
        except ElementTree.ParseError as error:
            raise UserError(
                f"{self.name} is not a valid XML file: {error}. Fetch it again."
            ) from error


class _Blocks(io.RawIOBase):
    """A file over an iterator of blocks; reading more than `allow` permits raises a UserError."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, b""

    def allow(self, size: int, what: str) -> None:
        """Permit `size` more bytes to be read; `what` describes these bytes in an error message."""
        self._left, self._size, self._what = size, size, what

    @override
    def read(self, size: int = -1) -> bytes:
        self._rest = self._rest or next(self._blocks, b"")
        data, self._rest = self._rest[:size], self._rest[size:]
        self._left -= len(data)
        if self._left < 0:
            raise UserError(f"{self._what}: more than the limit of {self._size:,} bytes.")
        return data


_FORMS = {"", "identity", "gzip", "x-gzip", "deflate"}
"""HTTP content encodings that can be read; bodies in other encodings are skipped."""


def _unpacked(body: bytes, form: str, most: int) -> bytes:
    """Decompress an HTTP body to at most `most` + 1 bytes; leave an uncompressed body as it is."""
    for bits in (32 + zlib.MAX_WBITS, -zlib.MAX_WBITS) if form not in ("", "identity") else ():
        with contextlib.suppress(zlib.error):
            return zlib.decompressobj(bits).decompress(body, most + 1)
    return body


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _article(page: ElementTree.Element) -> tuple[str, str, str] | None:
    """Return title, id and wikitext of a page; None if it is a redirect or not an article."""
    found: dict[str, str] = {}
    for element in page.iter():
        name = _name(element)
        if name == "redirect":
            return None
        found.setdefault(name, element.text or "")  # the first <id> is the page's
    if found.get("ns", _ARTICLES) != _ARTICLES or not found.get("text"):
        return None
    return found.get("title", ""), found.get("id", ""), found["text"]
