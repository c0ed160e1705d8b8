"""Optimizers for the candidates, which this module registers by name."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bert_jax.training.steps import optim_parts as parts
from bert_jax.training.steps.optim import OPTIMIZERS, OptimizerConfig

POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
"""Coefficients of five iterations (Amsel et al. 2025, Polar Express)."""


def muon(config: OptimizerConfig, axes: Any, **settings: Any) -> optax.GradientTransformation:
    """Build the package's Muon, without weight decay, with settings of optax's `scale_by_muon`."""
    return parts.muon(config.momentum, adam(config), parts.matrix_sides(axes), **settings)


def adam(config: OptimizerConfig) -> optax.GradientTransformation:
    """Build the optimizer of all parameters that Muon does not train."""
    return parts.adam(config.b1, config.b2, config.eps, bias_correction=config.bias_correction)


def adam_head(config: OptimizerConfig, axes: Any) -> optax.GradientTransformation:
    """Build Muon that leaves the dense layer of the masked-LM head to AdamW."""
    sides = parts.matrix_sides(axes)
    del sides["mlm/dense/kernel"]
    return parts.muon(config.momentum, adam(config), sides)


def cautious(config: OptimizerConfig, axes: Any) -> optax.GradientTransformation:
    """Build Muon of only the entries with the sign of the gradient (Liang et al. 2024)."""
    inner = muon(config, axes)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def kept(step: Any, grad: Any) -> Any:
            agrees = (step * grad > 0).astype(step.dtype)
            return step * agrees / jnp.maximum(agrees.mean(), 1e-3)

        steps, state = inner.update(grads, state, params)
        return jax.tree.map(kept, steps, grads), state

    return optax.GradientTransformation(inner.init, update)


def even_rows(config: OptimizerConfig, axes: Any) -> optax.GradientTransformation:
    """Build Muon whose steps have equally long rows: NorMuon (Li et al. 2025) without averages."""
    inner, sides = muon(config, axes), parts.matrix_sides(axes)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def even(path: Any, step: Any) -> Any:
            name = parts.joined(path)
            if name not in sides:
                return step
            mean = jnp.square(step).mean(sides[name].reduction_axis, keepdims=True)
            whole = jnp.square(step).mean(tuple(range(1, step.ndim)), keepdims=True)
            return step * jnp.sqrt(whole / jnp.maximum(mean, 1e-12))

        steps, state = inner.update(grads, state, params)
        return jax.tree_util.tree_map_with_path(even, steps), state

    return optax.GradientTransformation(inner.init, update)


def scaled_adam(
    config: OptimizerConfig, axes: Any, *, factor: float, end: str = ""
) -> optax.GradientTransformation:
    """Build Muon, and AdamW with `factor` times the rate for paths that end in `end`."""
    sides = parts.matrix_sides(axes)

    def factor_of(path: Any, axes: Any) -> float:
        name = parts.joined(path)
        return factor if name not in sides and name.endswith(end) else 1.0

    is_leaf = lambda x: isinstance(x, tuple)  # noqa: E731
    factors = jax.tree_util.tree_map_with_path(factor_of, axes, is_leaf=is_leaf)
    return parts.scaled(muon(config, axes), factors)


BUILT = {
    "muon_polar": partial(muon, ns_coeffs=POLAR_EXPRESS),
    "muon_adaptive": partial(muon, adaptive=True),
    "muon_cautious": cautious,
    "muon_even_rows": even_rows,
    "muon_adam_head": adam_head,
    "muon_fast_adam": partial(scaled_adam, factor=3.0),
    "muon_slow_adam": partial(scaled_adam, factor=1 / 3),
    "muon_slow_table": partial(scaled_adam, factor=1 / 3, end="embeddings/token"),
}
for name, build in BUILT.items():
    OPTIMIZERS[name] = lambda config, axes, build=build: parts.then(
        build(config, axes), parts.decay(config.weight_decay)
    )
