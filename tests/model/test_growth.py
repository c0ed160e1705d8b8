"""Growing: every entry of a larger model comes from where the rule of tiling says."""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.growth import grow_params, grown_config
from bert_jax.model.heads import ReplacedHead, encode, param_shapes, vocabulary_projection

BERT = ModelConfig(
    vocab_size=11, num_positions=7, hidden_dim=8, num_layers=2, num_heads=2, mlp_dim=6
)
MODERN = dataclasses.replace(
    BERT, num_heads=4, num_layers=4, num_types=0, norm_order="pre", norm_bias=False,
    first_norm=False, positions="rope", attention_pattern="GLL", local_window=2, gated=True,
    attention_bias=False, mlp_bias=False, pooler=False, head_bias=False,
)  # fmt: skip
SHARED = dataclasses.replace(MODERN, num_kv_heads=2, tied=False, norm="rms", first_norm=True)
WIDER = {"hidden_dim": 12, "mlp_dim": 11}
CASES = [
    (BERT, {"num_layers": 5}),
    (BERT, {**WIDER, "num_heads": 3}),
    (BERT, {**WIDER, "num_heads": 3, "num_layers": 3}),
    (dataclasses.replace(BERT, embedding_dim=4), {**WIDER, "num_heads": 3, "embedding_dim": 6}),
    (MODERN, {**WIDER, "num_heads": 6, "num_layers": 6}),
    (MODERN, {"hidden_dim": 18, "num_heads": 9, "mlp_dim": 6}),
    (MODERN, {"num_layers": 9}),  # the first two of which come from the layer without a norm
    (SHARED, {"hidden_dim": 16, "num_heads": 8, "num_kv_heads": 4, "num_layers": 7}),
]


def numbered(config: ModelConfig) -> Any:
    """Parameters in which no number is there twice."""
    shapes = {**param_shapes(config), "rtd": param_shapes(config, ReplacedHead)}
    count = 0

    def fill(shape: Any) -> np.ndarray:
        nonlocal count
        start, count = count, count + int(np.prod(shape.shape))
        return np.arange(start, count, dtype=np.float32).reshape(shape.shape)

    return jax.tree.map(fill, shapes)


def middle(old: int, new: int) -> list[int]:
    """Old entries laid out as a strip of copies, of which the new ones are cut."""
    strip = list(range(old)) * 9
    start = 4 * old - (new - old) // 2
    return strip[start : start + new]


