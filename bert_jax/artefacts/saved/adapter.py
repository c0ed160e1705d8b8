"""Low-rank updates of a saved model: merged into its parameters, and kept beside them."""

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
    """Low-rank updates that are in the parameters of a model."""

    config: LoraConfig
    lora: Params
    """Entry `lora` of the parameters of the run."""
    layers: Params
    """Entry `encoder/layers` without the updates."""


def merged_params(
    params: Params, lora: Mapping[str, Any] | None, where: str
) -> tuple[Params, Adapter | None]:
    """Return the parameters of a run with its low-rank updates added, and the updates.

    `lora` is their configuration as `where` has it, None of a run without updates.
    """
    if lora is None:
        return params, None
    config = build(LoraConfig, lora, where)
    adapter = Adapter(config, params["lora"], params["encoder"]["layers"])
    return jax.tree.map(np.asarray, merged(config, params)), adapter
