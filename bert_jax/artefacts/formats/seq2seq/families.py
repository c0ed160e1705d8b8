"""Classes of Transformers that translate, by `model_type`; which of them a network is."""

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
    """Return the class that computes what a network does, and the network.

    Raises:
        UserError: No class does; says what the model `name` has that the nearest one has not.
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
        UserError: Fields or tensors that are missing, wrong or not supported: all at once.
    """
    family = FAMILIES[found["model_type"]]
    network = family.network(found, arrays, where)
    return network, family.params(network, arrays)
