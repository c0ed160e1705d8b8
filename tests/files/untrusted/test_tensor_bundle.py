"""TensorFlow's checkpoints: every layout of the format is read, nothing else is."""

from pathlib import Path

import google_crc32c
import ml_dtypes
import numpy as np
import pytest
from bounded_child import run_bounded
from tensor_bundle_writer import (
    crc32c,
    entry,
    field,
    header,
    masked,
    table,
    varint,
    write_bundle,
)

from bert_jax.errors import UserError
from bert_jax.files.untrusted.tensor_bundle import masked_crc32c, open_tensor_bundle

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a/b": np.arange(3.0),
    "a/bc": np.int64(7).reshape(()),
    "empty": np.zeros((0, 4), np.float32),
    "half": np.arange(4, dtype=np.float16),
    "z/bf16": np.arange(5).astype(ml_dtypes.bfloat16),
    "z/int": np.arange(1000, dtype=np.int32),
}


def read(index: Path) -> dict[str, np.ndarray]:
    return {name: tensor.array for name, tensor in open_tensor_bundle(index).items()}


def refused(index: Path) -> str:
    with pytest.raises(UserError) as caught:
        read(index)
    assert str(index.parent) in str(caught.value)
    return str(caught.value)


def write_index(tmp_path: Path, *entries: tuple[bytes, bytes], **options: int) -> Path:
    index = tmp_path / "x.index"
    index.write_bytes(table([(b"", header()), *entries], **options))
    (tmp_path / "x.data-00000-of-00001").write_bytes(bytes(100))
    return index


def test_crc32c_is_that_of_rfc_3720() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    for size in (0, 1, 9, 1000, (1 << 18) - 1, (1 << 18) + 7):
        data = bytes(range(256)) * (size // 256 + 1)
        if size < 2000:
            assert masked_crc32c(data[:size]) == masked(crc32c(data[:size]))
        mapped = np.frombuffer(data, np.uint8)[:size]
        assert masked_crc32c(mapped.data) == masked_crc32c(data[:size])


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("restart_interval", [1, 2, 16])
@pytest.mark.parametrize("per_block", [1, 3, 100])
def test_every_layout(
    tmp_path: Path, num_shards: int, restart_interval: int, per_block: int
) -> None:
    write_bundle(
        tmp_path / "x", ARRAYS, num_shards=num_shards,
        restart_interval=restart_interval, per_block=per_block,
    )  # fmt: skip
    found = open_tensor_bundle(tmp_path / "x.index")
    assert list(found) == sorted(ARRAYS)
    for name, tensor in found.items():
        assert tensor.shape == ARRAYS[name].shape
        assert tensor.array.dtype == ARRAYS[name].dtype
        np.testing.assert_array_equal(tensor.array, ARRAYS[name])
        assert not tensor.array.flags.writeable


def test_a_flipped_bit_of_the_index_never_gives_other_tensors(tmp_path: Path) -> None:
    arrays = {name: ARRAYS[name] for name in ("a", "a/b")}
    write_bundle(tmp_path / "x", arrays)
    index = tmp_path / "x.index"
    sound = index.read_bytes()
    unread = 0
    for at in range(len(sound)):
        raw = bytearray(sound)
        raw[at] ^= 1
        index.write_bytes(bytes(raw))
        try:
            found = read(index)
        except UserError:
            continue
        unread += 1
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array)
    metaindex, position, padding = 8 + 5, 2, 40 - 4
    assert unread == metaindex + position + padding


