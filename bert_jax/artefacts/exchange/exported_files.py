"""Files of an exported model, in Hugging Face's format or, if no class fits, in our own."""

import dataclasses
import json
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import safetensors.numpy

from bert_jax.artefacts.formats import model_config
from bert_jax.artefacts.formats.entries import Entry, in_model, named, to_tensors
from bert_jax.artefacts.formats.families import FAMILIES
from bert_jax.artefacts.formats.family import EMBEDDINGS
from bert_jax.artefacts.formats.huggingface_files import (
    CONSTANT,
    MULTIPLE_CHOICE,
    POOLED_HEADS,
    PRETRAINING_TASKS,
    UNTRAINED,
    WEIGHTS,
    head_class,
    head_to_huggingface,
)
from bert_jax.artefacts.formats.sentence_transformers import QUERIES, can_be_written, sentence_files
from bert_jax.artefacts.formats.sentencepiece_json import tokenizer_json
from bert_jax.artefacts.formats.translators import family_of as family_of_network
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.config.mapping import to_dict
from bert_jax.errors import UserError
from bert_jax.model.heads import Params
from bert_jax.model.seq2seq.search import SearchConfig
from bert_jax.terminal import plain
from bert_jax.tokenization.marian import MarianTokenizer
from bert_jax.tokenization.sentencepiece import SentencePieceTokenizer
from bert_jax.tokenization.tokenizer import CONFIG_NAME, ROLES, num_special
from bert_jax.tokenization.wordpiece import WordPieceTokenizer

MODEL, NETWORK = "model.json", "network.json"
"""Files with the fields of our own configurations, in place of `config.json`: `model.json` for an
encoder without a class in Transformers, `network.json` for a translation model in our layout."""


def family_of(saved: SavedModel) -> str:
    """Return the `model_type` of a written encoder; "bert" if a BERT class can compute the encoder.

    If no family fits, a UserError lists the differences from the nearest family.
    """
    if (kind := model_config.kind_of(saved.config)) is None:
        raise UserError(f"{saved.name}: {model_config.refusal(saved.config, ())}")
    if kind != "bert":
        return kind
    if saved.config.projects_embeddings or "rtd" in saved.params:
        return "electra"
    if saved.outputs is None or saved.outputs.head.kind != "classification":
        return "bert"
    distilled = (saved.config.num_types, saved.config.norm_eps) == (1, 1e-12)
    kinds = {"gelu": "electra", "relu": "distilbert" if distilled else "bert"}
    return kinds.get(saved.config.pooler_activation, "bert")


def without_pairs(saved: SavedModel) -> SavedModel:
    """Return an encoder of a modern family without its next-sentence head and pooler.

    No class of a modern family has such a head. A model is returned unchanged if it is a BERT, has
    a fine-tuning head, or would have no class even without these parts.
    """
    configs = (saved.config, dataclasses.replace(saved.config, pooler=False))
    config = next(filter(model_config.kind_of, configs), saved.config)
    nothing = config == saved.config and not POOLED_HEADS & saved.params.keys()
    if nothing or saved.outputs is not None or model_config.kind_of(config) in (None, "bert"):
        return saved
    return dataclasses.replace(saved, config=config).without({*POOLED_HEADS, "pooler"})


def class_of(saved: SavedModel) -> str:
    """Return the class of Transformers that computes a model; raise UserError if none does."""
    if saved.network is not None:
        return family_of_network(saved.network, saved.name)[0].class_name
    kind, activation, wrong = family_of(saved), saved.config.pooler_activation, ""
    task, head, family = task_of(saved), saved.head, FAMILIES[kind]
    wanted = family.classifies.get("pooler_activation", "tanh")
    name = family.class_of(task)
    fewest = (2 if family.doubles_type else 1) if "num_types" in family.fields.values() else 0
    if saved.config.num_types < fewest:
        wrong = f"model.num_types is {saved.config.num_types}; an export needs {fewest} or more"
    elif task == MULTIPLE_CHOICE and not family.compares:
        wrong = f"only BERT, ModernBERT and DeBERTa have a class for multiple choice, not {kind}"
    elif not family.like_bert:
        why = "" if head is None else model_config.unlike_head(kind, saved.config, head)
        wrong = why and f"no class of Transformers' {family.name} computes this head: {why}"
    elif head is not None and "transform" in saved.params:
        wrong = "its head has a linear map before the classifier, which no class of BERT has"
    elif activation != wanted and has_place_for_pooler(saved):
        wrong = (
            f"its pooler has {activation}, but no class of Transformers that fits the rest of "
            f"this model has this activation: {name} has {wanted}, ELECTRA's classifier has gelu, "
            "and DistilBERT's has relu, but only with one token type and norm_eps 1e-12"
        )
    if wrong:
        raise UserError(f"{saved.name}: {wrong}")
    return name


