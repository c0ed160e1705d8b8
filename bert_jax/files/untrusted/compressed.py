"""Decompression of files in blocks, with limited memory at any compression ratio."""

import bz2
import contextlib
import functools
import lzma
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bert_jax.errors import BadRecord, UserError
from bert_jax.files.untrusted.whole_file import read_bytes
from bert_jax.files.urls import open_binary

BLOCK = 1 << 20  # largest number of bytes that are yielded at a time
SUFFIXES = (".gz", ".xz", ".zst", ".bz2")
_XZ_MEMORY = 512 << 20  # limit for the dictionary of an .xz file; `xz -9` needs 65 MiB
# Compressed bytes per read. Reads are small, because the unused rest of a read is copied at the end
# of each stream, and a stream may have only 20 bytes.
_SIP = 1 << 16
# A megabyte of zstd can unpack to 32 GB, and the decoder cannot limit its output. These small reads
# limit the output to 64 MiB.
_ZSTD_SIP = 2048
_STORED = 1 << 18  # more bytes than any stored (uncompressed) block of a .gz or .zst file
_EDGE = 64  # bytes on each side of a stream's start that show whether a document begins there
_KEPT = 32  # last reads to search for the next stream, since damage is noticed late


def plain_suffix(name: str) -> str:
    """Return the suffix in lower case, ignoring a compression suffix: `.csv` for `a.csv.gz`."""
    path = Path(name)
    return Path(path.stem if path.suffix.lower() in SUFFIXES else path).suffix.lower()


def decompress(read: Callable[[int], bytes], name: str) -> Iterator[bytes]:
    """Yield the blocks of `sound_blocks`; raise a UserError if the file is damaged."""
    for block in sound_blocks(read, name):
        if isinstance(block, BadRecord):
            raise block
        yield block


def sound_blocks(read: Callable[[int], bytes], name: str) -> Iterator[bytes | BadRecord]:
    """Yield the decompressed bytes of a file, in blocks. After damage, go on with the next stream.

    A stream is a member of a .gz file or a frame of a .zst file. Damage is yielded as a BadRecord.
    The suffix of `name` gives the format (unknown: plain bytes). `read(n)` reads up to n bytes.
    """
    suffix = Path(name).suffix.lower()
    if suffix not in SUFFIXES:
        while data := read(BLOCK):
            yield data
        return
    kind, magic, new, errors = _decoder(suffix)
    sip = _ZSTD_SIP if suffix == ".zst" else _SIP
    decoder = new()
    fresh, streams, pending, taken, ended = True, 0, b"", 0, False
    kept, reads = deque[bytes](maxlen=_KEPT), 0  # stream's last reads; the next may begin in them
    damage: BadRecord | None = None
    while True:
        if not pending and (fresh or getattr(decoder, "needs_input", True)):
            pending = read(sip)
            taken += len(pending)
            ended = not pending
            if ended and fresh:
                break
            kept.append(pending)
            reads += 1
        if fresh and streams:
            pending = pending.lstrip(b"\0")  # padding between and after streams
            if not pending:
                continue
        if fresh:
            fresh, kept, reads = False, deque([pending], _KEPT), 1
        try:
            if ended:
                raise EOFError
            data = decoder.decompress(pending, *(() if suffix == ".zst" else (BLOCK,)))
        except (EOFError, errors) as error:
            told = f"is not a sound {kind} file: {error} (near byte {taken}). Fetch or compress it"
            if ended:
                told = f"ends in the middle: its {kind} stream is not complete after {taken} bytes."
                told += " Fetch it"
            if damage is None:
                damage = BadRecord(f"{name} {told} again.", "damaged")
            elif reads <= _KEPT:
                damage.count += 1
            pending = b"".join(kept)
            damage.unread += len(pending)
            pending = pending[reads <= _KEPT :]
            while (at := pending.find(magic)) < 0 and (more := read(sip)):
                pending = pending[1 - len(magic) :] + more
                taken += len(more)
                damage.unread += len(more)
            pending = pending[at:] if at >= 0 else b""
            damage.unread -= len(pending)
            decoder, fresh, ended = new(), True, False
            continue
        if data and damage is not None:
            yield damage
            damage = None
        for start in range(0, len(data), BLOCK):
            yield data[start : start + BLOCK]
        pending = getattr(decoder, "unconsumed_tail", b"")
        if decoder.eof:
            pending = decoder.unused_data
            decoder, fresh, streams = new(), True, streams + 1
    if damage is not None:
        yield damage


def next_start(data: bytes, name: str, ends: re.Pattern[bytes]) -> int:
    """Return the offset of the first stream whose text begins after a match of `ends`; -1 if none.

    `data` is a piece of a .gz or .zst file. A stored (uncompressed) block may contain bytes that
    look like a stream. A stream therefore counts only if all bytes after its start are sound
    streams, up to the end of `data` or for more bytes than a stored block has.
    """
    _, magic, new, errors = _decoder(Path(name).suffix.lower())
    first = -1
    while (first := data.find(magic, first + 1)) >= 0:
        begin, at, found, tail = first, first, -1, b""
        with contextlib.suppress(EOFError, errors):
            while found < 0 or (begin < len(data) and begin - first <= _STORED):
                decoder, before, head = new(), tail, b""
                while not decoder.eof:
                    if not (piece := data[at : at + _ZSTD_SIP]):
                        raise EOFError
                    at += len(piece)
                    text = decoder.decompress(piece)
                    head, tail = head + text[: _EDGE - len(head)], (tail + text[-_EDGE:])[-_EDGE:]
                at -= len(decoder.unused_data)
                starts = (each.end() == len(before) for each in ends.finditer(before + head))
                found = begin if found < 0 and any(starts) else found
                begin = at
            return found
        first = begin  # where the damaged stream begins
    return -1


def read_plain(path: Path, *, max_bytes: int) -> bytes:
    """Read a file, decompressed by its suffix; raise a UserError if bad or too large."""
    if path.suffix.lower() not in SUFFIXES:
        return read_bytes(path, max_bytes=max_bytes)
    found = bytearray()
    with open_binary(f"{path}") as file:
        for block in decompress(file.read, f"{path}"):
            found += block
            if len(found) > max_bytes:
                raise UserError(f"{path} unpacks to more than {max_bytes:,} bytes, the limit")
    return bytes(found)


def _decoder(suffix: str) -> tuple[str, bytes, Callable[[], Any], Any]:
    """Return a format's name, the first bytes of a stream, a maker of decoders and their errors."""
    if suffix == ".gz":
        return "gzip", b"\x1f\x8b\x08", lambda: zlib.decompressobj(wbits=31), zlib.error
    if suffix == ".bz2":
        return "bzip2", b"BZh", bz2.BZ2Decompressor, OSError
    if suffix == ".xz":
        bounded = functools.partial(lzma.LZMADecompressor, memlimit=_XZ_MEMORY)
        return "xz", b"\xfd7zXZ\0", bounded, lzma.LZMAError
    import zstandard

    new = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj  # for zstd --long=31
    return "zstd", b"\x28\xb5\x2f\xfd", new, zstandard.ZstdError
