"""Files of hostile records between sound ones, in every format that `corpus` reads, from a seed.

    python tests/support/hostile_records.py DIRECTORY SEED COUNT PER_FILE PARSE_SECONDS

makes and reads them, one after the other, and prints what was read of each, the longest time on a
processor for a record, and the memory of the largest process.

A record is a line, a row, a page, a document or, where the damage is in a compressed file, the one
document of a stream. A file that is hostile as a whole, such as an empty file, is one record.
"""

import bz2
import functools
import gzip
import io
import json
import lzma
import os
import random
import re
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from bert_jax.data.corpus.documents import ReadOptions
from bert_jax.data.corpus.kinds import archives
from bert_jax.data.corpus.sources import resolve_sources

LONG = (16 << 20) + 1
"""Bytes of a line above the limit."""


@dataclass
class Made:
    """A file, and the records in it."""

    name: str
    content: bytes
    hostile: int
    sound: list[str] = field(default_factory=list)
    """Texts that must arrive whatever lies beside them."""

    @property
    def records(self) -> int:
        return self.hostile + len(self.sound)


NOT_UTF8 = [
    b"\xff\xfe\xfd",
    b"caf\xe9",
    b"\xed\xa0\x80",
    b"\xc0\xaf",
    b"\xf5\x80\x80\x80",
    b"\x80" * 99,
]
ODD = ["\ufffe", "a\u2028\u2029\x85", "\x1b[2J\x07\b", "\x0ca\x0b", "\u202e\u200f", "a\u0301" * 99,
       "\U0010ffff", "x" * 100_000, "\ufeff" * 9 + "x"]  # fmt: skip
"""Texts that are UTF-8, and stay documents."""


def lines(rng: random.Random) -> list[bytes]:
    """Lines of text."""
    return [
        *NOT_UTF8, *(text.encode() for text in ODD), b"\0" * 50, b"t\0e\0x\0t\0" * 20, b"a\0b",
        b"a" * (LONG if rng.random() < 0.1 else 999), b"\x1f\x8b\x08", b"%PDF-1.7 x", b'"', b"\\",
    ]  # fmt: skip


def json_lines(rng: random.Random) -> list[bytes]:
    deep = rng.choice([1000, 100_000, 3_000_000])
    return [
        b"[]", b"[1, 2]", b'"text"', b"3", b"null", b"true", b"{}", b"}{", b"{'text': 'x'}", b"{",
        b'{"text": "x"', b'{"text": "x}', b'{"text": 3}', b'{"text": null}', b'{"text": ["x"]}',
        b'{"text": {"text": "x"}}', b'{"Text": "x"}', b'{"text": "x"} {"text": "y"}', b"NaN",
        b'{"text": NaN}', b'{"text": 1e999}', b'{"text": ' + b"9" * 9999 + b"}", b"\xef\xbb\xbf{}",
        b'{"text": "\\ud800 lone"}', b'{"text": "\\u0000 nul"}', b'{"text": "\\x41"}',
        b'{"text": "a\tb"}', b'{"text": "a", "text": 3}', b"[" * deep, b'{"a":' * deep,
        b'{"text": ' + b"[" * deep + b"]" * deep + b"}", b'{"t\0xt": "x"}', b'{"text": "a\0b"}',
        b'{"text": "\xff"}', b'{"text": "caf\xe9"}',
        b'{"text": "' + b"a" * (LONG if rng.random() < 0.1 else 99_999) + b'"}',
        b'{"text": [' + b"{}," * rng.choice([99, 5_000_000]) + b"{}]}",
    ]  # fmt: skip


def rows(rng: random.Random, mark: bytes = b",") -> list[bytes]:
    """Rows of a table with the columns n and text; no quote that is opened here is closed."""
    long = b"1" + mark + b"a" * (LONG if rng.random() < 0.1 else 99_999)
    found = [b"1", mark * 2, b"1" + mark + b"a" + mark + b"b", long, b"1" + mark + b"caf\xe9"]
    found += [b"1" + mark + text for text in (b"\0" * 50, b"\x1b[0m", b"\xff" * 9, b"a\0b")]
    if mark == b",":
        found += [b'1,"open', b'1,"open,' + b"," * 999, b'1,"a"b', b'1,"a""b', b'1,"caf\xe9']
    return found


