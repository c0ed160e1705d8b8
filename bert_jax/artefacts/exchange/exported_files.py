"""Files of an exported model: in Hugging Face's format, or with our names if no class fits."""

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
    MULTIPLE_CHOICE,
    POOLED_HEADS,
    PRETRAINING_TASKS,
    UNTRAINED,
    WEIGHTS,
    NoClassError,
    head_class,
    head_to_huggingface,
)
from bert_jax.artefacts.formats.sentence_transformers import can_be_written, sentence_files
from bert_jax.artefacts.formats.sentencepiece_json import tokenizer_json
from bert_jax.artefacts.formats.translators import family_of as family_of_network
from bert_jax.artefacts.saved.model import CONSTANT, SavedModel
from bert_jax.config.mapping import to_dict
from bert_jax.errors import UserError
from bert_jax.model.heads import Params
from bert_jax.model.seq2seq.search import SearchConfig
from bert_jax.terminal import plain
from bert_jax.tokenization.sentencepiece import SentencePieceTokenizer
from bert_jax.tokenization.tokenizer import CONFIG_NAME, ROLES
from bert_jax.tokenization.wordpiece import WordPieceTokenizer

MODEL, NETWORK = "model.json", "network.json"
"""Files that describe models in our own terms: an encoder that no class of Transformers computes,
and a translation model whose parameters keep our layout."""


def family_of(saved: SavedModel) -> str:
    """Return the `model_type` for writing a model: bert, unless only another family computes it.

    If no family computes it, a NoClassError lists the differences from the nearest family.
    """
    if (kind := model_config.kind_of(saved.config)) is None:
        raise NoClassError(f"{saved.name}: {model_config.refusal(saved.config, ())}")
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
    """Return a modern encoder without its next-sentence head and pooler.

    No class of a modern family has that head. A model comes back unchanged if it is a BERT, has a
    fine-tuning head, or would have no class even without these parts.
    """
    config, heads = model_config.exported(saved.config, saved.params.keys())
    if saved.outputs is not None or (config == saved.config and heads == saved.params.keys()):
        return saved
    return dataclasses.replace(saved, config=config).without({*POOLED_HEADS, "pooler"})


def class_of(saved: SavedModel) -> str:
    """Return the class of Transformers that computes a model; a UserError says why none does."""
    if saved.network is not None:
        return family_of_network(saved.network, saved.name)[0].class_name
    kind, activation, wrong = family_of(saved), saved.config.pooler_activation, ""
    task, head, family = task_of(saved), saved.head, FAMILIES[kind]
    wanted = family.classifies.get("pooler_activation", "tanh")
    name = family.class_of(task)
    if task == MULTIPLE_CHOICE and not family.compares:
        wrong = f"only BERT and ModernBERT have a class for multiple choice, but this is a {kind}"
    elif not family.like_bert:
        why = "" if head is None else model_config.unlike_head(kind, saved.config, head)
        wrong = why and f"no class of Transformers' {family.name} computes this head: {why}"
    elif head is not None and "transform" in saved.params:
        wrong = "its head has a linear map before the classifier, but no class of BERT has one"
    elif activation != wanted and has_place_for_pooler(saved):
        wrong = (
            f"its pooler has {activation}, but no class of Transformers computes that with the "
            f"rest of this model: {name} has {wanted}, ELECTRA's classifier has gelu, and "
            "DistilBERT's has relu, one token type and norm_eps 1e-12"
        )
    if wrong:
        raise NoClassError(f"{saved.name}: {wrong}")
    return name


def class_name(saved: SavedModel) -> str:
    """Return the name of the model's class in Transformers, else of our network, else "none"."""
    try:
        return class_of(saved)
    except UserError:
        return "none" if saved.network is None else type(saved.network).__name__


def has_class(saved: SavedModel) -> bool:
    """Return true if a class of Transformers computes a model."""
    return class_name(saved) != "none"


def task_of(saved: SavedModel) -> str:
    """Return the suffix of a model's class, such as `ForMaskedLM`; NoClassError: no class fits."""
    if saved.outputs is not None:
        return head_class(saved.outputs)
    if why := model_config.refusal(saved.config, saved.params.keys()):
        raise NoClassError(f"{saved.name}: {why}")
    return next(task for parts, task in PRETRAINING_TASKS if parts <= saved.params.keys())


def entries_of(saved: SavedModel) -> list[Entry]:
    """Return the table entries for the parameters of a model's class."""
    family = FAMILIES[family_of(saved)]
    if saved.head is None:
        table = family.table(saved.params, pooler=has_place_for_pooler(saved))
    else:
        table = family.table(head=saved.head.kind)
    return in_model(table, _complete(saved))


def state_dict_of(saved: SavedModel) -> dict[str, np.ndarray]:
    """Return every tensor of the model's class, in float32, without tied duplicates.

    If the model has no class, the names are ours, joined by slashes. If the class has a pooler and
    the model has none, the pooler gets initial values. Rows that pad the vocabulary are left out.
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
    """Return the prefix that the class of a bare encoder omits from names, or ""."""
    return FAMILIES[family_of(saved)].prefix if task_of(saved) == "Model" else ""


def _complete(saved: SavedModel) -> Params:
    return saved.complete_params() if has_place_for_pooler(saved) else saved.params


def without_types(saved: SavedModel) -> SavedModel:
    """Fold the first token type into the positions, if the model's class has no token types."""
    table = saved.params["encoder"]["embeddings"]
    if FAMILIES[family_of(saved)].has_types or not np.any(table["type"]):
        return saved
    types = np.asarray(table["type"])
    moved = {"position": np.asarray(table["position"]) + types, "type": np.zeros_like(types)}
    encoder = {**saved.params["encoder"], "embeddings": {**table, **moved}}
    return dataclasses.replace(saved, params={**saved.params, "encoder": encoder})


