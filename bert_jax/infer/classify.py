"""Classification of texts and pairs of texts: a class, a set of labels or a score for each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from bert_jax.config.bounds import Count, Fraction
from bert_jax.errors import UserError
from bert_jax.infer.predictor import Answer, Prepared, TextPredictor
from bert_jax.tasks.examples import TextExample
from bert_jax.tasks.long_texts import CUT, LongTexts, text_rows


class RowPredictor(TextPredictor):
    """A predictor that turns each text, or pair of texts, into one or more rows of tokens."""

    FIELDS = ("text", "text_b")

    @property
    def long(self) -> LongTexts:
        """Treatment of texts that do not fit in one row."""
        return CUT

    @override
    def prepare(self, examples: Sequence[TextExample]) -> Prepared[TextExample]:
        length = self.model.max_length
        made = text_rows(examples, self.model.tokenizer, length, None, self.long)
        limit = f"texts are longer than {length} tokens, including special tokens,"
        done = "lost their middle" if self.long.how == "head_tail" else "were cut there"
        cut = made.long if made.left_out else ()
        return Prepared(examples, made.rows, made.owners, cut=cut, limit=limit, done=done)


@dataclass(eq=False)
class Classifier(RowPredictor):
    """Predictor of classes of texts. The options are described in `LoadedModel.classify`."""

    top: Count | None = None
    threshold: Fraction | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.require("classify", "classification head")
        if self.model.config.pooler:
            self.model.complete_params()  # refuses a model whose head lacks its pooler
        kind = self.model.outputs and self.model.outputs.objective
        for option, wrong in (("threshold", kind != "multi_label"), ("top", kind == "regression")):
            if wrong and (given := getattr(self, option)) is not None:
                told = "a score" if kind == "regression" else "one class for each text"
                raise UserError(
                    f"{option} is {given}, but {self.model.name} predicts {told}; leave {option} "
                    "out"
                )

    @property
    @override
    def long(self) -> LongTexts:
        return CUT if self.model.outputs is None else self.model.outputs.long

    @override
    def answers(self, prepared: Prepared[TextExample], outputs: Sequence[Any]) -> list[Answer]:
        logits = self.long.pooled(np.stack(outputs), prepared.context)
        return [self._answer(each) for each in logits]

    @override
    def lines(self, example: TextExample, answer: Answer) -> list[str]:
        if "score" in answer:
            return [f"{answer['score']:.7g}"]
        shares = [f"{label} {share:.3f}" for label, share in answer["probabilities"].items()]
        if "labels" in answer:
            return [", ".join(answer["labels"]) or "(none)", "   ".join(shares)]
        return ["   ".join(shares)]

    def _answer(self, logits: np.ndarray) -> Answer:
        """Return the label, the labels or the score in the form that `bert-jax predict` writes."""
        from scipy.special import expit, softmax

        known = self.model.outputs
        assert known is not None  # `require` checks it
        if known.objective == "regression":
            return {"score": float(f"{logits[0]:.7g}")}
        several = known.objective == "multi_label"
        scores = logits.astype(np.float64)
        shares = expit(scores) if several else softmax(scores)
        best = np.argsort(-shares, kind="stable")
        names = known.labels
        listed = {names[n]: round(float(shares[n]), 6) for n in best[: self.top]}
        if not several:
            return {"label": names[best[0]], "probabilities": listed}
        least = np.array((known.thresholds or 0.5) if self.threshold is None else self.threshold)
        held = [names[n] for n in np.flatnonzero(shares > least)]
        return {"labels": held, "probabilities": listed}
