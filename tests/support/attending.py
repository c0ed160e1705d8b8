"""Attention by named arguments."""

from bert_jax.model.attention import attend as attention
from bert_jax.model.attention.xla import Asked


def attend(*arrays, impl="auto", layout=None, layers=1, **options):
    """Call `attention.attend` with the fields of `Asked` as arguments."""
    return attention.attend(Asked(*arrays, **options), impl, layout, layers)
