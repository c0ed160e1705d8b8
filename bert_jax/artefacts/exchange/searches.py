"""Proof that a written model translates like its source: equal or equally probable translations."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.artefacts.exchange import proof
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.model.seq2seq.network import Side
from bert_jax.model.seq2seq.search import SearchConfig, search

SEARCHES = {"greedy": SearchConfig(num_beams=1), "beam": SearchConfig()}
"""Searches to compare, by name."""
MAX_STEPS = 32
"""Largest number of tokens in a translation that a proof compares."""
TIE = 1e-5
"""Difference in log-probability below which two translations tie: rounding decides between them."""

Translate = Callable[[proof.Batch, SearchConfig, int], list[list[int]]]
"""Function from sources, a search and a length limit to the tokens of the best translations."""


def translated(
    saved: SavedModel, source: proof.Batch, settings: SearchConfig, steps: int
) -> list[list[int]]:
    """Translate in float32 like `bert-jax translate`; return the best translations as token ids."""
    special = saved.tokenizer.special_ids
    with jax.default_matmul_precision("highest"):
        found = search(
            proof.exact(saved.network), saved.params,
            Side(jnp.asarray(source.tokens), jnp.asarray(source.segment_ids)),
            jnp.full(len(source.tokens), steps),
            settings=settings, max_length=steps, begin=special.cls, end=special.sep,
        )  # fmt: skip
    tokens, lengths = np.asarray(found.tokens)[:, 0], np.asarray(found.lengths)[:, 0]
    return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]


def compare_searches(
    saved: SavedModel,
    rows: Sequence[Sequence[int]],
    translate: Translate,
    searches: Mapping[str, SearchConfig] = SEARCHES,
    size: int = 8,
) -> dict[str, dict[str, int]]:
    """Compare the translations of `rows` by `saved` and by `translate`, in batches of `size` rows.

    Return, for each search, counts of `equal` and of equally probable (`ties`) translations. Raise
    a ProofFailedError if a translation differs and is not a tie.
    """
    steps = min(MAX_STEPS, saved.max_length)
    found = {}
    for name, settings in searches.items():
        equal = ties = 0
        for start in range(0, len(rows), size):
            some = rows[start : start + size]
            # Repeat the first row to fill the last batch, so that only one shape is compiled.
            full = [*some, *[some[0]] * (size - len(some))]
            source = proof.batch_of(saved, full, max(map(len, rows)))
            ours = translated(saved, source, settings, steps)
            theirs = translate(source, settings, steps)
            for row, first, second in zip(some, ours, theirs, strict=False):
                if first == second:
                    equal += 1
                elif _is_tie(saved, row, first, second, steps, greedy=settings.num_beams == 1):
                    ties += 1
                else:
                    raise proof.ProofFailedError(
                        f"{name} search translates {_shown(row)} to {_shown(second)}, but the "
                        f"source model translates it to {_shown(first)}"
                    )
        found[name] = {"equal": equal, "ties": ties}
    return found


def _is_tie(
    saved: SavedModel, row: Sequence[int], first: list[int], second: list[int], steps: int, *,
    greedy: bool,
) -> bool:  # fmt: skip
    """Return true if two translations of a source, of at most `steps` tokens, are equally probable.

    For a beam search, the mean log-probabilities of the translations are compared; for a greedy
    search, the log-probabilities of the first tokens that differ.
    """
    log_probs = [_log_probs(saved, row, tokens) for tokens in (first, second)]
    for each in log_probs:
        if len(each) == steps and saved.network is not None and saved.network.forces_end:
            each[-1] = 0  # the forced end token costs nothing
    if not greedy:
        return bool(abs(log_probs[0].mean() - log_probs[1].mean()) < TIE)
    at = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    return at is not None and bool(abs(log_probs[0][at] - log_probs[1][at]) < TIE)


def _log_probs(saved: SavedModel, row: Sequence[int], tokens: list[int]) -> np.ndarray:
    inputs = [saved.tokenizer.special_ids.cls, *tokens[:-1]]
    sides = proof.Sides(proof.batch_of(saved, [row]), proof.batch_of(saved, [inputs]))
    logs = jax.nn.log_softmax(proof.logits_of(saved, sides)["logits"][0].astype(np.float32))
    return np.array(logs, np.float64)[np.arange(len(tokens)), tokens]


def _shown(ids: Sequence[int]) -> str:
    return f"[{' '.join(map(str, ids[:24]))}{' ...' if len(ids) > 24 else ''}]"
