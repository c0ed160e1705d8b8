"""Words that a pretrained model puts in place of a mask."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bert_jax.errors import UserError
from bert_jax.infer import forward
from bert_jax.infer.asker import Answer, Given, Prepared, ask, check_count, finite, text_field
from bert_jax.infer.masks import MASK, encode_masked, filled, mask_spans, token_text
from bert_jax.saved.model import SavedModel, read_model
from bert_jax.tasks.examples import Origin
from bert_jax.tasks.rows import Batch, Rows
from bert_jax.tokenization.tokenizer import make_row

_SHOWN_BEFORE, _SHOWN_AFTER = 40, 60  # characters of a filled text around the mask


@dataclass(frozen=True)
class Candidate:
    """A token for one masked place."""

    token: str
    """Readable text, without the blank that begins a word; `##s` continues a word (WordPiece)."""
    id: int
    probability: float
    sequence: str
    """Text with the token in the place of this mask."""


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
        model: The model.
        top: Candidates for each mask, the most probable ones.

    Raises:
        UserError: The model has no masked-LM head.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ("text",)

    def __init__(self, model: SavedModel, *, top: int = 5) -> None:
        model.require("fill-mask", "masked-LM head")
        check_count("top", top)
        self.model = model
        self._special = model.tokenizer.special_ids
        specials = sorted(set(dataclasses.astuple(self._special)))
        self._top = min(top, model.config.vocab_size - len(specials))
        self._banned = np.zeros(model.config.padded_vocab_size, np.float32)
        self._banned[specials] = -np.inf

    @classmethod
    def load(cls, directory: str | Path, top: int = 5) -> "MaskFiller":
        """Make a filler of the model in a directory (see `read_model`)."""
        return cls(forward.on_device(read_model(directory)), top=top)

    def fill(self, texts: Sequence[str]) -> list[list[list[Candidate]]]:
        """For every text, for each mask in it: the most probable tokens, best first.

        Raises:
            UserError: A text without a mask, or longer than the model's positions.
        """
        examples = [MaskedText(text, Given("text", n)) for n, text in enumerate(texts, 1)]
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
        second_start = np.fromiter((len(ids) for ids in tokens), np.int32, len(tokens))
        return Prepared(examples, Rows(tokens, second_start, None))

    def judge(self, batch: Batch) -> Any:
        """See `asker.Asker`."""
        is_mask = batch["tokens"] == self._special.mask
        # A power of 2: few shapes are compiled. Places beyond a row's own masks are not read.
        count = 1 << (max(int(is_mask.sum(1).max()), 1) - 1).bit_length()
        count = min(count, is_mask.shape[1])
        places = np.argsort(~is_mask, axis=1, kind="stable")[:, :count].astype(np.int32)
        return forward.top_tokens(self.model, batch, places, self._top, self._banned)

    def answers(self, prepared: Prepared[MaskedText], outputs: Sequence[Any]) -> list[Answer]:
        """See `asker.Asker`: masks, in their order, each a list of candidates."""
        finite([probabilities for probabilities, _ in outputs], self.model.name)
        tokenizer = self.model.tokenizer
        answers: list[Answer] = []
        for example, output in zip(prepared.examples, outputs, strict=True):
            spans = mask_spans(example.text, tokenizer)
            masks = self.candidates(len(spans), output)
            for span, candidates in zip(spans, masks, strict=True):
                for each in candidates:
                    each["sequence"] = filled(example.text, span, each["id"], tokenizer)
            answers.append({"masks": masks})
        return answers

    def candidates(self, count: int, output: Any) -> list[list[Answer]]:
        """Return token, id and probability of the candidates for the first masks of a row.

        Args:
            count: Number of masks.
            output: Row of what `judge` gives.
        """
        tokenizer = self.model.tokenizer
        masks = []
        for probabilities, ids in zip(output[0][:count], output[1][:count], strict=True):
            texts = [token_text(int(id), tokenizer) for id in ids]
            masks.append([
                {"token": text.strip() or text, "id": int(id), "probability": round(float(p), 6)}
                for text, id, p in zip(texts, ids, probabilities, strict=True)
            ])  # fmt: skip
        return masks

    def lines(self, example: MaskedText, answer: Answer) -> list[str]:
        """See `asker.Asker`."""
        found: list[str] = []
        spans = mask_spans(example.text, self.model.tokenizer)
        for number, (span, mask) in enumerate(zip(spans, answer["masks"], strict=True), 1):
            if len(spans) > 1:
                found.append(f"mask {number}")
            tokens = [t if t.isprintable() else repr(t) for t in (each["token"] for each in mask)]
            width = max(map(len, tokens))
            found += [
                f"{token:{width}}  {each['probability']:.3f}  id {each['id']:<7}"
                f"{_around(each['sequence'], span[0])}"
                for token, each in zip(tokens, mask, strict=True)
            ]
        return found

    def _row(self, example: MaskedText) -> np.ndarray:
        text, tokenizer = example.text, self.model.tokenizer
        if not mask_spans(text, tokenizer):
            raise UserError(
                f"{example.origin}: the text {text[:60]!r} has no {MASK}; mark the place to fill "
                f"with {MASK}"
            )
        ids = make_row(tokenizer, encode_masked(text, tokenizer).ids).ids
        limit = self.model.config.num_positions
        if len(ids) > limit:
            raise UserError(
                f"{example.origin}: the text {text[:40]!r}... has {len(ids)} tokens, and the model "
                f"was built for {limit}; shorten it"
            )
        return ids


def _around(text: str, place: int) -> str:
    """Return the part of a text around a place, on one line."""
    start, end = max(0, place - _SHOWN_BEFORE), place + _SHOWN_AFTER
    part = " ".join(text[start:end].split())
    return f"{'…' * (start > 0)}{part}{'…' * (end < len(text))}"


def format_candidates(candidates: Sequence[Candidate]) -> str:
    """One line: each token with its probability."""
    return "   ".join(f"{c.token} {c.probability:.3f}" for c in candidates)
