"""TensorFlow's checkpoints of version 2 (tensor bundles), read without TensorFlow.

    PREFIX.index                      a sorted string table: name -> BundleEntryProto
    PREFIX.data-00000-of-0000N        the bytes of the tensors

The protobuf messages (tensorflow/core/protobuf/tensor_bundle.proto) have few fields, so this module
decodes them from the wire format. The index is a sorted string table in the format of LevelDB:

    [data block]... [metaindex block] [index block] [footer, 48 bytes]

The footer has the positions of the metaindex and index blocks. The index block has a key and a
position per data block. A key is stored as the number of bytes shared with the previous key of the
block, then its other bytes. A byte for the compression method and a CRC-32C follow each block.
"""

import functools
import itertools
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np

from bert_jax.errors import UserError
from bert_jax.files.untrusted.safetensors_file import MAX_DIMENSIONS, MAX_NAME, MAX_TENSORS
from bert_jax.files.untrusted.whole_file import map_bytes, read_bytes

MAX_INDEX_BYTES = 1 << 24
_MAX_SHARDS = 10_000
_MAX_BYTES = (1 << 63) - 1
_VERSION = 1

DTYPES: Mapping[int, np.dtype] = {
    1: np.dtype("<f4"), 2: np.dtype("<f8"), 3: np.dtype("<i4"), 9: np.dtype("<i8"),
    14: np.dtype(ml_dtypes.bfloat16), 19: np.dtype("<f2"),
}  # fmt: skip
"""Readable data types by TensorFlow's `DataType`. Tensors of other types can only be listed."""
MAGIC = 0xDB4775248B80FB57
_FOOTER, _TRAILER = 48, 5
_MASK_DELTA = 0xA282EAD8
_PIECE = 1 << 18


@dataclass(frozen=True)
class BundleTensor:
    """Description of one tensor. Its bytes are read when `array` is used."""

    name: str
    _mapped: Callable[[int], tuple[Path, np.ndarray]]
    shape: tuple[int, ...]
    _type: int
    _slices: int
    _shard: int
    _offset: int
    _size: int
    _crc: int
    _where: str

    @property
    def array(self) -> np.ndarray:
        """The tensor as a read-only view of the memory-mapped data file.

        Raise a UserError if the tensor is damaged, or its data type or layout is not supported.
        """
        where = self._where
        if self._slices:
            raise UserError(
                f"{where} is stored in {self._slices} slices (a partitioned variable), which "
                "cannot be read; save the checkpoint again without a partitioner"
            )
        if (dtype := DTYPES.get(self._type)) is None:
            raise UserError(f"{where}: TensorFlow's data type {self._type} cannot be read")
        if (needed := math.prod(self.shape) * dtype.itemsize) != self._size:
            raise UserError(
                f"{where}: {dtype} of shape {self.shape!r:.80} takes {needed:,} bytes, but the "
                f"index says {self._size:,}"
            )
        path, mapped = self._mapped(self._shard)
        if self._offset + self._size > len(mapped):
            raise UserError(
                f"{path} has {len(mapped):,} bytes and is cut off: the tensor {self.name!r} ends "
                f"at {self._offset + self._size:,}"
            )
        stored = mapped[self._offset : self._offset + self._size]
        if masked_crc32c(stored.data) != self._crc:
            raise UserError(
                f"{path}: the tensor {self.name!r} ({self._size:,} bytes at byte {self._offset:,}) "
                "is damaged: its CRC-32C differs from the index; copy the file again"
            )
        return np.ndarray(self.shape, dtype, buffer=stored)


