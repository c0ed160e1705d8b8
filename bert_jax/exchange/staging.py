"""The directory of an exported or imported model, which is there whole and proven or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from bert_jax.errors import UserError
from bert_jax.files.remote import scheme
from bert_jax.files.staging import StagedDirectory, disk_full, sync_directory


@contextlib.contextmanager
def staged(out: str | Path) -> Iterator[Path]:
    """Yield a new directory beside `out`, which becomes `out` by a rename when the body ends well.

    Whatever ends the body otherwise, Ctrl-C and SIGTERM among it, the directory is removed. One
    that a killed process left is removed by the next call for the same `out`.

    Raises:
        UserError: `out` is there and is not an empty directory, is in a bucket, or cannot be
            written.
    """
    if scheme(out) is not None:
        raise UserError(f"{out} is in a bucket; name a local directory and copy what is made there")
    with StagedDirectory(out, lambda _: False) as directory:
        try:
            yield directory.path
            for folder, _, names in os.walk(directory.path):
                for name in names:
                    _sync(Path(folder, name))
                sync_directory(Path(folder))
            directory.commit()
        except OSError as error:
            raise disk_full(directory.target, error) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
