"""The interface to a class of Transformers that computes one of our translation networks."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from bert_jax.artefacts.formats.model_config import other_values
from bert_jax.errors import UserError
from bert_jax.model.heads import Params
from bert_jax.model.seq2seq.network import Network, Tying
from bert_jax.model.seq2seq.transformer import TransformerNetwork

LAYERS: dict[str, Any] = {
    "norm": "layer", "norm_bias": True, "num_kv_heads": 0, "gated": False, "embedding_dim": 0,
    "attention_pattern": "G", "attention_bias": True, "mlp_bias": True, "decoder_bias": True,
}  # fmt: skip
"""Fields of `ModelConfig` that have one value in all classes here."""


class Family(ABC):
    """A translation class of Transformers: conversion of its fields and tensors, both ways."""

    kind: str
    """Value of `model_type` in `config.json`."""
    class_name: str
    computes: ClassVar[Mapping[str, Any]]
    """Fields of `ModelConfig` that have one value in all models of the class."""
    tyings: tuple[Tying, ...] = ("all", "output", "none")
    """Values of `objective.tying` that the class supports."""
    untrained: tuple[str, ...] = ()
    """Parts that the class must have but a network lacks; written as zeros."""

    def unlike(self, network: TransformerNetwork) -> list[str]:
        """List the fields in which a network differs from the class."""
        found = other_values(network.model, self.computes)
        if network.feature_dim:
            found.append(f"objective.feature_dim is {network.feature_dim}, not 0")
        if network.tying not in self.tyings:
            found.append(f"objective.tying is {network.tying!r}, not {self.tyings[0]!r}")
        return found

    @abstractmethod
    def config(self, network: TransformerNetwork) -> dict[str, Any]:
        """Return the fields of `config.json`, without token ids."""

    @abstractmethod
    def network(
        self, found: Mapping[str, Any], arrays: Mapping[str, np.ndarray], where: str
    ) -> TransformerNetwork:
        """Return the network that a `config.json`, named `where`, and its tensors describe.

        Raises:
            UserError: Lists all fields that are wrong or not supported.
        """

    @abstractmethod
    def arrays(self, network: TransformerNetwork, params: Params) -> dict[str, np.ndarray]:
        """Return every tensor of the class by name, in float32, without tied duplicates."""

    @abstractmethod
    def params(self, network: TransformerNetwork, arrays: Mapping[str, np.ndarray]) -> Params:
        """Return the parameters of a network from the tensors of the class.

        Raises:
            UserError: Lists every tensor that is missing, unexpected or does not fit.
        """


def shapes_of(network: Network) -> Params:
    """Return a network's parameter tree with shapes in place of arrays."""
    shapes: Params = jax.eval_shape(network.init, jax.random.key(0))
    return shapes


def refuse(where: str, wrong: list[str]) -> None:
    """Raise a UserError that lists all faults of a file, if there are any."""
    if wrong:
        raise UserError(f"{where}: {'; '.join(wrong)}")