def untrained_parts(saved: SavedModel) -> list[str]:
    """List the parts that the class requires but the model lacks; they get initial values.

    In a translation model these values are zeros.
    """
    if saved.network is not None:
        return list(family_of_network(saved.network, saved.name)[0].untrained)
    if saved.has_pooler or not has_class(saved):
        return []
    return ["pooler"] if has_place_for_pooler(saved) else []


def has_place_for_pooler(saved: SavedModel) -> bool:
    """Return true if a model's class has a pooler, or a classifier's linear map in its place."""
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
    """Write `model.safetensors` and the files of `write_description`; no proof and no card.

    The directory must exist and hold none of these files. The written class is `class_of(saved)`. A
    translation model gets `config.json` and `generation_config.json`, not `network.json`.

    Raises:
        NoClassError: No class of Transformers computes the model.
        UserError: Hugging Face's format cannot express the tokenizer or the translation model.
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
    }  # fmt: skip
    fields = {**family.config(network), **ids, "dtype": "float32"}
    if family.untrained:
        fields[UNTRAINED] = list(family.untrained)
    write_json(directory / "config.json", {**fields, "architectures": [family.class_name]})
    generation = {  # fields that make `generate` equal our search
        "num_beams": search.num_beams,
        "length_penalty": search.length_alpha,
        "early_stopping": "never",
        "max_length": saved.max_length + 1,  # theirs counts the start token of the decoder
        "do_sample": False,
        "forced_eos_token_id": None,
    }
    write_json(directory / "generation_config.json", {**ids, **generation})
    write_arrays(directory / WEIGHTS, family.arrays(network, saved.params), format="pt")


def write_weights(saved: SavedModel, directory: Path) -> dict[str, np.ndarray]:
    """Write `model.safetensors` and the files of `write_description`, even if no class fits.

    Returns the tensors by their names in the file, which are our own for a translation model.
    """
    write_description(saved, directory)
    metadata = {"format": "pt"} if saved.network is None else {}
    weights = state_dict_of(saved) if saved.network is None else named(saved.params)
    write_arrays(directory / WEIGHTS, weights, **metadata)
    return weights


def write_arrays(path: Path, arrays: dict[str, np.ndarray], **metadata: str) -> None:
    """Write a file of safetensors."""
    # Not `save_file`: only the owner could read its files, and its errors are not OSErrors.
    path.write_bytes(safetensors.numpy.save(arrays, metadata=metadata or None))


def write_description(saved: SavedModel, directory: Path) -> None:
    """Write the files that accompany the weights in every format: `config.json` and the tokenizer.

    An encoder without a class gets `model.json` instead of `config.json`, a translation model
    `network.json`. An embedding model also gets the files of sentence-transformers, if
    sentence-transformers has its pooling.

    Raises:
        UserError: Hugging Face's format cannot express the tokenizer.
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
        files = sentence_files(saved.embedding, saved.config.hidden_dim, saved.max_length)
        for name, content in files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            write_json(directory / name, content)


def write_tokenizer(saved: SavedModel, directory: Path) -> None:
    """Write the tokenizer's files for Transformers' `AutoTokenizer` and for `load_tokenizer`."""
    tokenizer = saved.tokenizer
    tokenizer.save(directory)
    path = directory / CONFIG_NAME
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if isinstance(tokenizer, SentencePieceTokenizer):
        # The original `tokenizer.model` is kept too: `load_tokenizer` reads the original.
        (directory / "tokenizer.json").write_bytes(tokenizer_json(tokenizer))
        config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
        config |= dict(zip(ROLES, specials_of(saved), strict=True))
    elif isinstance(tokenizer, WordPieceTokenizer) and tokenizer.options.max_word_chars != 100:
        # BertTokenizer lacks this option; PreTrainedTokenizerFast uses tokenizer.json unchanged.
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config |= {"model_max_length": saved.max_length}
    config.setdefault("clean_up_tokenization_spaces", False)
    if saved.config.num_types < 2:  # models of Transformers then reject the second or all types
        config["model_input_names"] = ["input_ids", "attention_mask"]
    elif config.get("tokenizer_class") == "PreTrainedTokenizerFast":
        config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    write_json(path, config)
    if not (names := directory / "special_tokens_map.json").is_file():
        write_json(names, {field: config[field] for field in ROLES if field in config})


def write_json(path: Path, content: dict[str, Any] | list[Any]) -> None:
    """Write an indented JSON file."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    path.write_text(f"{text}\n", encoding="utf-8")


def card_fields(saved: SavedModel) -> dict[str, Any]:
    """Return the values that model cards put into their code snippets."""
    pad = saved.tokenizer.special_ids.pad
    prefix = "" if saved.embedding is None else saved.embedding.document_prefix
    return {
        "max_length": saved.max_length,
        "pad": pad,
        "pad_token": saved.tokenizer.id_to_token(pad),
        "prefix": json.dumps(prefix)[1:-1],  # JSON's escapes are Python's
    }


def specials_of(saved: SavedModel) -> list[str]:
    """Return the model's names of the five special tokens, in the order of `ROLES`."""
    ids = vars(saved.tokenizer.special_ids).values()
    return [saved.tokenizer.id_to_token(id) for id in ids]


def last_part(path: Any) -> str:
    """Return the last part of a path, so that a card does not reveal local directories."""
    return plain(PurePath(str(path or "unknown")).name)
