"""Attention by named arguments."""

import jax
import jax.numpy as jnp

from bert_jax.model.attention import attend as attention
from bert_jax.model.attention.xla import Asked


def attend(*arrays, impl="auto", layout=None, layers=1, **options):
    """Call `attention.attend` with the fields of `Asked` as arguments."""
    return attention.attend(Asked(*arrays, **options), impl, layout, layers)


def asked_of(queries, keys, head_dim, dtype, rate=0.0, **how):
    """Make a request with arrays of these sizes, of one row and head, that have no values."""
    q, k = (jax.ShapeDtypeStruct((1, n, 1, head_dim), jnp.dtype(dtype)) for n in (queries, keys))
    ids = (jax.ShapeDtypeStruct((1, n), jnp.dtype("int32")) for n in (queries, keys))
    return Asked(q, k, k, *ids, dropout_rate=rate, **how)