def reference(config: ModelConfig, new: ModelConfig, params: Any) -> Any:
    """Each matrix of theirs by itself, one layer after another, heads in rows of their numbers."""
    size, group = config.head_dim, config.num_heads // (config.num_kv_heads or config.num_heads)
    groups = [each.num_heads // group for each in (config, new)]
    strip = middle(*groups)
    keys = strip
    queries = [each * group + i for each in strip for i in range(group)]
    width, table = (config.hidden_dim, new.hidden_dim), (
        config.embedding_width, new.embedding_width
    )  # fmt: skip
    layers = [
        min(round(i * config.num_layers / new.num_layers), config.num_layers - 1)
        for i in range(new.num_layers)
    ]

    def rows(matrix: np.ndarray, indices: list[int]) -> np.ndarray:
        return np.stack([matrix[i] for i in indices])

    def columns(matrix: np.ndarray, indices: list[int]) -> np.ndarray:
        return np.stack([matrix[..., i] for i in indices], axis=-1)

    def layer(name: str, part: str, leaf: str, array: np.ndarray) -> np.ndarray:
        if name in ("attention_norm", "mlp_norm"):
            return columns(array, middle(*width))
        inner = middle(config.mlp_dim, new.mlp_dim)
        if name == "attention":
            heads = queries if part in ("query", "output") else keys
            inner = [h * size + k for h in heads for k in range(size)]
        flat = array
        if leaf == "bias":
            if part in ("output", "down"):
                return columns(array, middle(*width))
            found = columns(array.reshape(-1), inner)
        elif part in ("output", "down"):
            flat = array.reshape(-1, width[0])
            return columns(rows(flat, inner), middle(*width)).reshape(
                *((len(queries), size) if part == "output" else (new.mlp_dim,)), width[1]
            )
        else:
            flat = array.reshape(width[0], -1)
            found = columns(rows(flat, middle(*width)), inner)
        return found.reshape(*found.shape[:-1], -1, size) if name == "attention" else found

    def other(path: tuple[str, ...], array: np.ndarray) -> np.ndarray:
        names = path[:-1]
        if names[-1:] == ("score",) or path[0] == "nsp":
            return rows(array, middle(*width)) if path[-1] == "kernel" else array
        if path == ("mlm", "bias"):
            return array
        ends = width if path[0] != "mlm" and "embeddings" not in path else table
        if "project" in names:
            ends = width
        if path[-1] != "kernel":
            return columns(array, middle(*ends))
        inputs = table if "project" in names else width
        return columns(rows(array, middle(*inputs)), middle(*ends))

    def walk(tree: Any, path: tuple[str, ...] = ()) -> Any:
        if isinstance(tree, dict):
            return {name: walk(entry, (*path, name)) for name, entry in tree.items()}
        if path[:2] != ("encoder", "layers"):
            return other(path, tree)
        part = path[3]
        found = np.stack([layer(path[2], part, path[-1], tree[n]) for n in layers])
        if path[2:] == ("attention_norm", "scale") and not config.first_norm:
            found = np.stack(
                [np.ones(width[1]) if n == 0 else one for n, one in zip(layers, found, strict=True)]
            )
        return found

    return walk(params)


@pytest.mark.parametrize(("config", "sizes"), CASES)
def test_every_entry_comes_from_where_the_rule_says(config, sizes):
    new = grown_config(config, dataclasses.replace(config, **sizes), "a source")
    params = numbered(config)
    grown = grow_params(params, config, new)
    shapes = {**param_shapes(new), "rtd": param_shapes(new, ReplacedHead)}
    assert jax.tree.map(np.shape, grown) == jax.tree.map(lambda leaf: leaf.shape, shapes)
    jax.tree.map(np.testing.assert_array_equal, grown, reference(config, new, params))


@pytest.mark.parametrize("config", [BERT, MODERN, SHARED])
def test_equal_sizes_are_the_same_to_the_last_byte(config):
    params = numbered(config)
    if not config.first_norm:
        params["encoder"]["layers"]["attention_norm"]["scale"][0] = 1.0
    assert grown_config(config, config, "a source") == config
    found = grow_params(params, config, config)
    assert jax.tree.map(np.ndarray.tobytes, found) == jax.tree.map(np.ndarray.tobytes, params)


def test_the_published_growth():
    """Of ModernBERT: 22 layers of 768 to 28 of 1024, where 128 numbers are two heads of 64."""
    sizes = {"hidden_dim": 768, "num_heads": 12, "mlp_dim": 1152, "num_layers": 22}
    base = dataclasses.replace(MODERN, **sizes)
    large = dataclasses.replace(
        base, hidden_dim=1024, num_heads=16, mlp_dim=2624, num_layers=28, num_positions=8192
    )
    new = grown_config(base, large, "base")
    assert new == large
    scale = np.arange(22 * 768, dtype=np.float32).reshape(22, 768)
    norm = {"attention_norm": {"scale": scale}}  # of all the model, one entry
    (found,) = jax.tree.leaves(grow_params({"encoder": {"layers": norm}}, base, new))
    ends = found[3] - 2 * 768  # round(3 * 22 / 28) is 2
    assert ends[[0, 127, 128, 895, 896, 1023]].tolist() == [640, 767, 0, 767, 0, 127]
    assert (found[:, 128] // 768)[-3:].tolist() == [20, 20, 21]
    assert (found[0] == 1).all()


def test_the_noise_on_copies_is_that_of_the_seed():
    new = dataclasses.replace(BERT, hidden_dim=16, num_heads=4, mlp_dim=12)
    grown = [grow_params(numbered(BERT), BERT, new, preserve=True, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (each["encoder"]["layers"]["mlp"]["up"]["kernel"] for each in grown)
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.9


@pytest.mark.parametrize(
    "config", [BERT, SHARED, dataclasses.replace(SHARED, tied=True, head_transform=False)]
)
def test_a_model_that_is_doubled_computes_what_its_source_does(config):
    sizes = {name: 2 * getattr(config, name) for name in ("hidden_dim", "num_heads", "mlp_dim")}
    new = dataclasses.replace(config, **sizes, num_kv_heads=2 * config.num_kv_heads)
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: random.normal(size=leaf.shape).astype(np.float32), param_shapes(config)
    )
    rows = np.array([[2, 5, 6, 8, 10, 3, 0]], np.int32)

    @partial(jax.jit, static_argnums=0)
    def run(config, params, *inputs):
        hidden = encode(config, params, *inputs)
        return vocabulary_projection(config, params, hidden).logits()[0, :6, : config.vocab_size]

    def logits(config, params):
        return run(config, params, rows, 0 * rows, (rows > 0).astype(np.int32))

    grown = grow_params(params, config, new, preserve=True)
    expected = logits(config, params)
    np.testing.assert_allclose(logits(new, grown), expected, rtol=1e-4, atol=1e-4)
    tiled = grow_params(params, config, new)
    assert np.abs(logits(new, tiled) - expected).max() > 0.1
    up = grown["encoder"]["layers"]["mlp"]["up"]["kernel"]  # (N, D, F): copies of D are not equal
    half = config.hidden_dim // 2
    first, second = up[:, half : 2 * half], up[:, 3 * half :]
    old = np.take(tiled["encoder"]["layers"]["mlp"]["up"]["kernel"], range(half, 2 * half), 1)
    np.testing.assert_allclose(first + second, old, rtol=1e-4, atol=1e-5)
    assert np.abs(first - second).mean() > 0.1 * np.abs(old).mean()


def test_a_decoder_without_transform_after_a_shared_norm_cannot_be_preserved():
    old = dataclasses.replace(BERT, head_transform=False)
    new = dataclasses.replace(old, hidden_dim=16, num_heads=4, mlp_dim=12)
    assert grow_params(numbered(old), old, new)
    with pytest.raises(UserError, match="preserve cannot keep the outputs of this model"):
        grow_params(numbered(old), old, new, preserve=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 12}, "model.vocab_size is 12, but the source has 11"),
        ({"gated": False}, "model.gated is False, but the source has True"),
        ({"positions": "learned"}, "model.positions is 'learned', but the source has 'rope'"),
        ({"rope_theta": 5.0}, "model.rope_theta is 5.0, but the source has 10000.0"),
        ({"attention_pattern": "GL"}, "attention_pattern is 'GL', but the layers of the source "),
        ({"num_layers": 3}, "model.num_layers is 3, expected at least the source's 4"),
        ({"mlp_dim": 5}, "model.mlp_dim is 5, expected at least the source's 6"),
        ({"hidden_dim": 16}, "model.num_heads is 4, expected 8: heads of size 2 as in the source"),
        ({"num_kv_heads": 4}, "1 query heads share a key head, but 2 do in the source"),
        ({"embedding_dim": 4}, "model.embedding_dim is 4, but the source's tables are as wide"),
    ],
)
def test_what_does_not_fit_is_named(changes, said):
    wanted = dataclasses.replace(SHARED, **{"positions": "rope", **changes})
    with pytest.raises(UserError) as caught:
        grown_config(SHARED, wanted, "a source")
    assert said in f"{caught.value}"
    assert "from a source: " in f"{caught.value}"
    assert f"{caught.value}".endswith("embedding_dim, attention_pattern, num_positions")


