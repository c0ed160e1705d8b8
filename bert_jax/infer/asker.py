"""What each verb is to those that feed it: fields to examples, to rows, to answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from bert_jax.errors import UserError
from bert_jax.finetune.rows import Batch, Rows
from bert_jax.infer.batching import run_rows
from bert_jax.infer.network import Network
from bert_jax.tasks.examples import Origin

Answer = dict[str, Any]
"""As it stands in a JSON line."""

Example = TypeVar("Example")


@dataclass(frozen=True, eq=False)
class Prepared(Generic[Example]):
    """Examples that can be judged.

    Attributes:
        examples: In their order.
        rows: One or more an example.
        context: What `answers` needs beside them.
        warnings: What was cut.
    """

    examples: Sequence[Example]
    rows: Rows
    context: Any = None
    warnings: tuple[str, ...] = ()


@runtime_checkable
class Asker(Protocol[Example]):
    """A verb with its options and a model."""

    network: Network
    FIELDS: ClassVar[tuple[str, ...]]
    """Of a JSON line; a line of plain text is the first."""

    def example(self, fields: Mapping[str, Any], origin: Origin) -> Example:
        """One example.

        Raises:
            UserError: A field is missing or is of another type.
        """
        ...

    def prepare(self, examples: Sequence[Example]) -> Prepared[Example]:
        """Tokens.

        Raises:
            UserError: An example cannot be asked about.
        """
        ...

    def judge(self, batch: Batch) -> Any:
        """A batch to arrays with the rows on axis 0."""
        ...

    def answers(self, prepared: Prepared[Example], outputs: Sequence[Any]) -> Sequence[Any]:
        """What is said of each example: JSON lines' objects, of embeddings (D,) arrays."""
        ...

    def lines(self, example: Example, answer: Any) -> list[str]:
        """For people to read."""
        ...


def ask(asker: Asker[Example], prepared: Prepared[Example]) -> Sequence[Any]:
    """Judges the rows; see `Asker.answers`."""
    network = asker.network
    outputs = run_rows(
        prepared.rows, asker.judge, limit=network.max_length,
        pad_id=network.tokenizer.special_ids.pad,
    )  # fmt: skip
    return asker.answers(prepared, outputs)


def text_field(fields: Mapping[str, Any], name: str, origin: Origin) -> str:
    """A field that is text.

    Raises:
        UserError: There is none.
    """
    if name not in fields:
        there = ", ".join(map(repr, list(fields)[:8])) or "no field"
        raise UserError(f"{origin}: there is no field {name!r} but {there:.200}")
    value = fields[name]
    if not isinstance(value, str):
        raise UserError(f"{origin}: the field {name!r} holds {value!r:.60}, not text")
    return value


def finite(outputs: Sequence[np.ndarray], name: str) -> None:
    """Refuses what is no number.

    Raises:
        UserError: The model has diverged.
    """
    if not all(np.isfinite(output).all() for output in outputs):
        raise UserError(f"{name}: outputs are not finite; the model has diverged or is damaged")
