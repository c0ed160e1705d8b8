"""Sources of text in archives: WARC and WET files from web crawls, and dumps of Wikipedia."""

import contextlib
import functools
import io
import itertools
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from xml.etree import ElementTree

from typing_extensions import override

from bert_jax.data.corpus.documents import Row, paragraphs
from bert_jax.data.corpus.intake import MOST_HEADERS, MOST_PAGE, PARSE_BYTES, PARSE_SECONDS
from bert_jax.data.corpus.kinds.text import FileSource
from bert_jax.data.corpus.workers import Guard
from bert_jax.errors import BadRecord, needs_package
from bert_jax.tokenization.tokenizer import replace_surrogates

_HEADERS = {
    "url": "WARC-Target-URI",
    "date": "WARC-Date",
    "lang": "WARC-Identified-Content-Language",
}
"""WARC header from which each field of a document is read."""
_ARTICLES, _FILES, _CATEGORIES = "0", "6", "14"  # numbers of MediaWiki's namespaces
_RECORD, _PAGE, _END = b"WARC/1.", b"<page>", b"</mediawiki>"
"""Byte strings with which a WARC record and a wiki page begin, and with which a dump ends."""
_Piece = bytes | BadRecord | None


class _Archive(FileSource):
    """A file that can only be read from its beginning, record by record."""

    cut_suffixes: tuple[str, ...] = ()
    has_records = True
    record_name = "record"

    @override
    def _place(self, number: int) -> str:
        return f"{self.record_name} {number}" + f" after byte {self._begin:,}" * (self._begin > 0)

    def _needs(self, package: str) -> contextlib.AbstractContextManager[None]:
        said = f"reading this file needs {package}: pip install 'bert_jax[corpora]'."
        return needs_package(f"{self.name}: {said}")

    def _pieces(self, mark: bytes, most: int) -> Iterator[bytes | BadRecord]:
        """Yield the bytes before, between and after occurrences of `mark`, and errors for damage.

        If a piece exceeds `most` bytes, only a beginning of more than `most` bytes is yielded.
        """
        rest, lost = b"", False
        for block in self._content():
            if isinstance(block, BadRecord):
                yield from [rest] * (not lost and bool(rest))  # perhaps a whole record
                yield block
                rest, lost = b"", True
                continue
            *pieces, rest = (rest + block).split(mark)
            yield from pieces[lost:]
            lost = lost and not pieces
            if len(rest) > most and not lost:
                yield rest
                lost = True
            if lost:
                rest = rest[1 - len(mark) :]
        if not lost:
            yield rest

    def _read(
        self, pieces: Iterator[bytes | BadRecord], read: Callable[[bytes, int], Row | None]
    ) -> Iterator[Row]:
        """Yield the result or error of `read(piece, number)` for each piece, except None."""
        for number, piece in enumerate(pieces, 1):
            try:
                row = piece if isinstance(piece, BadRecord) else read(piece, number)
            except BadRecord as error:
                row = error
            if row is not None:
                yield row


