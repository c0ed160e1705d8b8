"""The interface of inference verbs: fields to examples, to rows in batches, to answers in order."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, ClassVar, Generic, Literal, TypeVar

import jax
import numpy as np
from jaxtyping import Int64

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.distributed.parallel.sharding import in_flight
from bert_jax.errors import UserError
from bert_jax.infer.forward import task_logits
from bert_jax.infer.records import PAUSE, Record
from bert_jax.tasks.examples import SHOWN, Origin, TextExample
from bert_jax.tasks.rows import Batch, Rows, eval_batches

Answer = dict[str, Any]
"""Answer, as in a JSON line."""

Example = TypeVar("Example")

PART = 1024
"""Examples between two signs of progress."""
LENGTHS = (16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
"""Rows are padded to the next of these, and to no more than the model's positions."""
MAX_TOKENS = 1024
"""Tokens in a batch: more are no faster on a CPU, and the rows of a batch are less alike in length.
A last batch, or a small call, has the next power of 2 of rows."""
MAX_CHARS = 4_000_000
"""Max chars of the fields of a chunk, so that long texts do not fill memory."""


@dataclass(frozen=True, eq=False)
class Prepared(Generic[Example]):
    """Examples, in their order, as rows of tokens, one or more an example."""

    examples: Sequence[Example]
    rows: Rows
    context: Any = None
    """Values that `answers` needs beside the rows."""
    cut: Sequence[int] = ()
    """Positions of the examples that were too long and lost their end."""
    limit: str = ""
    """Limit that they exceeded, such as "texts are longer than 128 tokens"."""
    done: str = "were cut there"


class Cuts:
    """Count of the examples that were cut, for one warning about all of them."""

    def __init__(self) -> None:
        self._total = self._cut = 0
        self._limit, self._done, self._first = "", "", ""

    def add(self, prepared: Prepared[Any]) -> None:
        """Count some more."""
        for n in prepared.cut[: max(0, SHOWN - self._cut)]:
            self._first += f"{'; ' if self._first else ''}{prepared.examples[n].origin}"
        self._total += len(prepared.examples)
        self._cut += len(prepared.cut)
        self._limit, self._done = prepared.limit, prepared.done

    def warning(self) -> str:
        """Return the warning; empty where nothing was cut."""
        found = self._first + ("; ..." if self._cut > SHOWN else "")
        warning = f"{self._cut:,} of {self._total:,} {self._limit} and {self._done} ({found})"
        return warning if self._cut else ""


class Given(Origin):
    """A position in a list that was passed, in no file."""

    def __str__(self) -> str:
        return f"{self.path} {self.line}"


@dataclass(eq=False)
class Predictor(ABC, Generic[Example]):
    """A verb with its options and a model."""

    model: SavedModel
    """Model on a device."""
    batch_tokens: int = field(default=MAX_TOKENS, kw_only=True)
    """Tokens in a batch of more than one row at most."""

    FIELDS: ClassVar[tuple[str, ...]]
    """Fields of a JSON line; a line of plain text is the first."""
    PER_TOKEN: ClassVar[bool] = False
    """Whether `forward` returns (B, L, ...); outputs of padding are dropped."""

    CHUNK: ClassVar[int] = 4096
    """Largest number of records that are answered at once, between two signs of progress."""

    @property
    def width(self) -> int | None:
        """D of answers that are vectors; None: answers are objects."""
        return None

    @abstractmethod
    def example(self, fields: Mapping[str, Any], origin: Origin) -> Example:
        """Make an example; refuse a field that is missing or of another type."""

    @abstractmethod
    def prepare(self, examples: Sequence[Example]) -> Prepared[Example]:
        """Make rows of tokens; refuse an example that cannot be asked about."""

    def forward(self, batch: Batch) -> Any:
        """Run a batch, and return arrays with rows on axis 0: logits of the fine-tuned head."""
        return task_logits(self.model, batch)

    @abstractmethod
    def answers(self, prepared: Prepared[Example], outputs: Sequence[Any]) -> Sequence[Any]:
        """Return the answer to each example: an object for a JSON line, or an embedding (D,)."""

    @abstractmethod
    def lines(self, example: Example, answer: Any) -> list[str]:
        """Format an answer for people to read."""

    def line(self, answer: Any) -> str:
        """Format an answer as one line, of a verb whose answers are texts."""
        raise NotImplementedError

    def outputs(self, rows: Rows) -> list[Any]:
        """Compute what `forward` returns for each row; refuse outputs that are not finite."""
        model = self.model
        found: list[Any] = [None] * len(rows)
        pad = model.tokenizer.special_ids.pad
        batches = row_batches(rows, model.max_length, pad, self.batch_tokens)
        for (index, _), outputs in in_flight(lambda item: self.forward(item[1]), batches, ahead=1):
            leaves, tree = jax.tree.flatten(outputs)
            for number, row in enumerate(index):
                end = rows.lengths[row]
                parts = [leaf[number][:end] if self.PER_TOKEN else leaf[number] for leaf in leaves]
                found[row] = jax.tree.unflatten(tree, parts)
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found)):
            raise UserError(
                f"{model.name}: outputs are not finite; the model has diverged or is damaged"
            )
        return found

    def predict(self, prepared: Prepared[Example]) -> Sequence[Any]:
        """Return the answer to each prepared example."""
        return self.answers(prepared, self.outputs(prepared.rows))

    def parts(
        self, columns: Mapping[str, Sequence[Any]], *, what: str = "text", most: int = PART,
        cuts: Cuts | None = None, advance: Callable[[int], object] = lambda count: None,
    ) -> Iterator[Prepared[Example]]:  # fmt: skip
        """Yield prepared examples, at most so many at once, of columns by field.

        `what` names an example in messages, `cuts` counts the examples that are cut, and `advance`
        takes the number of examples after each part.
        """
        examples = [
            self.example(dict(zip(columns, values, strict=True)), Given(what, number))
            for number, values in enumerate(zip(*columns.values(), strict=True), 1)
        ]
        for begin in range(0, len(examples), most):
            prepared = self.prepare(examples[begin : begin + most])
            if cuts is not None:
                cuts.add(prepared)
            yield prepared
            advance(len(prepared.examples))


