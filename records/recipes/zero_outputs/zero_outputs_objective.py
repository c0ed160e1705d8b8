"""The objective `zero_outputs`: a masked LM whose layers begin as identities."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_map_with_path
from typing_extensions import override

from bert_jax.objectives.config import OBJECTIVES, Given, MaskedLMConfig
from bert_jax.objectives.masked_lm import MaskedLM

OUTPUTS = ("['attention']['output']['kernel']", "['mlp']['down']['kernel']",
           "['mlm']['dense']['kernel']")  # fmt: skip


class ZeroOutputs(MaskedLM):
    """A masked LM whose output projections are 0 before the first step."""

    @override
    def init(self, key: jax.Array) -> Any:
        """Initialise the parameters."""
        return tree_map_with_path(
            lambda path, x: jnp.zeros_like(x) if keystr(path).endswith(OUTPUTS) else x,
            super().init(key),
        )


@dataclass(frozen=True)
class ZeroOutputsConfig(MaskedLMConfig):
    """A masked LM whose output projections begin at 0."""

    name: str = "zero_outputs"
    """Objective: zero_outputs."""

    @override
    def make(self, given: Given) -> ZeroOutputs:
        """Make the objective."""
        return ZeroOutputs(**given._asdict())


OBJECTIVES["zero_outputs"] = ZeroOutputsConfig
