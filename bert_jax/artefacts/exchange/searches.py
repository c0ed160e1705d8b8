"""Proof that a written model translates like its source: equal logits and equal translations."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bert_jax.artefacts.exchange.proof import Batch, ProofFailedError, batch_of, row_batches
from bert_jax.artefacts.exchange.translation.files import network_of
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.model.seq2seq.network import Network, Side
from bert_jax.model.seq2seq.search import Found, SearchConfig, search

SEARCHES = {"greedy": SearchConfig(num_beams=1), "beam": SearchConfig()}
"""Searches to compare, by name."""
MAX_STEPS = 32
"""Largest number of tokens in a translation of a proof."""
TIE = 1e-5
"""Largest difference of log-probabilities that counts as a tie, decided by rounding."""

Translate = Callable[[Batch, SearchConfig, int], list[list[int]]]
"""Function from sources, a search and a length limit to the tokens of each best translation."""


class Sides(NamedTuple):
    """Sources, and targets for teacher forcing; target i is the text of another row."""

    source: Batch
    target: Batch


def sides_of(saved: SavedModel, rows: Sequence[Sequence[int]], length: int) -> Sides:
    """Pad rows as sources, and as targets the same rows in another order, without [SEP]."""
    targets = [rows[number - 1][:-1] for number in range(len(rows))]
    return Sides(batch_of(saved, rows, length), batch_of(saved, targets, length))


def exact(network: Network) -> Network:
    """Return the network in float32, restricted to operations that every platform has."""
    model = dataclasses.replace(
        network.model, dtype="float32", attention_impl="xla", remat="none",
        scan_unroll=network.model.num_layers,
    )  # fmt: skip
    return dataclasses.replace(network, model=model)


@partial(jax.jit, static_argnums=0)
def _logits(network: Network, params: Any, source: Batch, target: Batch) -> Float[Array, "B T V"]:
    first, second = (
        Side(jnp.asarray(side.tokens), jnp.asarray(side.segment_ids)) for side in (source, target)
    )
    return network.logits(params, first, second)[..., : network.model.vocab_size]


def logits_of(saved: SavedModel, sides: Sides) -> np.ndarray:
    """Compute float32 logits (B, T, V) of the token after each target token."""
    with jax.default_matmul_precision("highest"):
        return np.asarray(_logits(exact(network_of(saved)), saved.params, *sides))


def translated(
    saved: SavedModel, source: Batch, settings: SearchConfig, steps: int
) -> list[list[int]]:
    """Translate as `bert-jax translate` does, in float32; return the tokens per source."""
    special = saved.tokenizer.special_ids
    with jax.default_matmul_precision("highest"):
        found = search(
            exact(network_of(saved)), saved.params,
            Side(jnp.asarray(source.tokens), jnp.asarray(source.segment_ids)),
            jnp.full(len(source.tokens), steps),
            settings=settings, max_length=steps, begin=special.cls, end=special.sep,
        )  # fmt: skip
    return best_of(found)


def best_of(found: Found) -> list[list[int]]:
    """Return the tokens of each row's best hypothesis, including the end token."""
    tokens, lengths = np.asarray(found.tokens)[:, 0], np.asarray(found.lengths)[:, 0]
    return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]


def largest_gap(
    saved: SavedModel,
    rows: Sequence[Sequence[int]],
    program: Callable[[Sides], np.ndarray],
    size: int = 8,
) -> float:
    """Return the largest difference of teacher-forced logits; infinite if one is not finite."""
    largest = 0.0
    for some, length in row_batches(rows, size):
        sides = sides_of(saved, some, length)
        ours, theirs = logits_of(saved, sides), program(sides)
        if ours.shape != theirs.shape:
            raise ProofFailedError(f"logits are {theirs.shape}, of the source {ours.shape}")
        real = sides.target.segment_ids > 0
        with np.errstate(invalid="ignore"):  # infinity less infinity
            gap = np.abs(ours[real] - theirs[real])
        largest = max(largest, float(gap.max()) if np.isfinite(gap).all() else float("inf"))
    return largest


def compare_searches(
    saved: SavedModel,
    rows: Sequence[Sequence[int]],
    translate: Translate,
    searches: Mapping[str, SearchConfig] = SEARCHES,
    *,
    steps: int = 0,
    size: int = 8,
) -> dict[str, dict[str, int]]:
    """Compare the tokens of translations by greedy search and by beam search.

    Args:
        saved: The source.
        rows: Sources, special tokens included.
        translate: Search in the written model.
        searches: Settings by name.
        steps: Largest number of tokens; 0: at most `MAX_STEPS`.
        size: Rows in a batch.

    Returns:
        By search, the number of `equal` translations and of `ties`: different translations that are
        equally probable, so that rounding chose.

    Raises:
        ProofFailedError: A translation differs and is not a tie.
    """
    steps = min(steps or MAX_STEPS, saved.max_length)
    found = {}
    for name, settings in searches.items():
        equal = ties = 0
        for start in range(0, len(rows), size):
            some = rows[start : start + size]
            # Repeat the first row to fill the last batch, so that only one shape is compiled.
            full = [*some, *[some[0]] * (size - len(some))]
            source = batch_of(saved, full, max(map(len, rows)))
            ours = translated(saved, source, settings, steps)
            theirs = translate(source, settings, steps)
            for row, first, second in zip(some, ours, theirs, strict=False):
                if first == second:
                    equal += 1
                elif _is_tie(saved, row, first, second, greedy=settings.num_beams == 1):
                    ties += 1
                else:
                    raise ProofFailedError(
                        f"{name} search translates {_shown(row)} to {_shown(second)}, and the "
                        f"source to {_shown(first)}"
                    )
        found[name] = {"equal": equal, "ties": ties}
    return found


def _is_tie(
    saved: SavedModel, row: Sequence[int], first: list[int], second: list[int], *, greedy: bool
) -> bool:
    """Tell whether two translations of a source are equally probable.

    Greedy search compares the first two tokens that differ; beam search the mean over all tokens.
    """
    log_probs = [_log_probs(saved, row, tokens) for tokens in (first, second)]
    if not greedy:
        return bool(abs(log_probs[0].mean() - log_probs[1].mean()) < TIE)
    at = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    return at is not None and bool(abs(log_probs[0][at] - log_probs[1][at]) < TIE)


def _log_probs(saved: SavedModel, row: Sequence[int], tokens: list[int]) -> np.ndarray:
    inputs = [saved.tokenizer.special_ids.cls, *tokens[:-1]]
    logits = logits_of(saved, Sides(batch_of(saved, [row]), batch_of(saved, [inputs])))[0]
    logs = jax.nn.log_softmax(logits.astype(np.float32))
    return np.asarray(logs, np.float64)[np.arange(len(tokens)), tokens]


def _shown(ids: Sequence[int]) -> str:
    return f"[{' '.join(map(str, ids[:24]))}{' ...' if len(ids) > 24 else ''}]"
