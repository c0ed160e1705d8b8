"""The loop over a stack of layers, unrolled or as a scan over periods of `attention_pattern`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from bert_jax.model.config import ModelConfig
from bert_jax.model.layout import all_but_gathered


def run_layers(
    config: ModelConfig, apply_layer: Callable, stacked, x: Any, gathers: bool, frozen: int = 0
) -> Any:
    """Run the layers: full periods of the pattern as a scan, the remaining layers unrolled.

    `stacked` has the parameters of the layers, stacked along axis 0. If `scan_unroll` is
    `num_layers` or more, all layers are unrolled, and `x` may then be a tuple that grows. With
    `gathers`, the backward pass gathers the layers' parameters again instead of keeping them, even
    if `remat` is "none". No gradient flows through or below the bottom `frozen` layers.
    """
    num_layers, period = config.num_layers, len(config.attention_pattern)
    straight = config.scan_unroll >= num_layers
    if config.remat != "none" or gathers:
        policy = {
            "none": all_but_gathered,
            "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            "full": jax.checkpoint_policies.nothing_saveable,
        }[config.remat]
        # XLA could merge repeated expressions with the original ones in unrolled code, but not in a
        # scan, whose backward pass is a separate loop.
        apply_layer = jax.checkpoint(
            apply_layer, policy=policy, prevent_cse=straight, static_argnums=0
        )
    leaves, tree = jax.tree.flatten(stacked)

    def run(x: Any, start: int, pieces: Sequence[Array], index: Callable[[int], Any]) -> Any:
        """Run layers one by one; `pieces` are their parameters, with layers on axis 0."""
        count = pieces[0].shape[0]
        # The gradient of `split` is one concatenation; the gradient of `piece[n]` pads and sums.
        split = [jax.lax.split(piece, (1,) * count) for piece in pieces]
        for n in range(count):
            params = jax.tree.unflatten(tree, [each[n].squeeze(0) for each in split])
            x = apply_layer(config.layer_kind(start + n), params, x, index(n))
        return x

    def part(x: Any, start: int, pieces: Sequence[Array]) -> Any:
        """Run layers from index `start` on, as a scan unless all layers are unrolled."""
        stop = start + pieces[0].shape[0]
        if straight:
            return run(x, start, pieces, lambda n: start + n)
        # A first layer without a norm differs from all other layers, so periods begin after it.
        aligned = 0 if config.first_norm else 1
        begin = min(max(start, aligned) + (aligned - max(start, aligned)) % period, stop)
        end = stop - (stop - begin) % period
        sizes = (begin - start, end - begin, stop - end)
        first, middle, left = zip(*(jax.lax.split(leaf, sizes) for leaf in pieces), strict=True)
        x = run(x, start, first, lambda n: start + n) if begin > start else x
        if end > begin:
            groups = [leaf.reshape(-1, period, *leaf.shape[1:]) for leaf in middle]
            firsts = jnp.arange(begin, end, period, dtype=jnp.uint32)
            x, _ = jax.lax.scan(
                lambda x, group: (run(x, begin, group[0], lambda n: group[1] + n), None),
                x,
                (groups, firsts),
                unroll=max(1, config.scan_unroll // period),
            )
        return run(x, end, left, lambda n: end + n) if end < stop else x

    if not frozen:
        return part(x, 0, leaves)
    x = part(x, 0, [jax.lax.stop_gradient(leaf[:frozen]) for leaf in leaves])
    return part(jax.lax.stop_gradient(x), frozen, [leaf[frozen:] for leaf in leaves])
