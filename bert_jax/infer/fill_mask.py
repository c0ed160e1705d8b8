"""Predictions of the tokens behind masks, by a pretrained model."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from bert_jax.config.bounds import Count
from bert_jax.errors import UserError
from bert_jax.infer import forward
from bert_jax.infer.predictor import Answer, Prepared, TextPredictor
from bert_jax.tasks.examples import TextExample
from bert_jax.tasks.rows import Batch, Rows
from bert_jax.tokenization.masks import MASK, encode_masked, filled, mask_spans, token_text
from bert_jax.tokenization.tokenizer import make_row

_SHOWN_BEFORE, _SHOWN_AFTER = 40, 60  # characters of a filled text around the mask


@dataclass(eq=False)
class MaskFiller(TextPredictor):
    """Predictor of masked tokens, with a pretrained model.

    `LoadedModel.fill_mask` describes `top`. A mask is written as `[MASK]` or as the tokenizer's
    mask token, such as `<mask>`. A row is `[CLS] text [SEP]`. Special tokens are never candidates.
    """

    FIELDS = ("text",)

    top: Count = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.require("fill-mask", "masked-LM head")
        size, rows = self.model.tokenizer.vocab_size, self.model.config.padded_vocab_size
        specials = sorted(set(astuple(self.model.tokenizer.special_ids)))
        self._top = min(self.top, size - len(specials))
        self._banned = np.zeros(rows, np.float32)
        self._banned[[*specials, *range(size, rows)]] = -np.inf  # rows may outnumber the tokens

    @override
    def prepare(self, examples: Sequence[TextExample]) -> Prepared[TextExample]:
        tokens = [self._row(example) for example in examples]
        return Prepared(examples, Rows(tokens, np.array([*map(len, tokens)], np.int32)))

    @override
    def forward(self, batch: Batch) -> Any:
        is_mask = batch["tokens"] == self.model.tokenizer.special_ids.mask
        # Most masks in a row, rounded up to a power of 2 for few compilations; the rest is unread.
        count = 1 << (max(int(is_mask.sum(1).max()), 1) - 1).bit_length()
        count = min(count, is_mask.shape[1])
        places = np.argsort(~is_mask, axis=1, kind="stable")[:, :count].astype(np.int32)
        return forward.top_tokens(self.model, batch, places, self._top, self._banned)

    @override
    def answers(self, prepared: Prepared[TextExample], outputs: Sequence[Any]) -> list[Answer]:
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
        """Return token, id and probability of each candidate for the first `count` masks."""
        tokenizer = self.model.tokenizer
        masks = []
        for probabilities, ids in zip(output[0][:count], output[1][:count], strict=True):
            texts = [token_text(int(id), tokenizer) for id in ids]
            masks.append([
                {"token": text.strip() or text, "id": int(id), "probability": round(float(p), 6)}
                for text, id, p in zip(texts, ids, probabilities, strict=True)
            ])  # fmt: skip
        return masks

    @override
    def lines(self, example: TextExample, answer: Answer) -> list[str]:
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

    def _row(self, example: TextExample) -> np.ndarray:
        text, tokenizer = example.text, self.model.tokenizer
        if not mask_spans(text, tokenizer):
            raise UserError(
                f"{example.origin}: the text {text[:60]!r} has no {MASK}; put one in the text"
            )
        ids = make_row(tokenizer, encode_masked(text, tokenizer).ids).ids
        limit = self.model.max_length
        if len(ids) > limit:
            raise UserError(
                f"{example.origin}: the text {text[:40]!r}... has {len(ids)} tokens, but the model "
                f"takes at most {limit}; shorten the text"
            )
        return ids


def _around(text: str, place: int) -> str:
    """Return the part of a text around the character at `place`, on one line."""
    start, end = max(0, place - _SHOWN_BEFORE), place + _SHOWN_AFTER
    part = " ".join(text[start:end].split())
    return f"{'…' * (start > 0)}{part}{'…' * (end < len(text))}"
