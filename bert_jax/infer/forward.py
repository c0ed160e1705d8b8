"""Forward passes of a saved model. The last layer computes only the positions that are needed.

The parameters of each layer are separate arrays, and one compiled program is called for each layer.
If the layers were stacked in one array, XLA on CPU would copy a layer at each use, which takes a
fifth of the time of a batch of BERT-base. If all layers were one program, compilation alone would
take as long as the first answer takes now (docs/experiments.md).
"""

import dataclasses
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.errors import UserError
from bert_jax.model.config import LayerKind, ModelConfig
from bert_jax.model.embedding import Pooling, mapped, pool_tokens
from bert_jax.model.encoder import Embeddings, Layer
from bert_jax.model.heads import end_norm, pool, vocabulary_projection, with_params
from bert_jax.model.rotation import Context, make_context
from bert_jax.model.task_heads import TaskHeadConfig, head_logits, reads_all_tokens
from bert_jax.tasks.rows import Batch

_OF_TOKENS = ("mean", "mean_sqrt_len", "max")
FEW_TOKENS = 128
"""Number of tokens in a batch up to which the last layer computes all positions."""


def on_device(
    saved: SavedModel, device: str | None = None, max_length: int | None = None
) -> SavedModel:
    """Put a model on one device, with its layers in a list, as the functions below expect.

    The parameters of a translation model keep their layout. `device` is a platform (cpu, gpu or
    tpu: its first device), or a platform and an index, such as gpu:1. None means JAX's default
    device. `max_length` is the largest number of tokens in a row, by default the model's limit.
    Raise a UserError if the device does not exist, or `max_length` is not from 8 to this limit.
    """
    chosen = _device(device)
    if max_length is not None:
        if not 8 <= max_length <= saved.config.num_positions:
            raise UserError(
                f"max_length is {max_length}; {saved.name} takes 8 to "
                f"{saved.config.num_positions} tokens, including special tokens"
            )
        saved = dataclasses.replace(saved, max_length=max_length)
    config, network = _config_on(chosen, saved.config), saved.network
    if network is not None:
        network = dataclasses.replace(network, model=_config_on(chosen, network.model))
        params = jax.device_put(saved.params, chosen)
        return dataclasses.replace(saved, config=config, network=network, params=params)
    encoder = saved.params["encoder"]
    layers = [
        jax.tree.map(lambda leaf, n=n: np.asarray(leaf)[n], encoder["layers"])
        for n in range(saved.config.num_layers)
    ]
    params = {**saved.params, "encoder": {**encoder, "layers": layers}}
    return dataclasses.replace(
        saved,
        config=dataclasses.replace(config, remat="none"),  # there is no backward pass
        params=jax.device_put(params, chosen),
    )


def layers_stacked(model: SavedModel) -> SavedModel:
    """Undo the layout of `on_device`: stack the layers on axis 0, as `read_model` returns them."""
    if model.network is not None:
        return model
    encoder = model.params["encoder"]
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *encoder["layers"])
    return dataclasses.replace(
        model, params={**model.params, "encoder": {**encoder, "layers": layers}}
    )


def _config_on(device: jax.Device, config: ModelConfig) -> ModelConfig:
    """Return the configuration for a device; `auto` would mean the default device."""
    if device.platform != "cpu" or jax.default_backend() == "cpu":
        return config
    dtype = "float32" if config.dtype == "auto" else config.dtype
    return dataclasses.replace(config, attention_impl="xla", dtype=dtype)


def _device(name: str | None) -> jax.Device:
    if name is None:
        return jax.devices()[0]
    platform, colon, number = name.partition(":")
    try:
        return jax.devices(platform or None)[int(number) if colon else 0]
    except (RuntimeError, ValueError, IndexError):
        found = ", ".join(f"{each.platform}:{n}" for n, each in enumerate(jax.devices()))
        raise UserError(f"device is {name!r:.40}; JAX finds {found}; cpu always works") from None


def task_logits(model: SavedModel, batch: Batch) -> Float[Array, "B C"] | Float[Array, "B L C"]:
    """Compute the logits of a fine-tuned head, in float32: per row (B, C) or token (B, L, C)."""
    assert model.outputs is not None  # `SavedModel.require` checks it
    head = model.outputs.head
    end = _before_end(model, batch, all_places=reads_all_tokens(model.config, head))
    return cast(Array, _task_logits(model.config, head, *end))


