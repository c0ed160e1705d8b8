"""A reranker: a fine-tuned model that reads a query and a passage together and scores the pair.

Source: Nogueira and Cho 2019 (Passage Re-ranking with BERT).
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Float

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.errors import UserError
from bert_jax.infer.classify import Classifier
from bert_jax.infer.predictor import Cuts
from bert_jax.infer.search.index import Hit

Item = TypeVar("Item")


class Reranker:
    """A model with one score, or with two classes whose second says that a passage answers."""

    def __init__(self, model: SavedModel) -> None:
        self._classifier = Classifier(model)
        outputs = model.outputs
        assert outputs is not None  # of `Classifier`
        several = outputs.objective == "multi_label" or len(outputs.labels) > 2
        if several:
            raise UserError(
                f"{model.name} predicts {len(outputs.labels)} classes; a reranker predicts one "
                "score, or two classes of which the second says that the passage answers"
            )
        self._two = outputs.objective == "single_label"

    def scores(
        self, queries: Sequence[str], passages: Sequence[str], *, cuts: Cuts | None = None,
        advance: Callable[[int], object] = lambda count: None,
    ) -> Float[np.ndarray, " N"]:  # fmt: skip
        """Score pairs, the higher the better: scores, or log odds of the second class.

        `cuts` and `advance` are as in `Predictor.parts`.
        """
        reader, found = self._classifier, [np.zeros(0, np.float32)]
        pairs = {"text": queries, "text_b": passages}
        for part in reader.parts(pairs, what="pair", cuts=cuts, advance=advance):
            logits = np.stack(reader.outputs(part.rows))
            found.append(logits[:, 1] - logits[:, 0] if self._two else logits[:, 0])
        return np.concatenate(found)

    def order(self, query: str, hits: Sequence[Hit]) -> list[Hit]:
        """Return hits with the scores of the pairs, best first."""
        scores = self.scores([query] * len(hits), [hit.passage.text for hit in hits])
        scored = zip(scores, hits, strict=True)
        return reranked(scores, [Hit(float(score), hit.passage) for score, hit in scored])


def reranked(scores: Float[np.ndarray, " N"], ranking: Sequence[Item]) -> list[Item]:
    """Return a ranking in the order of new scores; equal ones keep their order."""
    return [ranking[place] for place in np.argsort(-scores, kind="stable")]
