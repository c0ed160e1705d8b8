"""Question answering: each answer is a slice of the context that is given with the question."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from bert_jax.artefacts.formats.huggingface_files import Reading
from bert_jax.config.bounds import Count
from bert_jax.errors import UserError
from bert_jax.infer.predictor import Answer, Predictor, Prepared, text_field
from bert_jax.tasks.config import WindowOptions
from bert_jax.tasks.examples import Origin, Question
from bert_jax.tasks.rows import Rows
from bert_jax.tasks.squad.windows import Prediction, SquadWindows, build_windows, find_answers
from bert_jax.tokenization.tokenizer import MAX_SPECIAL


@dataclass(eq=False)
class Answerer(Predictor[Question]):
    """Predictor of answers to questions, with a model that has a span head.

    The options are described in `LoadedModel.answer`. A context that does not fit in one row of
    tokens is read in overlapping windows. A token in several windows is scored in the window that
    has the most text around the token (see `tasks.squad.windows`).
    """

    FIELDS = ("question", "context")
    PER_TOKEN = True

    top: Count = 1
    null_threshold: float | str | None = "auto"
    max_answer_tokens: Count | None = None
    """Largest number of tokens in an answer. None means the limit in training or else 30."""
    max_length: int | None = None
    """Largest number of tokens in a row. None: at most 384 for a model of other software."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.require("answer", "span head")
        given = self.null_threshold
        is_number = isinstance(given, int | float | np.number) and np.isfinite(given)
        if given not in (None, "auto") and not is_number:
            raise UserError(f"null_threshold is {given!r}; give a finite number, None or 'auto'")
        assert self.model.outputs is not None  # `require` checks it
        reading, length = self.model.outputs.reading, self.model.max_length
        if reading is None:  # BERT's `run_squad.py`: 384, 64 and 128; less for a shorter model
            length = min(length, self.max_length or 384)
            question = min(64, length // 4)
            reading = Reading(max(1, min(128, (length - question - MAX_SPECIAL) // 2)), question)
        question = min(reading.max_question, length - MAX_SPECIAL - 1)
        stride = min(reading.stride, length - MAX_SPECIAL - question)
        self._windows = WindowOptions(length, stride, question)
        self._max_tokens = min(self.max_answer_tokens or reading.max_answer_tokens, length)
        self._threshold = reading.null_threshold if isinstance(given, str) else given

    @override
    def example(self, fields: Mapping[str, Any], origin: Origin) -> Question:
        question, context = (text_field(fields, name, origin) for name in self.FIELDS)
        return Question(f"{origin}", question, context, None, origin)

    @override
    def prepare(self, examples: Sequence[Question]) -> Prepared[Question]:
        built = build_windows(examples, self.model.tokenizer, self._windows)
        starts = np.array([window.context_at for window in built.windows], np.int32)
        rows = Rows([window.ids for window in built.windows], starts)
        limit = f"questions are longer than {self._windows.max_question} tokens"
        return Prepared(examples, rows, built, built.cut_questions, limit)

    @override
    def answers(self, prepared: Prepared[Question], outputs: Sequence[np.ndarray]) -> list[Answer]:
        built: SquadWindows = prepared.context
        starts, ends = ([each[:, n] for each in outputs] for n in (0, 1))
        found = find_answers(
            prepared.examples, built.windows, starts, ends, num_best=max(20, self.top),
            max_answer_tokens=self._max_tokens,
        )  # fmt: skip
        return [self._answer(prediction) for prediction in found]

    @override
    def lines(self, example: Question, answer: Answer) -> list[str]:
        listed = answer.get("candidates", [answer])
        return [f"{each['answer'] or '(no answer)'}   {each['probability']:.3f}" for each in listed]

    def _answer(self, prediction: Prediction) -> Answer:
        """Return the answer to one question, with the fields described in `LoadedModel.answer`.

        There are at most max(20, `top`) candidates, and their probabilities add up to 1. If there
        is a threshold, "no answer" is a further candidate.
        """
        listed: list[Answer] = [
            {"answer": each.text, "start": each.start, "end": each.end,
             "probability": round(share, 6)}
            for each, share in prediction.shares(with_null=self._threshold is not None)
        ]  # fmt: skip
        text = prediction.text(self._threshold)
        listed.sort(key=lambda each: each["answer"] != text)  # the answer comes first
        answer: Answer = {**listed[0], "null_odds": round(prediction.null_odds, 6)}
        return answer if self.top == 1 else {**answer, "candidates": listed[: self.top]}