def test_a_flipped_bit_or_a_missing_end_of_the_data_is_found(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x", ARRAYS)
    data = tmp_path / "x.data-00000-of-00001"
    sound = data.read_bytes()
    for at in (0, 30, len(sound) - 1):
        raw = bytearray(sound)
        raw[at] ^= 4
        data.write_bytes(bytes(raw))
        assert "is damaged: its CRC-32C differs" in refused(tmp_path / "x.index")
    data.write_bytes(sound[:-1])
    assert "is cut off: the tensor 'z/int'" in refused(tmp_path / "x.index")
    data.write_bytes(b"")
    assert "has 0 bytes and is cut off: the tensor 'a'" in refused(tmp_path / "x.index")
    data.unlink()
    assert "x.data-00000-of-00001: no such file" in refused(tmp_path / "x.index")


def test_no_table(tmp_path: Path) -> None:
    index = tmp_path / "x.index"
    for raw in (b"version https://git-lfs.github.com/spec/v1\n", bytes(100)):
        index.write_bytes(raw)
        assert "does not end like a sorted string table" in refused(index)
    index.write_bytes(b"")
    assert "is empty" in refused(index)
    index.write_bytes(table([(b"a", b"")]))
    assert "has no header" in refused(index)


def test_what_tensorflow_does_not_write(tmp_path: Path) -> None:
    array = ARRAYS["a"]
    assert "compressed with Snappy" in refused(write_index(tmp_path, compression=1))
    assert "compressed with method 9" in refused(write_index(tmp_path, compression=9))
    twice = [(b"a", entry(array, 0, 0))] * 2
    assert "the key b'a' is not greater" in refused(write_index(tmp_path, *twice))
    shard = (b"a", entry(array, 1, 0))
    assert "is in shard 1, but the last shard is 0" in refused(write_index(tmp_path, shard))
    sliced = (b"a", entry(array, 0, 0) + field(7, b"") + field(7, b""))
    assert "is stored in 2 slices" in refused(write_index(tmp_path, sliced))
    text = (b"a", field(1, 7) + field(5, 10))
    assert "data type 7 cannot be read" in refused(write_index(tmp_path, text))
    for head, said in (
        (header(0), "0 data files"),
        (header(1 << 40), "1099511627776 data files"),
        (header(endianness=1), "big-endian"),
        (header(min_consumer=2), "needs a reader of version 2"),
        (field(3, b"\x0f"), "not a protobuf message (wire type 7)"),
        (varint(1 << 3 | 2) + b"\x05ab", "a field of 5 bytes is cut off"),
        (b"\x08" + b"\xff" * 9, "is cut off or too long"),
        (b"\x08" + b"\xff" * 11, "is cut off or too long"),
        (b"\x08" + b"\xff" * 9 + b"\x02", "is cut off or too long"),
    ):
        (tmp_path / "x.index").write_bytes(table([(b"", head)]))
        assert said in refused(tmp_path / "x.index")
    for name in (b"\xff", b"a\n", b"a\x1b[0m"):
        assert "the tensor name" in refused(write_index(tmp_path, (name, entry(array, 0, 0))))


def test_sizes_beyond_all_bounds(tmp_path: Path) -> None:
    array = ARRAYS["a"]
    for shape in ([1 << 40, 1 << 40], [1 << 62], [0, 1 << 62], [1] * 33):
        found = refused(write_index(tmp_path, (b"a", entry(array, 0, 0, shape=shape))))
        assert "larger than any memory" in found
    for shape in ([1 << 40], [2, 4], []):
        found = refused(write_index(tmp_path, (b"a", entry(array, 0, 0, shape=shape))))
        assert "bytes, but the index says 24" in found
    assert "invalid size in the shape" in refused(
        write_index(tmp_path, (b"a", field(1, 1) + field(2, field(2, field(1, (1 << 64) - 1)))))
    )
    for offset in (77, 1 << 40, (1 << 63) - 25):
        found = refused(write_index(tmp_path, (b"a", entry(array, 0, offset))))
        assert "is cut off: the tensor 'a' ends at" in found
    assert "no file is that large" in refused(
        write_index(tmp_path, (b"a", entry(array, 0, 1 << 63)))
    )
    assert "a key at most 512" in refused(write_index(tmp_path, (b"a" * 513, b"")))


def raw_table(content: bytes, index: bytes) -> bytes:
    """A table of one block and its index, as they are."""
    out, handles = b"", b""
    for part in (content, index):
        handles = varint(len(out)) + varint(len(part))
        out += part + b"\0" + masked(crc32c(part + b"\0")).to_bytes(4, "little")
    return out + (b"\0\0" + handles).ljust(40, b"\0") + 0xDB4775248B80FB57.to_bytes(8, "little")


def one_block(size: int, *, repeat: int = 1) -> bytes:
    handle = varint(0) + varint(size)
    entries = b"".join(
        b"\0\4" + varint(len(handle)) + i.to_bytes(4, "big") + handle for i in range(repeat)
    )
    return entries + bytes(4) + b"\1\0\0\0"


END = bytes(4) + b"\1\0\0\0"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\5\1\0a" + END, "previous key of 0 bytes and adds 1 bytes"),
        (b"\0\xff\xff\xff\x7f\0a" + END, "previous key of 0 bytes and adds 268,435,455 bytes"),
        (b"\0\1\xff\xff\xff\x7fa" + END, "the value has 268,435,455 bytes"),
        (b"\0\1\0", "restart points in a block of 3 bytes"),
        (b"\0\1\0a\xff\xff\xff\xff", "4,294,967,295 restart points in a block"),
        (b"\xff" * 11 + END, "is cut off or too long"),
    ],
)
def test_a_block_that_is_no_block(tmp_path: Path, content: bytes, said: str) -> None:
    index = tmp_path / "x.index"
    index.write_bytes(raw_table(content, one_block(len(content))))
    assert said in refused(index)


def test_blocks_elsewhere(tmp_path: Path) -> None:
    index = tmp_path / "x.index"
    content = END
    index.write_bytes(raw_table(content, one_block(1 << 50)))
    assert "is beyond the file" in refused(index)
    index.write_bytes(raw_table(content, one_block(len(content), repeat=2)))
    assert "overlaps the previous block" in refused(index)


def test_a_hostile_table_takes_little_memory(tmp_path: Path) -> None:
    """Keys of 512 bytes from entries of four: without a bound 60,000 take 30 MB, and so on."""
    long = b"\0" + varint(508) + b"\0" + b"a" * 508
    rows = b"".join(b"\xfc\x03\x04\x00" + i.to_bytes(4, "big") for i in range(1, 200_000))
    index = tmp_path / "x.index"
    content = long + rows + END
    part = content + b"\0"
    crc = masked(google_crc32c.value(part)).to_bytes(4, "little")
    blocks = one_block(len(content))
    tail = masked(crc32c(blocks + b"\0")).to_bytes(4, "little")
    handles = b"\0\0" + varint(len(part) + 4) + varint(len(blocks))
    index.write_bytes(
        part + crc + blocks + b"\0" + tail + handles.ljust(40, b"\0")
        + 0xDB4775248B80FB57.to_bytes(8, "little")
    )  # fmt: skip
    said = run_bounded(
        """
        from pathlib import Path
        from bert_jax.files.untrusted.tensor_bundle import open_tensor_bundle
        open_tensor_bundle(Path(sys.argv[1]))
        """,
        index,
        extra=200 << 20,
        imports="import bert_jax.files.untrusted.tensor_bundle",
    )
    assert "has more than 100,000 entries" in said
