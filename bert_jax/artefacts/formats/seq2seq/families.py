"""Translation classes of Transformers by `model_type`, and the choice of one for a network."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bert_jax.artefacts.formats.seq2seq.bert_pair import BertPair
from bert_jax.artefacts.formats.seq2seq.family import Family
from bert_jax.artefacts.formats.seq2seq.marian import Marian, Pegasus
from bert_jax.errors import UserError
from bert_jax.model.heads import Params
from bert_jax.model.seq2seq.network import Network
from bert_jax.model.seq2seq.transformer import TransformerNetwork

FAMILIES: dict[str, Family] = {each.kind: each for each in (Marian(), Pegasus(), BertPair())}

_INSTEAD = "Export with --to stablehlo, the whole search as one program, or with --to orbax"


def family_of(network: Network, name: str) -> tuple[Family, TransformerNetwork]:
    """Return the class that computes the same as a network, and the network.

    Raises:
        UserError: There is no such class; lists where the model `name` differs from the nearest.
    """
    if not isinstance(network, TransformerNetwork):
        raise UserError(
            f"{name}: no class of Transformers computes a {type(network).__name__}. {_INSTEAD}"
        )
    unlike = {kind: family.unlike(network) for kind, family in FAMILIES.items()}
    nearest = min(unlike, key=lambda kind: len(unlike[kind]))
    if unlike[nearest]:
        raise UserError(
            f"{name}: no class of Transformers computes this model. The nearest is "
            f"{FAMILIES[nearest].class_name}, but {'; '.join(unlike[nearest])}. {_INSTEAD}, or "
            "train a model with these fields"
        )
    return FAMILIES[nearest], network


def read_network(
    found: Mapping[str, Any], arrays: Mapping[str, np.ndarray], *, where: str
) -> tuple[TransformerNetwork, Params]:
    """Return network and parameters of a directory whose `model_type` is in `FAMILIES`.

    Raises:
        UserError: Lists all fields or tensors that are missing, wrong or not supported.
    """
    family = FAMILIES[found["model_type"]]
    network = family.network(found, arrays, where)
    return network, family.params(network, arrays)
