"""TensorFlow Datasets without TensorFlow: preparing a data set, reading one that is prepared.

The library unpacks archives by TensorFlow, and takes an archive as unpacked where its directory is
there. So archives are unpacked here, within bounds, and the preparation is started again.
"""

import contextlib
import io
import logging
import sys
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.errors import UserError, needs_package
from bert_jax.files.untrusted.archives import extract_tar, extract_zip

_ARCHIVES = {
    ".zip": ("ZIP", extract_zip), ".tar.gz": ("TAR_GZ", extract_tar),
    ".tgz": ("TAR_GZ", extract_tar), ".tar": ("TAR", extract_tar),
}  # fmt: skip
"""Compressions by the end of file names: the library's name, and the function that unpacks."""


class PreparedSplit(NamedTuple):
    """Examples of a prepared data set."""

    features: Any
    """Features by name; classes have their names."""
    examples: Any
    """A sequence of dicts."""
    version: str


def open_tfds(name: str, dataset: str, split: str) -> PreparedSplit:
    """Return a split of a data set, such as glue/cola, that is prepared; messages name it `name`.

    A missing library, data set, split or preparation is a `UserError`; nothing is downloaded.
    """
    tfds = _library(name)
    try:
        builder = tfds.builder(dataset, file_format="array_record")
        prepared = (builder.data_path / "dataset_info.json").exists()
        examples = builder.as_data_source(split=split) if prepared else ()
    except Exception as error:  # its own errors have no common class
        raise UserError(f"{name}: {type(error).__name__}: {_first_line(error)}") from error
    if not prepared:
        raise UserError(
            f"{name} is not prepared: {builder.data_path} is not there (TFDS_DATA_DIR names "
            f"another directory). Prepare it once: bert-jax tfds {dataset}"
        )
    return PreparedSplit(builder.info.features, examples, str(builder.version))


def prepare_tfds(dataset: str) -> Path:
    """Write a data set such as glue/cola as array_record files, once; return its directory.

    It goes where TFDS_DATA_DIR says, by default to ~/tensorflow_datasets. What cannot be
    downloaded, unpacked or prepared without TensorFlow is a `UserError`.
    """
    tfds = _library(dataset)
    try:
        builder = tfds.builder(dataset, file_format="array_record")
    except (tfds.core.DatasetNotFoundError, ValueError) as error:  # ValueError: of configurations
        raise UserError(f"{dataset}: {_first_line(error)}") from error
    downloads = Path(builder.data_dir_root) / "downloads"
    extracted = downloads / "extracted"
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    # An archive may be fetched only after another was unpacked; each round unpacks one or more.
    while True:
        try:
            # Its bars go to stderr; what it prints is that TensorFlow is not there.
            with contextlib.redirect_stdout(io.StringIO()):
                builder.download_and_prepare(
                    download_dir=downloads,
                    download_config=tfds.download.DownloadConfig(extract_dir=extracted),
                    file_format="array_record",
                )
            return Path(builder.data_path)
        except Exception as error:  # its own errors have no common class
            if not _unpack(downloads / builder.name, extracted):
                why = f"could not be prepared: {type(error).__name__}: {_first_line(error)}"
                if "No module named 'tensorflow'" in str(error):
                    why = (
                        "cannot be prepared: its code needs TensorFlow. Where that is installed, "
                        f"run tfds build {dataset} --file_format=array_record; what it writes is "
                        "read here"
                    )
                raise UserError(f"{dataset} {why}") from error


def _library(name: str) -> Any:
    with needs_package(f"{name}: TFDS needs tensorflow-datasets: pip install 'bert_jax[data]'."):
        import tensorflow_datasets as tfds
        import tensorflow_datasets.text  # registers glue, imdb_reviews, ... without TensorFlow
    return tfds


def _unpack(downloads: Path, extracted: Path) -> int:
    """Unpack the archives that are not unpacked yet; return how many."""
    count = 0
    for path in sorted(downloads.glob("*")):
        for suffix, (method, extract) in _ARCHIVES.items():
            target = extracted / f"{method}.{path.name}"
            if path.name.endswith(suffix) and not target.exists():
                logging.getLogger(__name__).info("unpacking %s", path)
                target.parent.mkdir(parents=True, exist_ok=True)
                extract(path, target)
                count += 1
    return count


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
