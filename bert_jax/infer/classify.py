"""Classes, several labels or scores of texts and pairs of texts."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from jax import Array

from bert_jax.errors import UserError
from bert_jax.infer import forward
from bert_jax.infer.asker import Answer, Prepared, check_count, finite, text_field
from bert_jax.saved.model import SavedModel
from bert_jax.tasks.examples import Origin, TextExample
from bert_jax.tasks.rows import Batch
from bert_jax.tasks.text.rows import cut_rows


def text_example(fields: Mapping[str, Any], origin: Origin) -> TextExample:
    """Return a text, or with a field `text_b` a pair.

    Raises:
        UserError: A field is missing or no text.
    """
    text = text_field(fields, "text", origin)
    pair = None if fields.get("text_b") is None else text_field(fields, "text_b", origin)
    return TextExample("", text, pair, None, origin)


def text_rows(examples: Sequence[TextExample], model: SavedModel) -> Prepared[TextExample]:
    """Make rows of texts and pairs; the end of what is too long is cut."""
    length = model.max_length
    rows, cut = cut_rows(examples, model.tokenizer, length, None)
    limit = f"texts are longer than {length} tokens, special ones included,"
    return Prepared(examples, rows, cut=cut, limit=limit)


class Classifier:
    """A model with a classification head; see `asker.Asker`.

    Args:
        model: The model.
        top: Number of classes with a probability, best first; None: all.
        threshold: Least probability of a label among several.

    Raises:
        UserError: The model has no such head; an option is out of range.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ("text", "text_b")

    def __init__(
        self, model: SavedModel, *, top: int | None = None, threshold: float = 0.5
    ) -> None:
        model.require("classify", "head for classes or scores")
        if top is not None:
            check_count("top", top)
        if not 0 <= threshold <= 1:
            raise UserError(f"threshold is {threshold}; a probability lies between 0 and 1")
        if not model.has_pooler:
            raise UserError(f"{model.name}: the head reads the pooler, and there is none")
        self.model = model
        self._top = top
        self._threshold = threshold

    def example(self, fields: Mapping[str, Any], origin: Origin) -> TextExample:
        """See `asker.Asker`."""
        return text_example(fields, origin)

    def prepare(self, examples: Sequence[TextExample]) -> Prepared[TextExample]:
        """See `asker.Asker`."""
        return text_rows(examples, self.model)

    def judge(self, batch: Batch) -> Array:
        """See `asker.Asker`."""
        return forward.row_logits(self.model, batch)

    def answers(
        self, prepared: Prepared[TextExample], outputs: Sequence[np.ndarray]
    ) -> list[Answer]:
        """See `asker.Asker`: label, labels or score as `bert-jax predict` writes them."""
        finite(outputs, self.model.name)
        return [self._answer(logits) for logits in outputs]

    def lines(self, example: TextExample, answer: Answer) -> list[str]:
        """See `asker.Asker`."""
        if "score" in answer:
            return [f"{answer['score']:.4f}"]
        shares = [f"{label} {share:.3f}" for label, share in answer["probabilities"].items()]
        if "labels" in answer:
            return [", ".join(answer["labels"]) or "(none)", "   ".join(shares)]
        return ["   ".join(shares)]

    def _answer(self, logits: np.ndarray) -> Answer:
        from scipy.special import expit, softmax

        known = self.model.outputs
        assert known is not None  # of `require`
        if known.objective == "regression":
            return {"score": round(float(logits[0]), 6)}
        several = known.objective == "multi_label"
        scores = logits.astype(np.float64)
        shares = expit(scores) if several else softmax(scores)
        best = np.argsort(-shares, kind="stable")
        names = known.labels
        listed = {names[n]: round(float(shares[n]), 6) for n in best[: self._top]}
        if not several:
            return {"label": names[best[0]], "probabilities": listed}
        held = [names[n] for n in np.flatnonzero(shares > self._threshold)]
        return {"labels": held, "probabilities": listed}
