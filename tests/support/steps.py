"""Steps of masked LM for tests that make no run."""

from dataclasses import replace
from typing import Any

import jax

from bert_jax.model.config import ModelConfig
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.tokenization.special_ids import SpecialIds
from bert_jax.training.steps.state import StepConfig
from bert_jax.training.steps.step import gradients


def masked_lm_step(
    *,
    model: ModelConfig,
    masking: MaskingConfig,
    special_ids: SpecialIds,
    pairs: bool = True,
    **settings: Any,
) -> StepConfig:
    objective = MaskedLM(model, masking, special_ids, pairs=pairs)
    return StepConfig(objective=objective, **settings)


def with_model(config: StepConfig, model: ModelConfig) -> StepConfig:
    return replace(config, objective=replace(config.objective, model=model))


def batch_gradients(config: StepConfig, mesh: Any, params: Any, rows: Any, seed: Any) -> Any:
    """Gradients and sums of prepared rows."""
    return gradients(config, mesh, params, rows, seed, config.objective.counts(rows))


def forward(config: StepConfig, params: Any, rows: Any, seed: Any) -> dict[str, jax.Array]:
    """Sums of prepared rows on one device."""
    return config.objective.forward(params, rows, seed, None).sums