def class_name(saved: SavedModel) -> str:
    """Return the name of a model's class in Transformers.

    If there is none, return our class's name for a translation model, and "none" for an encoder.
    """
    try:
        return class_of(saved)
    except UserError:
        return "none" if saved.network is None else type(saved.network).__name__


def has_class(saved: SavedModel) -> bool:
    """Return true if a model has a class, in Transformers or, for translation, in this package."""
    return class_name(saved) != "none"


def task_of(saved: SavedModel) -> str:
    """Return the suffix of a model's class, such as `ForMaskedLM`; raise UserError for no class."""
    if saved.outputs is not None:
        return head_class(saved.outputs)
    if why := model_config.refusal(saved.config, saved.params.keys()):
        raise UserError(f"{saved.name}: {why}")
    return next(task for parts, task in PRETRAINING_TASKS if parts <= saved.params.keys())


def entries_of(saved: SavedModel) -> list[Entry]:
    """Return the tensors of a model's class, each with its name and its path in our parameters."""
    family = FAMILIES[family_of(saved)]
    if saved.head is None:
        table = family.table(saved.params, pooler=has_place_for_pooler(saved))
    else:
        table = family.table(head=saved.head.kind)
    return in_model(table, _complete(saved))


def state_dict_of(saved: SavedModel) -> dict[str, np.ndarray]:
    """Return the tensors of a model's class by name, in float32, without tied duplicates.

    Vocabulary padding is left out. `SavedModel.complete_params` adds a pooler that the class needs.
    A model without a class keeps our names, joined by slashes, and padding.
    """
    if not has_class(saved):
        return named(saved.params)
    family, saved = FAMILIES[family_of(saved)], without_types(saved)
    found = to_tensors(_complete(saved), saved.config, entries_of(saved))
    if not family.has_types:
        del found[family.name_of(*EMBEDDINGS, "type")]
    prefix = prefix_left_out(saved)
    return {key.removeprefix(prefix): array for key, array in found.items()}


def prefix_left_out(saved: SavedModel) -> str:
    """Return the prefix to drop from tensor names if the model's class has no head, else "".

    `BertForMaskedLM` has `bert.encoder.layer...`, for example; `BertModel` has `encoder.layer...`.
    """
    return FAMILIES[family_of(saved)].prefix if task_of(saved) == "Model" else ""


def _complete(saved: SavedModel) -> Params:
    return saved.complete_params() if has_place_for_pooler(saved) else saved.params


def without_types(saved: SavedModel) -> SavedModel:
    """Add the first token type's vector to the position table if a model's class has no types."""
    table = saved.params["encoder"]["embeddings"]
    if FAMILIES[family_of(saved)].has_types or not np.any(table["type"]):
        return saved
    types = np.asarray(table["type"])
    moved = {"position": np.asarray(table["position"]) + types, "type": np.zeros_like(types)}
    encoder = {**saved.params["encoder"], "embeddings": {**table, **moved}}
    return dataclasses.replace(saved, params={**saved.params, "encoder": encoder})


def untrained_parts(saved: SavedModel) -> list[str]:
    """List the parts that a model lacks but its class requires.

    The written files have initial values for these parts; for a translation model, zeros.
    """
    if saved.network is not None:
        return list(family_of_network(saved.network, saved.name)[0].untrained)
    lacks = not saved.has_pooler and has_class(saved) and has_place_for_pooler(saved)
    return ["pooler"] if lacks else []


def has_place_for_pooler(saved: SavedModel) -> bool:
    """Return true if a model's class has a pooler, or a classifier layer in the pooler's place."""
    family, task = FAMILIES[family_of(saved)], task_of(saved)
    if saved.head is None:
        return bool(family.pooler) and task != "ForMaskedLM"
    return any("pooler" in entry.path for entry in family.heads.get(saved.head.kind, ()))


