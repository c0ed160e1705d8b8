"""Reader of safetensors files. The library checks the layout, and this module adds limits.

By itself, the library (0.8.0) accepts a header with 90 MB of spaces, a million empty tensors, two
tensors of the same name (it keeps the later one), and names like `../../x`.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from bert_jax.errors import UserError
from bert_jax.files.untrusted.json_file import parse_json
from bert_jax.files.untrusted.whole_file import CONTROL, map_bytes

MAX_HEADER_BYTES = 10_000_000
MAX_TENSORS = 100_000
MAX_NAME = 512
MAX_DIMENSIONS = 32
_MAX_PADDING = 4096
_MAX_BYTES = (1 << 63) - 1

DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "BOOL": np.bool_, "U8": "<u1", "I8": "<i1", "U16": "<u2", "I16": "<i2", "U32": "<u4",
        "I32": "<i4", "U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
        "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
    }.items()
}  # fmt: skip

_LONG_SPACE = re.compile(rb"[ \t\r\n]{%d}" % (_MAX_PADDING + 1))


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """Map a file; return read-only tensors by name. Raise a UserError if missing or damaged."""
    path = Path(path)
    mapped = map_bytes(path, "a .safetensors file was expected")
    if len(mapped) < 8:
        raise UserError(f"{path} has {len(mapped)} bytes; a safetensors file has at least 8")
    begin, header = _header(path, mapped)
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise UserError(f"{path} has {len(header):,} tensors; the limit is {MAX_TENSORS:,}")
    for name, entry in header.items():
        check_name(path, name)
        _check_entry(f"{path}, tensor {name!r}", entry)
    try:
        # Without copying, this refuses wrong sizes, overlaps, gaps and bytes outside all tensors.
        with safetensors.safe_open(path, framework="numpy"):
            pass
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a sound safetensors file: {str(error)[:200]}") from error
    return {name: _view(path, name, entry, mapped, begin) for name, entry in header.items()}


def _header(path: Path, mapped: np.ndarray) -> tuple[int, dict[str, Any]]:
    """Return the offset at which the tensors begin, and the header."""
    length = int.from_bytes(mapped[:8].tobytes(), "little")
    if length > MAX_HEADER_BYTES:
        raise UserError(
            f"{path}: the header has {length:,} bytes; the limit is {MAX_HEADER_BYTES:,}. Perhaps "
            "this is not a safetensors file"
        )
    if length > len(mapped) - 8:
        raise UserError(
            f"{path} is cut off: a header of {length:,} bytes in a file of {len(mapped):,}"
        )
    raw = mapped[8 : 8 + length].tobytes()
    if raw[:1] != b"{":
        raise UserError(f"{path}: the header begins with {raw[:8]!r}; it must be a JSON object")
    if _LONG_SPACE.search(raw):
        raise UserError(f"{path}: the header has more than {_MAX_PADDING:,} spaces in a row")
    return 8 + length, parse_json(raw, where=f"{path}, header", max_depth=3)


def check_name(path: Path, name: str) -> None:
    """Raise a UserError if a name is unsafe as a parameter path, as a file name or in a message."""
    said = f"{path}: the tensor name {name[:80]!r}"
    if not name or len(name) > MAX_NAME:
        raise UserError(f"{said} has {len(name):,} characters; 1 to {MAX_NAME} are allowed")
    if CONTROL.search(name):
        raise UserError(f"{said} holds a control character")
    parts = re.split(r"[/\\]", name)
    if ".." in name or "" in parts or "." in parts or re.match(r"[A-Za-z]:", name):
        raise UserError(f"{said} would be unsafe as a file path; give tensors plain names")


def _check_entry(where: str, entry: object) -> None:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise UserError(f"{where}: the entry must be an object with dtype, shape and data_offsets")
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UserError(f"{where}: the dtype is {dtype!r:.40}; it must be {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise UserError(
            f"{where}: the shape is {shape!r:.80}; expected up to {MAX_DIMENSIONS} sizes"
        )
    # Ignore sizes of 0: numpy multiplies the other sizes even if the array is empty.
    sizes = [n for n in shape if isinstance(n, int) and n > 0]
    if math.prod(sizes) * DTYPES[dtype].itemsize > _MAX_BYTES:
        raise UserError(f"{where}: the shape {shape!r:.80} is larger than any memory")


def _view(
    path: Path, name: str, entry: dict[str, Any], mapped: np.ndarray, begin: int
) -> np.ndarray:
    dtype, offset = DTYPES[entry["dtype"]], begin + entry["data_offsets"][0]
    view = np.ndarray(entry["shape"], dtype, buffer=mapped, offset=offset)
    if dtype == np.bool_ and view.size and view.view(np.uint8).max() > 1:
        # A bool of numpy must not have a byte above 1.
        raise UserError(f"{path}: the BOOL tensor {name!r} has a byte other than 0 or 1")
    return view