def top_tokens(
    model: SavedModel, batch: Batch, places: Int[np.ndarray, "B P"], top: int, banned: np.ndarray
) -> tuple[Float[Array, "B P top"], Int[Array, "B P top"]]:
    """Return the probabilities and ids of the `top` most probable tokens at the given positions.

    The softmax is over the whole vocabulary. `places` has the positions for each row. `banned` (V,)
    is -inf for tokens that must not be returned and 0 for other tokens.
    """
    end = _before_end(model, batch)
    return cast(tuple[Array, Array], _top_tokens(model.config, top, *end, places, banned))


def label_log_probs(model: SavedModel, batch: Batch) -> Float[Array, " B"]:
    """Return the log-probability of each row's label, a token id, at the first mask of the row."""
    places = np.argmax(batch["tokens"] == model.tokenizer.special_ids.mask, axis=1)[:, None]
    inputs = *_before_end(model, batch), places, batch["labels"]
    return cast(Array, _label_log_probs(model.config, *inputs))


def pooled(
    model: SavedModel, batch: Batch, pooling: Pooling, layers: tuple[int, ...], special_tokens: bool
) -> Float[Array, "B W"]:
    """Compute one vector per row, in float32.

    The states of `layers` are averaged. `layers` ascends; 0 means the embeddings. `special_tokens`
    says whether [CLS] and [SEP] count in mean and max pooling.
    """
    config, segment_ids = model.config, batch["segment_ids"]
    if pooling in ("cls", "pooler") and layers == (config.num_layers,):
        return cast(Array, _first(config, pooling == "pooler", *_before_end(model, batch)))
    ids = model.tokenizer.special_ids
    ignored = () if special_tokens or pooling not in _OF_TOKENS else (ids.cls, ids.sep)
    states, _ = _states(model, batch, layers[-1])
    wanted = [states[n] for n in layers]
    if layers[-1] == config.num_layers:
        wanted[-1] = _normed(config, model.params, wanted[-1])
    read = {**model.params, "encoder": {"embeddings": model.params["encoder"]["embeddings"]}}
    return cast(Array, _pool(config, pooling, ignored, wanted, batch["tokens"], segment_ids, read))


def _states(model: SavedModel, batch: Batch, count: int) -> tuple[list[Array], Context]:
    """Return the states (B, L, D) after the embeddings and after each of the first `count` layers.

    The second value has the masks and rotations that all layers share.
    """
    config, encoder = model.config, model.params["encoder"]
    types = np.minimum(batch["type_ids"], np.int32(max(config.num_types, 1) - 1))
    inputs = batch["tokens"], types, batch["segment_ids"]
    embedded, context = _embedded(config, encoder["embeddings"], *inputs)
    states = [embedded]
    for n, params in enumerate(encoder["layers"][:count]):
        states.append(_layer(config, config.layer_kind(n), params, states[-1], context))
    return states, context


def _before_end(
    model: SavedModel, batch: Batch, *, all_places: bool = False
) -> tuple[dict[str, Any], Array, Context]:
    """Run all layers of the encoder except, in most cases, the last layer.

    Return the inputs of the final program: parameters, states (B, L, D) and context. The final
    program usually runs the last layer (the parameters' key `layer`), only at the positions needed.
    If `all_places` is set or the batch is small, this function runs the last layer at all
    positions. For a small batch, this costs less time than compiling another program.
    """
    encoder, num_layers = dict(model.params["encoder"]), model.config.num_layers
    layers = encoder.pop("layers")
    end = {**model.params, "encoder": encoder}
    if not all_places and batch["tokens"].size > FEW_TOKENS:
        num_layers -= 1
        end["layer"] = layers[-1]
    states, context = _states(model, batch, num_layers)
    return end, states[-1], context


# Programs, each compiled once per shape


