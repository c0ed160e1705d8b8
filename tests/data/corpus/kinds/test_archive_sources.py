"""Web archives and dumps of Wikipedia as sources."""

import bz2
import gzip

import pytest

from bert_jax.data.corpus.kinds import archives
from bert_jax.data.corpus.sources import resolve_sources
from bert_jax.errors import UserError


def read(path):
    (source,) = resolve_sources([str(path)])
    found = [(document.text, dict(document.fields)) for document in source.documents()]
    assert source.bytes_read == source.size
    return found


def record(kind: str, type_: str, body: str, encoding: str = "utf-8") -> bytes:
    data = body.encode(encoding)
    head = {
        "WARC-Type": kind, "WARC-Record-ID": "<urn:uuid:1>",
        "WARC-Target-URI": f"http://x.org/{kind}",
        "WARC-Date": "2026-01-02T03:04:05Z", "WARC-Identified-Content-Language": "deu",
        "Content-Type": type_, "Content-Length": str(len(data)),
    }  # fmt: skip
    lines = ["WARC/1.0", *(f"{name}: {value}" for name, value in head.items())]
    return "\r\n".join([*lines, "", ""]).encode() + data + b"\r\n\r\n"


def warc(*, gz: bool = True) -> bytes:
    """A file with a WET record, an answer of plain text, and one of HTML."""
    pytest.importorskip("warcio", reason="warcio is not installed")
    answer = "HTTP/1.1 200 OK\r\nContent-Type: {}\r\n\r\nPlain answer."
    records = [
        record("warcinfo", "application/warc-fields", "software: test"),
        record("conversion", "text/plain", " Erster Absatz.\n\nZweiter.\0 \n"),
        *(
            record("response", "application/http; msgtype=response", answer.format(type_))
            for type_ in ("text/plain; charset=utf-8", "text/html")
        ),
    ]
    return b"".join(gzip.compress(each) if gz else each for each in records)


@pytest.mark.parametrize("name", ["a.warc.wet.gz", "a.wet", "a.warc"])
def test_web_archive(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(warc(gz=name.endswith(".gz")))
    first, second = read(path)
    assert first == (
        "Erster Absatz.\nZweiter.",
        {"url": "http://x.org/conversion", "date": "2026-01-02T03:04:05Z", "lang": "deu"},
    )
    assert second[0] == "Plain answer."


def test_damaged_web_archives(tmp_path):
    path = tmp_path / "a.wet.gz"
    path.write_bytes(warc()[:-30])
    with pytest.raises(UserError, match=r"a\.wet\.gz ends in the middle"):
        read(path)
    path.write_bytes(gzip.compress(b"No archive at all.\n"))
    with pytest.raises(UserError, match=r"a\.wet\.gz is not a valid WARC file"):
        read(path)
    plain = warc(gz=False)
    path = tmp_path / "a.wet"
    path.write_bytes(plain[: plain.index(b"Zweiter")])
    with pytest.raises(UserError, match=r"is not a valid WARC file: Content-Length is 28, but 17"):
        read(path)


TEXT = "Köln liegt am Rhein."
RAW = TEXT.encode()


def response(headers: str, body: bytes, end: str = "\r\n") -> bytes:
    head = end.join(["HTTP/1.1 200 OK", *headers.splitlines(), "", ""])
    text = (head.encode() + body).decode("latin-1")
    return record("response", "application/http", text, "latin-1")


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ("Content-Type: text/plain; charset=ISO-8859-1", TEXT.encode("latin-1")),
        ('Content-Type: Text/Plain;Charset="utf-16"', TEXT.encode("utf-16")),
        ("Content-Type: text/plain; charset=x-none", RAW),
        *(
            (f"Content-Type: text/plain; charset={name}", RAW)
            for name in ("hex", "undefined", "idna", "punycode")
        ),
        (
            "Content-Type: text/plain\nTransfer-Encoding: Chunked",
            b"%x\r\n%s\r\n0\r\n\r\n" % (len(RAW), RAW),
        ),
    ],
)
def test_an_answer_is_read_as_its_headers_say(tmp_path, headers, body):
    pytest.importorskip("warcio", reason="warcio is not installed")
    path = tmp_path / "a.warc"
    path.write_bytes(response(headers, body))
    assert [text for text, _ in read(path)] == [TEXT]


