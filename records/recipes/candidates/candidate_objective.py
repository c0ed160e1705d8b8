"""The objective `candidate`: masked LM with changes of the layers, and of what is predicted."""

import sys
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from candidate_layers import CHANGES, CandidateEncoder, CandidateModel
from jaxtyping import Array, Float
from typing_extensions import override

from bert_jax.errors import UserError
from bert_jax.model import heads
from bert_jax.model.counter_hash import hash_u32
from bert_jax.model.layout import OnMesh
from bert_jax.model.rotation import make_context
from bert_jax.objectives.config import OBJECTIVES, Given, MaskedLMConfig
from bert_jax.objectives.masked_lm import MaskedLM, projected_cross_entropy
from bert_jax.objectives.objective import Batch, Objective

sys.path.append(str(Path(__file__).parents[1] / "zero_outputs"))
from zero_outputs_objective import ZeroOutputs

_RATE, _PHASE, _SPAN = 0x52415445, 0x50484153, 0x5350414E
SPAN = 3
"""Tokens in a span."""


def uniform(*words: Any) -> Float[Array, "..."]:
    """Hash integer words to numbers in [0, 1)."""
    return hash_u32(*words).astype(jnp.float32) / 2.0**32


@dataclass(frozen=True)
class Candidate(ZeroOutputs):
    """A masked LM with changes; an evaluation has only the changes of the layers."""

    zero: bool = field(default=False, kw_only=True)
    changes: tuple[str, ...] = field(default=(), kw_only=True)
    diffusion: bool = field(default=False, kw_only=True)
    spans: bool = field(default=False, kw_only=True)
    rare: bool = field(default=False, kw_only=True)
    causal_share: float = field(default=0.0, kw_only=True)
    causal_rate: float = field(default=0.0, kw_only=True)
    shifted: bool = field(default=False, kw_only=True)

    @override
    def parts(self) -> tuple[Any, ...]:
        """Return the module class and its changes."""
        return CandidateModel, self.changes

    @override
    def init(self, key: jax.Array) -> Any:
        """Initialise the parameters."""
        return super().init(key) if self.zero else MaskedLM.init(self, key)

    @override
    def for_evaluation(self) -> Objective:
        """Return the objective for evaluation: plain masked LM of single tokens."""
        return replace(
            self, diffusion=False, spans=False, rare=False, causal_share=0.0, causal_rate=0.0,
            masking=replace(self.masking, whole_word=False, mask_rate=0.8, random_rate=0.1),
        )  # fmt: skip

    def _num_causal(self, rows: Array) -> int:
        """Return the number of causal rows, which are the first rows of a batch."""
        share = 1.0 if self.masking.rate == self.causal_rate else self.causal_share
        return round(share * len(rows))

    @override
    def prepare(self, batch: Batch, seed: int | Array) -> Batch:
        """Mask tokens as the changes say; causal rows are not masked."""
        rows = batch["row_index"]
        if self.diffusion:  # uniform rates, weighted by 1 / rate (Sahoo et al. 2024)
            lowest, highest = 0.05, self.masking.rate
            rates = lowest + (highest - lowest) * uniform(seed, _RATE, rows)
            made = super().prepare({**batch, "masking_rates": rates}, seed)
            return {**made, "weights": made["weights"] * (highest / rates)[:, None]}
        made = super().prepare(batch, seed)
        if self.spans or self.rare:
            return self._with_places(batch, made, seed)
        causal = self._num_causal(rows)
        return {**made, "tokens": made["tokens"].at[:causal].set(batch["tokens"][:causal])}

    def _with_places(self, batch: Batch, made: Batch, seed: int | Array) -> Batch:
        """Choose the places to mask: spans of `SPAN` tokens, or more rare than frequent tokens.

        A span is replaced as a whole (Joshi et al. 2020). Rare tokens are drawn with weights,
        without replacement (Efraimidis & Spirakis 2006). The weight is the square root of the id,
        since a learned vocabulary begins with frequent tokens.
        """
        tokens, rows = jnp.asarray(batch["tokens"], jnp.int32), batch["row_index"][:, None]
        block = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        if self.spans:
            block = (block + hash_u32(seed, _PHASE, rows) % SPAN) // SPAN
        free = (batch["segment_ids"] > 0) & ~jnp.isin(tokens, np.array(astuple(self.special_ids)))
        order = uniform(seed, _SPAN, rows, block)
        if self.rare:
            order = order ** jnp.sqrt(self.model.vocab_size / (tokens + 1.0))
        order = jnp.where(free, order, -1.0)
        chosen, positions = jax.lax.top_k(order, made["positions"].shape[1])
        used = (jnp.arange(chosen.shape[1]) < made["weights"].sum(1)[:, None]) & (chosen >= 0)
        labels = jnp.take_along_axis(tokens, positions, 1)
        action = uniform(seed, _SPAN + 1, rows, jnp.take_along_axis(block, positions, 1))
        random = hash_u32(seed, _SPAN + 2, rows, positions) % self.model.vocab_size
        shown = jnp.where(action < 0.9, random.astype(jnp.int32), labels)
        shown = jnp.where(action < 0.8, self.special_ids.mask, shown)
        masked = jax.vmap(lambda row, at, new: row.at[at].set(new))(
            tokens, positions, jnp.where(used, shown, labels)
        )
        return {
            **made, "tokens": masked, "positions": positions, "labels": labels,
            "weights": used.astype(jnp.float32),
        }  # fmt: skip

    @override
    def at_places(
        self, params: Any, rows: Batch, seed: Array | None, layout: OnMesh
    ) -> tuple[Array, Array, Array]:
        """Return the last states, and the loss and correctness of each prediction."""
        encoder = heads.with_params(params["encoder"], CandidateEncoder, self.model, self.changes)
        tokens, types, segments, _ = self.inputs(rows, seed)
        causal, found = self._num_causal(tokens), []
        for part, is_causal in ((slice(causal), True), (slice(causal, None), False)):
            if len(tokens[part]):
                context = make_context(self.model, segments[part], None, None, layout)
                found.append(encoder(tokens[part], types[part], context, is_causal))
        states = jnp.concatenate(found)
        # A shifted model predicts a token from the state before it (Charpentier & Samuel 2024).
        positions = jnp.maximum(rows["positions"] - 1, 0) if self.shifted else rows["positions"]
        projection = heads.vocabulary_projection(self.model, params, states, positions)
        return states, *projected_cross_entropy(projection, rows["labels"], layout)


@dataclass(frozen=True)
class CandidateConfig(MaskedLMConfig):
    """Masked LM with changes."""

    name: str = "candidate"
    """Objective: candidate."""
    zero: bool = False
    """Whether output projections begin at 0."""
    changes: tuple[str, ...] = ()
    """Names of changes of the layers."""
    diffusion: bool = False
    """Whether each row has its own masking rate, up to masking.rate, and the weight 1 / rate."""
    spans: bool = False
    """Whether spans of three tokens are masked."""
    rare: bool = False
    """Whether rare tokens are masked more often than frequent tokens."""
    causal_share: float = 0.0
    """Share of the rows in which tokens are predicted from earlier tokens only."""
    causal_rate: float = 0.0
    """Mark of causal phases: if a phase has this masking rate, all its rows are causal."""
    shifted: bool = False
    """Whether a token is predicted from the state before it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := set(self.changes) - set(CHANGES):
            raise UserError(f"objective.changes has {unknown}; known are {', '.join(CHANGES)}")

    @override
    def make(self, given: Given) -> Candidate:
        """Make the objective."""
        own = {n: getattr(self, n) for n in Candidate.__annotations__}
        return Candidate(**given._asdict(), **own)


OBJECTIVES["candidate"] = CandidateConfig