class TextPredictor(Predictor[TextExample]):
    """A verb for texts, each perhaps with a second one, the field after `FIELDS[0]`."""

    def example(self, fields: Mapping[str, Any], origin: Origin) -> TextExample:
        """Make an example."""
        first, *more = self.FIELDS
        text = text_field(fields, first, origin)
        given = [name for name in more if fields.get(name) is not None]
        pair = text_field(fields, given[0], origin) if given else None
        return TextExample("", text, pair, None, origin)


def shape_for(
    longest: int, count: int, limit: int, max_tokens: int = MAX_TOKENS
) -> tuple[int, int]:
    """Return rows and length of a batch: the longest row has so many tokens, and `count` are left.

    A row has at most `limit` tokens, a batch of more than one row at most `max_tokens`.
    """
    length = next((length for length in LENGTHS if longest <= length < limit), limit)
    most = max(1, max_tokens // length)
    return min(1 << (most.bit_length() - 1), 1 << (count - 1).bit_length()), length


def row_batches(
    rows: Rows, limit: int, pad_id: int, max_tokens: int = MAX_TOKENS
) -> Iterator[tuple[Int64[np.ndarray, " B"], Batch]]:
    """Yield the numbers of some rows, longest first, and their batch, until all have had a turn.

    `bert-jax predict` has other lengths, `tasks.batches.choose_buckets`: those with the least
    padding for the rows of one file, where these are shared by all calls (docs/decisions.md).
    """
    order = np.argsort(-rows.lengths, kind="stable")
    at = 0
    while at < len(order):
        longest = int(rows.lengths[order[at]])
        size, length = shape_for(longest, len(order) - at, limit, max_tokens)
        index = order[at : at + size]
        own = Rows([rows.tokens[row] for row in index.tolist()], rows.second_start[index])
        ((_, batch),) = eval_batches(own, (length,), size, pad_id)
        yield index, batch
        at += size


def answer_records(
    predictor: Predictor[Any], records: Iterable[Record], *, say: Callable[[str], object],
    on_error: Literal["fail", "skip"] = "fail",
) -> Iterator[list[Record]]:  # fmt: skip
    """Yield the records with their answers, in chunks.

    `on_error` fail raises at the first record that cannot be asked about; skip leaves the record
    without answer and says why in its `problem`. `say` takes warnings: the first few records
    skipped, and at the end what was cut.
    """
    cuts, skipped = Cuts(), 0

    def refuse(record: Record, problem: str) -> None:
        nonlocal skipped
        record.problem = problem
        skipped += on_error == "skip"
        if on_error == "skip" and skipped <= SHOWN:
            say(f"Skipped: {problem}")

    def sound(chunk: list[Record]) -> list[Record]:
        """Return the records before the first that ends all."""
        return [*takewhile(lambda record: on_error == "skip" or record.problem is None, chunk)]

    try:
        for chunk in chunks(records, predictor.CHUNK):
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


def chunks(records: Iterable[Record], most: int) -> Iterator[list[Record]]:
    """Yield records so many at once, fewer where they are long or their input pauses."""
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


def check_count(name: str, value: int) -> None:
    """Refuse a number below 1 by the name of its option."""
    if value < 1:
        raise UserError(f"{name} is {value}; it must be at least 1")


def text_field(fields: Mapping[str, Any], name: str, origin: Origin) -> str:
    """Return a field that is text; refuse another, or none."""
    if name not in fields:
        there = ", ".join(map(repr, list(fields)[:8])) or "no field"
        raise UserError(f"{origin}: there is no field {name!r} but {there:.200}")
    value = fields[name]
    if not isinstance(value, str):
        raise UserError(f"{origin}: the field {name!r} holds {value!r:.60}, not text")
    return value
