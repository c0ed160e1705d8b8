"""Reading safetensors: a header of JSON, then the bytes of all tensors without gaps.

Stricter than the library (0.8.0), which takes a header of 90 MB of spaces, a million empty tensors,
the later of two equal names, and names like `../../x`.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bert_jax.errors import UserError
from bert_jax.untrusted.json_file import parse_json

MAX_HEADER_BYTES = 10_000_000
MAX_TENSORS = 100_000
MAX_NAME = 512
MAX_DIMENSIONS = 32
_MAX_PADDING = 4096
_MAX_BYTES = (1 << 63) - 1

DTYPES: Mapping[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("<u1"),
    "I8": np.dtype("<i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_LONG_SPACE = re.compile(rb"[ \t\r\n]{%d}" % (_MAX_PADDING + 1))


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file; its bytes are read when `array` is used."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    _file: "SafetensorsFile"
    _begin: int

    @property
    def array(self) -> np.ndarray:
        """A read-only view of the mapped file, of `shape` and `dtype`.

        Raises:
            UserError: a BOOL tensor with bytes other than 0 and 1, which numpy must not see.
        """
        found = np.ndarray(self.shape, self.dtype, buffer=self._file.mapped, offset=self._begin)
        if self.dtype == np.bool_ and found.size and found.view(np.uint8).max() > 1:
            raise UserError(f"{self._file.path}: the BOOL tensor {self.name!r} has a byte above 1")
        return found


class SafetensorsFile(Mapping[str, StoredTensor]):
    """The tensors of a file by name, read-only.

    Attributes:
        path: the file.
        metadata: the header's `__metadata__`.
        mapped: the whole file, (bytes,) uint8, read-only.
    """

    def __init__(self, path: Path, mapped: np.ndarray, header: dict[str, Any], begin: int) -> None:
        """See `open_safetensors`; `begin` is where the tensors' bytes begin."""
        self.path = path
        self.mapped = mapped
        self.metadata = _metadata(path, header.pop("__metadata__", {}))
        if len(header) > MAX_TENSORS:
            raise UserError(f"{path} has {len(header):,} tensors; the limit is {MAX_TENSORS:,}")
        self._tensors: dict[str, StoredTensor] = {}
        ranges = []
        for name, entry in header.items():
            _check_name(path, name)
            dtype, shape, (first, last) = _check_entry(f"{path}, tensor {name!r}", entry)
            self._tensors[name] = StoredTensor(name, dtype, shape, self, begin + first)
            ranges.append((first, last, name))
        _check_ranges(path, sorted(ranges), len(mapped) - begin)

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def open_safetensors(path: str | Path) -> SafetensorsFile:
    """Opens a file and checks its header; the tensors' bytes are not read.

    Returns:
        Name to `StoredTensor`.

    Raises:
        UserError: names what is wrong, or beyond the bounds of this module, and the tensor.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; a .safetensors file was expected")
    try:
        size = path.stat().st_size
        if size < 8:
            raise UserError(f"{path} has {size} bytes; a safetensors file has at least 8")
        mapped = np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    length = int.from_bytes(mapped[:8].tobytes(), "little")
    if length > MAX_HEADER_BYTES:
        raise UserError(
            f"{path}: a header of {length:,} bytes; the limit is {MAX_HEADER_BYTES:,} (or this is "
            "not a safetensors file)"
        )
    if length > len(mapped) - 8:
        raise UserError(
            f"{path} is cut off: a header of {length:,} bytes in a file of {len(mapped):,}"
        )
    raw = mapped[8 : 8 + length].tobytes()
    if raw[:1] != b"{":
        raise UserError(f"{path}: the header begins with {raw[:8]!r}; an object is needed")
    if _LONG_SPACE.search(raw):
        raise UserError(f"{path}: more than {_MAX_PADDING:,} spaces in a row in the header")
    header = parse_json(raw, where=f"{path}, header", max_depth=3)
    return SafetensorsFile(path, mapped, header, 8 + length)


def _metadata(path: Path, found: object) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise UserError(f"{path}: __metadata__ is not an object of strings")
    return found


def _check_name(path: Path, name: str) -> None:
    """Names become parameter paths and parts of messages, in other programs file names too."""
    shown = f"{name[:80]!r}"
    if not name or len(name) > MAX_NAME:
        raise UserError(
            f"{path}: the tensor name {shown} has {len(name):,} characters; 1 to {MAX_NAME} are "
            "allowed"
        )
    if _CONTROL.search(name):
        raise UserError(f"{path}: the tensor name {shown} holds a control character")
    parts = re.split(r"[/\\]", name)
    if ".." in name or "" in parts or "." in parts or re.match(r"[A-Za-z]:", name):
        raise UserError(f"{path}: the tensor name {shown} is a path out of its directory")


def _check_entry(where: str, entry: object) -> tuple[np.dtype, tuple[int, ...], tuple[int, int]]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise UserError(f"{where}: an object with dtype, shape and data_offsets is needed")
    name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(name, str) or name not in DTYPES:
        raise UserError(f"{where}: the dtype is {name!r:.40}; {', '.join(DTYPES)} are read")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise UserError(
            f"{where}: the shape is {shape!r:.80}; at most {MAX_DIMENSIONS} sizes are needed"
        )
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise UserError(f"{where}: data_offsets is {offsets!r:.80}; two positions are needed")
    first, last = offsets
    dtype = DTYPES[name]
    # Python's integers do not overflow; numpy multiplies the sizes of an empty array, too.
    if math.prod(max(1, n) for n in shape) * dtype.itemsize > _MAX_BYTES:
        raise UserError(f"{where}: the shape {shape!r:.80} is larger than any memory")
    needed = math.prod(shape) * dtype.itemsize
    if last - first != needed:
        raise UserError(
            f"{where}: {name} of shape {shape!r:.80} takes {needed:,} bytes, data_offsets "
            f"{offsets!r:.80} hold {last - first:,}"
        )
    return dtype, tuple(shape), (first, last)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= _MAX_BYTES for n in value)


def _check_ranges(path: Path, ranges: list[tuple[int, int, str]], size: int) -> None:
    """The tensors' bytes must follow one another from the first to the last byte."""
    for (_, end, before), (first, _, name) in itertools.pairwise([(0, 0, ""), *ranges]):
        if first != end:
            what = "overlaps" if first < end else "leaves a hole behind"
            raise UserError(
                f"{path}: the tensor {name!r} begins at byte {first:,} and {what} "
                f"{f'{before!r}, which' if before else 'the header, which'} ends at {end:,}"
            )
    end = ranges[-1][1] if ranges else 0
    if end != size:
        raise UserError(
            f"{path}: the tensors end at byte {end:,} of the data, which has {size:,}; the file "
            f"{'is cut off' if end > size else 'has bytes that belong to no tensor'}"
        )