class WarcSource(_Archive):
    """Plain-text records of a WARC or WET file; others, such as HTML pages, are skipped."""

    cut_suffixes = (".gz", ".zst")  # a record of an uncompressed file may contain a whole WARC file
    record_start = re.compile(b"(?=%s)" % re.escape(_RECORD))

    @override
    def _rows(self) -> Iterator[Row]:
        with self._needs("warcio"):
            from warcio.recordloader import ArcWarcRecordLoader
        loader = ArcWarcRecordLoader(verify_http=False, arc2warc=False)
        pieces = self._pieces(_RECORD, self.options.max_document_chars + MOST_HEADERS)
        if isinstance(head := next(pieces), BadRecord):
            yield head
        elif head.strip():
            yield BadRecord(f"{self.name} is not a valid WARC file: it begins {head[:40]!r}.")
        again = deque[Any]()

        def take() -> _Piece:
            return again.popleft() if again else next(pieces, None)

        yield from self._read(
            iter(take, None), functools.partial(self._record, loader, take, again)
        )

    def _record(
        self, loader: Any, take: Callable[[], _Piece], again: deque[Any], piece: bytes, number: int
    ) -> Row | None:
        """Read a record, which begins with `piece` and may continue in pieces from `take`.

        If the record is bad, its length may be wrong, so the pieces from `take` are put into
        `again`, to be read as records. The result is None if the record is not plain text.
        """
        from warcio.bufferedreaders import ChunkedDataReader
        from warcio.exceptions import ArchiveLoadFailed

        most, more = self.options.max_document_chars, list[bytes]()
        head, end, body = (_RECORD + piece).partition(b"\r\n\r\n")
        try:
            self._check_headers(head, number)
            record = loader.parse_record_stream(
                io.BytesIO(head + end), known_format="warc", no_record_parse=True
            )
            headers, form = record.rec_headers, ""
            kind, length = map(headers.get_header, ("Content-Type", "Content-Length"))
            if not re.fullmatch("[0-9]{1,18}", length or ""):
                raise ArchiveLoadFailed(f"Content-Length is {length!r:.40}, not a byte count")
            size = int(length)
            there = len(body)
            while there < size <= most and (follows := take()) is not None:
                if isinstance(follows, BadRecord):
                    if not more:
                        raise follows
                    again.appendleft(follows)
                    break
                more.append(follows)
                there += len(_RECORD) + len(follows)
            body = _RECORD.join([body, *more])
            if size <= most and (len(body) < size or body[size:].strip()):
                told = f"Content-Length is {size}, but {len(body)} bytes follow"
                raise ArchiveLoadFailed(told)
            content = io.BytesIO(body[:size])
            if record.rec_type == "response":
                self._check_headers(body, number)
                url = headers.get_header("WARC-Target-URI") or ""
                http = loader.load_http_headers("response", url, content, size)
                if http is not None:
                    kind = http.get_header("Content-Type")
                    form = (http.get_header("Content-Encoding") or "").lower()
                    if (http.get_header("Transfer-Encoding") or "").lower() == "chunked":
                        content = ChunkedDataReader(content)
            elif record.rec_type not in ("conversion", "resource"):
                kind = ""
            if not (kind or "").lower().startswith("text/plain") or form not in _FORMS:
                return None
            data = _unpacked(content.read(most), form, most)
            if max(size, len(data)) > most:
                told = f"more bytes than the limit of {most:,} (max_document_chars)."
                raise self._bad(number, told, "too-long", body)
        except (ArchiveLoadFailed, EOFError) as error:
            why = " ".join(str(error).split())[:200] or "it ends inside a response's headers"
            told = f"{self.name} is not a valid WARC file: {why} ({self._place(number)})."
            again.extendleft(reversed(more))
            raise BadRecord(f"{told} Fetch it again.", data=head + body) from error
        try:
            text = data.decode(_charset(kind or ""), "replace")
        except (LookupError, UnicodeError):  # no such encoding, or no encoding of texts
            text = data.decode("utf-8", "replace")
        text = replace_surrogates(text.replace("\0", " "))
        found = {name: headers.get_header(header) for name, header in _HEADERS.items()}
        found["lang"] = (found["lang"] or "").partition(",")[0] or None  # the most frequent first
        return paragraphs(text), {k: v for k, v in found.items() if v or k == "lang"}

    def _check_headers(self, data: bytes, number: int) -> None:
        if len(data) > MOST_HEADERS and not re.search(rb"\n\r?\n", data[:MOST_HEADERS]):
            told = f"headers: more than the limit of {MOST_HEADERS:,} bytes."
            raise self._bad(number, told, "too-long", data)


def _charset(kind: str) -> str:
    """Return the encoding that a content type names; UTF-8 if none, or punycode, which is slow."""
    found = re.search(r"charset=[\"']?([\w.:-]+)", kind, re.I)
    return "utf-8" if found is None or "punycode" in found[1].lower() else found[1]


class WikipediaSource(_Archive):
    """Articles of a dump of Wikipedia or of another MediaWiki wiki, with the markup removed."""

    record_name = "page"

    @override
    def _rows(self) -> Iterator[Row]:
        with self._needs("mwparserfromhell"):
            from bert_jax.data.corpus.kinds.wikitext import stripped
        pieces = self._pieces(_PAGE, MOST_PAGE)
        head, *first = itertools.islice(pieces, 2)
        if isinstance(head, BadRecord):  # the names of the namespaces are lost
            yield head
            head = b"<mediawiki>"
        root = self._element(head + _END * len(first), 1)
        if _name(root) != "mediawiki":
            raise BadRecord(
                f"{self.name} is not a dump of MediaWiki: its root is <{_name(root):.40}>. "
                "Other XML files cannot be read."
            )
        found = (each.text for each in root.iter() if each.get("key") in (_FILES, _CATEGORIES))
        left_out = {"file", "image", "category", *map(str.casefold, filter(None, found))}
        with contextlib.closing(Guard(PARSE_SECONDS, PARSE_BYTES)) as guard:
            parse = functools.partial(guard.call, functools.partial(stripped, left_out))
            read = functools.partial(self._page, parse)
            yield from self._read(itertools.chain(first, pieces), read)

    def _page(self, parse: Callable[[str], str], piece: bytes, number: int) -> Row | None:
        """Read a page; return None if it is not an article."""
        page, end, _ = piece.partition(b"</page>")
        if (found := _article(self._element(_PAGE + page + end, number))) is None:
            return None
        title, id_, markup = found
        try:
            return parse(markup), {"title": title, "id": id_}
        except ChildProcessError as error:
            told = f"{self.name}, page {number}, {title!r:.200}: {error}. Remove it from the dump."
            raise BadRecord(told, "unparsable", markup) from error

    def _element(self, data: bytes, number: int) -> ElementTree.Element:
        if len(data) > MOST_PAGE:
            told = f"more than the limit of {MOST_PAGE:,} bytes for a page with one revision."
            raise self._bad(number, told, "too-long", data)
        try:
            return ElementTree.fromstring(data)
        except ElementTree.ParseError as error:
            told = f"{self.name} is not a valid XML file: {error} of page {number}. Fetch it again."
            raise BadRecord(told, data=data) from error


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
        if name == "text" or name not in found:  # the first <id>, the newest text
            found[name] = element.text or ""
    if found.get("ns", _ARTICLES) != _ARTICLES or not found.get("text"):
        return None
    return found.get("title", ""), found.get("id", ""), found["text"]
