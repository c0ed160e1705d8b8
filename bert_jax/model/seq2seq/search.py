"""Beam search on the device, for any `Network`.

The rules are as in Transformers' `generate` with `early_stopping="never"`. A step finds the 2 K
best continuations of K beams. An end token among the best K finishes a hypothesis; among the other
K, it is ignored. The K best continuations without an end token become the next beams. The maximum
length also finishes a hypothesis and, if the network has `forces_end`, adds an end token that costs
nothing (see `forced_eos_token_id` there). The begin token is never chosen (`bad_words_ids`).

The search of a row ends when no beam can still beat the worst of the row's K finished hypotheses.
The upper bound of a beam's final score is its sum of log-probabilities so far, divided by the
length penalty at the maximum length. Greedy search (K = 1) ends with the first end token.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

from bert_jax.config.bounds import Bounded, Count, Natural, NonNegative
from bert_jax.errors import UserError
from bert_jax.model.config import VOCAB_MULTIPLE
from bert_jax.model.seq2seq.network import Network, Side, Tree


@dataclass(frozen=True)
class SearchConfig(Bounded):
    """Settings of the beam search for translations."""

    num_beams: Count = 5
    """Number of beams (K). Each step continues K hypotheses. 1 means greedy search."""
    length_alpha: NonNegative = 1.0
    """Exponent alpha of the length penalty; 0 means no penalty. The score of n tokens, with the end
    token, is the sum of their log-probabilities divided by ((beta + n) / (beta + 1)) ** alpha."""
    length_beta: NonNegative = 0.0
    """Constant beta of the length penalty; 5 in Wu et al. 2016 (GNMT), equation 14."""
    max_length: Natural = 0
    """Largest number of tokens in a translation, end token included; 0 means the model's limit."""
    max_length_rate: NonNegative = 3.0
    """Largest number of target tokens per source token, counting [CLS] and [SEP]; 0: no limit."""
    nbest: Count = 1
    """Number of hypotheses to return for each source, at most `num_beams`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nbest > self.num_beams:
            raise UserError(
                f"nbest is {self.nbest}; it must be at most num_beams, which is {self.num_beams}"
            )

    def limits(self, lengths: Any, most: int) -> Any:
        """Return the largest target length for each source length, at most `most` tokens."""
        most = min(most, self.max_length or most)
        if not self.max_length_rate:
            return np.full_like(lengths, most)
        product = self.max_length_rate * np.asarray(lengths)
        # Without the 1e-6, a product just above a whole number would be rounded up.
        return np.minimum(np.ceil(product - 1e-6), most).astype(int)

    def penalty(self, length: Any) -> Any:
        """Return the divisor of a sum of log-probabilities over `length` tokens."""
        return ((self.length_beta + length) / (self.length_beta + 1)) ** self.length_alpha


class Found(NamedTuple):
    """Finished hypotheses, best first."""

    tokens: Integer[Array, "B K T"]
    """Tokens without the begin token but with the end token, followed by zeros."""
    lengths: Integer[Array, "B K"]
    """Number of tokens. It is 0 where there is no hypothesis: a row may have fewer than K."""
    scores: Float[Array, "B K"]
    """Sum of log-probabilities divided by the length penalty; -inf if there is no hypothesis."""
    ended: Bool[Array, "B K"]
    """Whether the last token is the end token; false if the maximum length cut the hypothesis."""


class Prefix(NamedTuple):
    """Tokens with which translations must begin; scores and length penalties ignore them."""

    tokens: Integer[Array, "B P"]
    lengths: Integer[Array, " B"]
    """Number of tokens, at most P."""


class _State(NamedTuple):
    """State of the loop after `step` tokens."""

    step: Array
    cache: Any
    last: Array
    """Last token of each beam, (B, K)."""
    tokens: Array
    """Tokens of each beam, (B, K, T)."""
    sums: Array
    """Sums of log-probabilities (B, K), best first; -inf where there is no beam."""
    found: Found
    open: Array
    """Mask (B,) of rows whose search goes on."""


@partial(jax.jit, static_argnames=("network", "settings", "max_length", "begin", "end"))
def search(
    network: Network,
    params: Tree,
    source: Side,
    limits: Integer[Array, " B"],
    prefix: Prefix | None = None,
    *,
    settings: SearchConfig,
    max_length: int,
    begin: int,
    end: int,
) -> Found:
    """Find the best target sequences of each source by beam search.

    The source has one text per row. `limits` has each row's largest number of target tokens, cut to
    `max_length` (T). The decoder first reads the token `begin`; the token `end` ends a target.
    """
    count, beams = len(source.tokens), settings.num_beams
    nothing = Prefix(jnp.zeros((count, 1), jnp.int32), jnp.zeros(count, jnp.int32))
    forced = nothing if prefix is None else prefix
    limits = jnp.minimum(limits, max_length)
    greatest = settings.penalty(jnp.maximum(limits - forced.lengths, 1).astype(jnp.float32))

    def grow(state: _State) -> _State:
        step = state.step
        logits, cache = network.step(params, state.cache, state.last)
        most = beams * min(2, network.model.vocab_size)
        sums, parents, tokens = continuations(logits, state.sums, most, begin)
        sums = jnp.where(tokens < network.model.vocab_size, sums, -jnp.inf)
        is_last = (step + 1 >= limits)[:, None]
        if network.forces_end or prefix is not None:
            # Each beam continues only with its prefix's next token, or with the end token.
            in_prefix = (step < forced.lengths)[:, None]
            is_forced = in_prefix | is_last if network.forces_end else in_prefix
            column = forced.tokens[:, jnp.minimum(step, forced.tokens.shape[1] - 1), None]
            others = (0, 0), (0, most - beams)
            unchanged = jnp.pad(state.sums, others, constant_values=-jnp.inf)
            sums = jnp.where(is_forced, unchanged, sums)
            parents = jnp.where(is_forced, jnp.arange(most) % beams, parents)
            tokens = jnp.where(is_forced, jnp.where(in_prefix, column, end), tokens)
        written = _picked(state.tokens, parents).at[:, :, step].set(tokens)
        ended = (tokens == end) & (step >= forced.lengths)[:, None]
        stops = ended | is_last
        length = step + 1 - forced.lengths
        penalty = settings.penalty(jnp.maximum(length, 1).astype(jnp.float32))[:, None]
        scores = jnp.where(stops & state.open[:, None], sums / penalty, -jnp.inf)
        new = Found(written, jnp.full_like(tokens, step + 1), scores, ended)
        found = _best(state.found, new, beams)
        sums, kept = jax.lax.top_k(jnp.where(stops, -jnp.inf, sums), beams)
        is_open = state.open & (sums[:, 0] / greatest > found.scores[:, -1])
        if beams == 1:  # greedy search ends with its first end token
            is_open &= ~stops[:, 0]
        else:
            parents = _picked(parents, kept)
            continued = jax.tree.map(lambda leaf: _picked(leaf, parents), cache.beams)
            cache = cache._replace(beams=continued)
        last, written = _picked(tokens, kept), _picked(written, kept)
        return _State(step + 1, cache, last, written, sums, found, is_open)

    none = Found(
        jnp.zeros((count, beams, max_length), jnp.int32),
        jnp.zeros((count, beams), jnp.int32),
        jnp.full((count, beams), -jnp.inf),
        jnp.zeros((count, beams), bool),
    )
    first = _State(
        step=jnp.zeros((), jnp.int32),
        cache=network.start(params, source, beams, max_length),
        last=jnp.full((count, beams), begin, jnp.int32),
        tokens=none.tokens,
        sums=jnp.where(jnp.arange(beams) == 0, 0.0, none.scores),
        found=none,
        open=jnp.ones(count, bool),
    )
    return jax.lax.while_loop(lambda state: state.open.any(), grow, first).found


def continuations(
    logits: Float[Array, "B K V"], sums: Float[Array, "B K"], most: int, begin: int
) -> tuple[Float[Array, "B C"], Integer[Array, "B C"], Integer[Array, "B C"]]:
    """Return the sums, beams and tokens of the `most` best continuations.

    The search reads only the blocks with the largest maxima. `begin` is excluded after the softmax.
    """
    rows, beams, columns = logits.shape
    greatest = logits.max(-1, keepdims=True)
    powers = jnp.exp(logits - greatest).sum(-1, keepdims=True)
    before = sums[..., None] - greatest - jnp.log(powers)
    logits = jnp.where(jnp.arange(columns) == begin, -jnp.inf, logits)
    blocks = logits.reshape(rows, beams, -1, VOCAB_MULTIPLE)
    maxima = blocks.max(-1)
    count = maxima.shape[-1]
    _, best = jax.lax.top_k((maxima + before).reshape(rows, -1), min(most, beams * count))
    best = jnp.sort(best, axis=-1)  # among equal sums the first column wins
    found = _picked(blocks.reshape(rows, -1, VOCAB_MULTIPLE), best)
    found = found + _picked(before[..., 0], best // count)[..., None]
    sums, at = jax.lax.top_k(found.reshape(rows, -1), most)
    columns_before = _picked(best, at // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    parents, tokens = jnp.divmod(columns_before + at % VOCAB_MULTIPLE, columns)
    return sums, parents, tokens


def _picked(values: Array, index: Integer[Array, "B C"]) -> Array:
    """Pick entries along axis 1, with separate indices for each row."""
    return jax.vmap(lambda row, at: row.at[at].get(mode="promise_in_bounds"))(values, index)


def _best(found: Found, new: Found, beams: int) -> Found:
    """Return the best `beams` hypotheses among `found` and the first `beams` entries of `new`."""
    pairs = zip(found, new, strict=True)
    both = Found(*(jnp.concatenate([old, more[:, :beams]], 1) for old, more in pairs))
    scores, chosen = jax.lax.top_k(both.scores, beams)
    tokens, lengths, _, ended = (_picked(part, chosen) for part in both)
    there = scores > -jnp.inf
    tokens, lengths = jnp.where(there[..., None], tokens, 0), jnp.where(there, lengths, 0)
    return Found(tokens, lengths, scores, there & ended)
