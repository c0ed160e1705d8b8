"""Decoding with a cache against computing the prefix anew at each step, same cores, same network.

    python benchmarks/decoding.py --check

3 + 3 layers, 256 wide, feed-forward 512, 4 heads, 8,000 tokens, random weights; 16 sources of 20
tokens, 64 target tokens each, greedy, float32. The peer takes `logits` of the whole padded prefix
for each token, the encoder in it, in one compiled loop. Both must give the same tokens. In one
process, in alternating repeats; ratios are of the processor's time, which other work on the machine
disturbs less than the wall's. `--check` exits with 1 where the Transformer's ratio is below 5.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bert_jax.model.config import ModelConfig
from bert_jax.model.seq2seq.network import Network, Side
from bert_jax.model.seq2seq.recurrent import RecurrentNetwork
from bert_jax.model.seq2seq.recurrent_layers import RecurrentConfig
from bert_jax.model.seq2seq.search import SearchConfig, search
from bert_jax.model.seq2seq.transformer import TransformerNetwork

MODEL = ModelConfig(
    vocab_size=8000, num_positions=128, hidden_dim=256, num_layers=3, num_heads=4, mlp_dim=512,
    num_types=0, positions="sinusoidal", scale_embeddings=True, embedding_norm=False,
    activation="relu", norm_eps=1e-6, head_transform=False, pooler=False, init_std=0.06,
    dtype="float32",
)  # fmt: skip
NETWORKS: dict[str, Network] = {
    "transformer": TransformerNetwork(MODEL),
    "gru, additive": RecurrentNetwork(MODEL, RecurrentConfig("gru", "additive")),
}
BEGIN, NO_END, GOAL = 2, -1, 5.0  # no token ends a target: all have the same length


@partial(jax.jit, static_argnums=(0, 3))
def recomputed(network: Network, params: Any, source: Side, length: int) -> Array:
    """Return the most probable tokens, each from the logits of the whole padded prefix."""
    rows = len(source.tokens)

    def grow(place: Array, tokens: Array) -> Array:
        real = (jnp.arange(length) <= place).astype(jnp.int32)
        target = Side(tokens[:, :-1], jnp.broadcast_to(real, (rows, length)))
        logits = jnp.take(network.logits(params, source, target), place, axis=1)
        return tokens.at[:, place + 1].set(logits.argmax(-1).astype(jnp.int32))

    begun = jnp.zeros((rows, length + 1), jnp.int32).at[:, 0].set(BEGIN)
    return jax.lax.fori_loop(0, length, grow, begun)[:, 1:]


def cached(network: Network, params: Any, source: Side, length: int) -> Array:
    """Return the tokens of a greedy search."""
    found = search(
        network, params, source, jnp.full(len(source.tokens), length),
        settings=SearchConfig(num_beams=1), max_length=length, begin=BEGIN, end=NO_END,
    )  # fmt: skip
    return found.tokens[:, 0]


def compare(name: str, rows: int, length: int, repeats: int) -> float:
    """Print seconds and ratios of both ways; return the ratio of processor time."""
    network, random = NETWORKS[name], np.random.default_rng(0)
    params = network.init(jax.random.key(0))
    tokens = jnp.asarray(random.integers(5, MODEL.vocab_size, (rows, 20)), jnp.int32)
    source = Side(tokens, jnp.ones_like(tokens))
    ways: dict[str, Callable[..., Array]] = {"recomputed": recomputed, "cached": cached}
    written = [np.asarray(way(network, params, source, length)) for way in ways.values()]
    same = float((written[0] == written[1]).mean())
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, decode in ways.items():
            begun = time.perf_counter(), time.process_time()
            decode(network, params, source, length).block_until_ready()
            ended = time.perf_counter(), time.process_time()
            seconds[way].append((ended[0] - begun[0], ended[1] - begun[1]))
    wall, cpu = (
        {way: statistics.median(each[n] for each in seconds[way]) for way in ways} for n in (0, 1)
    )
    ratio = cpu["recomputed"] / cpu["cached"]
    print(
        f"{name:14} cached {rows * length / wall['cached']:8,.0f} tokens/s  "
        f"ratio {ratio:5.1f} (by the wall {wall['recomputed'] / wall['cached']:.1f})  "
        f"same tokens {100 * same:.1f}%"
    )
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    ratios = {
        name: compare(name, options.rows, options.length, options.repeats) for name in NETWORKS
    }
    return int(options.check and ratios["transformer"] < GOAL)


if __name__ == "__main__":
    sys.exit(main())
