"""Normalisers of logits over a vocabulary, as a Pallas kernel for TPUs.

The kernel computes logits tile by tile in the core's memory, and stores none. One pass keeps a
running maximum and a running sum of exponentials (Milakov & Gimelshein 2018).
"""

from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from bert_jax.model.attention.fused_plan import LANES, NT, product
from bert_jax.model.heads import PADDED_LOGIT

_ROWS, _COLUMNS, _TABLE_ENTRIES = 512, 1024, 2**20
"""Greatest sizes of a tile of logits, and of the part of the table that a program holds."""


class Normalisers(NamedTuple):
    """Sums and maxima of the logits of each row, from which a cross entropy follows."""

    log_z: Float[Array, " N"]
    """Logarithm of the sum of exponentials."""
    picked: Float[Array, " N"]
    """Logit of the label."""
    highest: Float[Array, " N"]
    """Largest logit."""


def normalisers(
    states: Float[Array, "N E"], table: Float[Array, "V E"], bias: Float[Array, " V"],
    labels: Int[Array, " N"],
) -> Normalisers:  # fmt: skip
    """Compute the normalisers of the logits states @ table.T + bias, in float32.

    Without a TPU, Pallas interprets the kernel.
    """
    (count, width), size = states.shape, len(table)
    rows = min(_ROWS, count)
    most = min(_COLUMNS, max(LANES, _TABLE_ENTRIES // width // LANES * LANES))
    columns = min(most, pl.cdiv(size, LANES) * LANES)
    by_row = pl.BlockSpec((rows, 1), lambda row, _: (row, 0))
    call = partial(
        pl.pallas_call,
        partial(_kernel, size),
        name="vocabulary_normalisers",
        grid=(pl.cdiv(count, rows), pl.cdiv(size, columns)),
        in_specs=[
            pl.BlockSpec((rows, width), lambda row, _: (row, 0)),
            pl.BlockSpec((columns, width), lambda _, column: (column, 0)),
            pl.BlockSpec((1, columns), lambda _, column: (0, column)),
            by_row,
        ],
        out_specs=[by_row] * 3,
        out_shape=[jax.ShapeDtypeStruct((count, 1), jnp.float32)] * 3,
        scratch_shapes=[pltpu.VMEM((rows, LANES), jnp.float32)] * 3,
    )
    parameters = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))
    on_tpu, elsewhere = call(compiler_params=parameters), call(interpret=True)
    operands = states, table, bias[None], labels[:, None]
    found = jax.lax.platform_dependent(*operands, tpu=on_tpu, default=elsewhere)
    return Normalisers(*(each[:, 0] for each in found))


def _kernel(size, states, table, bias, labels, log_z, picked, highest, tops, totals, found):
    """Fold a tile of columns into `tops` (maxima), `totals` (sums) and `found` (labels' logits).

    The three have an entry for each row and lane.
    """
    column = pl.program_id(1)

    @pl.when(column == 0)
    def _():
        tops[...] = jnp.full(tops.shape, PADDED_LOGIT)
        totals[...] = jnp.zeros(totals.shape)
        found[...] = jnp.zeros(found.shape)

    logits = product(states[...], table[...], NT) + bias[...]
    place = column * logits.shape[1] + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    logits = jnp.where(place < size, logits, PADDED_LOGIT)
    right = jnp.where(place == labels[...], logits, 0.0)
    parts = [slice(start, start + LANES) for start in range(0, logits.shape[1], LANES)]
    top = reduce(jnp.maximum, (logits[:, part] for part in parts), tops[...])
    before = totals[...] * jnp.exp(tops[...] - top)
    totals[...] = sum((jnp.exp(logits[:, part] - top) for part in parts), before)
    found[...] = sum((right[:, part] for part in parts), found[...])
    tops[...] = top

    @pl.when(column == pl.num_programs(1) - 1)
    def _():
        most = top.max(1, keepdims=True)
        total = (totals[...] * jnp.exp(top - most)).sum(1, keepdims=True)
        log_z[...] = most + jnp.log(total)
        picked[...] = found[...].sum(1, keepdims=True)
        highest[...] = most
