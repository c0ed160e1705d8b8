"""Parameters of a larger encoder, made by tiling the parameters of a smaller encoder.

Source: Warner et al. 2024 (ModernBERT), section 2.2, and its code. From m to n layers, new layer i
starts as a copy of old layer round(i * m / n). An old matrix is in the middle of the new one, and
copies of it fill the space around it. Query, key, value, gate and up matrices grow separately.

Heads are copied whole, so that each dimension of a head keeps its RoPE frequency. Query heads that
share a key head are copied together, so that each query head keeps its key head.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from bert_jax.errors import UserError
from bert_jax.model.config import ARCHITECTURE, ModelConfig
from bert_jax.model.heads import MASKED_LM, Params, ReplacedHead, logical_axes, param_shapes

SIZES = ("num_layers", "hidden_dim", "num_heads", "num_kv_heads", "mlp_dim", "embedding_dim")
"""Fields of the architecture that growing changes."""
_NOISE = 0.5
"""Standard deviation of the noise on copied weights, as a multiple of the kernel's deviation."""


def grown_config(old: ModelConfig, wanted: ModelConfig, name: str) -> ModelConfig:
    """Return the configuration `old` with the larger sizes of `wanted`.

    `attention_pattern` also comes from `wanted`, so that added layers may be global or local. With
    RoPE, `num_positions` comes from `wanted`, too. Error messages call the source model `name`.
    Raise a UserError with all faults if other fields differ, or `old` cannot grow to the sizes.
    """
    taken = [*SIZES, "attention_pattern", *["num_positions"] * (old.positions == "rope")]
    first_local = "L" in wanted.attention_pattern and "L" not in old.attention_pattern
    taken += ["local_window", "local_rope_theta"] * first_local
    if wrong := [*_unlike(old, wanted), *_wrong_sizes(old, wanted)]:
        raise UserError(
            f"a larger model cannot be tiled from {name}: {'; '.join(wrong)}. Growing changes only "
            f"{', '.join(taken)}"
        )
    return dataclasses.replace(old, **{field: getattr(wanted, field) for field in taken})


def grow_params(
    params: Params, old: ModelConfig, new: ModelConfig, *, preserve: bool = False, seed: int = 0
) -> Params:
    """Tile the parameters of `old` (encoder and pretraining heads) to the sizes of `new`.

    `new` comes from `grown_config`. If a new layer has an attention norm but copies a layer without
    this norm (`first_norm`), the scale of the norm starts as ones.

    With `preserve`, each weight is divided by the number of copies of its input feature. A model
    that grows only in width then computes the same as the old model (Chen et al. 2016, Net2Net),
    exactly if each new width is a multiple of the old width, otherwise approximately. Noise from
    `seed` gives the copies different gradients, and adds up to zero over the copies of a feature.
    With `preserve`, raise a UserError if the embedding width grows, a tied decoder has no
    `head_transform`, and the source model has a pooler or `norm_order` "post".
    """
    shapes = {MASKED_LM: {}, **param_shapes(new), "rtd": param_shapes(new, ReplacedHead)}
    axes = {MASKED_LM: {}, **logical_axes(new), "rtd": logical_axes(new, ReplacedHead)}

    def grow(entry: Any, shape: Any, axes: Any) -> Any:
        if isinstance(entry, dict):
            return {name: grow(part, shape[name], axes[name]) for name, part in entry.items()}
        sources = [
            _layer_sources(old, new) if at[-1] == "layers" else _sources(*at, old)
            for at in zip(np.shape(entry), shape.shape, axes, strict=True)
        ]
        return np.asarray(entry)[np.ix_(*sources)]

    grown = grow(params, shapes, axes)
    if not old.first_norm:
        norm = grown["encoder"]["layers"]["attention_norm"]["scale"]
        norm[_layer_sources(old, new) == 0] = 1.0
    if preserve:
        _divide_kernels(grown, params, axes, old, np.random.default_rng(seed))
        if MASKED_LM in grown:  # a tied table keeps its values: divide the decoder's input instead
            copies = _copies(_sources(old.embedding_width, new.embedding_width, "embed", old))
            reads_encoder = old.tied and not old.head_transform
            if reads_encoder and copies.max() > 1 and (old.pooler or old.norm_order == "post"):
                raise UserError(
                    "preserve cannot keep the outputs of this model at a larger width: the token "
                    "table is tied, model.head_transform is False, and other parts read the norm "
                    "before the decoder. Leave out preserve"
                )
            if old.tied:
                norm = grown[MASKED_LM].get("norm") or grown["encoder"].get("final_norm", {})
                for entry in norm.values():
                    entry /= copies
            else:
                grown[MASKED_LM]["decoder"] /= copies
    return grown


