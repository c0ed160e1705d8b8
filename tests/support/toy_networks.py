"""Networks small enough to be searched exhaustively, and a search without a cache."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from asked_models import TOKENIZER
from typing_extensions import override

from bert_jax.artefacts.saved.model import Origin, SavedModel
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import PADDED_LOGIT
from bert_jax.model.seq2seq.network import Cache, Network, Side, Weights
from bert_jax.model.seq2seq.search import SearchConfig


def toy_config(vocab_size: int) -> ModelConfig:
    return ModelConfig(vocab_size=vocab_size, hidden_dim=8, num_heads=1, num_layers=1, mlp_dim=8)


@dataclass(frozen=True)
class ToyNetwork(Network):
    """What the networks below share: `logits` is `step` at each place, one source a row."""

    @override
    def parts(self) -> Any:
        raise NotImplementedError

    @override
    def flops(self, source_length: int, target_length: int) -> int:
        raise NotImplementedError

    @override
    def logits(self, params, source, target, stream=None, layout=None):
        params = jax.tree.map(jnp.asarray, params)

        def place(cache, tokens):
            logits, cache = self.step(params, cache, tokens[:, None])
            return cache, logits[:, 0]

        cache = self.start(params, source, 1, target.tokens.shape[1])
        return jax.lax.scan(place, cache, target.tokens.T)[1].swapaxes(0, 1)

    @override
    def weights(self, params, source: Side, target: Side) -> Weights:
        (rows, length), width = target.tokens.shape, source.tokens.shape[1]
        """Place t attends to source place t + 1 with 0.7, and to all with the rest."""
        real = jnp.broadcast_to((source.segment_ids > 0)[:, None], (rows, length, width))
        last = source.segment_ids.sum(1)[:, None, None] - 1
        looked = jnp.minimum(jnp.arange(length)[:, None] + 1, last) == jnp.arange(width)
        cross = 0.7 * looked + 0.3 * real / real.sum(-1, keepdims=True)
        return Weights(None, None, cross[None, :, None].astype(jnp.float32))

    def padded(self, logits):
        missing = self.model.padded_vocab_size - self.model.vocab_size
        return jnp.pad(logits, ((0, 0), (0, 0), (0, missing)), constant_values=PADDED_LOGIT)


@dataclass(frozen=True)
class TableNetwork(ToyNetwork):
    """A table (M, P, V) of logits: the first source token names the model, the prefix the row."""

    @override
    def start(self, params, source: Side, num_beams: int, max_length: int) -> Cache:
        model = source.tokens[:, 0]
        return Cache(model, jnp.full((len(model), num_beams), -1, jnp.int32))

    @override
    def step(self, params, cache: Cache, tokens):
        # Prefixes are numbered in base V: the empty one is 0, then prefix * V + token + 1.
        prefix = jnp.where(cache.beams < 0, 0, cache.beams * self.model.vocab_size + tokens + 1)
        table = params["table"][cache.shared]
        return self.padded(jax.vmap(lambda rows, at: rows[at])(table, prefix)), Cache(
            cache.shared, prefix
        )


@dataclass(frozen=True)
class MemoryNetwork(ToyNetwork):
    """A recurrent decoder whose state holds all tokens so far; it starts from the source's mean."""

    @override
    def init(self, key):
        size, width = self.model.vocab_size, self.model.hidden_dim
        names = {"read": (size, width), "keep": (width, width), "write": (width, size)}
        keys = jax.random.split(key, len(names))
        return {
            name: 1.5 * jax.random.normal(each, shape)
            for (name, shape), each in zip(names.items(), keys, strict=True)
        }

    @override
    def start(self, params, source: Side, num_beams: int, max_length: int) -> Cache:
        real = (source.segment_ids > 0)[..., None]
        mean = (params["read"][source.tokens] * real).sum(1)
        mean /= jnp.maximum(real.sum(1), 1)  # a row that fills a batch has no token
        state = jnp.repeat(mean[:, None], num_beams, 1)
        return Cache(mean, {"state": state})

    @override
    def step(self, params, cache: Cache, tokens):
        mixed = params["read"][tokens] + cache.beams["state"] @ params["keep"] / 2
        state = jnp.tanh(mixed + cache.shared[:, None])
        return self.padded(state @ params["write"]), Cache(cache.shared, {"state": state})


@lru_cache
def _next_logits(network: Network):
    def last(params, source, tokens, length):
        rows = jnp.broadcast_to(source, (len(tokens), *source.shape))
        sides = Side(rows, jnp.ones_like(rows)), Side(tokens, jnp.ones_like(tokens))
        return network.logits(params, *sides)[:, length - 1]

    return jax.jit(last)


def plain_search(
    network: Network, params, source, settings: SearchConfig, limit: int, begin: int, end: int
) -> list[tuple[list[int], float, bool]]:
    """Search for one source in Python; each step computes all logits of all prefixes anew.

    Returns:
        Tokens, score and whether there is an end token, of each hypothesis, best first.
    """
    beams, vocab = settings.num_beams, network.model.vocab_size
    live: list[tuple[list[int], float]] = [([], 0.0)]
    found: list[tuple[list[int], float, bool]] = []
    for step in range(limit):
        rows = np.zeros((beams, limit), np.int32)  # as many in each step: one program
        for row, (tokens, _) in zip(rows, live, strict=False):
            row[: step + 1] = [begin, *tokens]
        logits = np.asarray(_next_logits(network)(params, source, rows, step + 1))[:, :vocab]
        logits = logits.astype(np.float64)
        logs = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        logs -= logits.max(1, keepdims=True)
        grown = sorted(
            (([*tokens, id], total + logs[row, id])
             for row, (tokens, total) in enumerate(live) for id in range(vocab) if id != begin),
            key=lambda each: -each[1],
        )[: 2 * beams]  # fmt: skip
        stops = [tokens[-1] == end or step + 1 == limit for tokens, _ in grown]
        for (tokens, total), stop in list(zip(grown, stops, strict=True))[:beams]:
            if stop:
                found.append((tokens, total / settings.penalty(step + 1), tokens[-1] == end))
        found = sorted(found, key=lambda each: -each[1])[:beams]
        if beams == 1 and stops[0]:
            break
        live = [each for each, stop in zip(grown, stops, strict=True) if not stop][:beams]
        full = len(found) == beams
        if not live or (full and found[-1][1] >= live[0][1] / settings.penalty(limit)):
            break
    return found


def toy_translator(network: Network | None = None, seed: int = 0, scale: float = 1.0) -> SavedModel:
    """A model that translates words of `TOKENIZER` to others of them, as chance has it.

    Args:
        network: One with the vocabulary of `TOKENIZER`; None: a `MemoryNetwork`.
        seed: Of the parameters.
        scale: Factor of matrices: larger ones make probabilities less even.
    """
    network = network or MemoryNetwork(toy_config(TOKENIZER.vocab_size))
    params = jax.device_get(jax.jit(network.init)(jax.random.key(seed)))
    return SavedModel(
        config=network.model,
        params=jax.tree.map(lambda leaf: leaf * scale if leaf.ndim > 1 else leaf, params),
        outputs=None, tokenizer=TOKENIZER, tokenizer_files=Path(), max_length=24, name="a toy",
        origin=Origin("pretrain"), network=network,
    )  # fmt: skip
