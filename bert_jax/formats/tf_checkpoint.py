"""Google's original BERT checkpoints (google-research/bert, TensorFlow 1) as Hugging Face's BERT.

    found = read_tf_checkpoint("uncased_L-12_H-768_A-12")
    config = model_config_from_huggingface(found.config, where=...)
    params = parts_from_huggingface(found.arrays, config)

A directory holds bert_config.json, vocab.txt, bert_model.ckpt.index and its data files. TensorFlow
is not needed.

`gelu` in such a configuration is what the code of that repository computes: the tanh form.
Transformers takes the same word for the erf form, and so do the copies of these models on its Hub.
"""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bert_jax.errors import UserError
from bert_jax.formats.families import BertForm
from bert_jax.formats.huggingface_config import model_config_from_huggingface
from bert_jax.model.config import ModelConfig
from bert_jax.untrusted.json_file import read_json_object
from bert_jax.untrusted.tensor_bundle import TensorBundle, open_tensor_bundle

CONFIG, VOCABULARY = "bert_config.json", "vocab.txt"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_SHOWN = 20

_FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "type_vocab_size", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "initializer_range",
)  # fmt: skip
"""Fields of both files; the same names."""
_NORM_EPS = 1e-12
"""A constant of the original code."""

_OPTIMIZER = re.compile(
    r"global_step|beta[12]_power|good_steps|loss_scale|"
    r".*/(adam_[mv]|Adam(_1)?|LAMB(_1)?|AdamWeightDecayOptimizer(_1)?|Momentum)"
)
_TASK_HEAD = re.compile(r"output_(weights|bias)|cls/squad/output_(weights|bias)|loss/output_.*")
_OTHERS = (
    (
        re.compile(r"_CHECKPOINTABLE_OBJECT_GRAPH|.*/\.ATTRIBUTES/.*"),
        "an object-based checkpoint of TensorFlow 2, whose names depend on the code that saved it",
    ),
    (
        re.compile(r"bert/encoder/(transformer/group_|embedding_hidden_mapping_in/).*"),
        "an ALBERT, one layer of weights for all layers",
    ),
    (re.compile(r"(electra|generator|discriminator_predictions)/.*"), "an ELECTRA"),
)


def read_tf_checkpoint(path: str | Path, *, gelu: Literal["tanh", "erf"] = "tanh") -> BertForm:
    """Read a checkpoint of the original code; slots of its optimizer are passed over.

    The arrays are views of the mapped files. Variables of a fine-tuned head are dropped: such a
    checkpoint does not have the names of its labels.

    Args:
        path: The directory; where it holds several checkpoints, one of them as PREFIX or
            PREFIX.index.
        gelu: Meaning of a `hidden_act` of "gelu": the code of google-research/bert computes the
            tanh form, Transformers (and the first release of that code) the erf form.

    Raises:
        UserError: Files that are missing or not sound, another architecture, variables that are
            missing, unexpected or of another shape than the configuration says: all of them.
    """
    index = _find_index(Path(path))
    bundle = open_tensor_bundle(index)
    _refuse_others(index, bundle)
    directory = index.parent
    for name in (CONFIG, VOCABULARY):
        if not (directory / name).is_file():
            raise UserError(f"{directory} has no {name}, which belongs beside {index.name}")
    config = _config(directory / CONFIG, gelu)
    model = model_config_from_huggingface(config, where=f"{directory / CONFIG}")
    heads = [part for part in _HEADS if any(name.startswith(part) for name in bundle)]
    wanted = dict(_variables(model, heads))
    variables = [name for name in bundle if not _OPTIMIZER.fullmatch(name)]
    passed_over = tuple(name for name in variables if _TASK_HEAD.fullmatch(name))
    wrong = [f"{name} is missing" for name in wanted if name not in bundle]
    for name in variables:
        if name in wanted:
            shape = wanted[name].shape
            if (found := bundle[name].shape) != shape:
                wrong.append(f"{name} is {found}, the configuration wants {shape}")
        elif name not in passed_over:
            wrong.append(f"{name} is unexpected")
    if wrong:
        more = f"; and {len(wrong) - _MAX_SHOWN} more" if len(wrong) > _MAX_SHOWN else ""
        raise UserError(
            f"{index} is not of the model of {CONFIG}: {'; '.join(wrong[:_MAX_SHOWN])}{more}"
        )
    if passed_over:
        logging.getLogger(__name__).warning(
            "%s: the fine-tuned head (%s) is not read: such a checkpoint does not name its labels",
            index, ", ".join(passed_over),
        )  # fmt: skip
    arrays = {}
    for name, variable in wanted.items():
        array = bundle[name].array
        arrays[variable.name] = array.T if variable.transposed else array
    made_by = "BertForPreTraining" if len(heads) == len(_HEADS) else "BertModel"
    if made_by == "BertModel" and _MLM in heads:
        made_by = "BertForMaskedLM"
    config["architectures"] = [made_by]
    return BertForm("BERT", config, arrays, passed_over, (), files=directory / VOCABULARY)


def is_tf_checkpoint(path: str | Path) -> bool:
    """Whether a directory, or a PREFIX, looks like one of the original code."""
    path = Path(path)
    if path.is_dir():
        return any(path.glob("*.index")) or (path / CONFIG).is_file()
    return path.name.endswith(".index") or path.with_name(path.name + ".index").is_file()


