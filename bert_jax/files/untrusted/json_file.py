"""Reader of untrusted JSON, with limits on bytes, depth and number of values.

By itself, `json.loads` recurses into 10,000 levels, keeps the last of two equal keys, accepts NaN,
turns 1e999 into `Infinity`, and, for a file of empty lists, needs 70 times its size in memory.
"""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from bert_jax.errors import UserError
from bert_jax.files.untrusted.whole_file import decode_text, read_bytes

MAX_VALUES = 8_000_000  # a corpus of a million sources has six million
"""Largest number of lists, objects and their members, which take less than 1 GB of memory."""
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_STRING = re.compile(rb'"[^"]*"?')
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_STRUCTURE = b"[]{},\n"
_NO_STRUCTURE = bytes(set(range(256)) - set(_STRUCTURE))
_BLOCK = 1 << 20


def read_json(path: Path, *, max_bytes: int) -> Any:
    """Read a JSON file of at most `max_bytes`. Errors are as in `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, max_bytes=max_bytes), where=f"{path}")


def read_json_object(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """Read a JSON file whose top level must be an object. Other errors are as in `read_json`."""
    value = read_json(path, max_bytes=max_bytes)
    if not isinstance(value, dict):
        raise UserError(f"{path}: the top level is a {type(value).__name__}; expected an object")
    return value


def parse_json(raw: bytes, *, where: str, max_depth: int = 64, allow_nan: bool = False) -> Any:
    """Parse a JSON document in UTF-8 into Python values; `where` names the document in messages.

    `max_depth` is the largest nesting of lists and objects. `allow_nan` allows `NaN`, `Infinity`
    and numbers beyond the range of float64. Raise a UserError if the document is not valid, exceeds
    a limit, or has an object with two equal keys.
    """
    text = decode_text(raw, where=where)
    _check_structure(raw, where, max_depth)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            twice = next(key for key, count in counts.items() if count > 1)
            raise UserError(f"{where}: the key {twice[:80]!r} occurs twice in one object")
        return found

    def refuse(name: str) -> NoReturn:
        raise UserError(f"{where}: {name[:40]} is not a valid JSON number")

    def finite(digits: str) -> float:
        value = float(digits)
        return value if math.isfinite(value) else refuse(digits)

    hooks: dict[str, Any] = {} if allow_nan else {"parse_constant": refuse, "parse_float": finite}
    try:
        value = json.loads(text, object_pairs_hook=unique, **hooks)
        if _SURROGATE.search(raw):  # half of a pair cannot be encoded: refuse it
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: a string is not valid Unicode text: half of a surrogate pair"
        ) from error
    except UserError:
        raise
    except json.JSONDecodeError as error:
        raise UserError(f"{where}, line {error.lineno}: not JSON ({error.msg})") from error
    except ValueError as error:  # an integer has more digits than Python converts
        raise UserError(f"{where}: not JSON ({error})") from error
    except RecursionError as error:  # the caller had already used most of the stack
        raise UserError(f"{where}: JSON nested too deeply") from error
    return value


def short(value: object) -> str:
    """Describe a value in at most one line, for an error message."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return "missing" if value is None else repr(value)[:80]


def _check_structure(raw: bytes, where: str, max_depth: int) -> None:
    """Raise a UserError if a document that is not parsed yet has too many values or levels."""
    if raw.count(b"[") + raw.count(b"{") <= max_depth and raw.count(b",") < MAX_VALUES:
        return
    structure = _STRING.sub(b"", _ESCAPE.sub(b"", raw)).translate(None, _NO_STRUCTURE)
    values = len(structure) - structure.count(b"\n") - structure.count(b"]") - structure.count(b"}")
    if values > MAX_VALUES:
        raise UserError(f"{where}: {values:,} values; the limit is {MAX_VALUES:,}")
    steps = np.zeros(256, np.int8)
    steps[list(b"[{")] = 1
    steps[list(b"]}")] = -1
    depth = 0
    for begin in range(0, len(structure), _BLOCK):
        block = np.frombuffer(structure[begin : begin + _BLOCK], np.uint8)
        depths = depth + np.cumsum(steps[block], dtype=np.int64)
        deep = np.flatnonzero(depths > max_depth)
        if deep.size:
            line = structure.count(b"\n", 0, begin + int(deep[0])) + 1
            raise UserError(
                f"{where}, line {line}: JSON nested too deeply; the limit is {max_depth} levels"
            )
        depth = int(depths[-1])
