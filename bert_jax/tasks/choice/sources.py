"""Texts with choices, from a table."""

from dataclasses import dataclass
from typing import Any

from bert_jax.errors import UserError
from bert_jax.tasks.examples import LabelSet, Origin
from bert_jax.tasks.kinds.choice import ChoiceConfig
from bert_jax.tasks.problems import MissingColumn, Problems
from bert_jax.tasks.tables.delimited import TableFormat
from bert_jax.tasks.tables.files import read_rows


@dataclass(frozen=True)
class ChoiceExample:
    """A text and its choices."""

    id: str
    """Name of the example in the file, else its number from 0."""
    text: str
    choices: tuple[str, ...]
    """Choices, each with the beginning that all choices share."""
    label: int | None
    """Number of the right choice; None where the file has no labels."""
    origin: Origin


def read_choices(
    source: str, config: ChoiceConfig, *, labelled: bool = True
) -> list[ChoiceExample]:
    """Read texts with choices.

    Args:
        source: a CSV, TSV, JSON lines or parquet file, or `tfds:NAME:SPLIT`.
        config: columns, and how the file is written.
        labelled: False leaves the labels out.

    Raises:
        UserError: the file or a column cannot be read, or rows are wrong: the first five are named
            with their lines, the rest are counted.
    """
    table = TableFormat(config.format)
    columns = [config.text, *config.choices]
    optional = [name for name in (config.beginning, config.id) if name]
    columns += [*optional, *([config.label] if labelled else [])]
    labels, problems = LabelSet(config.names), Problems(source)
    found: list[ChoiceExample] = []
    ids: set[str] = set()
    for row in read_rows(source, columns, table):
        try:
            if row.problem:
                raise UserError(row.problem)
            values = dict(zip(columns, row.values, strict=True))
            begin = _text(values, config.beginning, row.origin) if config.beginning else ""
            choices = tuple(
                " ".join(filter(None, (begin, _text(values, name, row.origin))))
                for name in config.choices
            )
            id = f"{values[config.id]}" if config.id else f"{len(found)}"
            if config.id and (id in ids or id in ("", "None")):
                raise UserError(f"{row.origin}: the id {id[:80]!r} is empty, or there twice")
            ids.add(id)
            label = (
                labels.id(_name(values[config.label], config, row.origin), row.origin)
                if (labelled)
                else None
            )
            text = _text(values, config.text, row.origin)
            found.append(ChoiceExample(id, text, choices, label, row.origin))
        except UserError as error:
            problems.add(error)
    problems.check()
    if not found:
        raise UserError(f"{source} has no examples")
    return found


def read_other_choices(
    source: str, config: ChoiceConfig, *, labelled: bool
) -> tuple[list[ChoiceExample], tuple[str, ...]]:
    """Read a table that may lack the column of the label; a warning then says so."""
    try:
        return read_choices(source, config, labelled=labelled), ()
    except MissingColumn as error:
        if error.column != config.label:
            raise
        note = f"{source}: there is no column {error.column!r}, so its rows have no labels"
        return read_choices(source, config, labelled=False), (note,)


def _text(values: dict[str, Any], column: str, origin: Origin) -> str:
    value = values[column]
    if not isinstance(value, str) or "\0" in value:
        what = "nothing" if value is None else f"{value!r:.60}"
        raise UserError(f"{origin}: column {column!r} holds {what}, not text")
    return value


def _name(value: Any, config: ChoiceConfig, origin: Origin) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a parquet column of whole numbers with gaps comes as floats
    if not isinstance(value, int | str) or isinstance(value, bool):
        raise UserError(
            f"{origin}: column {config.label!r} holds {value!r:.60}; expected one of "
            f"{', '.join(config.names)}"
        )
    return f"{value}"
