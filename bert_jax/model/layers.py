"""Affine maps, token tables, norms and activations, as NNX modules over float32 parameters.

Parameters record logical names of axes, which `distributed/parallel/sharding.py` maps to a mesh.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from bert_jax.model.config import ModelConfig


def compute_dtype(config: ModelConfig) -> jnp.dtype:
    """Return the dtype of activations: `config.dtype`, where `auto` depends on JAX's backend."""
    if config.dtype == "auto":
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    return jnp.dtype(config.dtype)


def truncated_normal(key: Array, shape: tuple[int, ...], std: float) -> Float[Array, "..."]:
    """Draw from a normal of standard deviation `std`, truncated at 2 `std`, without rescaling."""
    return std * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)


def parameter(value: Float[Array, "..."], *axes: str | None) -> nnx.Param:
    """Make a parameter that records the logical name of each axis."""
    if len(axes) != value.ndim:
        raise ValueError(f"{len(axes)} axis names {axes} for an array of shape {value.shape}")
    return nnx.Param(value, axes=axes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum_float32(spec: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Array:
    """Compute an einsum with a float32 result, and its gradients in the operands' type.

    JAX's automatic derivative would compute both backward products in float32, which is at most
    half as fast on hardware with bfloat16. With float32 operands, this function is a plain einsum.
    """
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _einsum_backward(spec: str, operands: tuple[Array, Array], cotangent: Array):
    _, pull_back = jax.vjp(partial(jnp.einsum, spec), *operands)
    return pull_back(cotangent.astype(operands[0].dtype))


einsum_float32.defvjp(lambda spec, a, b: (einsum_float32(spec, a, b), (a, b)), _einsum_backward)


def differentiable(
    forward: Callable[..., Any], backward: Callable[..., Any], static: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """Make a function whose gradient is `backward`; `forward` returns (value, residuals).

    `static` are the indices of arguments that are not differentiated.
    """
    made = jax.custom_vjp(lambda *arguments: forward(*arguments)[0], nondiff_argnums=static)
    made.defvjp(forward, backward)
    return made


def _product_forward(x, kernel, num_inputs, turns_x):
    """Contract the last `num_inputs` axes of `x` with the first axes of `kernel`."""
    return jnp.tensordot(x, kernel, axes=num_inputs), (x, kernel)


def _product_backward(num_inputs, turns_x, operands, slope):
    """Return the gradients; a CPU first transposes `x` (if `turns_x`) or the slope.

    For the kernel's gradient, JAX's derivative lets XLA on CPU multiply two transposes, which takes
    twice the time, and compute the operands again while it transposes them (docs/experiments.md).
    """
    rows = operands[0].ndim - num_inputs

    def automatic(x, kernel, slope):
        return jax.vjp(partial(jnp.tensordot, axes=num_inputs), x, kernel)[1](slope)

    def on_cpu(x, kernel, slope):
        first, second = (x, slope) if turns_x else (slope, x)
        turned = jax.lax.optimization_barrier(jnp.moveaxis(first, range(rows), range(-rows, 0)))
        product = jax.lax.optimization_barrier(jnp.tensordot(turned, second, axes=rows))
        outputs = range(kernel.ndim - num_inputs)
        gradient = product if turns_x else jnp.moveaxis(product, outputs, range(-len(outputs), 0))
        return automatic(x, kernel, slope)[0], gradient

    return jax.lax.platform_dependent(*operands, slope, cpu=on_cpu, default=automatic)


contract = differentiable(_product_forward, _product_backward, static=(2, 3))

AxisSizes = dict[str | None, int]
"""Sizes of axes by logical name, in the order of the axes."""


class Affine(nnx.Module):
    """Affine map `x @ kernel + bias` with any number of input axes and output axes."""

    def __init__(
        self,
        config: ModelConfig,
        inputs: AxisSizes,
        outputs: AxisSizes,
        rngs: nnx.Rngs,
        *,
        bias: bool = True,
        std: float | None = None,
    ):
        """Make a map; `std` is the initial kernel's standard deviation, by default `init_std`."""
        shape = (*inputs.values(), *outputs.values())
        self.inputs = tuple(inputs)
        kernel = truncated_normal(rngs.params(), shape, std or config.init_std)
        self.kernel = parameter(kernel, *inputs, *outputs)
        zeros = jnp.zeros(tuple(outputs.values()), jnp.float32)
        self.bias = parameter(zeros, *outputs) if bias else None

    def __call__(self, x: Float[Array, "..."], biased: bool = True) -> Float[Array, "..."]:
        """Apply the map, without its bias if `biased` is false; compute in the type of `x`."""
        # XLA computes the residual stream in any case, so transposing the stream costs least.
        turns_x = "embed" in self.inputs
        y = contract(x, self.kernel[...].astype(x.dtype), len(self.inputs), turns_x)
        return y if self.bias is None or not biased else add_bias(y, self.bias[...])


def token_table(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Param:
    """Make a table of token embeddings; the rows that pad the vocabulary are zeros."""
    shape = config.vocab_size, config.embedding_width
    std = config.embedding_width**-0.5 if config.scale_embeddings else config.init_std
    rows = truncated_normal(rngs.params(), shape, std)
    padding = config.padded_vocab_size - config.vocab_size
    return parameter(jnp.pad(rows, ((0, padding), (0, 0))), "vocab", "embed")


def look_up(
    config: ModelConfig, table: Float[Array, "V E"], tokens: Integer[Array, "B L"]
) -> Float[Array, "B L E"]:
    """Look up the embeddings of tokens, and scale them if `config.scale_embeddings` is true."""
    found = table[tokens]
    return found * math.sqrt(table.shape[1]) if config.scale_embeddings else found


def output_std(config: ModelConfig) -> float:
    """Return the standard deviation of the initial output weights of attention and feed-forward."""
    shrink = math.sqrt(2 * config.num_layers) if config.init == "scaled" else 1.0
    return config.init_std / shrink


def _add_bias_forward(x, bias):
    """Return `x + bias` in the type of `x`; the bias's gradient is summed in float32."""
    return x + bias.astype(x.dtype), bias


def sum_rows(x: Float[Array, "..."], rows: int, copies: int = 1) -> Float[Array, "..."]:
    """Sum over the first `rows` axes in float32, as a product with `copies` equal rows of ones.

    For bfloat16 on a TPU, the product is faster than `x.sum` (docs/experiments.md); 8 copies fill a
    register. On a CPU, the product is faster for wide `x`: 3.6, not 13 ms, for 320 rows of 30,592.
    """
    ones = jnp.ones((copies, *x.shape[:rows]), x.dtype)
    return jnp.tensordot(ones, x, rows, preferred_element_type=jnp.float32)[0]


def _add_bias_backward(bias, gradient):
    rows = gradient.ndim - bias.ndim
    by_sum = partial(jnp.sum, axis=tuple(range(rows)), dtype=jnp.float32)
    # By default, a TPU's products round float32 operands to bfloat16.
    is_exact = gradient.dtype == jnp.bfloat16
    on_cpu = partial(sum_rows, rows=rows)
    on_tpu = partial(sum_rows, rows=rows, copies=8) if is_exact else by_sum
    return gradient, jax.lax.platform_dependent(gradient, cpu=on_cpu, tpu=on_tpu, default=by_sum)


add_bias = differentiable(_add_bias_forward, _add_bias_backward)


class Norm(nnx.Module):
    """Layer norm or RMS norm, as `config.norm` says, with float32 statistics."""

    def __init__(self, config: ModelConfig, width: int | None = None, rngs: nnx.Rngs | None = None):
        """Make a norm over `width` features, by default hidden_dim; `rngs` is not used."""
        width = width or config.hidden_dim
        self.kind, self.eps = config.norm, config.norm_eps
        self.scale = parameter(jnp.ones((width,), jnp.float32), "embed")
        has_bias = config.norm == "layer" and config.norm_bias
        self.bias = parameter(jnp.zeros((width,), jnp.float32), "embed") if has_bias else None

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalise the last axis; the result has the type of `x`."""
        if self.kind == "rms":
            wide = x.astype(jnp.float32)
            inverse = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps)
            return (wide * inverse * self.scale[...]).astype(x.dtype)
        bias = None if self.bias is None else self.bias[...]
        return layer_norm(x, self.scale[...], bias, self.eps)


def _layer_norm_forward(x, scale, bias, eps):
    """Normalise in two passes (Ba et al. 2016).

    The second pass averages squared deviations. The one-pass form E[x^2] - E[x]^2 loses all digits
    for nearly constant inputs, and BERT's eps of 1e-12 is too small to hide this.
    """
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.square(wide - mean).mean(-1, keepdims=True) + eps)
    y = (wide - mean) * (inverse * scale)
    y = y if bias is None else y + bias
    return y.astype(x.dtype), (x, scale, bias, mean, inverse)


def _layer_norm_backward(eps, residuals, gradient):
    # One pass computes all four sums, and a TPU fuses it into the product that makes `gradient`.
    # JAX's own derivative takes two passes and twice the operations (docs/experiments.md).
    x, scale, bias, mean, inverse = residuals
    centred = x.astype(jnp.float32) - mean
    gradient = gradient.astype(jnp.float32)
    scaled = gradient * scale
    normal = centred * inverse
    mean_gradient = scaled.mean(-1, keepdims=True)
    slope = (scaled * normal).mean(-1, keepdims=True) * inverse * inverse
    dx = scaled * inverse - mean_gradient * inverse - centred * slope
    rows = tuple(range(x.ndim - 1))
    dbias = None if bias is None else gradient.sum(rows)
    return dx.astype(x.dtype), (gradient * normal).sum(rows), dbias


layer_norm = differentiable(_layer_norm_forward, _layer_norm_backward, static=(3,))


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return x Phi(x), where Phi is the normal distribution function (Hendrycks & Gimpel 2016)."""
    if x.dtype.itemsize == 2:
        return _wide_gelu(x)
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


def _normal_cdf(x):
    return 0.5 * (1 + jax.lax.erf(x * math.sqrt(0.5)))


def _wide_gelu_forward(x):
    """Compute GELU in float32, and keep only `x` for the backward pass.

    Bfloat16 would round 2 / sqrt(pi), a constant of the derivative, to 1.125, 0.3% too small.
    """
    wide = x.astype(jnp.float32)
    return (wide * _normal_cdf(wide)).astype(x.dtype), x


def _wide_gelu_backward(x, gradient):
    wide = x.astype(jnp.float32)
    density = jnp.exp(-0.5 * jnp.square(wide)) / math.sqrt(2 * math.pi)
    slope = _normal_cdf(wide) + wide * density
    return ((gradient.astype(jnp.float32) * slope).astype(x.dtype),)


_wide_gelu = differentiable(_wide_gelu_forward, _wide_gelu_backward)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated(activation: str, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Array:
    """Return activation(gate) * up; keep only the arrays `gate` and `up` for the backward pass.

    With JAX's automatic derivative, a loop over layers would keep five arrays of this size.
    """
    return ACTIVATIONS[activation](gate) * up


def _gated_backward(activation, arguments, gradient):
    _, pull_back = jax.vjp(lambda gate, up: ACTIVATIONS[activation](gate) * up, *arguments)
    return pull_back(gradient)


gated.defvjp(
    lambda activation, gate, up: (gated(activation, gate, up), (gate, up)), _gated_backward
)
