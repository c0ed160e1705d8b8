"""The model that `bert_jax.load` returns, with a method for each kind of prediction."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.config.mapping import build
from bert_jax.errors import UserError
from bert_jax.infer import forward
from bert_jax.infer.answer import Answerer
from bert_jax.infer.attend import Attention, attention
from bert_jax.infer.classify import Classifier
from bert_jax.infer.embed import Embedder, Kind
from bert_jax.infer.fill_mask import MaskFiller
from bert_jax.infer.predictor import Answer, Cuts, Predictor, check_count
from bert_jax.infer.tag import Tagger
from bert_jax.infer.translate import Translator
from bert_jax.model.embedding import Pooling
from bert_jax.model.seq2seq.search import SearchConfig
from bert_jax.tokenization.tokenizer import Tokenizer

Texts = str | Sequence[str]
"""One text, or several. The answer is a list in either case."""
TextsOrPairs = str | Sequence[str | tuple[str, ...]]
"""One text, or several. In a list, a tuple (first, second) is a pair of texts."""
Pairs = str | Sequence[str | None]
"""One second text, or several. None stands for a text without a second text."""


class LoadedModel:
    """A model on one device, with a method for each kind of prediction.

    Answers are in the order of the texts. A text becomes a row of tokens, padded to one of a few
    lengths; each length is compiled once. `forward.on_device` describes `device` and `max_length`.
    A batch of several rows has at most `batch_tokens` tokens (None: 1,024; for translation, 2,048).
    Every method raises a UserError if the model lacks the head that the method needs, an option is
    out of range, or an input cannot be answered.
    """

    def __init__(
        self, saved: SavedModel, *, device: str | None = None, max_length: int | None = None,
        batch_tokens: int | None = None,
    ) -> None:  # fmt: skip
        if batch_tokens is not None:
            check_count("batch_tokens", batch_tokens)
        self.model = forward.on_device(saved, device, max_length)
        self._limit = max_length
        self.batch_tokens = batch_tokens

    def __repr__(self) -> str:
        config = self.model.config
        verbs = ", ".join(verb.replace("-", "_") for verb in self.verbs)
        return (
            f"<{self.name}: {config.num_layers} layers x {config.hidden_dim}, at most "
            f"{self.max_length} tokens, {config.vocab_size:,} in the vocabulary; {verbs}>"
        )

    @property
    def name(self) -> str:
        """Directory of the model, followed by the step of the checkpoint or the model class."""
        return self.model.name

    @property
    def verbs(self) -> tuple[str, ...]:
        """Verbs of `bert-jax` that the model supports."""
        return self.model.verbs

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of classes or tags, in the order of the outputs."""
        return () if self.model.outputs is None else self.model.outputs.labels

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model; `encode(text)` gives ids and offsets."""
        return self.model.tokenizer

    @property
    def max_length(self) -> int:
        """Largest number of tokens in a row, including special tokens."""
        return self.model.max_length

    def fill_mask(self, texts: Texts, *, top: int = 5) -> list[Answer]:
        """Find the `top` most probable tokens for each `[MASK]`.

        Returns, per text, {"masks": [[{"token": ..., "id": ..., "probability": ..., "sequence":
        ...}, ...], ...]}, with a list per mask. In "sequence", the token replaces the mask.
        """
        return self._ask(MaskFiller(self.model, top=top), {"text": _several(texts)})

    def classify(
        self, texts: TextsOrPairs, pairs: Pairs | None = None, *, top: int | None = None,
        threshold: float | None = None,
    ) -> list[Answer]:  # fmt: skip
        """Predict a class, a set of labels or a score for each text or pair of texts.

        A warning says how many texts were cut because they were too long.

        Args:
            texts: Texts, or tuples of two texts for pairs.
            pairs: Second texts, if `texts` has no tuples. None stands for no second text.
            top: Number of classes to list with probabilities, best first. None means all classes.
            threshold: Probability above which a label is predicted, for a model that may predict
                several. None means the thresholds of the model or else 0.5.

        Returns:
            For each text, {"label": ..., "probabilities": {...}}, {"labels": [...],
            "probabilities": {...}} or {"score": ...}.
        """
        classifier = Classifier(self.model, top=top, threshold=threshold)
        return self._ask(classifier, _paired(texts, pairs))

    def tag(self, texts: Texts | Sequence[Sequence[str]]) -> list[Answer]:
        """Tag the words of raw texts, or of lists of words.

        Returns, per text, {"tokens": [...], "tags": [...]}. For raw text, "offsets" has the
        character range [start, end) of each word. If tags mark entities, "entities" lists them.
        """
        given = _several(texts)
        of_words = bool(given) and not isinstance(given[0], str)
        return self._ask(Tagger(self.model), {"tokens" if of_words else "text": given})

    def answer(
        self, questions: Texts, contexts: Texts, *, top: int = 1,
        null_threshold: float | str | None = "auto",
    ) -> list[Answer]:  # fmt: skip
        """Answer questions with slices of the contexts.

        Args:
            contexts: One context per question, or one for all questions.
            top: Number of "candidates" to list in an answer. 1 means that there is no such list.
            null_threshold: Largest `null_odds` (score of "no answer" minus score of the best
                answer) at which a question is answered; above it, the answer is "". None means that
                every question is answered. "auto" means the threshold with the best F1 on the dev
                data of the run, or None if every dev question had an answer.

        Returns:
            For each question, "answer" (`context[start:end]`, or "" for no answer), "start", "end",
            "probability", "null_odds", and "candidates" if `top` is above 1.
        """
        asked = _several(questions)
        given = [contexts] * len(asked) if isinstance(contexts, str) else list(contexts)
        answerer = Answerer(
            self.model, top=top, null_threshold=null_threshold, max_length=self._limit
        )
        return self._ask(answerer, {"question": asked, "context": given})

    def translate(
        self, texts: Texts, prefixes: Pairs | None = None, *, alignments: bool = False,
        **search: Any,
    ) -> list[Answer]:  # fmt: skip
        """Translate texts by beam search.

        Args:
            texts: Source texts. A text without words is translated to "".
            prefixes: Text with which each translation must begin. None means no prefix.
            alignments: Whether to return the source word that each target word attends to most.
            **search: Fields of `SearchConfig`, such as `num_beams` and `nbest`.

        Returns:
            For each text, {"translation": ..., "score": ...}. If the translation reached the length
            limit without its own end, "cut" is true. If `nbest` is above 1, "candidates" lists the
            hypotheses, best first. If `alignments` is set, "attention" is as in `word_attention`.
        """
        settings = build(SearchConfig, search, "translate")
        translator = Translator(self.model, search=settings, alignments=alignments)
        columns = {"text": _several(texts)}
        if prefixes is not None:
            columns["prefix"] = _several(prefixes)
        return self._ask(translator, columns)

    def embed(
        self, texts: TextsOrPairs, pairs: Pairs | None = None, *, kind: Kind | None = None,
        dimensions: int | None = None, pooling: Pooling | None = None,
        layers: int | Sequence[int] | slice = -1, special_tokens: bool = True,
        normalize: bool | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Return an array (N, D) in float32 with one vector per text.

        A model that was trained to make vectors, or read from the layout of sentence-transformers,
        defines how vectors are pooled and scaled. The options below override the model.

        Args:
            texts, pairs: Texts or pairs of texts, as in `classify`.
            kind: "query" or "document" adds the model's prefix of this kind. None adds no prefix.
            dimensions: Number of leading values of a vector to keep. None means all values.
            pooling: "mean" or "max" over tokens, "mean_sqrt_len" (sum / square root of the number),
                "cls" (state of the first token), "pooler" (BERT's pooler on this state), "last"
                (state of the last token) or "weighted" (mean with learned weights). None means the
                model's pooling or else "mean". The model's linear maps are then applied.
            layers: Layers to average, from 0 (the embeddings) to `num_layers`, or from -1 (the
                last) downwards. A slice includes both ends; a missing end is layer 0 or the last.
            special_tokens: Whether mean and max use [CLS] and [SEP], as in sentence-transformers.
            normalize: Whether to divide vectors, after they are cut to `dimensions`, by their
                Euclidean norm. None means as the model defines or, if it does not say, no.
        """
        embedder = Embedder(
            self.model, kind=kind, dimensions=dimensions, pooling=pooling, layers=layers,
            special_tokens=special_tokens, normalize=normalize,
        )  # fmt: skip
        found = self._ask(embedder, _paired(texts, pairs))
        return np.stack(found) if found else np.zeros((0, embedder.width), np.float32)

    def attend(self, text: str, pair: str | None = None) -> Attention:
        """Compute the attention weights of a text in every layer and head; see `attention`."""
        return attention(forward.layers_stacked(self.model), text, pair)

    def _ask(self, predictor: Predictor[Any], columns: dict[str, list[Any]]) -> list[Any]:
        predictor.batch_tokens = self.batch_tokens or predictor.batch_tokens
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            given = " but ".join(f"{number} {name}" for name, number in lengths.items())
            raise UserError(f"got {given}; give the same number of each")
        cuts = Cuts()
        parts = [*predictor.parts(columns, most=max(*lengths.values(), 1), cuts=cuts)]
        if warning := cuts.warning():
            warnings.warn(warning, stacklevel=3)  # shown where the method was called
        return [answer for part in parts for answer in predictor.predict(part)]


def _several(texts: Any) -> list[Any]:
    return [texts] if isinstance(texts, str) else list(texts)


def _paired(texts: TextsOrPairs, pairs: Pairs | None) -> dict[str, list[Any]]:
    given = _several(texts)
    if not any(isinstance(each, tuple) for each in given):
        return {"text": given} if pairs is None else {"text": given, "text_b": _several(pairs)}
    if pairs is not None:
        raise UserError(
            "texts has tuples, and pairs is given too; give the second texts in only one of them"
        )
    both = [each if isinstance(each, tuple) else (each, None) for each in given]
    for number, each in enumerate(both, 1):
        if len(each) != 2:
            raise UserError(
                f"text {number} is a tuple of length {len(each)}; a pair is (first, second)"
            )
    return {"text": [first for first, _ in both], "text_b": [second for _, second in both]}
