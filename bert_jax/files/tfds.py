"""TensorFlow Datasets without TensorFlow: prepare a data set, and read a prepared data set.

The library unpacks archives with TensorFlow, but skips an archive that is already unpacked. So this
module unpacks the archives, within limits, and calls the library again.
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
"""TFDS's name of each archive format, and our function that unpacks it, by file suffix."""


class PreparedSplit(NamedTuple):
    """One split of a prepared data set."""

    features: Any
    """Type of each feature, by feature name. A `ClassLabel` type also holds the class names."""
    examples: Any
    """Sequence of examples. Each example is a dictionary from feature name to value."""
    version: str


def open_tfds(name: str, dataset: str, split: str) -> PreparedSplit:
    """Open a split of a prepared data set such as glue/cola. Messages call the data set `name`.

    Raise a UserError if the library, data set or split is missing, or the data set is not prepared.
    """
    tfds = _library(name)
    try:
        builder = tfds.builder(dataset, file_format="array_record")
        prepared = (builder.data_path / "dataset_info.json").exists()
        examples = builder.as_data_source(split=split) if prepared else ()
    except Exception as error:  # the library's errors have no common class
        raise UserError(f"{name}: {type(error).__name__}: {_first_line(error)}") from error
    if not prepared:
        raise UserError(
            f"{name} is not prepared: {builder.data_path} does not exist. Prepare it once with "
            f"bert-jax tfds {dataset}, or set TFDS_DATA_DIR if the data set is elsewhere"
        )
    return PreparedSplit(builder.info.features, examples, str(builder.version))


def prepare_tfds(dataset: str) -> Path:
    """Download a data set such as glue/cola, write array_record files, and return their directory.

    The directory is in TFDS_DATA_DIR, by default ~/tensorflow_datasets. Prepared data are reused.
    Raise a UserError if the data set is unknown, cannot be prepared, or needs TensorFlow.
    """
    tfds = _library(dataset)
    try:
        builder = tfds.builder(dataset, file_format="array_record")
    except (tfds.core.DatasetNotFoundError, ValueError) as error:  # ValueError: no such config
        raise UserError(f"{dataset}: {_first_line(error)}") from error
    downloads = Path(builder.data_dir_root) / "downloads"
    extracted = downloads / "extracted"
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    # Some archives are fetched only after another is unpacked. Each round unpacks at least one.
    while True:
        try:
            # Progress bars go to stderr. Stdout gets only messages that TensorFlow is missing.
            with contextlib.redirect_stdout(io.StringIO()):
                builder.download_and_prepare(
                    download_dir=downloads,
                    download_config=tfds.download.DownloadConfig(extract_dir=extracted),
                    file_format="array_record",
                )
            return Path(builder.data_path)
        except Exception as error:  # the library's errors have no common class
            if not _unpack(downloads / builder.name, extracted):
                why = f"could not be prepared: {type(error).__name__}: {_first_line(error)}"
                if "No module named 'tensorflow'" in str(error):
                    why = (
                        "cannot be prepared: its code needs TensorFlow. On a machine with "
                        f"TensorFlow run tfds build {dataset} --file_format=array_record; bert_jax "
                        "reads the result"
                    )
                raise UserError(f"{dataset} {why}") from error


def _library(name: str) -> Any:
    with needs_package(f"{name}: TFDS needs tensorflow-datasets: pip install 'bert_jax[data]'."):
        import tensorflow_datasets as tfds
        import tensorflow_datasets.text  # registers glue, imdb_reviews, ... without TensorFlow
    return tfds


def _unpack(downloads: Path, extracted: Path) -> int:
    """Unpack the archives that are not unpacked yet. Return how many were unpacked."""
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
