"""Masking on the device: choosing the tokens to predict, and replacing them in the input.

Source: Devlin et al. 2018, section 3.1 and appendix A.1. As in the published code, the number of
masked tokens in a row is n = clip(round(rate * tokens), 1, P), where special tokens count, too.

Every random number is a hash of (seed, row_index, position in the row). So a row is masked in the
same way in any batch, on any mesh and after a restart, but differently when it is read again (with
another row_index). No operation mixes rows, so a batch that is sharded by rows needs no collective.

The n candidates with the highest random 32-bit priorities are chosen. A bisection of 32 steps, each
a count over (B, L), finds the lowest chosen priority. On one CPU core it takes 7 ns per token,
`lax.sort` 21 to 27 ns, and `lax.top_k` on integers 101 to 124 ns (L = 128 and 512).
"""

import math
from dataclasses import astuple, dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer, UInt32

from bert_jax.config.bounds import Bounded, Count, Fraction, Part
from bert_jax.errors import UserError
from bert_jax.model.counter_hash import hash_u32, threshold_u32
from bert_jax.tokenization.special_ids import SpecialIds

# Words hashed with the seed, so that each use draws other numbers; dropout hashes smaller words.
_PRIORITY, _ACTION, _REPLACEMENT = 0x4D41534B, 0x41435431, 0x52455031
_LONG_WORD = 8  # tokens; longer words may be chosen in parts
_WORD_ROUNDS = 4  # rounds of choosing words; later rounds fit shorter words into the rest of n