def warc_record(text: bytes, **headers: str | None) -> bytes:
    """A record whose headers may be replaced, or left out."""
    names: dict[str, str | None] = {
        "WARC-Type": "conversion", "WARC-Record-ID": "<urn:uuid:1>",
        "WARC-Target-URI": "http://x.org",
        "WARC-Date": "2026-01-02T03:04:05Z", "Content-Type": "text/plain",
        "Content-Length": str(len(text)),
    }  # fmt: skip
    names |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = [f"{name}: {value}" for name, value in names.items() if value is not None]
    return "\r\n".join(["WARC/1.0", *head, "", ""]).encode() + text + b"\r\n\r\n"


def answer(head: bytes, body: bytes) -> bytes:
    content = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n" + head + b"\r\n" + body
    kind = {"WARC_Type": "response", "Content_Type": "application/http"}
    return warc_record(content, **kind)


def warc_records(rng: random.Random) -> list[bytes]:
    sound = warc_record(b"A text.")
    bomb = gzip.compress(b"a" * rng.choice([1 << 16, 70 << 20]), 1)
    zipped, chunks = b"Content-Encoding: gzip\r\n", b"Transfer-Encoding: chunked\r\n"
    lengths = ["-5", "x", "", "9" * 5000, "3", "900", "60000000", "6.0", "99999999999999999", None]
    return [
        *(warc_record(b"A text.", Content_Length=length) for length in lengths),
        *(sound[:cut] for cut in (9, 40, 120, len(sound) - 8)),
        *(warc_record(text) for text in NOT_UTF8), warc_record(b"a\0b"),
        sound.replace(b"\r\n", b"\n"), sound.replace(b": ", b" "), sound.replace(b"\r\n\r\n", b""),
        b"WARC/1.0\r\n" + b"X: y\r\n" * rng.choice([9, 300_000]) + b"\r\n",
        b"WARC/1.0\r\nX: " + b"y" * rng.choice([9, 3_000_000]) + b"\r\n\r\n",
        b"WARC/1.\xff\r\n\r\n", b"WARC/1.0\r\n\r\n", b"WARC/1.0\0\r\n\r\n",
        answer(zipped, bomb), answer(zipped, b"no gzip"),
        answer(zipped, gzip.compress(b"text")[:-9]),
        answer(chunks, b"5\r\nhello\r\n0\r\n\r\n"), answer(chunks, b"zzz\r\nhello"),
        answer(chunks, b"ffffffff\r\nhello"), answer(b"X" * 9999 + b"\r\n", b"text"),
    ]  # fmt: skip


PAGE = "<page><title>T</title><ns>0</ns><id>1</id><revision><text>%s</text></revision></page>"


def pages(rng: random.Random) -> list[bytes]:
    many = rng.choice([9, 99, 99, 999, 999, 999, 60_000])
    units = [
        "{{a|",
        "[[a|",
        "{{{",
        "'''",
        "<ref>",
        "{|\n|",
        "[[File:a|[[",
        "<div ",
        "==",
        "http://[",
    ]
    texts = [f"Kept. {unit.replace('<', '&lt;') * many} Kept." for unit in units]
    deep = "<a>" * rng.choice([99, 100_000])
    return [
        *(PAGE.replace("%s", text).encode() for text in [*texts, "a&#0;b", "&bomb;", "a\0b", deep]),
        *(PAGE.encode() % text for text in NOT_UTF8), (PAGE % "a")[:-20].encode(),
        (PAGE % ("a " * rng.choice([9999, 3_000_000]))).encode(), b"<page></pag>", b"<page><",
        b"<page><a b='1' b='2'>", (PAGE % "x").replace("</text>", "").encode(),
    ]  # fmt: skip