def config_of(saved: SavedModel) -> dict[str, Any]:
    """Return the content of `config.json`."""
    kind, special = family_of(saved), saved.tokenizer.special_ids
    family = FAMILIES[kind]
    fields: dict[str, Any] = {
        "dtype": "float32", "pad_token_id": special.pad, "tie_word_embeddings": saved.config.tied,
        **model_config.config_to_huggingface(kind, saved.config),
    }  # fmt: skip
    if not family.like_bert:
        fields |= {"cls_token_id": special.cls, "sep_token_id": special.sep}
        fields |= {"bos_token_id": special.cls, "eos_token_id": special.sep}
        fields |= {"mask_token_id": special.mask}
    if saved.outputs is not None:
        head = saved.outputs.head
        fields[family.dropouts[head.kind]] = head.dropout_rate
        fields |= head_to_huggingface(saved.outputs)
    fields |= family.pooling_fields(saved.pooling)
    if untrained := untrained_parts(saved):
        fields[UNTRAINED] = untrained
    if saved.outputs is not None and saved.origin.unlearned:
        fields[CONSTANT] = list(saved.origin.unlearned)
    return {**fields, "architectures": [class_of(saved)]}


def write_huggingface(saved: SavedModel, directory: Path) -> None:
    """Write a model as a directory in Hugging Face's format, without a proof or a model card.

    The files are `model.safetensors`, `config.json` and the tokenizer's files. A translation model
    also has `generation_config.json`, and an embedding model files of sentence-transformers (see
    `write_description`). The class is `class_of(saved)`. The directory must exist, without these
    files. Raise a UserError if no class fits, or the format cannot express the tokenizer.
    """
    class_of(saved)
    if saved.network is None:
        write_weights(saved, directory)
        return
    family, network = family_of_network(saved.network, saved.name)
    write_tokenizer(saved, directory)
    special, search = saved.tokenizer.special_ids, SearchConfig()
    ids = {
        "pad_token_id": special.pad, "bos_token_id": special.cls, "eos_token_id": special.sep,
        "decoder_start_token_id": special.cls,
        "forced_eos_token_id": special.sep if network.forces_end else None,
    }  # fmt: skip
    fields = {**family.config(network), **ids, "dtype": "float32"}
    if family.untrained:
        fields[UNTRAINED] = list(family.untrained)
    write_json(directory / "config.json", {**fields, "architectures": [family.class_name]})
    generation = {  # fields with which `generate` gives the results of our search
        "num_beams": search.num_beams,
        "length_penalty": search.length_alpha,
        "early_stopping": "never",
        "max_length": saved.max_length + 1,  # Transformers counts the decoder's start token
        "do_sample": False,
        "bad_words_ids": [[special.cls]],  # the search never chooses the start token
    }
    write_json(directory / "generation_config.json", {**ids, **generation})
    write_arrays(directory / WEIGHTS, family.arrays(network, saved.params), format="pt")


def write_weights(saved: SavedModel, directory: Path) -> dict[str, np.ndarray]:
    """Write `model.safetensors` and the files of `write_description`, even if no class fits.

    Returns the tensors by name; translation models, and encoders without a class, keep our names.
    """
    write_description(saved, directory)
    metadata = {"format": "pt"} if saved.network is None else {}
    weights = state_dict_of(saved) if saved.network is None else named(saved.params)
    write_arrays(directory / WEIGHTS, weights, **metadata)
    return weights


def write_arrays(path: Path, arrays: dict[str, np.ndarray], **metadata: str) -> None:
    """Write arrays to a safetensors file."""
    # `save_file` makes files that only their owner can read, and its errors are not OSErrors.
    path.write_bytes(safetensors.numpy.save(arrays, metadata=metadata or None))


