"""Batches whose loss or gradient is bad, told by a row that is in them."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from bert_jax.training.steps import step as step_module


def poison(monkeypatch, bad_rows: Mapping[int, str]) -> None:
    """Makes the steps built from now on bad for batches that hold some rows.

    Args:
        monkeypatch: Of the test.
        bad_rows: `row_index` to what is bad: "nan" and "inf" (loss and gradient), "gradient" (NaN
            in one of its leaves, the loss finite), "spike" (a loss 100 times as high).
    """
    whole = step_module.gradients

    def gradients(config, mesh, params, rows, seed, counts):
        grads, sums = whole(config, mesh, params, rows, seed, counts)
        for row, what in bad_rows.items():
            here = jnp.any(rows["row_index"] == row)
            if what == "spike":
                loss = sums["mlm_loss"]
                sums = sums | {"mlm_loss": jnp.where(here, 100 * loss, loss)}
                continue
            value = jnp.inf if what == "inf" else jnp.nan
            add = jnp.where(here, value, 0.0)
            if what == "gradient":
                leaves, structure = jax.tree.flatten(grads)
                grads = jax.tree.unflatten(structure, [leaves[0] + add, *leaves[1:]])
            else:
                grads = jax.tree.map(lambda x, add=add: x + add, grads)
                sums = sums | {"mlm_loss": sums["mlm_loss"] + add}
        return grads, sums

    monkeypatch.setattr(step_module, "gradients", gradients)
