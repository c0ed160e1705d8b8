"""LoRA: low-rank updates of the layers' weight matrices (Hu et al. 2021, section 4.1).

The entry `lora` of the parameters is a tree like `encoder`, but has only the target matrices, with
`a` (N, *inputs, rank) and `b` (N, rank, *outputs) in place of a kernel (N, *inputs, *outputs).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from bert_jax.config.bounds import Bounded, Distinct, Natural, Positive
from bert_jax.errors import UserError
from bert_jax.model.heads import Params
from bert_jax.model.layout import LogicalAxes

Target = Literal["query", "key", "value", "output", "up", "gate", "down"]
TARGETS: Mapping[str, str] = {
    "query": "attention", "key": "attention", "value": "attention", "output": "attention",
    "up": "mlp", "gate": "mlp", "down": "mlp",
}  # fmt: skip
"""Part of a layer (`attention` or `mlp`) that contains each target matrix."""
_PURPOSE = 0x6C6F7261


@dataclass(frozen=True)
class LoraConfig(Bounded, section="lora"):
    """Settings of LoRA: low-rank updates trained in place of the encoder's own weights."""

    rank: Natural = 0
    """Rank of each update; with 0 there are no updates, and the encoder itself is trained."""
    alpha: Positive = 16.0
    """Numerator of the updates' scale, which is alpha / rank."""
    targets: Annotated[tuple[Target, ...], Distinct(1)] = ("query", "value")
    """Matrices that get an update in every layer."""

    def check_section(self) -> None:
        """Raise a UserError if a field is set although `rank` is 0."""
        if not self.rank and (self.alpha, self.targets) != (LoraConfig.alpha, LoraConfig.targets):
            raise UserError(
                f"lora.rank is 0, so lora.alpha {self.alpha:g} and lora.targets {self.targets} "
                "have no effect; set lora.rank, such as 8, or leave them out"
            )

    @property
    def scale(self) -> float:
        """Factor alpha / rank of the product A B."""
        return self.alpha / self.rank


def with_lora_axes(config: LoraConfig, axes: Params) -> Params:
    """Add the entry `lora` to the tree of the parameters' logical axes, if `rank` is not 0."""
    if not config.rank:
        return axes

    def pair(_: str, kernel: LogicalAxes) -> Params:
        split = 1 + _num_inputs(kernel)
        return {"a": (*kernel[:split], None), "b": ("layers", None, *kernel[split:])}

    return {**axes, "lora": _of_targets(config, axes, pair)}


def with_lora(config: LoraConfig, key: Array, params: Params, axes: Params) -> Params:
    """Add the entry `lora` to parameters with the logical axes `axes`, if `rank` is not 0.

    A is drawn from a normal distribution with standard deviation 1 / sqrt(3 * inputs), like PEFT's
    uniform distribution. B starts as zeros. A target's A does not depend on the other targets.
    Raise a UserError if the layers have no matrix with the name of a target.
    """
    if not config.rank:
        return params
    kernels: dict[str, Array] = {name: _kernel(params, name) for name in config.targets}
    base = jax.random.fold_in(key, _PURPOSE)

    def pair(name: str, kernel_axes: LogicalAxes) -> Params:
        shape, split = kernels[name].shape, 1 + _num_inputs(kernel_axes)
        width = math.prod(shape[1:split])
        draw = jax.random.fold_in(base, list(TARGETS).index(name))
        a = jax.random.normal(draw, (*shape[:split], config.rank), jnp.float32)
        b = jnp.zeros((shape[0], config.rank, *shape[split:]), jnp.float32)
        return {"a": a / jnp.sqrt(3.0 * width), "b": b}

    return {**params, "lora": _of_targets(config, axes, pair)}


def merged(config: LoraConfig, params: Params) -> Params:
    """Add the updates, (alpha / rank) A B, to the layers' kernels, and drop the entry `lora`.

    On a mesh, each shard of a kernel is computed from the shards of A and B on the same device.
    """
    if not config.rank:
        return params
    changed = dict(params["encoder"]["layers"])
    for name, pair in updates(params["lora"]):
        part = changed[TARGETS[name]]
        kernel = part[name]["kernel"]
        kernel = kernel + config.scale * product(pair).reshape(kernel.shape)
        changed[TARGETS[name]] = {**part, name: {**part[name], "kernel": kernel}}
    rest = {name: entry for name, entry in params.items() if name != "lora"}
    return {**rest, "encoder": {**params["encoder"], "layers": changed}}


def product(pair: Params) -> Array:
    """Return the product A B (N, inputs, outputs), in float32, of one target in every layer."""
    a, b = pair["a"], pair["b"]
    count, rank = b.shape[:2]
    a, b = a.reshape(count, -1, rank), b.reshape(count, rank, -1)
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def updates(lora: Params) -> Iterator[tuple[str, Params]]:
    """Yield the name of each updated matrix with the dict of its A and B."""
    for part in lora["layers"].values():
        yield from part.items()


def _of_targets(config: LoraConfig, axes: Params, make: Callable[[str, Any], Params]) -> Params:
    found: Params = {}
    for name in config.targets:
        found.setdefault(TARGETS[name], {})[name] = make(name, _kernel(axes, name))
    return {"layers": found}


def _kernel(tree: Params, name: str) -> Any:
    found = tree["encoder"]["layers"][TARGETS[name]].get(name)
    if found is None:
        raise UserError(
            f"lora.targets has {name!r}, but the layers of this model have no such matrix "
            f"(model.gated is false); remove {name!r} from lora.targets"
        )
    return found["kernel"]


def _num_inputs(axes: LogicalAxes) -> int:
    """Count the input axes of a stacked kernel. Its only input or only output axis is `embed`."""
    return 1 if axes[1] == "embed" else len(axes) - 2