def _find_index(path: Path) -> Path:
    if not path.is_dir():
        index = path if path.name.endswith(".index") else path.with_name(path.name + ".index")
        if index.is_file():
            return index
        if path.is_file():
            raise UserError(
                f"{path} is not read: there is no {index.name} beside it. A checkpoint in one file "
                "is of version 1, from before 2017; save it again with tf.compat.v1.train.Saver"
            )
        raise UserError(
            f"{path}: neither a directory nor the prefix of a checkpoint ({index.name})"
        )
    found = sorted(path.glob("*.index"))
    if len(found) > 1:
        names = ", ".join(each.name.removesuffix(".index") for each in found[:10])
        raise UserError(f"{path} holds {len(found)} checkpoints; name one of them: {names}")
    if not found:
        old = next((each for each in sorted(path.glob("*.ckpt*")) if each.is_file()), None)
        there = (
            f" ({old.name} without an index is of version 1, or its index was not copied)"
            if old
            else ""
        )
        raise UserError(f"{path} holds no checkpoint of TensorFlow: no *.index is there{there}")
    return found[0]


def _refuse_others(index: Path, bundle: TensorBundle) -> None:
    for pattern, what in _OTHERS:
        name = next((name for name in bundle if pattern.fullmatch(name)), None)
        if name is not None:
            raise UserError(
                f"{index} is {what} ({name[:80]!r}); only BERTs of google-research/bert are read. "
                "Convert it with Transformers, save that as safetensors and import the directory"
            )


def _config(path: Path, gelu: Literal["tanh", "erf"]) -> dict[str, Any]:
    found = read_json_object(path, max_bytes=_MAX_CONFIG_BYTES)
    missing = [name for name in (*_FIELDS[:5], "hidden_act") if name not in found]
    if missing:
        raise UserError(f"{path} has no {', '.join(missing)}")
    act = found["hidden_act"]
    if act not in ("gelu", "relu"):
        raise UserError(f"{path}: hidden_act is {act!r:.80}; gelu and relu are supported")
    if act == "gelu" and gelu == "tanh":
        act = "gelu_new"
    fields = {name: found[name] for name in _FIELDS if name in found}
    return {"model_type": "bert", **fields, "hidden_act": act, "layer_norm_eps": _NORM_EPS}


_POOLER, _MLM, _NSP = "bert/pooler/", "cls/predictions/", "cls/seq_relationship/"
_HEADS = (_POOLER, _MLM, _NSP)
"""Parts that a model need not have, but then has in full."""


class _Variable(NamedTuple):
    """Expected shape and type of a variable of the checkpoint."""

    name: str
    """Hugging Face's."""
    shape: tuple[int, ...]
    transposed: bool = False


def _variables(model: ModelConfig, parts: list[str]) -> Iterator[tuple[str, _Variable]]:
    """Every variable, by its name in the checkpoint."""
    width, middle = model.hidden_dim, model.mlp_dim

    def theirs(name: str) -> str:
        return re.sub(r"layer_(\d+)", r"layer.\1", name).replace("/", ".")

    def table(name: str, rows: int) -> tuple[str, _Variable]:
        return name, _Variable(f"{theirs(name)}.weight", (rows, width))

    def norm(name: str) -> Iterator[tuple[str, _Variable]]:
        yield f"{name}/LayerNorm/gamma", _Variable(f"{theirs(name)}.LayerNorm.weight", (width,))
        yield f"{name}/LayerNorm/beta", _Variable(f"{theirs(name)}.LayerNorm.bias", (width,))

    def dense(
        name: str, inputs: int = width, outputs: int = width
    ) -> Iterator[tuple[str, _Variable]]:
        yield f"{name}/kernel", _Variable(f"{theirs(name)}.weight", (inputs, outputs), True)
        yield f"{name}/bias", _Variable(f"{theirs(name)}.bias", (outputs,))

    yield table("bert/embeddings/word_embeddings", model.vocab_size)
    yield table("bert/embeddings/position_embeddings", model.num_positions)
    yield table("bert/embeddings/token_type_embeddings", model.num_types)
    yield from norm("bert/embeddings")
    for n in range(model.num_layers):
        layer = f"bert/encoder/layer_{n}"
        for name in ("query", "key", "value"):
            yield from dense(f"{layer}/attention/self/{name}")
        yield from dense(f"{layer}/attention/output/dense")
        yield from norm(f"{layer}/attention/output")
        yield from dense(f"{layer}/intermediate/dense", width, middle)
        yield from dense(f"{layer}/output/dense", middle, width)
        yield from norm(f"{layer}/output")
    if _POOLER in parts:
        yield from dense("bert/pooler/dense")
    if _MLM in parts:
        yield from dense("cls/predictions/transform/dense")
        yield from norm("cls/predictions/transform")
        bias = _Variable("cls.predictions.bias", (model.vocab_size,))
        yield "cls/predictions/output_bias", bias
    if _NSP in parts:  # stored (outputs, inputs), as theirs
        yield f"{_NSP}output_weights", _Variable("cls.seq_relationship.weight", (2, width))
        yield f"{_NSP}output_bias", _Variable("cls.seq_relationship.bias", (2,))
