"""`bert_jax.load`: a model to ask from Python."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_jax.errors import UserError
from bert_jax.infer import forward
from bert_jax.infer.answer import Answerer
from bert_jax.infer.classify import Classifier
from bert_jax.infer.embed import Embedder
from bert_jax.infer.fill_mask import MaskFiller
from bert_jax.infer.forward import Pooling
from bert_jax.infer.predictor import Answer, Cuts, Example, Given, Predictor
from bert_jax.infer.tag import Tagger
from bert_jax.saved.model import SavedModel

Texts = str | Sequence[str]
"""One text, or several; the answer is a list in either case."""
Pairs = str | Sequence[str | None]
"""Second texts, None for a text that has none."""


class LoadedModel:
    """A model with its tokenizer on one device; answers are in the order of the texts.

    What is compiled is kept: rows are padded to few lengths, and each of them is compiled once.

    Args:
        saved: From `read_model`; its arrays are not kept.
    """

    def __init__(self, saved: SavedModel) -> None:
        self.model = forward.on_device(saved)

    @property
    def name(self) -> str:
        """The directory, and the step or the class."""
        return self.model.name

    @property
    def verbs(self) -> tuple[str, ...]:
        """Verbs of `bert-jax` that the model supports."""
        return self.model.verbs

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of classes or tags, in the order of the outputs."""
        return () if self.model.outputs is None else self.model.outputs.labels

    def fill_mask(self, texts: Texts, *, top: int = 5) -> list[Answer]:
        """Find the most probable tokens for each `[MASK]`.

        Returns:
            For each text {"masks": [[{"token": ..., "id": ..., "probability": ..., "sequence":
            ...}, ...], ...]}; the sequence is the text with the token in place of the mask.

        Raises:
            UserError: No masked-LM head, or a text without mask or too long.
        """
        return self._ask(MaskFiller(self.model, top=top), {"text": _several(texts)})

    def classify(
        self,
        texts: Texts,
        pairs: Pairs | None = None,
        *,
        top: int | None = None,
        threshold: float = 0.5,
    ) -> list[Answer]:
        """Classes, several labels or a score, as the model was trained; see `Classifier`.

        Args:
            texts: The texts; what is too long is cut, and one warning counts it.
            pairs: Second texts, None for a text without one.
            top: Number of classes with a probability; None: all.
            threshold: Least probability of a label among several.

        Returns:
            For each text {"label": ..., "probabilities": {...}}, {"labels": [...],
            "probabilities": {...}} or {"score": ...}.

        Raises:
            UserError: No such head.
        """
        return self._ask(
            Classifier(self.model, top=top, threshold=threshold), _paired(texts, pairs)
        )

    def tag(self, texts: Texts | Sequence[Sequence[str]]) -> list[Answer]:
        """Tags of words, and entities; see `Tagger`.

        Args:
            texts: Raw texts, or lists of words.

        Returns:
            For each {"tokens": [...], "tags": [...]}, of raw text "offsets", and "entities" where
            the tags make some.

        Raises:
            UserError: No such head.
        """
        given = _several(texts)
        of_words = bool(given) and not isinstance(given[0], str)
        return self._ask(Tagger(self.model), {"tokens" if of_words else "text": given})

    def answer(
        self,
        questions: Texts,
        contexts: Texts,
        *,
        top: int = 1,
        null_threshold: float | str | None = "auto",
    ) -> list[Answer]:
        """Answers that are slices of the contexts; see `Answerer`.

        Args:
            questions: The questions.
            contexts: One for each, or one for all.
            top: With more than 1, so many "candidates" are listed.
            null_threshold: Above these odds there is no answer, "".

        Returns:
            For each {"answer": ..., "start": ..., "end": ..., "probability": ...,
            "null_odds": ...}.

        Raises:
            UserError: No such head, or a context without words.
        """
        asked = _several(questions)
        given = [contexts] * len(asked) if isinstance(contexts, str) else list(contexts)
        return self._ask(
            Answerer(self.model, top=top, null_threshold=null_threshold),
            {"question": asked, "context": given},
        )

    def embed(
        self,
        texts: Texts,
        pairs: Pairs | None = None,
        *,
        pooling: Pooling = "mean",
        layers: int | Sequence[int] | slice = -1,
        special_tokens: bool = True,
        normalize: bool = False,
    ) -> np.ndarray:
        """(N, D) float32, one vector a text; see `Embedder` for the options.

        Raises:
            UserError: No such layer, or no pooler.
        """
        embedder = Embedder(
            self.model, pooling=pooling, layers=layers, special_tokens=special_tokens,
            normalize=normalize,
        )  # fmt: skip
        found = self._ask(embedder, _paired(texts, pairs))
        return np.stack(found) if found else np.zeros((0, embedder.width), np.float32)

    def _ask(self, predictor: Predictor[Example], columns: dict[str, list[Any]]) -> list[Any]:
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            given = " and ".join(f"{number} of {name}" for name, number in lengths.items())
            raise UserError(f"there are {given}; give as many")
        examples = [
            predictor.example(dict(zip(columns, values, strict=True)), Given("text", number))
            for number, values in enumerate(zip(*columns.values(), strict=True), 1)
        ]
        if not examples:
            return []
        prepared = predictor.prepare(examples)
        cuts = Cuts()
        cuts.add(prepared)
        if warning := cuts.warning():
            warnings.warn(warning, stacklevel=3)  # at the caller of the method
        return list(predictor.predict(prepared))


def _several(texts: Any) -> list[Any]:
    return [texts] if isinstance(texts, str) else list(texts)


def _paired(texts: Texts, pairs: Pairs | None) -> dict[str, list[Any]]:
    columns = {"text": _several(texts)}
    return columns if pairs is None else {**columns, "text_b": _several(pairs)}
