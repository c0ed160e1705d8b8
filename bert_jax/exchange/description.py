"""What lies beside the weights of every format: `config.json` and the tokenizer's files."""

import json
from pathlib import Path

from bert_jax.data.staging import write_synced
from bert_jax.exchange.huggingface import config_of, write_tokenizer
from bert_jax.finetune.saved_model import SavedModel


def write_description(saved: SavedModel, directory: Path) -> None:
    """Writes both, as Hugging Face has them, into an existing directory.

    Raises:
        UserError: The tokenizer cannot be said in Hugging Face's format.
        OSError: The files cannot be written.
    """
    write_tokenizer(saved, directory)
    config = json.dumps(config_of(saved), indent=2, ensure_ascii=False) + "\n"
    write_synced(directory / "config.json", config.encode())
