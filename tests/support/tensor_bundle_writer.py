"""A writer of TensorFlow's tensor bundles that shares no code with the reader.

Written from LevelDB's table format and tensorflow/core/protobuf/tensor_bundle.proto; TensorFlow
2.21.0 reads what it writes.
"""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

TYPES = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "bfloat16": 14, "float16": 19}


def crc32c(data: bytes) -> int:
    """Castagnoli's polynomial, reflected, one bit after the other."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """As it is stored."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32


def varint(value: int) -> bytes:
    """7 bits in a byte, the lowest first."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | bytes) -> bytes:
    """A number as varint, or bytes."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3) + varint(value)


def block(entries: Sequence[tuple[bytes, bytes]], restart_interval: int) -> bytes:
    """Entries with shared prefixes, then the restart points."""
    out, restarts, last = b"", [], b""
    for i, (key, value) in enumerate(entries):
        shared = 0
        if i % restart_interval == 0:
            restarts.append(len(out))
        else:
            while shared < min(len(key), len(last)) and key[shared] == last[shared]:
                shared += 1
        rest = key[shared:]
        out += varint(shared) + varint(len(rest)) + varint(len(value)) + rest + value
        last = key
    restarts = restarts or [0]
    return out + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def table(
    entries: Sequence[tuple[bytes, bytes]],
    *,
    restart_interval: int = 16,
    per_block: int = 7,
    compression: int = 0,
) -> bytes:
    """A sorted string table; the keys must be in order."""
    out, index = b"", []

    def append(content: bytes) -> bytes:
        nonlocal out
        handle = varint(len(out)) + varint(len(content))
        whole = content + bytes([compression])
        out += whole + struct.pack("<I", masked(crc32c(whole)))
        return handle

    for first in range(0, len(entries), per_block):
        part = entries[first : first + per_block]
        index.append((part[-1][0] + b"\x01", append(block(part, restart_interval))))
    handles = append(block([], 1)) + append(block(index, 1))
    return out + handles.ljust(40, b"\0") + 0xDB4775248B80FB57.to_bytes(8, "little")


def header(num_shards: int = 1, *, endianness: int = 0, min_consumer: int = 0) -> bytes:
    """BundleHeaderProto."""
    version = field(1, 1) + (field(2, min_consumer) if min_consumer else b"")
    return field(1, num_shards) + (field(2, endianness) if endianness else b"") + field(3, version)


def entry(
    array: np.ndarray, shard: int, offset: int, *, shape: Sequence[int] | None = None
) -> bytes:
    """BundleEntryProto; zeros are left out, as protobuf does."""
    sizes = array.shape if shape is None else shape
    dims = b"".join(field(2, field(1, size) if size else b"") for size in sizes)
    out = field(1, TYPES[str(array.dtype)]) + field(2, dims)
    for number, value in ((3, shard), (4, offset), (5, array.nbytes)):
        out += field(number, value) if value else b""
    return out + varint(6 << 3 | 5) + struct.pack("<I", masked(crc32c(array.tobytes())))


def write_bundle(
    prefix: Path, arrays: Mapping[str, np.ndarray], *, num_shards: int = 1, **options: int
) -> None:
    """PREFIX.index and the data files; the tensors are dealt to the shards in turn."""
    data = [b""] * num_shards
    entries = [(b"", header(num_shards))]
    for i, name in enumerate(sorted(arrays, key=str.encode)):
        shard = i % num_shards
        entries.append((name.encode(), entry(arrays[name], shard, len(data[shard]))))
        data[shard] += arrays[name].tobytes()
    prefix.with_name(prefix.name + ".index").write_bytes(table(entries, **options))
    for shard, content in enumerate(data):
        prefix.with_name(f"{prefix.name}.data-{shard:05}-of-{num_shards:05}").write_bytes(content)
