"""Decompression of files in blocks, with limited memory at any compression ratio."""

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bert_jax.errors import UserError
from bert_jax.files.untrusted.whole_file import read_bytes

BLOCK = 1 << 20
"""Largest number of bytes that are yielded at a time."""
SUFFIXES = (".gz", ".xz", ".zst", ".bz2")
_XZ_MEMORY = 512 << 20  # limit for the dictionary of an .xz file; `xz -9` needs 65 MiB
# Compressed bytes per read. Reads are small, because the unused rest of a read is copied at the end
# of each stream, and a stream may have only 20 bytes.
_SIP = 1 << 16
# A megabyte of zstd can unpack to 32 GB, and the decoder cannot limit its output. These small reads
# limit the output to 64 MiB.
_ZSTD_SIP = 2048


def plain_suffix(name: str) -> str:
    """Return the suffix in lower case, ignoring a compression suffix: `.csv` for `a.csv.gz`."""
    path = Path(name)
    return Path(path.stem if path.suffix.lower() in SUFFIXES else path).suffix.lower()


def decompress(read: Callable[[int], bytes], name: str) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file, in blocks.

    Args:
        read: Function that reads up to a given number of bytes of the file.
        name: Name of the file. Its suffix determines the format; an unknown one means plain bytes.

    Raises:
        UserError: The file is damaged.
    """
    suffix = Path(name).suffix.lower()
    if suffix not in SUFFIXES:
        while data := read(BLOCK):
            yield data
        return
    kind, new, errors = _decoder(suffix)
    sip = _ZSTD_SIP if suffix == ".zst" else _SIP
    decoder = new()
    fresh, streams, pending, taken = True, 0, b"", 0
    while True:
        if not pending and (fresh or getattr(decoder, "needs_input", True)):
            pending = read(sip)
            taken += len(pending)
            if not pending:
                break
        if fresh and streams:
            pending = pending.lstrip(b"\0")  # padding between and after streams
            if not pending:
                continue
        fresh = False
        try:
            data = decoder.decompress(pending, *(() if suffix == ".zst" else (BLOCK,)))
        except errors as error:
            raise UserError(
                f"{name} is not a sound {kind} file: {error} (near byte {taken}). Fetch or "
                "compress it again."
            ) from error
        for start in range(0, len(data), BLOCK):
            yield data[start : start + BLOCK]
        pending = getattr(decoder, "unconsumed_tail", b"")
        if decoder.eof:
            pending = decoder.unused_data
            decoder, fresh, streams = new(), True, streams + 1
    if not fresh:
        raise UserError(
            f"{name} ends in the middle: its {kind} stream is not complete after {taken} bytes. "
            "Fetch it again."
        )


def read_plain(path: Path, *, max_bytes: int) -> bytes:
    """Return the content of a file, decompressed if its suffix says so.

    Raises:
        UserError: The decompressed content exceeds `max_bytes`, or the data are damaged.
    """
    if path.suffix.lower() not in SUFFIXES:
        return read_bytes(path, max_bytes=max_bytes)
    found = bytearray()
    with open(path, "rb") as file:
        for block in decompress(file.read, f"{path}"):
            found += block
            if len(found) > max_bytes:
                raise UserError(f"{path} unpacks to more than {max_bytes:,} bytes, the limit")
    return bytes(found)


def _decoder(suffix: str) -> tuple[str, Callable[[], Any], Any]:
    """Return a format's name, a function that creates its decoder, and the decoder's exceptions."""
    if suffix == ".gz":
        return "gzip", lambda: zlib.decompressobj(wbits=31), zlib.error
    if suffix == ".bz2":
        return "bzip2", bz2.BZ2Decompressor, OSError
    if suffix == ".xz":
        return "xz", lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY), lzma.LZMAError
    import zstandard

    return "zstd", zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