@dataclass(frozen=True)
class MaskingConfig(Bounded, section="masking"):
    """Settings of masking, such as how many tokens are chosen and how they are replaced."""

    rate: Part = 0.15
    """Share of a row's tokens that are predicted in training."""
    max_predictions: Count | None = None
    """Predicted positions per row (P) in training, at most. None: 4 * ceil(rate * length / 4)."""
    mask_rate: Fraction = 0.8
    """Share of the chosen tokens that become [MASK]."""
    random_rate: Fraction = 0.1
    """Share of the chosen tokens that become random tokens. The rest do not change."""
    whole_word: bool = False
    """Whether either all tokens of a word are chosen or none."""
    eval_rate: Part = 0.15
    """Share of a row's tokens that are predicted in evaluations. It is independent of `rate`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_rate + self.random_rate > 1 + 1e-9:
            raise UserError(
                f"masking.mask_rate {self.mask_rate} and masking.random_rate {self.random_rate} "
                "add up to more than 1; lower one of them"
            )

    def num_predictions(self, length: int) -> int:
        """Return P, the largest number of predicted positions, for rows of `length` tokens."""
        if self.max_predictions is not None:
            return min(self.max_predictions, length)
        return min(math.ceil(self.rate * length / 4) * 4, length)


class Masked(NamedTuple):
    """A masked batch: the input of the model, and the tokens that the model must predict."""

    tokens: Int[Array, "B L"]
    """Input ids, int32, with the chosen tokens replaced."""
    positions: Int[Array, "B P"]
    """Chosen positions, int32, ascending. Unused entries are 0."""
    labels: Int[Array, "B P"]
    """Original ids at the positions, int32. Unused entries are 0."""
    weights: Float[Array, "B P"]
    """Weights, float32: 1 for used entries, 0 for unused entries."""


def mask_tokens(
    tokens: Integer[Array | np.ndarray, "B L"],
    segment_ids: Integer[Array | np.ndarray, "B L"],
    row_index: Integer[Array | np.ndarray, " B"],
    *,
    seed: int | Integer[Array | np.ndarray, ""],
    config: MaskingConfig,
    vocab_size: int,
    special_ids: SpecialIds,
    continues_word: Bool[Array | np.ndarray, " V"] | None = None,
    rates: Float[Array | np.ndarray, " B"] | None = None,
) -> Masked:
    """Choose and replace tokens. A row's result is a pure function of seed, row_index and row.

    Padding (segment 0) and special ids are never chosen, and special ids never replace a token. If
    a row has no tokens to choose, its weights are 0. `vocab_size` is the size without the padding
    of the embedding table. `continues_word` is true for ids that continue the preceding word.
    `rates` are used instead of `config.rate`, which then determines only P. Raise a UserError if
    whole-word masking has no `continues_word`, or all ids are special.
    """
    if config.whole_word and continues_word is None:
        raise UserError(
            "masking.whole_word is set, but this tokenizer does not tell which tokens continue a "
            "word; set masking.whole_word to False"
        )
    if special_ids.mask == special_ids.pad:
        raise UserError(
            "the tokenizer has no mask token, so words cannot be masked. Marian's tokenizer is for "
            "objective.name 'translation'"
        )
    specials = sorted(set(astuple(special_ids)))
    if vocab_size <= len(specials):
        raise UserError(
            f"vocab_size is {vocab_size}, but there are {len(specials)} special tokens; expected a "
            "vocabulary with at least one other token"
        )
    tokens = jnp.asarray(tokens).astype(jnp.int32)
    segment_ids = jnp.asarray(segment_ids)
    length = tokens.shape[1]
    num_predictions = config.num_predictions(length)
    rows = jnp.asarray(row_index).astype(jnp.uint32)[:, None]
    places = jnp.arange(length, dtype=jnp.int32)

    is_real = segment_ids != 0
    candidate = is_real
    for special in specials:
        candidate &= tokens != special
    num_real = is_real.sum(axis=1, dtype=jnp.int32)
    share = config.rate if rates is None else jnp.asarray(rates)
    wanted = jnp.round(share * num_real.astype(jnp.float32)).astype(jnp.int32)
    wanted = jnp.clip(wanted, 1, num_predictions)
    if config.whole_word:
        starts = ~jnp.asarray(continues_word)[tokens]
        chosen = _choose_words(seed, rows, candidate, segment_ids, starts, wanted)
    else:
        priority = _priority(seed, rows, places, candidate)
        chosen = candidate & (priority >= _threshold(priority, candidate, wanted)[:, None])

    action = hash_u32(seed, _ACTION, rows, places)
    to_mask = threshold_u32(config.mask_rate)
    to_random = threshold_u32(config.mask_rate + config.random_rate)
    # Draw the n-th non-special id, then add 1 for each special id up to it. Because of the modulo,
    # some ids are more probable than others, by a factor of at most 1 + vocab_size / 2^32.
    drawn = hash_u32(seed, _REPLACEMENT, rows, places) % np.uint32(vocab_size - len(specials))
    drawn = drawn.astype(jnp.int32)
    for special in specials:
        drawn += drawn >= special
    replaced = jnp.where(
        action < np.uint32(to_mask),
        jnp.int32(special_ids.mask),
        jnp.where(action < np.uint32(to_random), drawn, tokens),
    )

    # Move the chosen positions to the front, in ascending order.
    positions = lax.sort(jnp.where(chosen, places, length), dimension=1)[:, :num_predictions]
    used = positions < length
    positions = jnp.where(used, positions, 0)
    labels = jnp.where(used, jnp.take_along_axis(tokens, positions, axis=1), 0)
    return Masked(jnp.where(chosen, replaced, tokens), positions, labels, used.astype(jnp.float32))


def _priority(seed, rows, places, candidate: Bool[Array, "B L"]) -> UInt32[Array, "B L"]:
    """Return a random priority per candidate, unique by its low bits, `places` + 1; 0 elsewhere."""
    bits = max((candidate.shape[1]).bit_length(), 1)
    high = hash_u32(seed, _PRIORITY, rows, places) >> bits << bits
    return jnp.where(candidate, high | (places + 1).astype(jnp.uint32), 0)


def _threshold(
    priority: UInt32[Array, "B L"], countable: Bool[Array, "B L"], limit: Int[Array, " B"]
) -> UInt32[Array, " B"]:
    """Return the smallest t >= 1 for which at most `limit` countable priorities are >= t."""

    def halve(step, below):
        # `below`, built from the highest bit, is the largest t known to admit too many positions.
        trial = below | (jnp.uint32(1) << (31 - step).astype(jnp.uint32))
        count = (countable & (priority >= trial[:, None])).sum(axis=1, dtype=jnp.int32)
        return jnp.where(count > limit, trial, below)

    # If all candidates are within the limit, `below` stays 0 and t is 1: candidates are above 0.
    return lax.fori_loop(0, 32, halve, jnp.zeros_like(limit, jnp.uint32)) + 1


def _choose_words(
    seed,
    rows: UInt32[Array, "B 1"],
    candidate: Bool[Array, "B L"],
    segment_ids: Integer[Array, "B L"],
    starts: Bool[Array, "B L"],
    wanted: Int[Array, " B"],
) -> Bool[Array, "B L"]:
    """Choose complete words in the order of their priority, up to `wanted` tokens.

    As in the published code, a word that does not fit is skipped, and shorter words are tried. A
    round ends at the first word that does not fit, and the next round considers only shorter words.
    So `_WORD_ROUNDS` rounds suffice for words of at most `_WORD_ROUNDS` tokens. With longer words,
    which are rare, slightly too few tokens may be chosen. Each token of a word that is longer
    than both `_LONG_WORD` and `wanted` counts as a word.
    """
    length = candidate.shape[1]
    places = jnp.arange(length, dtype=jnp.int32)
    joined = candidate[:, 1:] & candidate[:, :-1] & (segment_ids[:, 1:] == segment_ids[:, :-1])
    starts = starts.at[:, 1:].set(starts[:, 1:] | ~joined).at[:, 0].set(True)
    first = lax.cummax(jnp.where(starts, places, 0), axis=1)
    ends = jnp.roll(starts, -1, axis=1).at[:, -1].set(True)
    last = lax.cummin(jnp.where(ends, places, length), axis=1, reverse=True)
    size = last - first + 1
    endless = size > jnp.maximum(wanted, _LONG_WORD)[:, None]  # as in text without spaces
    first, size = jnp.where(endless, places, first), jnp.where(endless, 1, size)
    priority = _priority(seed, rows, first, candidate)

    def fill(_, state):
        chosen, waiting, left = state
        waiting &= size <= left[:, None]
        fits = waiting & (priority >= _threshold(priority, waiting, left)[:, None])
        return chosen | fits, waiting & ~fits, left - fits.sum(axis=1, dtype=jnp.int32)

    state = (jnp.zeros_like(candidate), candidate, wanted)
    return lax.fori_loop(0, _WORD_ROUNDS, fill, state)[0]