def _program(*static: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function at its first call. `static` are the positions of its static arguments.

    On a CPU, a lower LLVM optimization level and a single module halve the time to compile a layer
    of BERT-base. The layer runs as fast as before (docs/experiments.md).
    """
    on_cpu = {"xla_backend_optimization_level": 1, "xla_cpu_parallel_codegen_split_count": 1}
    if jax.__version_info__ < (0, 11):  # JAX 0.11 has no such option
        on_cpu["xla_cpu_use_fusion_emitters"] = False

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @cache
        def compiled() -> Callable[..., Any]:
            options = on_cpu if jax.default_backend() == "cpu" else None
            return jax.jit(function, static_argnums=static, compiler_options=options)

        @wraps(function)
        def call(*arguments: Any) -> Any:
            return compiled()(*arguments)

        call.program = compiled  # type: ignore[attr-defined]
        return call

    return decorate


@_program(0)
def _embedded(
    config: ModelConfig, params: Any, tokens: Int[Array, "B L"], type_ids: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"],
) -> tuple[Float[Array, "B L D"], Context]:  # fmt: skip
    embeddings = with_params(params, Embeddings, config)
    context = embeddings.shared(make_context(config, segment_ids))
    return embeddings(tokens, type_ids, context), context


@_program(0, 1)
def _layer(
    config: ModelConfig, kind: LayerKind, params: Any, x: Float[Array, "B L D"], context: Context,
) -> Float[Array, "B L D"]:  # fmt: skip
    return with_params(params, Layer, config)(x, context, 0, kind)


@_program(0)
def _normed(config: ModelConfig, params: Any, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
    return end_norm(config, params, x)


@_program(0, 1)
def _task_logits(
    config: ModelConfig, head: TaskHeadConfig, end: Any, x: Float[Array, "B L D"], context: Context,
) -> Float[Array, "B C"] | Float[Array, "B L C"]:  # fmt: skip
    if reads_all_tokens(config, head):
        x = end_norm(config, end, x)
    else:
        x = _last(config, end, x, context)
    return head_logits(config, head, end, x, context.segment_ids)


@_program(0, 1)
def _top_tokens(
    config: ModelConfig, top: int, end: Any, x: Float[Array, "B L D"], context: Context,
    places: Int[Array, "B P"], banned: Float[Array, " V"],
) -> tuple[Float[Array, "B P top"], Int[Array, "B P top"]]:  # fmt: skip
    hidden = _last(config, end, x, context, places)
    logits = vocabulary_projection(config, end, hidden).logits()
    _, ids = jax.lax.top_k(logits + banned, top)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return jnp.exp(jnp.take_along_axis(logits, ids, axis=-1) - total), ids


@_program(0)
def _label_log_probs(
    config: ModelConfig, end: Any, x: Float[Array, "B L D"], context: Context,
    places: Int[Array, "B 1"], labels: Int[Array, " B"],
) -> Float[Array, " B"]:  # fmt: skip
    logits = vocabulary_projection(config, end, _last(config, end, x, context, places)).logits()
    return jnp.take_along_axis(jax.nn.log_softmax(logits[:, 0]), labels[:, None], axis=1)[:, 0]


@_program(0, 1)
def _first(
    config: ModelConfig, pools: bool, end: Any, x: Float[Array, "B L D"], context: Context,
) -> Float[Array, "B D2"]:  # fmt: skip
    x = _last(config, end, x, context)
    return mapped((pool(config, end, x) if pools else x[:, 0]).astype(jnp.float32), end)


@_program(0, 1, 2)
def _pool(
    config: ModelConfig, pooling: Pooling, ignored: tuple[int, ...],
    states: list[Float[Array, "B L D"]], tokens: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"], params: Any,
) -> Float[Array, "B W"]:  # fmt: skip
    counts = segment_ids > 0
    for id in ignored:
        counts &= tokens != id
    wanted = [each.astype(jnp.float32) for each in states]
    mean = sum(wanted[1:], wanted[0]) / len(wanted)
    return mapped(pool_tokens(pooling, mean, counts, params, config), params)


# Parts that the programs above share


def _last(
    config: ModelConfig, end: Any, x: Array, context: Context, places: Array | None = None
) -> Float[Array, "B P D"]:
    """Compute the final states at `places`. None means the first position of each row."""
    if places is None:
        places = jnp.zeros((len(x), 1), jnp.int32)
    if "layer" in end:
        layer = with_params(end["layer"], Layer, config)
        x = layer(x, context, 0, config.layer_kind(config.num_layers - 1), places=places)
    else:
        x = jnp.take_along_axis(x, places[..., None], axis=1)
    return end_norm(config, end, x)
