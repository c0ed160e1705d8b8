"""Sorted string tables of LevelDB's format, which hold the index of a TensorFlow checkpoint.

    [data block]... [metaindex block] [index block] [footer, 48 bytes]

The footer has the positions of the last two blocks; the index block has a key and the position of
each data block. In a block, a key is stored as the number of bytes that it shares with the one
before it, and the rest. After each block come a byte that names its compression and a CRC-32C.
"""

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path

import google_crc32c

from bert_jax.errors import UserError
from bert_jax.files.untrusted.whole_file import read_bytes

MAGIC = 0xDB4775248B80FB57
_FOOTER, _TRAILER = 48, 5
_MASK_DELTA = 0xA282EAD8
_PIECE = 1 << 18


def masked_crc32c(data: bytes | memoryview) -> int:
    """Compute a CRC-32C as LevelDB and TensorFlow store it: rotated by 15 bits plus a constant."""
    crc = 0
    for begin in range(0, len(data), _PIECE):  # the library takes nothing but `bytes`
        crc = int(google_crc32c.extend(crc, bytes(data[begin : begin + _PIECE])))
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def read_varint(raw: bytes, at: int, end: int, where: str) -> tuple[int, int]:
    """Return a number of 64 bits at most, 7 in a byte, and where it ends; refuse others."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, at
    raise UserError(f"{where}: the number that ends at byte {at:,} is cut off or too long")


def read_sstable(
    path: Path, *, max_bytes: int, max_entries: int, max_key: int
) -> dict[bytes, bytes]:
    """Return all entries by key, in order; refuse other formats, damage, and passed bounds."""
    raw = read_bytes(path, max_bytes=max_bytes)
    end = len(raw) - _FOOTER
    if end < 0 or int.from_bytes(raw[-8:], "little") != MAGIC:
        raise UserError(
            f"{path} does not end as a sorted string table does; it is cut off, or no such file "
            "(a pointer of git-lfs instead of the file, for example)"
        )
    where = f"{path}, footer"
    at = end
    handle = [0, 0, 0, 0]  # of the metaindex block, which holds nothing; of the index block
    for i in range(4):
        handle[i], at = read_varint(raw, at, len(raw) - 8, where)
    index = _block(raw, handle[2], handle[3], end, where)
    found: dict[bytes, bytes] = {}
    begin, last = 0, b""
    for _, value in itertools.islice(_entries(index, where, max_key), max_entries + 1):
        where = f"{path}, index block"
        offset, at = read_varint(value, 0, len(value), where)
        size, at = read_varint(value, at, len(value), where)
        if offset < begin:  # else a small file could name a block a million times
            raise UserError(f"{where}: the block at byte {offset:,} overlaps the one before it")
        begin = offset + size + _TRAILER
        where = f"{path}, block at byte {offset:,}"
        for key, content in _entries(_block(raw, offset, size, end, where), where, max_key):
            if found and key <= last:
                raise UserError(f"{where}: the key {key[:80]!r} is not after the one before it")
            found[key], last = content, key
            if len(found) > max_entries:
                raise UserError(f"{path} has more than {max_entries:,} entries")
    return found


def _block(raw: bytes, offset: int, size: int, end: int, where: str) -> bytes:
    """Return the content of a block, checked against its CRC."""
    stop = offset + size
    if stop + _TRAILER > end:
        raise UserError(f"{where}: a block of {size:,} bytes at {offset:,} is beyond the file")
    kind, stored = struct.unpack_from("<BI", raw, stop)
    if masked_crc32c(raw[offset : stop + 1]) != stored:
        raise UserError(f"{where}: a block of {size:,} bytes at {offset:,} is damaged (CRC-32C)")
    if kind:
        method = "Snappy" if kind == 1 else f"method {kind}"
        raise UserError(
            f"{where}: a block at {offset:,} is compressed with {method}, which TensorFlow does "
            "not do and which is not read"
        )
    return raw[offset:stop]


def _entries(block: bytes, where: str, max_key: int) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a block; the restart points, which serve a search, are not needed."""
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 * (restarts + 1)
    if len(block) < 4 or end < 0:
        raise UserError(f"{where}: {restarts:,} restart points in a block of {len(block):,} bytes")
    at, key = 0, b""
    while at < end:
        shared, at = read_varint(block, at, end, where)
        rest, at = read_varint(block, at, end, where)
        size, at = read_varint(block, at, end, where)
        if shared > len(key) or at + rest + size > end or shared + rest > max_key:
            raise UserError(
                f"{where}: a key of {shared:,} + {rest:,} bytes with a value of {size:,} at "
                f"{at:,} does not fit (the block has {end:,}; a key has at most {max_key:,}, the "
                f"one before has {len(key):,})"
            )
        key = key[:shared] + block[at : at + rest]
        at += rest
        yield key, block[at : at + size]
        at += size
