"""What a pretrained model puts in place of a mask."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bert_jax.data.tokenizer import make_row
from bert_jax.errors import UserError
from bert_jax.finetune.rows import Batch, Rows
from bert_jax.finetune.saved_model import read_model
from bert_jax.infer.asker import Answer, Prepared, ask, finite, text_field
from bert_jax.infer.network import Network
from bert_jax.tasks.examples import Origin

MASK = "[MASK]"


@dataclass(frozen=True)
class Candidate:
    """A token for one masked place."""

    token: str
    probability: float


@dataclass(frozen=True)
class MaskedText:
    """A text with one mask or more."""

    text: str
    origin: Origin


class MaskFiller:
    """A pretrained model that fills masks; see `asker.Asker`.

    A mask is written `[MASK]`, or as the model's own tokenizer spells it (`<mask>`). Each text is
    read alone, as `[CLS] text [SEP]`. Special tokens are never candidates.

    Args:
        network: The model.
        top: Candidates for each mask, the most probable ones.

    Raises:
        UserError: The model has no masked-LM head.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ("text",)

    def __init__(self, network: Network, *, top: int = 5) -> None:
        network.require("fill-mask", "masked-LM head")
        if top < 1:
            raise UserError(f"top is {top}; it must be at least 1")
        self.network = network
        self._special = network.tokenizer.special_ids
        self._spellings = {MASK, network.tokenizer.id_to_token(self._special.mask)}
        specials = sorted(set(dataclasses.astuple(self._special)))
        self._top = min(top, network.config.vocab_size - len(specials))
        self._banned = np.zeros(network.config.padded_vocab_size, np.float32)
        self._banned[specials] = -np.inf

    @classmethod
    def load(cls, directory: str | Path, top: int = 5) -> "MaskFiller":
        """Of the model in a directory; see `read_model`."""
        return cls(Network(read_model(directory)), top=top)

    def fill(self, texts: Sequence[str]) -> list[list[list[Candidate]]]:
        """For every text, for each mask in it: the most probable tokens, best first.

        Raises:
            UserError: A text without a mask, or longer than the model's positions.
        """
        examples = [MaskedText(text, Origin("text", n)) for n, text in enumerate(texts, 1)]
        return [
            [[Candidate(**candidate) for candidate in mask] for mask in answer["masks"]]
            for answer in ask(self, self.prepare(examples))
        ]

    def example(self, fields: Mapping[str, Any], origin: Origin) -> MaskedText:
        """See `asker.Asker`."""
        return MaskedText(text_field(fields, "text", origin), origin)

    def prepare(self, examples: Sequence[MaskedText]) -> Prepared[MaskedText]:
        """See `asker.Asker`."""
        tokens = [self._row(example) for example in examples]
        second_at = np.fromiter((len(ids) for ids in tokens), np.int32, len(tokens))
        return Prepared(examples, Rows(tokens, second_at, None))

    def judge(self, batch: Batch) -> Any:
        """See `asker.Asker`."""
        is_mask = batch["tokens"] == self._special.mask
        # A power of 2: few shapes are compiled. Places beyond a row's own masks are not read.
        count = 1 << (max(int(is_mask.sum(1).max()), 1) - 1).bit_length()
        count = min(count, is_mask.shape[1])
        places = np.argsort(~is_mask, axis=1, kind="stable")[:, :count].astype(np.int32)
        return self.network.top_tokens(batch, places, self._top, self._banned)

    def answers(self, prepared: Prepared[MaskedText], outputs: Sequence[Any]) -> list[Answer]:
        """See `asker.Asker`: masks, in their order, each a list of token and probability."""
        finite([probabilities for probabilities, _ in outputs], self.network.name)
        return [
            {
                "masks": [
                    self._candidates(probabilities[mask], ids[mask])
                    for mask in range(int((row == self._special.mask).sum()))
                ]
            }
            for row, (probabilities, ids) in zip(prepared.rows.tokens, outputs, strict=True)
        ]

    def lines(self, example: MaskedText, answer: Answer) -> list[str]:
        """See `asker.Asker`."""
        return [format_candidates([Candidate(**c) for c in mask]) for mask in answer["masks"]]

    def _row(self, example: MaskedText) -> np.ndarray:
        text = example.text
        for spelling in self._spellings - {MASK}:
            text = text.replace(spelling, MASK)
        pieces = text.split(MASK)
        if len(pieces) == 1:
            raise UserError(
                f"{example.origin}: the text {example.text[:60]!r} has no {MASK}; mark the place "
                f"to fill with {MASK}"
            )
        tokenizer = self.network.tokenizer
        found: list[np.ndarray] = []
        for number, piece in enumerate(pieces):
            if number:
                found.append(np.array([self._special.mask], np.int32))
            if tokenizer.mask_takes_blank and number < len(pieces) - 1:
                piece = piece.rstrip()
            found.append(tokenizer.encode(piece).ids)
        ids = make_row(tokenizer, np.concatenate(found)).ids
        limit = self.network.config.num_positions
        if len(ids) > limit:
            raise UserError(
                f"{example.origin}: the text {text[:40]!r}... has {len(ids)} tokens, and the model "
                f"was built for {limit}; shorten it"
            )
        return ids

    def _candidates(self, probabilities: np.ndarray, ids: np.ndarray) -> list[Answer]:
        name = self.network.tokenizer.id_to_token
        return [
            {"token": name(int(id)), "probability": round(float(share), 6)}
            for id, share in zip(ids, probabilities, strict=True)
        ]


def format_candidates(candidates: Sequence[Candidate]) -> str:
    """One line: each token with its probability."""
    return "   ".join(f"{c.token} {c.probability:.3f}" for c in candidates)
