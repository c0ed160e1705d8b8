"""Files of an exported translation model."""

from pathlib import Path
from typing import Any

import safetensors.numpy

from bert_jax.artefacts.exchange.huggingface_files import write_json, write_tokenizer
from bert_jax.artefacts.formats.huggingface_config import UNTRAINED
from bert_jax.artefacts.formats.huggingface_files import WEIGHTS
from bert_jax.artefacts.formats.seq2seq.families import family_of
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.config.mapping import to_dict
from bert_jax.errors import UserError
from bert_jax.model.seq2seq.network import Network
from bert_jax.model.seq2seq.search import SearchConfig

NETWORK = "network.json"
"""File that describes the network, for parameters in our own layout."""


def network_of(saved: SavedModel) -> Network:
    """Return the network of a translation model."""
    assert saved.network is not None
    return saved.network


def class_name(saved: SavedModel) -> str:
    """Return the Transformers class that computes a model, else the class of our network."""
    network = network_of(saved)
    try:
        return family_of(network, saved.name)[0].class_name
    except UserError:
        return type(network).__name__


def write_huggingface(saved: SavedModel, directory: Path) -> None:
    """Write weights, `config.json`, `generation_config.json` and the tokenizer for Transformers.

    Raises:
        UserError: No class of Transformers computes the model or can hold its tokenizer.
        OSError: The files cannot be written.
    """
    family, network = family_of(network_of(saved), saved.name)
    write_tokenizer(saved, directory)
    special = saved.tokenizer.special_ids
    ids = {
        "pad_token_id": special.pad, "bos_token_id": special.cls, "eos_token_id": special.sep,
        "decoder_start_token_id": special.cls,
    }  # fmt: skip
    fields = {**family.config(network), **ids, "dtype": "float32"}
    if family.untrained:
        fields[UNTRAINED] = list(family.untrained)
    write_json(directory / "config.json", {**fields, "architectures": [family.class_name]})
    write_json(directory / "generation_config.json", {**ids, **generation_of(saved)})
    arrays = family.arrays(network, saved.params)
    # Not `save_file`: only the owner could read its files, and its errors are not OSErrors.
    weights = safetensors.numpy.save(arrays, metadata={"format": "pt"})
    (directory / WEIGHTS).write_bytes(weights)


def generation_of(saved: SavedModel) -> dict[str, Any]:
    """Return the fields of `generation_config.json` that make `generate` equal our search."""
    search = SearchConfig()
    return {
        "num_beams": search.num_beams,
        "length_penalty": search.length_alpha,
        "early_stopping": "never",
        "max_length": saved.max_length + 1,  # theirs counts the start token of the decoder
        "do_sample": False,
        "forced_eos_token_id": None,
    }


def untrained_parts(saved: SavedModel) -> list[str]:
    """List the parts that a class of Transformers requires and the model lacks; zeros stand in."""
    return list(family_of(network_of(saved), saved.name)[0].untrained)


def write_description(saved: SavedModel, directory: Path) -> None:
    """Write `network.json` and the tokenizer's files, for parameters in our own layout.

    Raises:
        UserError: Hugging Face's format cannot express the tokenizer.
        OSError: The files cannot be written.
    """
    network = network_of(saved)
    write_tokenizer(saved, directory)
    described = {
        "network": type(network).__name__,
        **to_dict(network),
        "special_ids": vars(saved.tokenizer.special_ids),
        "max_length": saved.max_length,
    }
    write_json(directory / NETWORK, described)