def parquet(rng: random.Random, values: list[object]) -> bytes:
    out = io.BytesIO()
    table = pa.table({"n": list(range(len(values))), "text": pa.array(values)})
    codec = rng.choice(["snappy", "zstd", "gzip", "none"])
    pq.write_table(table, out, compression=codec)
    return out.getvalue()


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": functools.partial(gzip.compress, mtime=0), ".bz2": bz2.compress, ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}  # fmt: skip


def damaged(stream: bytes, rng: random.Random) -> bytes:
    """A compressed stream with a wrong checksum, a changed middle, or without its end."""
    half = len(stream) // 2
    kind = rng.randrange(3)
    if kind == 0:
        return (
            stream[:half]
            + bytes(each ^ 0x55 for each in stream[half : half + 4])
            + stream[half + 4 :]
        )
    return stream[: -rng.randrange(12, half)] if kind == 1 else stream[:-6] + b"\x55" * 6


def whole(rng: random.Random) -> list[tuple[str, bytes]]:
    """Files of which nothing can be read."""
    text = b"A text of no consequence.\n" * 99
    table = parquet(rng, ["a", "b"])
    at = rng.randrange(8, len(table) - 8)
    return [
        *(
            (f"empty{suffix}", b"")
            for suffix in (
                ".txt",
                ".jsonl",
                ".csv",
                ".tsv",
                ".parquet",
                ".warc",
                ".xml",
                ".txt.gz",
                ".jsonl.zst",
                ".csv.bz2",
                ".txt.xz",
                ".wet.gz",
            )
        ),
        *(
            (f"cut{suffix}.txt{suffix}", compress(text)[:9])
            for suffix, compress in COMPRESSORS.items()
        ),
        *((f"named{suffix}.jsonl{suffix}", b"No archive.\n") for suffix in COMPRESSORS),
        *((f"blank{suffix}", b" \n\n \r\n") for suffix in (".txt", ".jsonl")),
        ("header.csv", b"a,b\n1,2\n"),
        ("quote.csv", b'"text\n1\n'),
        ("header.tsv", b"\xff\t\xfe\n"),
        ("column.parquet", parquet(rng, [1]).replace(b"text", b"TEXT")),
        ("short.parquet", table[:-9]),
        ("flip.parquet", table[:at] + b"\xff" * 8 + table[at + 8 :]),
        ("magic.parquet", b"PAR1" * 3),
        *(
            (f"type{n}.parquet", parquet(rng, [value]))
            for n, value in enumerate([7, -1.5, True, ["a"], {"text": "a"}, b"caf\xe9"])
        ),
        ("feed.xml", b"<feed/>"),
        ("open.xml", b"<mediawiki><siteinfo>"),
        ("text.xml", b"No XML."),
        ("bomb.xml", b'<!DOCTYPE m [<!ENTITY a "%s">]><mediawiki>' % (b"x" * 9999) + b"&a;" * 9999),
        ("text.warc", b"No archive."),
        ("mark.warc", b"WARC/1.0"),
        ("half.wet.gz", b"\x1f\x8b\x08\0"),
    ]


FORMATS: dict[str, tuple[Callable[[random.Random], list[bytes]], bytes, bytes, str, bytes]] = {
    ".txt": (lines, b"", b"\n\n", "{}", b""),
    ".jsonl": (json_lines, b"", b"\n", '{{"text": "{}"}}', b""),
    ".csv": (rows, b"n,text\n", b"\n", "0,{}", b""),
    ".tsv": (functools.partial(rows, mark=b"\t"), b"n\ttext\n", b"\n", "0\t{}", b""),
    ".warc": (warc_records, b"", b"", "", b""),
    ".xml": (pages, b"<mediawiki>", b"\n", PAGE.replace("%s", "{}"), b"</mediawiki>"),
}
"""For each format: its hostile records, head, separator, sound record, and end."""