def test_a_long_answer_whose_headers_end_in_bare_line_feeds(tmp_path):
    pytest.importorskip("warcio", reason="warcio is not installed")
    path, count = tmp_path / "a.warc", archives.MOST_HEADERS // len(RAW) + 1
    path.write_bytes(response("Content-Type: text/plain", (RAW + b"\n") * count, "\n"))
    ((text, _),) = read(path)
    assert text == "\n".join([TEXT] * count)


@pytest.mark.parametrize(
    ("header", "lang"),
    [(b"eng,deu", "eng"), (b"deu", "deu"), (b"", None), (None, None)],  # None is unknown
)
def test_the_language_of_a_record_is_the_most_frequent(tmp_path, header, lang):
    pytest.importorskip("warcio", reason="warcio is not installed")
    path, name = tmp_path / "a.wet", b"WARC-Identified-Content-Language: "
    line = b"" if header is None else name + header + b"\r\n"
    content = record("conversion", "text/plain", TEXT)
    path.write_bytes(content.replace(name + b"deu\r\n", line))
    assert [fields["lang"] for _, fields in read(path)] == [lang]


PAGE = """
  <page><title>{title}</title><ns>{ns}</ns><id>{id}</id>{more}
    <revision><id>99</id><text xml:space="preserve">{text}</text></revision>
  </page>"""
MARKUP = """{{Infobox|name=x}}
'''Berlin''' is the [[Germany|German]] capital.&lt;ref&gt;A book.&lt;/ref&gt;
[[File:Berlin.jpg|thumb|A picture]] [[Bild:Spree.jpg|mini|hochkant|The [[Spree]] flows]]
== History ==
It is [https://x.org old], as [[Star Trek: Berlin|{{nowrap|a|b}}a film]] says.
{| class="wikitable"
| cell
|}
[[Kategorie:Stadt]]"""


BERLIN = "Berlin is the German capital.\nHistory\nIt is old, as a film says."


def dump() -> bytes:
    pages = [
        PAGE.format(title="Berlin", ns=0, id=7, more="", text=MARKUP),
        PAGE.format(title="Talk:Berlin", ns=1, id=8, more="", text="Talk."),
        PAGE.format(title="BER", ns=0, id=9, more='<redirect title="Berlin"/>', text="No."),
        PAGE.format(title="Ümlaut", ns=0, id=10, more="", text="Zwei.\n\nDrei."),
    ]
    head = (
        '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/"><siteinfo><namespaces>'
        '<namespace key="0"/><namespace key="6">Datei</namespace>'
        '<namespace key="14">Kategorie</namespace></namespaces></siteinfo>'
    )
    return (head + "".join(pages) + "</mediawiki>").encode()


def test_wikipedia(tmp_path):
    pytest.importorskip("mwparserfromhell", reason="mwparserfromhell is not installed")
    path = tmp_path / "dewiki.xml.bz2"
    path.write_bytes(bz2.compress(dump()[:500]) + bz2.compress(dump()[500:]))  # two streams
    assert read(path) == [
        (BERLIN, {"title": "Berlin", "id": "7"}),
        ("Zwei.\nDrei.", {"title": "Ümlaut", "id": "10"}),
    ]


def test_a_part_of_a_dump_with_old_revisions_has_the_newest_text(tmp_path):
    pytest.importorskip("mwparserfromhell", reason="mwparserfromhell is not installed")
    old = "<revision><id>98</id><text>A stub.</text></revision>"
    page = PAGE.format(title="Berlin", ns=0, id=7, more=old, text="The article.")
    path = tmp_path / "enwiki-pages-articles1.xml-p1p41242.bz2"
    path.write_bytes(bz2.compress(f"<mediawiki>{page}</mediawiki>".encode()))
    assert read(path) == [("The article.", {"title": "Berlin", "id": "7"})]


def test_damaged_dumps(tmp_path):
    pytest.importorskip("mwparserfromhell", reason="mwparserfromhell is not installed")
    path = tmp_path / "a.xml.bz2"
    path.write_bytes(bz2.compress(dump())[:-20])
    with pytest.raises(UserError, match=r"a\.xml\.bz2 ends in the middle"):
        read(path)
    path = tmp_path / "a.xml"
    path.write_bytes(dump()[:-20])
    with pytest.raises(UserError, match=r"a\.xml is not a valid XML file: .* line"):
        read(path)
    path.write_text("<feed/>")
    with pytest.raises(UserError, match="not a dump of MediaWiki: its root is <feed>"):
        read(path)


