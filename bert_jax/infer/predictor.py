"""Base class of predictors, which turn input fields into examples, rows, batches and answers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, ClassVar, Generic, Literal, TypeVar

import jax
import numpy as np
from jaxtyping import Int64
from typing_extensions import override

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.config.bounds import Bounded
from bert_jax.distributed.parallel.in_flight import in_flight
from bert_jax.errors import UserError
from bert_jax.infer.forward import task_logits
from bert_jax.infer.records import PAUSE, Record
from bert_jax.tasks.examples import SHOWN, Origin, TextExample
from bert_jax.tasks.rows import Batch, Rows, eval_batches

Answer = dict[str, Any]
"""An answer as a JSON object. Output files have one such object per line."""

Example = TypeVar("Example")

PART = 1024
"""Number of examples after which progress is reported."""
LENGTHS = (
    *(16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512),
    *(640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144),
)
"""Lengths in tokens to which rows are padded, up to the longest row that the model takes."""
MAX_TOKENS = 1024
"""Largest number of tokens in a batch. Larger batches of an encoder are no faster on a CPU.
The last batch may be smaller: its number of rows is padded to a power of 2."""
MAX_CHARS = 4_000_000
"""Number of characters after which a chunk of records ends, so that memory stays bounded."""


@dataclass(frozen=True, eq=False)
class Prepared(Generic[Example]):
    """Examples in order, and their rows of tokens. An example may have several rows."""

    examples: Sequence[Example]
    rows: Rows
    context: Any = None
    """Values that `answers` needs besides the rows."""
    cut: Sequence[int] = ()
    """Positions in `examples` of the examples that were cut because they were too long."""
    limit: str = ""
    """Limit that was exceeded, such as "texts are longer than 128 tokens"."""
    done: str = "were cut there"
    """Verb phrase that tells, in the warning, what happened to the examples."""


class Cuts:
    """Counter of the examples that were cut, for one warning about all of them."""

    def __init__(self) -> None:
        self._total = self._cut = 0
        self._limit, self._done, self._first = "", "", ""

    def add(self, prepared: Prepared[Any]) -> None:
        """Add the examples of one part to the counts."""
        for n in prepared.cut[: max(0, SHOWN - self._cut)]:
            self._first += f"{'; ' if self._first else ''}{prepared.examples[n].origin}"
        self._total += len(prepared.examples)
        self._cut += len(prepared.cut)
        if prepared.cut:
            self._limit, self._done = prepared.limit, prepared.done

    def warning(self) -> str:
        """Return the warning, which is empty if nothing was cut."""
        found = self._first + ("; ..." if self._cut > SHOWN else "")
        warning = f"{self._cut:,} of {self._total:,} {self._limit} and {self._done} ({found})"
        return warning if self._cut else ""


class Given(Origin):
    """Origin of an example in a list from the caller: a name and the position, from 1."""

    def __str__(self) -> str:
        return f"{self.path} {self.line}"


@dataclass(eq=False)
class Predictor(ABC, Generic[Example], Bounded):
    """Base class of predictors. A predictor has a model and options."""

    model: SavedModel
    """Model from `forward.on_device`."""
    batch_tokens: int = field(default=MAX_TOKENS, kw_only=True)
    """Largest number of tokens in a batch of more than one row."""

    FIELDS: ClassVar[tuple[str, ...]]
    """Fields that are read from a JSON line. Plain text is the value of the first field."""
    PER_TOKEN: ClassVar[bool] = False
    """Whether `forward` returns an output for each token, (B, L, ...); padding is then removed."""
    CHUNK: ClassVar[int] = 4096
    """Largest number of records that `answer_records` answers together."""

    @property
    def width(self) -> int | None:
        """Width D if answers are vectors; None if answers are JSON objects."""
        return None

    @abstractmethod
    def example(self, fields: Mapping[str, Any], origin: Origin) -> Example:
        """Make an example from fields. Raise a UserError for a missing field or a wrong type."""

    @abstractmethod
    def prepare(self, examples: Sequence[Example]) -> Prepared[Example]:
        """Encode examples as rows of tokens. Raise a UserError if an example cannot be answered."""

    def forward(self, batch: Batch) -> Any:
        """Run the model; return arrays with rows on axis 0, by default the logits of the head."""
        return task_logits(self.model, batch)

    @abstractmethod
    def answers(self, prepared: Prepared[Example], outputs: Sequence[Any]) -> Sequence[Any]:
        """Return the answer to each example: an object for a JSON line, or a vector (D,)."""

    @abstractmethod
    def lines(self, example: Example, answer: Any) -> list[str]:
        """Format an answer for people to read, in one or more lines."""

    def fields(self, answer: Any) -> dict[str, Any]:
        """Return the fields of an answer's JSON line."""
        return {"embedding": answer} if isinstance(answer, np.ndarray) else answer

    def line(self, answer: Any) -> str:
        """Format an answer as one line of text. Only predictors whose answers are texts do this."""
        raise NotImplementedError

    def outputs(self, rows: Rows) -> list[Any]:
        """Return the outputs of `forward` by row. Raise a UserError if a value is not finite."""
        model = self.model
        found: list[Any] = [None] * len(rows)
        pad = model.tokenizer.special_ids.pad
        batches = row_batches(rows, model.max_length, pad, self.batch_tokens)

        def computed(item: tuple[Int64[np.ndarray, " B"], Batch]) -> tuple[list[np.ndarray], Any]:
            return jax.tree.flatten(jax.device_get(self.forward(item[1])))

        # The small operations of one batch leave cores idle, so two batches are computed at once.
        with ThreadPoolExecutor(max_workers=2) as threads:
            begun = in_flight(lambda item: threads.submit(computed, item), batches)
            for (index, _), future in begun:
                leaves, tree = future.result()
                for number, row in enumerate(index):
                    own = [leaf[number] for leaf in leaves]
                    own = [part[: rows.lengths[row]] for part in own] if self.PER_TOKEN else own
                    found[row] = jax.tree.unflatten(tree, own)
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
        """Prepare examples in parts of at most `most` examples.

        `columns` maps each field to its values in all examples. `what` is the noun for an example
        in messages, such as "text" in "text 3". `cuts` counts the examples that are cut. `advance`
        is called with the size of a part when the next part is requested. Raise a UserError if a
        field has a wrong type, or an example cannot be answered.
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
    """A predictor for texts. The first field is the text; a later field may be a second text."""

    @override
    def example(self, fields: Mapping[str, Any], origin: Origin) -> TextExample:
        first, *more = self.FIELDS
        text = text_field(fields, first, origin)
        given = [name for name in more if fields.get(name) is not None]
        pair = text_field(fields, given[0], origin) if given else None
        return TextExample("", text, pair, None, origin)


def shape_for(
    longest: int, count: int, limit: int, max_tokens: int = MAX_TOKENS
) -> tuple[int, int]:
    """Return the shape (rows, tokens) of the next batch.

    The longest of the `count` rows that are left has `longest` tokens. A row may have at most
    `limit` tokens, and a batch with several rows at most `max_tokens` tokens.
    """
    length = next((length for length in LENGTHS if longest <= length < limit), limit)
    most = max(1, max_tokens // length)
    return min(1 << (most.bit_length() - 1), 1 << (count - 1).bit_length()), length


def row_batches(
    rows: Rows, limit: int, pad_id: int, max_tokens: int = MAX_TOKENS
) -> Iterator[tuple[Int64[np.ndarray, " B"], Batch]]:
    """Yield the rows in batches, longest rows first, each batch with the indices of its rows.

    Every call pads to the same `LENGTHS` (docs/decisions.md). In contrast, `bert-jax predict`
    chooses the lengths with the least padding for its file (`tasks.rows.choose_buckets`).
    """
    order = np.argsort(-rows.lengths, kind="stable")
    at = 0
    while at < len(order):
        size, length = shape_for(int(rows.lengths[order[at]]), len(order) - at, limit, max_tokens)
        index = order[at : at + size]
        labels = rows.labels[index] if isinstance(rows.labels, np.ndarray) else None
        own = Rows([rows.tokens[row] for row in index.tolist()], rows.second_start[index], labels)
        ((_, batch),) = eval_batches(own, (length,), size, pad_id)
        yield index, batch
        at += size


def answer_records(
    predictor: Predictor[Any], records: Iterable[Record], *, say: Callable[[str], object],
    on_error: Literal["fail", "skip"] = "fail",
) -> Iterator[list[Record]]:  # fmt: skip
    """Yield the records with their answers, in chunks.

    If a record cannot be answered and `on_error` is "skip", the record has no answer, and
    `Record.problem` has the reason. `say` receives a message for each of the first few skipped
    records and, at the end, a warning if examples were cut. Raise a UserError if a record cannot be
    answered and `on_error` is "fail", or an output is not finite.
    """
    cuts, skipped = Cuts(), 0

    def refuse(record: Record, problem: str) -> None:
        nonlocal skipped
        record.problem = problem.encode(errors="replace").decode()  # with a path, may not be UTF-8
        skipped += on_error == "skip"
        if on_error == "skip" and skipped <= SHOWN:
            say(f"Skipped: {problem}")

    def sound(chunk: list[Record]) -> list[Record]:
        """Return the records up to the first problem, or all if problems are skipped."""
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
    """Answer the records that have no problem. Call `refuse` for each that cannot be prepared."""
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
    """Yield lists of at most `most` records; `MAX_CHARS` characters or a `PAUSE` end a list."""
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
    """Raise a UserError that names the option `name` if its value is below 1."""
    if value < 1:
        raise UserError(f"{name} is {value}; it must be at least 1")


def text_field(fields: Mapping[str, Any], name: str, origin: Origin) -> str:
    """Return the value of a text field. Raise a UserError if it is missing or not a string."""
    if name not in fields:
        there = ", ".join(map(repr, list(fields)[:8])) or "none"
        raise UserError(f"{origin}: no field {name!r}; the fields present are {there:.200}")
    value = fields[name]
    if not isinstance(value, str):
        raise UserError(f"{origin}: the field {name!r} is {value!r:.60}; it must be a string")
    return value
