"""The command line of the stations, and the loop that trains their networks."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

PICTURES = Path(__file__).parents[2] / "docs" / "pictures" / "chapter"


class Asked(NamedTuple):
    """Values from the command line."""

    steps: int
    """Number of training steps of each network."""
    pictures: Path
    """Directory of the station's picture."""


def asked(title: str | None, steps: int) -> Asked:
    """Read the command line; `steps` is the number of training steps of the station's page."""
    parser = argparse.ArgumentParser(description=(title or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=steps, help="training steps (%(default)s)")
    parser.add_argument(
        "--pictures", type=Path, default=PICTURES, help="directory of the picture (%(default)s)"
    )
    return Asked(**vars(parser.parse_args()))


def learn(
    loss: Callable[..., Any], params: Any, batches: Iterable[Any], optimizer: Any
) -> tuple[Any, np.ndarray]:
    """Train `params` on `batches`, one step each; return the parameters and all losses.

    A step computes `loss(params, batch)` and its gradient, which says for each parameter how the
    loss changes with it. The optimizer then moves all parameters so that the loss falls.
    """

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        value, gradient = jax.value_and_grad(loss)(params, batch)
        changes, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, changes), state, value

    state, losses = optimizer.init(params), []
    for batch in batches:
        params, state, value = step(params, state, batch)
        losses.append(value)
    return params, np.array(losses)
