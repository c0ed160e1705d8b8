"""What a pretrained model answers: fill-mask."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bert_jax.data.tokenizer import Tokenizer, load_tokenizer
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import apply_pretraining
from bert_jax.training.pretrained import load_params

MASK = "[MASK]"
_LENGTH_STEP = 32  # rows are padded to a multiple of this, so that few lengths are compiled
_MAX_BATCH = 64


@dataclass(frozen=True)
class Candidate:
    """A token for one masked place."""

    token: str
    probability: float


@dataclass(frozen=True)
class MaskFiller:
    """A pretrained model that fills masks.

    Attributes:
        config: The architecture.
        params: As from `init_params`.
        tokenizer: The model's own.
    """

    config: ModelConfig
    params: Any
    tokenizer: Tokenizer

    @classmethod
    def load(cls, workdir: str | Path) -> "MaskFiller":
        """From the newest intact checkpoint of a work directory.

        Raises:
            UserError: There is none.
        """
        loaded = load_params(workdir)
        return cls(loaded.config.model, loaded.params, load_tokenizer(loaded.tokenizer))

    def fill(self, texts: Sequence[str], top: int = 5) -> list[list[list[Candidate]]]:
        """For every text, for each `[MASK]` in it: the `top` most probable tokens, best first.

        Each text is read alone, as `[CLS] text [SEP]`. Special tokens are never candidates.

        Raises:
            UserError: A text without `[MASK]`, or longer than the model's positions.
        """
        rows = [self._row(text) for text in texts]
        special = self.tokenizer.special_ids
        specials = sorted(set(dataclasses.astuple(special)))
        top = min(top, self.config.vocab_size - len(specials))
        banned = np.zeros(self.config.padded_vocab_size, np.float32)
        banned[specials] = -np.inf
        filled: list[list[list[Candidate]]] = []
        for start in range(0, len(rows), _MAX_BATCH):
            part = rows[start : start + _MAX_BATCH]
            tokens, segment_ids, places = self._batch(part)
            probabilities, ids = jax.device_get(
                _top_tokens(self.config, top, self.params, tokens, segment_ids, places, banned)
            )
            for row, p, i in zip(part, probabilities, ids, strict=True):
                count = row.count(special.mask)
                filled.append([self._candidates(p[n], i[n]) for n in range(count)])
        return filled

    def _row(self, text: str) -> list[int]:
        pieces = text.split(MASK)
        if len(pieces) == 1:
            raise UserError(f"the text {text!r} has no {MASK}; mark the place to fill with {MASK}")
        special = self.tokenizer.special_ids
        row = [special.cls]
        for number, piece in enumerate(pieces):
            if number:
                row.append(special.mask)
            row.extend(self.tokenizer.encode(piece).ids.tolist())
        row.append(special.sep)
        if len(row) > self.config.num_positions:
            raise UserError(
                f"the text {text[:40]!r}... has {len(row)} tokens, and the model was built for "
                f"{self.config.num_positions}; shorten it"
            )
        return row

    def _batch(self, rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens and segment_ids (B, L), places of the masks (B, P; 0 where a row has fewer)."""
        special = self.tokenizer.special_ids
        longest = max(map(len, rows))
        length = min(-(-longest // _LENGTH_STEP) * _LENGTH_STEP, self.config.num_positions)
        masks = max(row.count(special.mask) for row in rows)
        tokens = np.full((len(rows), length), special.pad, np.int32)
        segment_ids = np.zeros_like(tokens)
        places = np.zeros((len(rows), masks), np.int32)
        for number, row in enumerate(rows):
            tokens[number, : len(row)] = row
            segment_ids[number, : len(row)] = 1
            at = [place for place, token in enumerate(row) if token == special.mask]
            places[number, : len(at)] = at
        return tokens, segment_ids, places

    def _candidates(self, probabilities: np.ndarray, ids: np.ndarray) -> list[Candidate]:
        return [
            Candidate(self.tokenizer.id_to_token(int(i)), float(p))
            for p, i in zip(probabilities, ids, strict=True)
        ]


@partial(jax.jit, static_argnums=(0, 1))
def _top_tokens(
    config: ModelConfig,
    top: int,
    params: Any,
    tokens: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"],
    places: Int[Array, "B P"],
    banned: Float[Array, " V"],
) -> tuple[Float[Array, "B P top"], Int[Array, "B P top"]]:
    """Probabilities (over the whole vocabulary) and ids of the `top` tokens not banned."""
    logits = apply_pretraining(
        config, params, tokens, jnp.zeros_like(tokens), segment_ids, places
    ).mlm
    probabilities = jax.nn.softmax(logits, axis=-1)
    _, ids = jax.lax.top_k(logits + banned, top)
    return jnp.take_along_axis(probabilities, ids, axis=-1), ids


def format_candidates(candidates: Sequence[Candidate]) -> str:
    """One line: each token with its probability."""
    return "   ".join(f"{c.token} {c.probability:.3f}" for c in candidates)
