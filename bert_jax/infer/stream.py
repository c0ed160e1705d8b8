"""Many records through a verb, some thousand at a time, in order."""

from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import Any, Literal

from bert_jax.errors import UserError
from bert_jax.infer.predictor import Cuts, Predictor
from bert_jax.infer.records import PAUSE, Record

OnError = Literal["fail", "skip"]
MAX_RECORDS = 4096
MAX_CHARS = 4_000_000
"""Max chars of the fields of a chunk, so that long texts do not fill memory."""
_SHOWN = 5


def answer_records(
    predictor: Predictor[Any], records: Iterable[Record], *, on_error: OnError = "fail",
    say: Callable[[str], object],
) -> Iterator[list[Record]]:  # fmt: skip
    """Yield the records with their answers, in chunks.

    `on_error` fail raises at the first record that cannot be asked about; skip leaves the record
    without answer and says why in its `problem`. `say` takes warnings: the first few records
    skipped, and at the end what was cut.

    Raises:
        UserError: A record cannot be asked about, on `fail`; or the model's outputs are not finite.
    """
    cuts, skipped = Cuts(), 0

    def refuse(record: Record, problem: str) -> None:
        nonlocal skipped
        record.problem = problem
        skipped += on_error == "skip"
        if on_error == "skip" and skipped <= _SHOWN:
            say(f"Skipped: {problem}")

    def sound(chunk: list[Record]) -> list[Record]:
        """Return the records before the first that ends all."""
        return [*takewhile(lambda record: on_error == "skip" or record.problem is None, chunk)]

    try:
        for chunk in _chunks(records, min(MAX_RECORDS, predictor.CHUNK)):
            for record in chunk:
                if record.line:
                    continue
                try:
                    if record.problem is None:
                        record.example = predictor.example(record.fields, record.origin)
                    else:
                        refuse(record, record.problem)
                except UserError as error:
                    refuse(record, f"{error}")
            asked = sound(chunk)
            _answer(predictor, asked, refuse, cuts)
            answered = sound(asked)
            yield answered
            if len(answered) < len(chunk):
                raise UserError(f"{chunk[len(answered)].problem}")
    finally:
        if warning := cuts.warning():
            say(f"Warning: {warning}")


def _answer(
    predictor: Predictor[Any], chunk: list[Record], refuse: Callable[[Record, str], None],
    cuts: Cuts,
) -> None:  # fmt: skip
    """Answer the records without a problem; refuse the records that cannot be prepared."""
    asked = [record for record in chunk if record.problem is None and not record.line]
    if not asked:
        return
    try:
        prepared = predictor.prepare([record.example for record in asked])
    except UserError:
        for record in asked:
            try:
                predictor.prepare([record.example])
            except UserError as error:
                refuse(record, f"{error}")
        asked = [record for record in asked if record.problem is None]
        if not asked:
            return
        prepared = predictor.prepare([record.example for record in asked])
    cuts.add(prepared)
    for record, answer in zip(asked, predictor.predict(prepared), strict=True):
        record.answer = answer


def _chunks(records: Iterable[Record], most: int) -> Iterator[list[Record]]:
    chunk: list[Record] = []
    chars = 0
    for record in records:
        if record is not PAUSE:
            chunk.append(record)
            chars += sum(len(str(value)) for value in record.fields.values())
        full = len(chunk) == most or chars > MAX_CHARS
        if chunk and (full or record is PAUSE):
            yield chunk
            chunk, chars = [], 0
    if chunk:
        yield chunk
