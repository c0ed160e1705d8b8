"""A model as read from a directory that bert_jax or Transformers wrote."""

import dataclasses
import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from bert_jax.artefacts.formats.families import known_family
from bert_jax.artefacts.formats.huggingface_files import CONSTANT, TaskOutputs
from bert_jax.artefacts.formats.model_config import kind_of
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.embedding import PLAIN, EmbeddingConfig, Pooled, Pooling
from bert_jax.model.heads import MASKED_LM, Params, init_params
from bert_jax.model.lora import LoraConfig, merged
from bert_jax.model.seq2seq.network import Network
from bert_jax.model.task_heads import TaskHeadConfig
from bert_jax.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:  # not needed for a model in Hugging Face's format, which has no task
    from bert_jax.tasks.task import Task

_VERBS = {
    "single_label": "classify", "multi_label": "classify", "regression": "classify",
    "tags": "tag", "span": "answer",
}  # fmt: skip
"""Verb for each objective of a head; only `bert-jax predict` supports other objectives."""


@dataclass(frozen=True)
class Origin:
    """Origin of a model: the run or the format that it was read from."""

    kind: str
    """Kind of origin: pretrain, finetune or huggingface."""
    step: int = 0
    """Number of updates in a run of bert_jax; 0 for any other model."""
    config: dict[str, Any] = field(default_factory=dict)
    """Configuration of the run, or config.json of Hugging Face's format, as JSON values."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of these parameters on held-out or dev data; empty if they were not evaluated."""
    task: "Task | None" = None
    """Task of a fine-tuning run, which makes predictions and scores them; None for other models."""
    reports: Mapping[str, Any] = field(default_factory=dict)
    """Reports on a fine-tuning run's dev and test data, by split; empty until the run has ended."""

    @property
    def pairing(self) -> str | None:
        """Pairing of sentences in a pretraining run; None for any other model."""
        return self.config.get("data", {}).get("pairing") if self.kind == "pretrain" else None

    @property
    def objective(self) -> str | None:
        """Name of a pretraining run's objective; None for any other model."""
        return self.config.get("objective", {}).get("name") if self.kind == "pretrain" else None

    @property
    def unlearned(self) -> tuple[float, float] | None:
        """Dev scores of the head and a constant output; None if the head is better or unscored."""
        found = self.config.get(CONSTANT) if self.kind == "huggingface" else None
        if self.task is not None and self.reports:
            dev = next(iter(self.reports.values()))
            found = [dev["scores"].get(self.task.metric), dev.get("constant")]
        match found:
            case [int() | float() as score, int() | float() as constant] if score <= constant:
                return score, constant
        return None


@dataclass(frozen=True, eq=False)
class Adapter:
    """Low-rank updates (LoRA) that were merged into a model's parameters."""

    config: LoraConfig
    lora: Params
    """Entry `lora` of the run's parameters."""
    layers: Params
    """Entry `encoder/layers` of the parameters before the merge."""


