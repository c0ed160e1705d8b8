"""Learning rates that differ between layers, and the rate of the head."""

from typing import Any

import jax
import numpy as np

from bert_jax.training.optim_parts import is_stacked


def layer_rates(logical_axes: Any, num_layers: int, decay: float) -> Any:
    """Return the factor of each parameter's learning rate: discriminative fine-tuning.

    The rate falls from layer to layer, from the head downwards (Howard & Ruder 2018, section 3.2):
    1 for all that is above the layers, `decay` ** (num_layers - n) for layer n counted from 0,
    which is `decay` for the top layer, and `decay` ** (num_layers + 1) for the embeddings.

    Args:
        logical_axes: Tree like the parameters, of tuples of axis names.
        num_layers: Layers of the encoder.
        decay: Factor from each layer to the layer below.

    Returns:
        Tree like the parameters, of float32 scalars; of stacked layers (N, 1, ...).
    """

    def one(path: Any, axes: tuple[str | None, ...]) -> Any:
        names = [entry.key for entry in path]
        if is_stacked(axes):
            each = decay ** np.arange(num_layers, 0, -1, dtype=np.float32)
            return each.reshape(-1, *(1,) * (len(axes) - 1))
        return np.float32(decay ** (num_layers + 1) if "embeddings" in names else 1.0)

    return jax.tree_util.tree_map_with_path(
        one, logical_axes, is_leaf=lambda x: isinstance(x, tuple)
    )


def is_head(path: Any) -> bool:
    """Say whether a parameter belongs to the head: the pooler, the map of a head, the head itself.

    All of these lie above the layers and the final norm of the encoder, and `lora` in the layers.
    """
    names = [entry.key for entry in path]
    return names[0] not in ("encoder", "lora") or "pooler" in names[:2]
