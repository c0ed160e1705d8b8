"""The first of two readings of a task: signatures of the documents that filters keep, in files.

A scan is a directory of arrays. Entries of an index are sorted by their keys, so that those with
keys of one range, from all scans, are few reads (see `duplicates`).
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from bert_jax.data.corpus.cleaning.clean import Cleaner
from bert_jax.data.corpus.cleaning.config import CleaningConfig
from bert_jax.data.corpus.overlap.signatures import Signatures, sign
from bert_jax.data.corpus.workers import grouped, map_ordered
from bert_jax.files.staging import disk_full

_BLOCK_CHARS = 1 << 20


@dataclass(frozen=True)
class Scan:
    """Signatures of the documents of one task, as memory maps; a row is a document that stays."""

    numbers: np.ndarray
    """(n,) int64, number of each row in the task, ascending."""
    filtered: np.ndarray
    """(k,) int64, numbers of the documents that a filter drops, ascending."""
    hashes: np.ndarray
    """(n,) uint64, of each row's words."""
    sketches: np.ndarray
    """(s,) uint32, see `Signatures`."""
    sketch_offsets: np.ndarray
    """(n + 1,) int64, bounds of each row in `sketches`."""
    document_keys: np.ndarray
    """(e,) uint64, hashes and bands of the rows, ascending."""
    document_rows: np.ndarray
    """(e,) uint32, row of each key."""
    paragraph_keys: np.ndarray
    """(m,) uint64, hashes of the paragraphs, ascending."""
    paragraph_places: np.ndarray
    """(m, 2) uint32, row and number of each paragraph."""

    def sketch(self, row: int) -> np.ndarray:
        """Return the sketch of a row."""
        return self.sketches[self.sketch_offsets[row] : self.sketch_offsets[row + 1]]


def scan(
    documents: Iterable[str], config: CleaningConfig, directory: Path, *, num_workers: int = 1
) -> None:
    """Read the documents of a task and write their scan into an existing directory.

    Memory grows with the number of documents, by about 400 bytes for each.

    Raises:
        UserError: the disk is full, or see `signatures.sign`.
    """
    blocks = grouped(enumerate(documents), lambda item: len(item[1]), _BLOCK_CHARS)
    sign_block = functools.partial(_sign_block, config)
    # A task may have no documents; its arrays have their shapes all the same.
    signed = itertools.chain([sign_block([])], map_ordered(sign_block, blocks, num_workers))
    numbers, filtered, signatures = [], [], []
    sketches = directory / "sketches.bin"
    try:
        with open(sketches, "wb") as file:
            for kept, unwanted, found in signed:
                numbers.append(kept)
                filtered.append(unwanted)
                file.write(found.sketches.tobytes())
                signatures.append(found._replace(sketches=found.sketches[:0]))
        _write(directory, numbers, filtered, signatures)
    except OSError as error:
        raise disk_full(directory, error) from error


def open_scan(directory: Path) -> Scan:
    """Open what `scan` wrote."""
    arrays = {
        each.name: np.load(directory / f"{each.name}.npy", mmap_mode="r")
        for each in fields(Scan)
        if each.name != "sketches"
    }
    file = directory / "sketches.bin"
    empty = not file.stat().st_size
    sketches = np.zeros(0, np.uint32) if empty else np.memmap(file, np.uint32, mode="r")
    return Scan(sketches=sketches, **arrays)


def _sign_block(
    config: CleaningConfig, block: list[tuple[int, str]]
) -> tuple[np.ndarray, np.ndarray, Signatures]:
    """Return the numbers of documents that stay, of those that do not, and signatures."""
    cleaner = Cleaner(config)
    kept: dict[int, str] = {}
    filtered: list[int] = []
    for number, text in block:
        cleaned = cleaner.clean(number, text)
        if isinstance(cleaned, str):
            kept[number] = cleaned
        else:
            filtered.append(number)
    found = sign(
        list(kept.values()),
        near=config.near_duplicates is not None,
        paragraphs=config.duplicate_paragraphs,
    )
    return np.array(list(kept), np.int64), np.array(filtered, np.int64), found


def _write(
    directory: Path,
    numbers: Sequence[np.ndarray],
    filtered: Sequence[np.ndarray],
    signatures: Sequence[Signatures],
) -> None:
    firsts = np.cumsum([0, *map(len, numbers)])  # row of each block's first document
    keys, rows, paragraphs, places = [], [], [], []
    for first, each in zip(firsts, signatures, strict=False):
        block = np.column_stack([each.hashes, each.bands])
        keys.append(block.reshape(-1))
        rows.append(np.repeat(first + np.arange(len(block)), block.shape[1]))
        paragraphs.append(each.paragraphs[:, 0])
        places.append(each.paragraphs[:, 1:] + np.array([first, 0], np.uint64))
    arrays = {
        "numbers": _joined(numbers, np.int64),
        "filtered": _joined(filtered, np.int64),
        "hashes": _joined([each.hashes for each in signatures], np.uint64),
        "sketch_offsets": np.cumsum(
            _joined([np.zeros(1), *(each.sketch_lengths for each in signatures)], np.int64)
        ),
    }
    for key, place, parts, where in (
        ("document_keys", "document_rows", keys, rows),
        ("paragraph_keys", "paragraph_places", paragraphs, places),
    ):
        found = _joined(parts, np.uint64)
        order = np.argsort(found, kind="stable")
        arrays[key] = found[order]
        arrays[place] = _joined(where, np.uint32)[order]
    for name, array in arrays.items():
        np.save(directory / f"{name}.npy", array)


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype)
