"""Preparing a TensorFlow Datasets data set without TensorFlow, zip archives included.

Most of that library works without TensorFlow; unpacking a downloaded zip does not. It takes an
archive as unpacked where its directory is there already, so archives are unpacked here, within
bounds, and the preparation is started again.
"""

import logging
from pathlib import Path

from bert_jax.errors import UserError
from bert_jax.untrusted.archives import extract_zip


def prepare_tfds(dataset: str) -> Path:
    """Downloads a data set and writes it as array_record files, unless that is done.

    Args:
        dataset: its name at TensorFlow Datasets, for example glue/cola. It goes where
            TFDS_DATA_DIR says, by default to ~/tensorflow_datasets.

    Returns:
        Its directory.

    Raises:
        UserError: tensorflow-datasets is missing, there is no such data set, its server does not
            answer, or an archive is not sound.
    """
    try:
        import tensorflow_datasets as tfds
        import tensorflow_datasets.text  # registers glue, imdb_reviews, ... without TensorFlow
    except ImportError as error:
        raise UserError(
            f"{dataset}: TFDS needs tensorflow-datasets: pip install 'bert_jax[data]'."
        ) from error
    try:
        builder = tfds.builder(dataset, file_format="array_record")
    except (tfds.core.DatasetNotFoundError, ValueError) as error:  # ValueError: of configurations
        raise UserError(f"{dataset}: {str(error).strip().splitlines()[0]}") from error
    downloads = Path(builder.data_dir_root) / "downloads"
    extracted = downloads / "extracted"
    # An archive may be fetched only after another was unpacked; each round unpacks one or more.
    while True:
        try:
            builder.download_and_prepare(
                download_dir=downloads,
                download_config=tfds.download.DownloadConfig(extract_dir=extracted),
                file_format="array_record",
            )
            return Path(builder.data_path)
        except Exception as error:  # its own errors have no common class
            archives = [
                (path, extracted / f"ZIP.{path.name}")
                for path in sorted((downloads / builder.name).glob("*.zip"))
            ]
            waiting = [(path, target) for path, target in archives if not target.exists()]
            if not waiting:
                message = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
                raise UserError(
                    f"{dataset} could not be prepared: {type(error).__name__}: {message}"
                ) from error
        for path, target in waiting:
            logging.getLogger(__name__).info("unpacking %s", path)
            target.parent.mkdir(parents=True, exist_ok=True)
            extract_zip(path, target)
