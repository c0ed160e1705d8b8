"""Reading of Google's original BERT checkpoints (google-research/bert, TensorFlow 1).

    form = read_tf_checkpoint("uncased_L-12_H-768_A-12")
    params = form.params(None)

The directory's bert_config.json, vocab.txt and bert_model.ckpt.* are read without TensorFlow.

In bert_config.json, `gelu` means the tanh form, which the original code computes. In Transformers,
and in the copies of these models on the Hugging Face Hub, the same word means the erf form.
"""

import logging
import re
from pathlib import Path
from typing import Any, Literal

from bert_jax.artefacts.formats.bert_families import BERT
from bert_jax.artefacts.formats.entries import tensor_shapes
from bert_jax.artefacts.formats.form import Form
from bert_jax.artefacts.formats.model_config import config_from_huggingface
from bert_jax.errors import UserError, first_few
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.files.untrusted.tensor_bundle import open_tensor_bundle
from bert_jax.model.heads import param_shapes

CONFIG, VOCABULARY = "bert_config.json", "vocab.txt"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_SHOWN = 20

_FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "type_vocab_size", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "initializer_range",
)  # fmt: skip
"""Fields that have the same name in `bert_config.json` and in `config.json`."""
_NORM_EPS = 1e-12
"""Epsilon of the norms, a constant of the original code."""

_OPTIMIZER = re.compile(
    r"global_step|beta[12]_power|good_steps|loss_scale|"
    r".*/(adam_[mv]|Adam(_1)?|LAMB(_1)?|AdamWeightDecayOptimizer(_1)?|Momentum)"
)
_TASK_HEAD = re.compile(r"output_(weights|bias)|cls/squad/output_(weights|bias)|loss/output_.*")
_PARTS = {"pooler": "bert/pooler/", "mlm": "cls/predictions/", "nsp": "cls/seq_relationship/"}
"""Optional parts, each complete or absent, with the prefixes of their variables."""
_OTHERS = (
    (
        re.compile(r"_CHECKPOINTABLE_OBJECT_GRAPH|.*/\.ATTRIBUTES/.*"),
        "an object-based checkpoint of TensorFlow 2, whose names depend on the code that saved it",
    ),
    (
        re.compile(r"bert/encoder/(transformer/group_|embedding_hidden_mapping_in/).*"),
        "an ALBERT, whose layers share one layer of weights",
    ),
    (re.compile(r"(electra|generator|discriminator_predictions)/.*"), "an ELECTRA"),
)


def read_tf_checkpoint(path: str | Path, *, gelu: Literal["tanh", "erf"] = "tanh") -> Form:
    """Read a checkpoint of the original code, without the variables of its optimizer.

    Arrays are views of the mapped files. Variables of a fine-tuned head are dropped, because its
    labels' names are unknown. Raise a UserError if files are missing or malformed, the model is not
    a BERT, or variables are missing, unexpected or of a wrong shape (all are listed).

    Args:
        path: The directory, or PREFIX or PREFIX.index to choose one of several checkpoints.
        gelu: Meaning of "gelu" as `hidden_act`. The code of google-research/bert computes the tanh
            form. Transformers, and the first release of google-research/bert, compute the erf form.
    """
    index = _find_index(Path(path))
    bundle = open_tensor_bundle(index)
    for pattern, what in _OTHERS:
        other = next((name for name in bundle if pattern.fullmatch(name)), None)
        if other is not None:
            raise UserError(
                f"{index} is {what} (it has the variable {other[:80]!r}); only checkpoints of "
                "google-research/bert are read. Convert the model with Transformers, save it as "
                "safetensors and import the saved directory"
            )
    directory = index.parent
    for name in (CONFIG, VOCABULARY):
        if not (directory / name).is_file():
            raise UserError(f"{directory} has no {name}, which belongs beside {index.name}; add it")
    config = _config(directory / CONFIG, gelu)
    model = config_from_huggingface(config, where=f"{directory / CONFIG}")
    parts = [part for part, root in _PARTS.items() if any(name.startswith(root) for name in bundle)]
    shapes = tensor_shapes(BERT.table(parts, pooler="pooler" in parts), param_shapes(model), model)
    wanted = {_variable(name): (name, shape) for name, shape in shapes.items()}
    variables = [name for name in bundle if not _OPTIMIZER.fullmatch(name)]
    passed_over = tuple(name for name in variables if _TASK_HEAD.fullmatch(name))
    wrong = [f"{name} is missing" for name in wanted if name not in bundle]
    for name in variables:
        if name in wanted:
            shape = wanted[name][1][:: -1 if name.endswith("/kernel") else 1]
            if (found := bundle[name].shape) != shape:
                wrong.append(f"{name} is {found}, but the configuration needs {shape}")
        elif name not in passed_over:
            wrong.append(f"{name} is unexpected")
    if wrong:
        raise UserError(f"{index} does not fit {CONFIG}: {first_few(wrong, _MAX_SHOWN)}")
    if passed_over:
        logging.getLogger(__name__).warning(
            "%s: the fine-tuned head (%s) is not read, as the checkpoint does not name its labels",
            index, ", ".join(passed_over),
        )  # fmt: skip
    arrays = {}
    for name, (theirs, _) in wanted.items():
        array = bundle[name].array
        arrays[theirs] = array.T if name.endswith("/kernel") else array
    made_by = "BertForPreTraining" if len(parts) == len(_PARTS) else "BertModel"
    if made_by == "BertModel" and "mlm" in parts:
        made_by = "BertForMaskedLM"
    config["architectures"] = [made_by]
    return Form(BERT, config, model, arrays, passed_over, files=directory / VOCABULARY)


def is_tf_checkpoint(path: str | Path) -> bool:
    """Return true if a directory or a PREFIX looks like a checkpoint of the original code."""
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
                f"{path} has no {index.name} beside it. Checkpoints in a single file have the old "
                "format, version 1, which is not read; save the checkpoint again with "
                "tf.compat.v1.train.Saver"
            )
        raise UserError(f"{path} is not a directory, and there is no {index.name}")
    found = sorted(path.glob("*.index"))
    if len(found) > 1:
        names = ", ".join(each.name.removesuffix(".index") for each in found[:10])
        raise UserError(f"{path} holds {len(found)} checkpoints; name one of them: {names}")
    if not found:
        old = next((each for each in sorted(path.glob("*.ckpt*")) if each.is_file()), None)
        why = "has the old format, version 1, or its index was not copied"
        there = f" ({old.name} {why})" if old else ""
        raise UserError(f"{path} holds no TensorFlow checkpoint: it has no *.index{there}")
    return found[0]


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


def _variable(theirs: str) -> str:
    """Convert a parameter name of Hugging Face's BERT to the name in an original checkpoint."""
    stem, _, part = theirs.replace(".layer.", ".layer_").replace(".", "/").rpartition("/")
    if stem.endswith("_embeddings"):
        return stem
    if stem.endswith("LayerNorm"):
        return f"{stem}/{'gamma' if part == 'weight' else 'beta'}"
    if stem in ("cls/predictions", "cls/seq_relationship"):
        return f"{stem}/output_{'weights' if part == 'weight' else part}"
    return f"{stem}/{'kernel' if part == 'weight' else part}"