def file_of(suffix: str, number: int, count: int, rng: random.Random) -> Made:
    """A file of `count` hostile records, each after a sound one; perhaps compressed."""
    kind, head, mark, form, end = FORMATS[suffix]
    sound = [f"Sound {suffix[1:]} {number} {each}." for each in range(count + 1)]
    whole = [
        warc_record(t.encode()) if suffix == ".warc" else form.format(t).encode() for t in sound
    ]
    content = head + whole[0] + mark
    for record in whole[1:]:
        content += rng.choice(kind(rng)) + mark + record + mark
    packed = rng.choice(["", *COMPRESSORS])
    content = COMPRESSORS.get(packed, bytes)(content + end)
    return Made(f"mixed{number}{suffix}{packed}", content, count, sound)


def members(suffix: str, number: int, count: int, rng: random.Random) -> Made:
    """A compressed file of one stream for each record; `count` of the streams are damaged."""
    _, head, mark, form, end = FORMATS[suffix]
    packed = rng.choice([*COMPRESSORS])
    compress = COMPRESSORS[packed]
    sound, streams = [], [compress(head)] if head else []
    for each in range(2 * count + 1):
        text = f"Member {number} {each} {rng.randbytes(400).hex()}."
        raw = warc_record(text.encode()) if suffix == ".warc" else form.format(text).encode()
        stream = compress(raw + mark)
        if each % 2:
            streams.append(damaged(stream, rng))
        else:
            streams.append(stream)
            sound.append(text)
    streams += [compress(end)] if end else []
    return Made(f"members{number}{suffix}{packed}", b"".join(streams), count, sound)


def table(suffix: str, number: int, count: int, rng: random.Random) -> Made:
    """A parquet file of one row group whose column of bytes has `count` hostile values."""
    sound = [f"Row {number} {each}." for each in range(count + 1)]
    long = b"a" * ((64 << 20) + 1 if rng.random() < 0.1 else 999) + b"\xff"
    hostile = [rng.choice([*NOT_UTF8, long, b"\xff" * 9]) for _ in range(count)]
    values = [text.encode() for text in sound]
    mixed = [each for pair in zip(values, hostile, strict=False) for each in pair]
    return Made(f"table{number}{suffix}", parquet(rng, [*mixed, values[-1]]), count, sound)


def make(seed: int = 0, count: int = 1000, per_file: int = 8) -> Iterator[Made]:
    """Yield files with `count` hostile records in all."""
    number = 0
    for name, content in whole(random.Random(seed))[:count]:
        number += 1
        yield Made(f"whole-{name}", content, 1)
    kinds = [(make, suffix) for suffix in FORMATS for make in (file_of, file_of, members)]
    kinds.append((table, ".parquet"))
    while number < count:
        make_file, suffix = kinds[number // per_file % len(kinds)]
        some = min(per_file, count - number)
        yield make_file(suffix, number, some, random.Random(f"{seed} {number}"))
        number += some


def read(made: Made, path: Path) -> dict[str, object]:
    """Read a file; return the numbers of records and the sound texts that did not arrive."""
    path.write_bytes(made.content)
    (source,) = resolve_sources([str(path)], ReadOptions(on_bad="quarantine", most_bad=1.0))
    missing, longest, before = set(made.sound), 0.0, sum(os.times()[:4])
    documents = 0
    for document in source.documents(gaps=True):
        missing.discard(document.text)
        documents += bool(document.text)
        before, longest = (now := sum(os.times()[:4])), max(longest, now - before)
    path.unlink()
    return {
        "name": made.name, "made": made.records, "records": source.bad.records,
        "documents": documents, "bad": source.bad.documents, "missing": sorted(missing),
        "seconds": max(longest, sum(os.times()[:4]) - before),
    }  # fmt: skip


def main(directory: str, seed: str, count: str, per_file: str, seconds: str) -> None:
    archives.PARSE_SECONDS = float(seconds)
    for made in make(int(seed), int(count), int(per_file)):
        print(json.dumps(read(made, Path(directory) / made.name)), flush=True)
    # `ru_maxrss` of this process would have the memory of the process that started it.
    own = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert own is not None
    kilobytes = max(int(own[1]), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    print(json.dumps({"memory": kilobytes << 10}))


if __name__ == "__main__":
    main(*sys.argv[1:])