BODY = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Encoding: gzip\r\n%s\r\n%s"
BOMB = gzip.compress(bytes(70 << 20), 1)


def answer(*parts: bytes) -> bytes:
    return record("response", "application/http", (BODY % parts).decode("latin-1"), "latin-1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (answer(b"", BOMB), "record 1: more bytes than the limit of 67,108,864"),
        (
            answer(b"Transfer-Encoding: chunked\r\n", b"%x\r\n%s\r\n0\r\n\r\n" % (len(BOMB), BOMB)),
            "record 1: more bytes than the limit",
        ),
        (b"WARC/1.0\r\n" + b"X: y\r\n" * 10**6, "record 1: headers: more than the limit of 1,048"),
        (b"WARC/1.0\r\nX: " + b"y" * 10**7, "record 1: headers: more than the limit"),
        (
            record("response", "application/http", "HTTP/1.1 200 OK\r\n" + "X: y\r\n" * 10**6),
            "record 1: headers: more than the limit",
        ),
        *(
            (record("conversion", "text/plain", "x").replace(b"Content-Length: 1", x), "not a byte")
            for x in (b"Content-Length: -5", b"X: y", b"Content-Length: " + b"9" * 5000)
        ),
        (gzip.compress(record("conversion", "text/plain", "x")), "not a valid WARC"),
        (record("response", "application/http", "HTTP/1.1"), None),
        (record("response", "application/http", "x").replace(b"WARC-Target-URI", b"X"), None),
    ],
)  # fmt: skip
def test_hostile_web_archives(tmp_path, content, message):
    pytest.importorskip("warcio", reason="warcio is not installed")
    path = tmp_path / "a.warc"
    path.write_bytes(content + record("conversion", "text/plain", "The neighbour."))
    if message is None:
        assert [text for text, _ in read(path)] == ["The neighbour."]
        return
    with pytest.raises(UserError, match=message):
        read(path)


OPEN = "<mediawiki><page><title>T</title><ns>0</ns><id>7</id><text>"


@pytest.mark.parametrize(
    ("head", "unit", "message"),
    [
        (OPEN, "a " * (1 << 16), "page 1: more than the limit of 4,194,304 bytes"),
        ("<mediawiki><page a='", "a " * (1 << 16), "page 1: more than the limit"),
        ("<mediawiki><page>", "<a/>" * (1 << 16), "page 1: more than the limit"),
        ("<mediawiki>", "<a>" * (1 << 16), "page 1: more than the limit"),
    ],
)
def test_hostile_dumps(tmp_path, head, unit, message):
    pytest.importorskip("mwparserfromhell", reason="mwparserfromhell is not installed")
    path = tmp_path / "a.xml.gz"
    path.write_bytes(gzip.compress((head + unit * 64).encode(), 1))
    with pytest.raises(UserError, match=message):
        read(path)


def test_hostile_wikitext(tmp_path, monkeypatch):
    """Markup that takes squares of time has a limit; links take none for each of the others."""
    pytest.importorskip("mwparserfromhell", reason="mwparserfromhell is not installed")
    path = tmp_path / "a.xml"
    text = "[[File:a]] " * 5000 + "[[" + " " * 10**5 + "x]] Rest."
    path.write_text(OPEN + text + "</text></page></mediawiki>")
    assert [text.split() for text, _ in read(path)] == [["x", "Rest."]]
    plain, slow, large = "Plain [[text]].", "{{a|" * 60_000, "[[a]] " * 600_000
    for limit, value, hostile in (("SECONDS", 0.5, slow), ("BYTES", 100 << 20, large)):
        with monkeypatch.context() as patch:
            patch.setattr(archives, f"PARSE_{limit}", value)
            path.write_text(OPEN + plain + "</text></page></mediawiki>")
            assert [text for text, _ in read(path)] == ["Plain text."]
            path.write_text(OPEN + hostile + "</text></page></mediawiki>")
            with pytest.raises(UserError, match=r"page 1, 'T': its parser fails, or takes over"):
                read(path)
