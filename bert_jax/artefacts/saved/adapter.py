"""Low-rank updates (LoRA) of a saved model, merged into its parameters and also kept apart."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bert_jax.config.mapping import build
from bert_jax.model.heads import Params
from bert_jax.model.lora import LoraConfig, merged


@dataclass(frozen=True, eq=False)
class Adapter:
    """Low-rank updates that have been merged into the parameters of a model."""

    config: LoraConfig
    lora: Params
    """Entry `lora` of the run's parameters."""
    layers: Params
    """Entry `encoder/layers` before the updates are merged."""


def merged_params(
    params: Params, lora: Mapping[str, Any] | None, where: str
) -> tuple[Params, Adapter | None]:
    """Merge the low-rank updates of a run into its parameters; return both.

    `lora` is the configuration of the updates, read from `where`; None for a run without updates.
    """
    if lora is None:
        return params, None
    config = build(LoraConfig, lora, where)
    adapter = Adapter(config, params["lora"], params["encoder"]["layers"])
    return jax.tree.map(np.asarray, merged(config, params)), adapter