def open_tensor_bundle(index: str | Path) -> dict[str, BundleTensor]:
    """Read PREFIX.index; return its tensors by name. The data of the tensors are read later.

    Raise a UserError if the index is missing, damaged, beyond a limit, or of another format.
    """
    index = Path(index)
    table = _read_sstable(index)
    if b"" not in table:
        raise UserError(f"{index} has no header: it is not the index of a TensorFlow checkpoint")
    number = _num_shards(table.pop(b""), f"{index}, header")

    @functools.cache  # a data file is mapped when it is first used
    def mapped(n: int) -> tuple[Path, np.ndarray]:
        path = index.with_name(f"{index.stem}.data-{n:05}-of-{number:05}")
        return path, np.asarray(map_bytes(path, f"{index.name} names it"))

    tensors: dict[str, BundleTensor] = {}
    for key, value in table.items():
        if key.startswith(b"\0"):  # one slice of a partitioned variable
            continue
        try:
            name = key.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{index}: the tensor name {key[:80]!r} is not UTF-8") from error
        if not name.isprintable():
            raise UserError(f"{index}: the tensor name {name[:80]!r} is not printable")
        fields = _fields_of_tensor(value, f"{index}, tensor {name!r}", number)
        tensors[name] = BundleTensor(name, mapped, *fields)
    return tensors


def _fields_of_tensor(raw: bytes, where: str, num_shards: int) -> tuple[Any, ...]:
    """Decode a BundleEntryProto; return the `BundleTensor` fields from `shape` to `_where`."""
    numbers = {1: 0, 3: 0, 4: 0, 5: 0, 6: 0}  # dtype, shard, offset, size, CRC
    shape: tuple[int, ...] = ()
    slices = 0
    for number, value in fields_of(raw, where):
        if number == 2 and isinstance(value, bytes):
            shape = _shape(value, where)
        elif number == 7:
            slices += 1
        elif number in numbers and isinstance(value, int):
            numbers[number] = value
    kind, shard, offset, size, crc = numbers.values()
    if not (slices or shard < num_shards):
        raise UserError(f"{where} is in shard {shard:,}, but the last shard is {num_shards - 1:,}")
    if offset + size > _MAX_BYTES:
        raise UserError(f"{where}: {size:,} bytes at byte {offset:,}; no file is that large")
    return shape, kind, slices, shard, offset, size, crc, where


def fields_of(raw: bytes, where: str) -> Iterator[tuple[int, int | bytes]]:
    """Yield the field numbers and values of a protobuf message. Nested messages stay bytes."""
    at = 0
    while at < len(raw):
        tag, at = read_varint(raw, at, len(raw), where)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = read_varint(raw, at, len(raw), where)
            yield number, value
            continue
        if kind == 2:
            size, at = read_varint(raw, at, len(raw), where)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise UserError(f"{where}: not a protobuf message (wire type {kind})")
        content = raw[at : at + size]
        if len(content) < size:
            raise UserError(f"{where}: a field of {size:,} bytes is cut off")
        at += size
        yield number, content if kind == 2 else int.from_bytes(content, "little")


def _num_shards(raw: bytes, where: str) -> int:
    fields = dict(fields_of(raw, where))
    shards, big_endian = fields.get(1, 0), fields.get(2, 0)
    stamp = fields.get(3, b"")
    needs = dict(fields_of(stamp, where)).get(2, 0) if isinstance(stamp, bytes) else _VERSION + 1
    if not isinstance(shards, int) or not 1 <= shards <= _MAX_SHARDS:
        raise UserError(f"{where}: {shards!r:.40} data files; there must be 1 to {_MAX_SHARDS:,}")
    if big_endian != 0:
        raise UserError(f"{where}: the tensors are big-endian, which cannot be read")
    if not isinstance(needs, int) or needs > _VERSION:
        raise UserError(
            f"{where}: needs a reader of version {needs!r:.40}; this reader is version {_VERSION}"
        )
    return shards


