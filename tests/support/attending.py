"""Attention by named arguments, and inputs for it."""

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.model.attention import attend as attention
from bert_jax.model.attention.library import Gpu
from bert_jax.model.attention.xla import Asked
from bert_jax.model.dropout import DropoutStream

B, H, K = 2, 2, 16
H100 = Gpu((9, 0), 91100)
STATIC = ("dropout_rate", "site", "impl", "window")


def attend(*arrays, impl="auto", layout=None, layers=1, **options):
    """Call `attention.attend` with the fields of `Asked` as arguments."""
    return attention.attend(Asked(*arrays, **options), impl, layout, layers)


jitted = jax.jit(attend, static_argnames=STATIC)


def asked_of(queries, keys, head_dim, dtype, rate=0.0, **how):
    """Make a request with arrays of these sizes, of one row and head, that have no values."""
    q, k = (jax.ShapeDtypeStruct((1, n, 1, head_dim), jnp.dtype(dtype)) for n in (queries, keys))
    ids = (jax.ShapeDtypeStruct((1, n), jnp.dtype("int32")) for n in (queries, keys))
    return Asked(q, k, k, *ids, dropout_rate=rate, **how)


def inputs(length=128, keys=128, heads=H, rows=B, dtype=jnp.float32):
    """(q, k, v, gradient of the output) and segments: a packed row and a padded one."""
    random = np.random.default_rng(0)
    arrays = [
        random.normal(size=(rows, n, heads, K)).astype(dtype) for n in (length, keys, keys, length)
    ]

    def ids(n):
        packed = np.repeat([1, 2, 3, 0], [n // 4 + 3, n // 4 - 1, n // 4 + 5, n // 4 - 7])
        padded = np.repeat([1, 0], [n // 2 - 5, n // 2 + 5])
        return np.stack([packed, padded] * (rows // 2)).astype(np.int32)

    return arrays, {"q_segment_ids": ids(length), "kv_segment_ids": ids(keys)}


def dropout_of(rate, rows=B):
    return {
        "dropout_rate": rate,
        "stream": DropoutStream(np.uint32(5), np.arange(7, 7 + rows, dtype=np.uint32)),
        "site": 3,
    }


def value_and_gradients(arrays, layout=None, **options):
    fixed = {name: options.pop(name) for name in STATIC if name in options}

    @jax.jit
    def run(arrays, options):
        *qkv, gradient = arrays
        out, pull_back = jax.vjp(lambda *qkv: attend(*qkv, **options, **fixed, layout=layout), *qkv)
        return out, *pull_back(gradient)

    return run(arrays, options)


def assert_all_close(ours, reference, tolerance):
    for x, y in zip(ours, reference, strict=True):
        assert x.dtype == y.dtype
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance)