@dataclass(frozen=True, eq=False)
class SavedModel:
    """A model with its tokenizer."""

    config: ModelConfig
    """Architecture of the source; `attention_impl` is auto, whatever training used."""
    params: Params
    """Parameters: the entry `encoder` and one entry for each head. `encoder` has a `pooler` if the
    file has one. For a translation model: all parameters of `network`."""
    outputs: TaskOutputs | None
    """Meaning of the entry `head`; None if there is no such entry."""
    tokenizer: Tokenizer
    tokenizer_files: Path
    """Path that `load_tokenizer` reads; in Hugging Face's format, the directory of the model."""
    max_length: int
    """Largest number of tokens in a row, including special tokens."""
    name: str
    """Name for messages: the directory, and the step or the class."""
    origin: Origin
    network: Network | None = None
    """Network of a translation model; None for any other model."""
    embedding: EmbeddingConfig | None = None
    """Definition of text vectors; None for a model that was not trained to produce vectors.
    Learned token weights and linear maps, if any, are the entry `pooling` of the parameters."""
    adapter: Adapter | None = None
    """Low-rank updates that a run trained instead of the encoder; None for any other model."""

    @property
    def head(self) -> TaskHeadConfig | None:
        """Fine-tuning head; None if the model has no such head."""
        return None if self.outputs is None else self.outputs.head

    @property
    def has_pooler(self) -> bool:
        """Whether the source has a pooler, which classification and regression read."""
        return "pooler" in self.params["encoder"]

    def vector_width(self, pooling: Pooling | None = None) -> int:
        """Return the width of vectors pooled by `pooling` (None: the model's own pooling)."""
        if (pooling or (self.embedding or PLAIN).pooling) == "splade":
            return self.config.vocab_size
        maps = self.params.get("pooling", {}).get("maps", {})
        return maps[max(maps)]["kernel"].shape[1] if maps else self.config.hidden_dim

    @property
    def pooling(self) -> Pooled:
        """Pooling of states for a classification head on this model, if the model has no pooler.

        The model's own head or its config.json decides. The default is the mean, because in local
        layers the first token attends only to its neighbours.
        """
        if self.outputs is not None and self.outputs.head.kind == "classification":
            return self.outputs.head.pooling
        family = known_family(self.origin.config)
        poolings = {} if family is None else family.poolings
        return poolings.get(f"{self.origin.config.get('classifier_pooling')}", "mean")

    @property
    def verbs(self) -> tuple[str, ...]:
        """Verbs of `bert-jax` that the model supports."""
        if self.network is not None:
            return ("translate",)
        verb = None if self.outputs is None else _VERBS.get(self.outputs.objective)
        fills = "fill-mask" if MASKED_LM in self.params else None
        return tuple(filter(None, (verb, fills, "embed")))

    def require(self, verb: str, what: str) -> None:
        """Raise UserError if the model does not support `verb`; `what` names the missing part."""
        if verb in self.verbs:
            return
        hint = ""
        detects = self.origin.objective == "replaced_tokens"
        if verb == "fill-mask" and detects and kind_of(self.config) == "bert":
            hint = (
                ". The generator of the run fills masks: bert-jax export RUN --to huggingface "
                "--part generator"
            )
        raise UserError(
            f"{self.name}: this model has no {what}; it supports {' and '.join(self.verbs)}{hint}"
        )

    def without(self, parts: Collection[str]) -> "SavedModel":
        """Return the model without the heads in `parts`; "pooler" in `parts` removes the pooler."""
        encoder = {n: tree for n, tree in self.params["encoder"].items() if n not in parts}
        heads = {n: tree for n, tree in self.params.items() if n not in parts}
        return dataclasses.replace(self, params={**heads, "encoder": encoder})

    def complete_params(self) -> Params:
        """Return `params` with a pooler; a missing pooler gets initial values.

        Raise a UserError if the pooler is missing and the head reads it.
        """
        if self.has_pooler:
            return self.params
        if self.head is not None and self.head.kind == "classification":
            raise UserError(f"{self.name}: the head needs a pooler, but the model has none")
        with_pooler = dataclasses.replace(self.config, pooler=True)
        fresh = init_params(with_pooler, jax.random.key(0))["encoder"]["pooler"]
        return {**self.params, "encoder": {**self.params["encoder"], "pooler": fresh}}


def digest_of(params: Any, told: str = "") -> str:
    """Compute the SHA-256 of the text `told`, all parameters, and paths without the first key."""
    digest = hashlib.sha256(told.encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path[1:]).encode())
        digest.update(np.ascontiguousarray(np.asarray(leaf, np.float32)).tobytes())
    return digest.hexdigest()


def merged_params(params: Params, config: LoraConfig) -> tuple[Params, Adapter]:
    """Merge a run's low-rank updates into its parameters; return the result and the adapter."""
    adapter = Adapter(config, params["lora"], params["encoder"]["layers"])
    return jax.tree.map(np.asarray, merged(config, params)), adapter