def write_description(saved: SavedModel, directory: Path) -> None:
    """Write the files that accompany a model's weights: `config.json` and the tokenizer.

    In place of `config.json`, an encoder without a class gets `model.json`, and a translation model
    `network.json`. An embedding model with a class also gets files of sentence-transformers, if
    they can express its pooling. Raise a UserError if the format cannot express the tokenizer.
    """
    write_tokenizer(saved, directory)
    own = {"special_ids": vars(saved.tokenizer.special_ids), "max_length": saved.max_length}
    if saved.network is not None:
        network = {"network": type(saved.network).__name__, **to_dict(saved.network)}
        write_json(directory / NETWORK, network | own)
        return
    if not has_class(saved):
        parts = {"model": saved.config, "outputs": saved.outputs, "embedding": saved.embedding}
        described = {name: to_dict(part) for name, part in parts.items() if part is not None}
        write_json(directory / MODEL, described | own)
        return
    write_json(directory / "config.json", config_of(saved))
    if saved.embedding is not None and can_be_written(saved.embedding):
        maps, width = saved.params.get("pooling", {}).get("maps", {}), saved.config.hidden_dim
        for name, content in sentence_files(saved.embedding, width, saved.max_length, maps).items():
            (directory / name).parent.mkdir(exist_ok=True)
            write = write_json if name.endswith(".json") else write_arrays
            write(directory / name, content)
        if saved.embedding.static_queries:  # static queries have no special tokens
            room = saved.max_length - num_special(saved.tokenizer, pair=False)
            write_tokenizer(dataclasses.replace(saved, max_length=room), directory / QUERIES)
            weights = np.asarray(saved.params["queries"])
            write_arrays(directory / QUERIES / WEIGHTS, {"weight": weights}, format="pt")


def write_tokenizer(saved: SavedModel, directory: Path) -> None:
    """Write the tokenizer's files for Transformers' `AutoTokenizer` and for `load_tokenizer`."""
    tokenizer = saved.tokenizer
    tokenizer.save(directory)
    if isinstance(tokenizer, MarianTokenizer):  # already in Transformers' format
        return
    path = directory / CONFIG_NAME
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if isinstance(tokenizer, SentencePieceTokenizer):
        # `tokenizer.save` has also written `tokenizer.model`, which `load_tokenizer` reads.
        (directory / "tokenizer.json").write_bytes(tokenizer_json(tokenizer))
        config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
        config |= dict(zip(ROLES, specials_of(saved), strict=True))
    elif isinstance(tokenizer, WordPieceTokenizer) and tokenizer.options.max_word_chars != 100:
        # BertTokenizer lacks this option; PreTrainedTokenizerFast uses tokenizer.json unchanged.
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config |= {"model_max_length": saved.max_length}
    config.setdefault("clean_up_tokenization_spaces", False)
    if saved.config.num_types < 2:  # such a model in Transformers rejects type 1, or all types
        config["model_input_names"] = ["input_ids", "attention_mask"]
    elif config.get("tokenizer_class") == "PreTrainedTokenizerFast":
        config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    write_json(path, config)
    if not (names := directory / "special_tokens_map.json").is_file():
        write_json(names, {field: config[field] for field in ROLES if field in config})


def write_json(path: Path, content: dict[str, Any] | list[Any]) -> None:
    """Write an indented JSON file."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    path.write_text(f"{text}\n", "utf-8", "replace")  # a path in it may not be UTF-8


_TOKENIZE = """\
tokenizer = Tokenizer.from_file("DIR/tokenizer.json")
tokenizer.enable_truncation({length})
tokenizer.enable_padding(pad_id={pad}, pad_token={token!r})
rows = tokenizer.encode_batch(["{prefix}A text.", "{prefix}Another text."])"""


def code_of_rows(saved: SavedModel) -> str:
    """Return code for model cards that encodes two texts with the package `tokenizers`."""
    pad = saved.tokenizer.special_ids.pad
    prefix = "" if saved.embedding is None else saved.embedding.document_prefix
    quoted = json.dumps(prefix)[1:-1]  # JSON's escapes are also Python's
    token = saved.tokenizer.id_to_token(pad)
    return _TOKENIZE.format(length=saved.max_length, pad=pad, token=token, prefix=quoted)


def specials_of(saved: SavedModel) -> list[str]:
    """Return the five special tokens as the model spells them, in the order of `ROLES`."""
    return [saved.tokenizer.id_to_token(id) for id in vars(saved.tokenizer.special_ids).values()]


def last_part(path: Any) -> str:
    """Return the last part of a path, so that a card does not reveal local directories."""
    return plain(PurePath(str(path or "unknown")).name)