def _sources(before: int, after: int, axis: str | None, old: ModelConfig) -> np.ndarray:
    """Return, for each new index of an axis, the old index that it copies.

    The old axis is in the middle, repeated on both sides. Query heads of a key head stay together.
    """
    unit = before // (old.num_kv_heads or old.num_heads) if axis == "heads" else 1
    return (np.arange(after) - (after - before) // unit // 2 * unit) % before


def _divide_kernels(
    grown: Params, params: Params, axes: Params, old: ModelConfig, random: np.random.Generator
) -> None:
    """Divide the weights of each input feature by its number of copies, in place, and add noise."""
    for name, entry in grown.items():
        if isinstance(entry, dict):
            _divide_kernels(entry, params[name], axes[name], old, random)
        elif name == "kernel":
            at = int(axes[name][0] == "layers")
            before = np.shape(params[name])[at]
            sources = _sources(before, entry.shape[at], axes[name][at], old)
            inputs = np.moveaxis(entry, at, 0)  # a view
            inputs /= _copies(sources).reshape(-1, *(1,) * (inputs.ndim - 1))
            noise = random.standard_normal(inputs.shape, np.float32) * (_NOISE * inputs.std())
            sums = np.zeros((before, *inputs.shape[1:]), np.float32)
            np.add.at(sums, sources, noise)
            mean = sums[sources] / _copies(sources).reshape(-1, *(1,) * (inputs.ndim - 1))
            inputs += noise - mean


def _copies(sources: np.ndarray) -> np.ndarray:
    """Return, for each new index, how many new indices copy the same old index."""
    return np.bincount(sources)[sources].astype(np.float32)


def _layer_sources(old: ModelConfig, new: ModelConfig) -> np.ndarray:
    """Return, for each new layer, the index of the old layer that it copies.

    The old layer has the same relative depth, with its index rounded as by `round` (half to even).
    """
    ratio = old.num_layers / new.num_layers
    nearest = [round(layer * ratio) for layer in range(new.num_layers)]
    return np.minimum(nearest, old.num_layers - 1)


def _unlike(old: ModelConfig, wanted: ModelConfig) -> Iterator[str]:
    """Describe the differences, other than sizes, that affect what the two models compute."""
    before, after = _read_fields(old), _read_fields(wanted)
    for field, value in before.items():
        if after.get(field, value) != value:
            yield f"model.{field} is {after[field]!r}, but the source has {value!r}"
    count = min(old.num_layers, wanted.num_layers)
    kinds = [[each.layer_kind(n).letter for n in range(count)] for each in (old, wanted)]
    if kinds[0] != kinds[1]:
        yield (
            f"model.attention_pattern is {wanted.attention_pattern!r}, but the layers of the "
            f"source are {''.join(kinds[0])}"
        )


def _read_fields(config: ModelConfig) -> dict[str, object]:
    """Return the values of the fields that affect this model, except for the sizes."""
    local = "L" in config.attention_pattern
    unread = {
        *SIZES, "attention_pattern",
        "num_positions" if config.positions == "rope" else "rope_theta",
        *(() if local and config.positions == "rope" else ("local_rope_theta",)),
        *(() if local else ("local_window",)),
        *(() if config.head_transform else ("head_bias", "head_activation")),
        *(() if config.norm == "layer" else ("norm_bias",)),
        *(() if config.pooler else ("pooler_activation",)),
    }  # fmt: skip
    fields = {name: getattr(config, name) for name in ARCHITECTURE if name not in unread}
    if "head_activation" in fields:
        fields["head_activation"] = config.head_activation or config.activation
    return {"vocab_size": config.vocab_size, **fields}


def _wrong_sizes(old: ModelConfig, wanted: ModelConfig) -> Iterator[str]:
    def wrong(name: str, expected: object) -> str:
        return f"model.{name} is {getattr(wanted, name)}, expected {expected}"

    for name in ("num_layers", "hidden_dim", "mlp_dim"):
        if getattr(wanted, name) < (size := getattr(old, name)):
            yield wrong(name, f"at least the source's {size}")
    heads, rest = divmod(wanted.hidden_dim, old.head_dim)
    if rest:
        yield wrong("hidden_dim", f"a multiple of {old.head_dim}, the size of the source's heads")
    elif heads != wanted.num_heads:
        yield wrong("num_heads", f"{heads}: heads of size {old.head_dim} as in the source")
    before, after = (c.num_heads // (c.num_kv_heads or c.num_heads) for c in (old, wanted))
    if before != after:
        yield (
            f"model.num_kv_heads is {wanted.num_kv_heads}, so that {after} query heads share a key "
            f"head, but {before} do in the source; expected {wanted.num_heads / before:g}"
        )
    width = old.embedding_width
    has_sizes = old.scale_embeddings or old.positions == "sinusoidal"
    if old.projects_embeddings != wanted.projects_embeddings:
        yield (
            f"model.embedding_dim is {wanted.embedding_dim}, but the source's tables "
            f"are {'not ' if old.projects_embeddings else ''}as wide as its layers"
        )
    elif wanted.embedding_width != width and has_sizes:
        reason = "the source's embeddings depend on their width, by their scale or sinusoids"
        yield wrong("embedding_dim", f"{width}: {reason}")
    elif wanted.embedding_width < width:
        yield wrong("embedding_dim", f"at least the source's {width}")
