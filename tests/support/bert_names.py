"""Parameters under the names of Hugging Face's BERT classes, and back."""

from typing import Any

import numpy as np

from bert_jax.artefacts.formats.bert_families import BERT
from bert_jax.artefacts.formats.entries import Entry, to_tensors
from bert_jax.artefacts.formats.form import form_of
from bert_jax.artefacts.formats.huggingface_files import TASKS
from bert_jax.artefacts.formats.model_config import config_to_huggingface
from bert_jax.model.config import ModelConfig
from bert_jax.model.task_heads import TaskHeadConfig


def table_of(parts: Any, head: TaskHeadConfig | None = None, *, pooler: bool = True) -> list[Entry]:
    """The entries of the encoder, of pretraining heads, and of a fine-tuning head."""
    table = BERT.table(parts, None if head is None else head.kind)
    has = any("pooler" in entry.path for entry in table)
    return [*table, *BERT.pooler] if pooler and not has else table


def to_huggingface(params: Any, config: ModelConfig, table: Any = None) -> dict[str, Any]:
    """Arrays of `BertForPreTraining`, or of a table."""
    return to_tensors(params, config, table or table_of(["mlm", "nsp"]))


def from_huggingface(
    arrays: Any,
    config: ModelConfig,
    head: TaskHeadConfig | None = None,
    *,
    pretraining: bool = True,
) -> Any:
    """Our parameters of a BERT whose arrays these are."""
    found = config_to_huggingface("bert", config)
    if head is not None:
        task = next(task for task, kind in TASKS.items() if kind == head.kind)
        found |= {"architectures": [f"Bert{task}"]}
    form = form_of(found, {n: np.asarray(a) for n, a in arrays.items()}, where="config.json")
    return form.params(head, pretraining=pretraining)