def test_fields_that_nothing_reads_may_differ():
    wanted = dataclasses.replace(BERT, rope_theta=7.0, local_window=3, head_activation="gelu")
    assert grown_config(BERT, wanted, "a source") == BERT
    table = dataclasses.replace(BERT, num_positions=9, hidden_dim=9, num_heads=3)
    with pytest.raises(UserError, match=r"is 9, but the source has 7; .*multiple of 4, "):
        grown_config(BERT, table, "a source")
    scaled = dataclasses.replace(BERT, scale_embeddings=True)
    wider = dataclasses.replace(
        scaled, hidden_dim=2 * BERT.hidden_dim, num_heads=2 * BERT.num_heads
    )
    with pytest.raises(
        UserError, match=r"model\.embedding_dim is 0, expected \d+: the source's emb"
    ):
        grown_config(scaled, wider, "a source")
    longer = dataclasses.replace(MODERN, num_positions=99, num_layers=5)
    assert grown_config(MODERN, longer, "a source") == longer


def test_the_first_local_layers_bring_their_window():
    old = dataclasses.replace(MODERN, num_layers=2, attention_pattern="G", local_window=0)
    wanted = dataclasses.replace(old, num_layers=4, attention_pattern="GGLL", local_window=3)
    found = grown_config(old, wanted, "a model")
    assert (found.attention_pattern, found.local_window) == ("GGLL", 3)
