"""The section `objective` of a configuration, and the objectives that it can name."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bert_jax.data.store import SpecialIds
from bert_jax.errors import UserError, nearest
from bert_jax.model.config import ModelConfig
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.objectives.objective import Metric, Objective
from bert_jax.objectives.replaced_tokens import (
    METRICS,
    ReplacedTokens,
    generator_of,
    generator_params,
)


class Given(NamedTuple):
    """The rest of a run's configuration and corpus, for an objective to read."""

    model: ModelConfig
    masking: MaskingConfig
    pairs: bool
    """Whether rows are pairs of sentences with a label."""
    special_ids: SpecialIds
    continues_word: np.ndarray | None = None
    """(vocab_size,) bool, for whole-word masking: the id continues the word before it."""
    unigram_entropy: float | None = None
    """Entropy of the corpus's tokens, nats; None where no corpus is at hand."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """The choice of what a run learns; an objective's own fields are those of its subclass."""

    name: str = "masked_lm"
    """Objective: masked_lm or replaced_tokens."""

    @classmethod
    def variant(cls, values: Mapping[str, Any]) -> "type[ObjectiveConfig]":
        """Return the subclass that `values` names.

        Raises:
            UserError: No objective of that name.
        """
        name = values.get("name", ObjectiveConfig.name)
        if name not in OBJECTIVES:
            near = nearest(str(name), OBJECTIVES)
            hint = f" (did you mean {near!r}?)" if near else ""
            raise UserError(
                f"objective.name is {name!r}{hint}; it must be one of {', '.join(OBJECTIVES)}"
            )
        return OBJECTIVES[name]

    def metrics(self, pairs: bool) -> tuple[Metric, ...]:
        """List the metrics of a run, before its model and corpus are known."""
        raise NotImplementedError

    def make(self, given: Given) -> Objective:
        """Make the objective."""
        raise NotImplementedError

    def models(self, model: ModelConfig, params: Any) -> dict[str, tuple[ModelConfig, Any]]:
        """Take a run's parameters apart into models by name; the first is what the run is for."""
        return {"model": (model, params)}


@dataclass(frozen=True)
class MaskedLMConfig(ObjectiveConfig):
    """Masked words, and with pairs of sentences whether the second follows (Devlin et al. 2018)."""

    def metrics(self, pairs: bool) -> tuple[Metric, ...]:
        """List the metrics of a run, before its model and corpus are known."""
        return MaskedLM.metrics_of(pairs)

    def make(self, given: Given) -> MaskedLM:
        """Make the objective."""
        return MaskedLM(
            given.model, given.masking, given.special_ids, given.continues_word, given.pairs,
            baseline=given.unigram_entropy,
        )  # fmt: skip


@dataclass(frozen=True)
class ReplacedTokensConfig(ObjectiveConfig):
    """Tokens that a small generator proposed in place of masked ones (Clark et al. 2020)."""

    name: str = "replaced_tokens"
    """Objective: replaced_tokens."""
    generator_size: float = 0.25
    """Share of the model's width, heads and feed-forward width that the generator has; its layers
    are as many."""
    discriminator_weight: float = 50.0
    """Factor of the discriminator's loss beside the generator's."""
    temperature: float = 1.0
    """Divisor of the generator's logits before a token is drawn."""

    def __post_init__(self) -> None:
        """Refuse numbers that make no generator and no loss."""
        if not 0 < self.generator_size <= 1:
            raise UserError(
                f"objective.generator_size is {self.generator_size}; it must be above 0 and at "
                "most 1"
            )
        for name in ("discriminator_weight", "temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(
                    f"objective.{name} is {getattr(self, name)}; it must be above 0 and finite"
                )

    def metrics(self, pairs: bool) -> tuple[Metric, ...]:
        """List the metrics of a run, before its model and corpus are known."""
        return METRICS

    def models(self, model: ModelConfig, params: Any) -> dict[str, tuple[ModelConfig, Any]]:
        """Take a run's parameters apart: discriminator, with its head, and generator."""
        discriminator = {name: params[name] for name in ("encoder", "rtd")}
        generator = generator_of(model, self.generator_size), generator_params(params)
        return {"discriminator": (model, discriminator), "generator": generator}

    def make(self, given: Given) -> ReplacedTokens:
        """Make the objective; labels of pairs are not learned."""
        return ReplacedTokens(
            given.model, given.masking, given.special_ids, self.generator_size,
            self.discriminator_weight, self.temperature, given.continues_word,
            baseline=given.unigram_entropy,
        )  # fmt: skip


OBJECTIVES: dict[str, type[ObjectiveConfig]] = {
    "masked_lm": MaskedLMConfig,
    "replaced_tokens": ReplacedTokensConfig,
}
"""Objectives by name: adding one is an entry here."""