def _shape(raw: bytes, where: str) -> tuple[int, ...]:
    sizes = []
    for number, value in fields_of(raw, where):
        if number == 2 and isinstance(value, bytes):
            size = dict(fields_of(value, where)).get(1, 0)
            if not isinstance(size, int) or size > _MAX_BYTES:
                raise UserError(f"{where}: invalid size in the shape: {size!r:.40}")
            sizes.append(size)
        elif number == 3 and value:
            raise UserError(f"{where} has an unknown shape, so it cannot be read")
    if len(sizes) > MAX_DIMENSIONS or math.prod(max(1, n) for n in sizes) * 8 > _MAX_BYTES:
        raise UserError(f"{where}: the shape {sizes!r:.80} is larger than any memory")
    return tuple(sizes)


def masked_crc32c(data: bytes | memoryview) -> int:
    """Compute a CRC-32C as LevelDB and TensorFlow store it: rotated by 15 bits, plus a constant."""
    pieces = (bytes(data[begin : begin + _PIECE]) for begin in range(0, len(data), _PIECE))
    crc = functools.reduce(google_crc32c.extend, pieces, 0)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def read_varint(raw: bytes, at: int, end: int, where: str) -> tuple[int, int]:
    """Return the varint (up to 64 bits) that begins at `at`, and the position after it."""
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


def _read_sstable(path: Path) -> dict[bytes, bytes]:
    """Read a sorted string table; raise a UserError if missing, damaged or beyond a limit."""
    raw = read_bytes(path, max_bytes=MAX_INDEX_BYTES)
    end = len(raw) - _FOOTER
    if end < 0 or int.from_bytes(raw[-8:], "little") != MAGIC:
        raise UserError(
            f"{path} does not end like a sorted string table: it is cut off, or it is another kind "
            "of file, such as a git-lfs pointer"
        )
    where = f"{path}, footer"
    at = end
    handle = [0, 0, 0, 0]  # offset and size of the (empty) metaindex block and of the index block
    for i in range(4):
        handle[i], at = read_varint(raw, at, len(raw) - 8, where)
    index = _block(raw, handle[2], handle[3], end, where)
    found: dict[bytes, bytes] = {}
    begin, last = 0, b""
    for _, value in itertools.islice(_entries(index, where), MAX_TENSORS + 1):
        where = f"{path}, index block"
        offset, at = read_varint(value, 0, len(value), where)
        size, at = read_varint(value, at, len(value), where)
        if offset < begin:  # a small file must not use the same block a million times
            raise UserError(f"{where}: the block at byte {offset:,} overlaps the previous block")
        begin = offset + size + _TRAILER
        where = f"{path}, block at byte {offset:,}"
        for key, content in _entries(_block(raw, offset, size, end, where), where):
            if found and key <= last:
                raise UserError(
                    f"{where}: the key {key[:80]!r} is not greater than the previous key"
                )
            found[key], last = content, key
            if len(found) > MAX_TENSORS:
                raise UserError(f"{path} has more than {MAX_TENSORS:,} entries")
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
            f"{where}: a block at {offset:,} is compressed with {method}; only blocks without "
            "compression, as TensorFlow writes them, can be read"
        )
    return raw[offset:stop]


def _entries(block: bytes, where: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a block, without the restart points for binary search."""
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 * (restarts + 1)
    if len(block) < 4 or end < 0:
        raise UserError(f"{where}: {restarts:,} restart points in a block of {len(block):,} bytes")
    at, key = 0, b""
    while at < end:
        shared, at = read_varint(block, at, end, where)
        rest, at = read_varint(block, at, end, where)
        size, at = read_varint(block, at, end, where)
        if shared > len(key) or at + rest + size > end or shared + rest > MAX_NAME:
            raise UserError(
                f"{where}: invalid entry at byte {at:,}: the key shares {shared:,} bytes with the "
                f"previous key of {len(key):,} bytes and adds {rest:,} bytes, and the value has "
                f"{size:,} bytes; the block has {end:,} bytes and a key at most {MAX_NAME:,}"
            )
        key = key[:shared] + block[at : at + rest]
        at += rest
        yield key, block[at : at + size]
        at += size
