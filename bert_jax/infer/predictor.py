"""The interface of inference verbs: fields to examples, to rows, to answers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import jax
import numpy as np

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.distributed.parallel.in_flight import in_flight
from bert_jax.errors import UserError
from bert_jax.infer.batching import MAX_TOKENS, row_batches
from bert_jax.infer.forward import task_logits
from bert_jax.tasks.examples import Origin, TextExample
from bert_jax.tasks.problems import SHOWN
from bert_jax.tasks.rows import Batch, Rows

Answer = dict[str, Any]
"""Answer, as in a JSON line."""

Example = TypeVar("Example")

PART = 1024
"""Examples between two signs of progress."""


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
