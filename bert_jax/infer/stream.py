"""Many records through a verb, some thousand at a time, in order."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bert_jax.errors import UserError
from bert_jax.infer.asker import Asker, Cuts, Prepared, ask
from bert_jax.infer.records import PAUSE, Record

OnError = Literal["fail", "skip"]
MAX_RECORDS = 4096
MAX_CHARS = 4_000_000
"""Max chars of the fields of a chunk, so that long texts do not fill memory."""
_SHOWN = 5


@dataclass(frozen=True)
class Skipped:
    """Stands in the place of an answer."""

    message: str
    line: int


@dataclass(frozen=True)
class Answered:
    """A record, its example, and what is said of it."""

    record: Record
    example: Any
    answer: Any
    """Or `Skipped`."""


@dataclass
class Counts:
    """Counts of a stream."""

    records: int = 0
    skipped: int = 0


def answer_records(
    asker: Asker[Any],
    records: Iterable[Record],
    *,
    on_error: OnError = "fail",
    counts: Counts | None = None,
    done: Callable[[int], object] = lambda count: None,
    say: Callable[[str], object] = lambda line: print(line, file=sys.stderr),
) -> Iterator[list[Answered]]:
    """Answers, in chunks.

    Args:
        asker: The verb.
        records: Records to ask about.
        on_error: fail raises at the first record that cannot be asked about; skip puts a `Skipped`
            in its place.
        counts: Counted up.
        done: Told how many records were answered.
        say: Takes warnings: the first few records skipped, and at the end what was cut.

    Raises:
        UserError: A record cannot be asked about, on `fail`; or the model's outputs are no numbers.
    """
    counts, cuts = counts or Counts(), Cuts()
    try:
        yield from _answered(asker, records, on_error, counts, cuts, done, say)
    finally:
        if warning := cuts.warning():
            say(f"Warning: {warning}")


def _answered(
    asker: Asker[Any],
    records: Iterable[Record],
    on_error: OnError,
    counts: Counts,
    cuts: Cuts,
    done: Callable[[int], object],
    say: Callable[[str], object],
) -> Iterator[list[Answered]]:
    for chunk in _chunks(records):
        slots: list[Any] = [None] * len(chunk)

        def skip(
            place: int, message: str, chunk: Sequence[Record] = chunk, slots: list[Any] = slots
        ) -> None:
            if on_error == "fail":
                raise UserError(message)
            counts.skipped += 1
            if counts.skipped <= _SHOWN:
                say(f"Skipped: {message}")
            slots[place] = Skipped(message, chunk[place].origin.line)

        examples: dict[int, Any] = {}
        for place, record in enumerate(chunk):
            if record.problem is not None:
                skip(place, record.problem)
                continue
            try:
                examples[place] = asker.example(record.fields, record.origin)
            except UserError as error:
                skip(place, f"{error}")
        prepared = _prepared(asker, examples, skip)
        if prepared is not None:
            cuts.add(prepared)
            for place, answer in zip(examples, ask(asker, prepared), strict=True):
                slots[place] = answer
        counts.records += len(chunk)
        done(len(chunk))
        yield [
            Answered(record, examples.get(place), slots[place])
            for place, record in enumerate(chunk)
        ]


def _prepared(
    asker: Asker[Any], examples: dict[int, Any], skip: Callable[[int, str], None]
) -> Prepared[Any] | None:
    """Prepare all examples, and take out the examples that cannot be prepared."""
    try:
        return asker.prepare(list(examples.values())) if examples else None
    except UserError:
        for place, example in list(examples.items()):
            try:
                asker.prepare([example])
            except UserError as error:
                skip(place, f"{error}")
                del examples[place]
    return asker.prepare(list(examples.values())) if examples else None


def _chunks(records: Iterable[Record]) -> Iterator[list[Record]]:
    chunk: list[Record] = []
    chars = 0
    for record in records:
        if record is not PAUSE:
            chunk.append(record)
            chars += sum(len(str(value)) for value in record.fields.values())
        full = len(chunk) == MAX_RECORDS or chars > MAX_CHARS
        if chunk and (full or record is PAUSE):
            yield chunk
            chunk, chars = [], 0
    if chunk:
        yield chunk
