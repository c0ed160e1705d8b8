"""A verb from its arguments to its answers."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bert_jax.errors import UserError
from bert_jax.infer.asker import Asker, Given
from bert_jax.infer.embed import Embedder
from bert_jax.infer.records import STDIN, Format, Record, format_of, read_records
from bert_jax.infer.stream import Counts, OnError, answer_records
from bert_jax.infer.writers import check_out, opened_writer
from bert_jax.tasks.tables.delimited import TableFormat
from bert_jax.tokenization.tokenizer import replace_surrogates


def run_verb(
    asker: Asker[Any],
    texts: Sequence[str],
    inputs: Sequence[str],
    *,
    more: dict[str, Any],
    fields: Sequence[str] = (),
    format: Format = "auto",
    table: TableFormat | None = None,
    out: Path | None = None,
    as_json: bool = False,
    on_error: OnError = "fail",
) -> None:
    """Answers to texts that are given, or to the lines of files.

    Args:
        asker: The verb, with a model.
        texts: Given on the command line; a single `-` is standard input.
        inputs: Files. Without texts and files standard input is read.
        more: Fields that are the same for all.
        fields: OURS=THEIRS, names of the fields of JSON lines and tables.
        format: Format of the files.
        table: How CSV and TSV files are written.
        out: Where answers go.
        as_json: JSON lines even for texts that are given.
        on_error: See `answer_records`.

    Raises:
        UserError: Nothing to read, or see `read_records`, `answer_records`, `opened_writer`.
    """
    if list(texts) == [STDIN]:
        texts, inputs = (), [*inputs, STDIN]
    if texts and inputs:
        raise UserError("give texts or --input FILE, not both")
    if not texts and not inputs:
        if sys.stdin.isatty():
            raise UserError("there is nothing to read: give texts, --input FILE, or pipe lines in")
        inputs = [STDIN]
    names = _names(fields, asker)
    total = sum(os.path.getsize(name) for name in inputs if os.path.isfile(name))
    counts = Counts()
    with tqdm(
        total=total if total and STDIN not in inputs else None,
        unit="B", unit_scale=True, disable=not inputs or not sys.stderr.isatty(),
    ) as bar:  # fmt: skip

        def records() -> Iterator[Record]:
            for number, text in enumerate(texts, 1):
                given = {asker.FIELDS[0]: replace_surrogates(text)}
                yield Record(Given("text", number), {**more, **given})
            for source in inputs:
                yield from read_records(
                    source, format=format, fields=asker.FIELDS, names=names, more=more,
                    table=table, read=bar.update,
                )  # fmt: skip

        width = asker.width if isinstance(asker, Embedder) else None
        as_json = as_json or bool(inputs)
        with opened_writer(asker, out, as_json=as_json, width=width) as writer:
            for answered in answer_records(
                asker, records(), on_error=on_error, counts=counts,
                done=lambda count: bar.set_postfix(answered=counts.records),
                say=lambda line: bar.write(line, file=sys.stderr),
            ):  # fmt: skip
                writer.write(answered)
    if counts.skipped:
        print(f"{counts.skipped:,} of {counts.records:,} records were skipped", file=sys.stderr)
    if out is not None:
        print(f"{counts.records:,} answers in {out}", file=sys.stderr)


def check_files(
    inputs: Sequence[str], format: Format, out: Path | None, table: Sequence[str], *, vectors: bool
) -> TableFormat:
    """Refuse files that cannot be read or written as they are named, before a model is loaded.

    Args:
        inputs: Files to read.
        format: Format of the files.
        out: File to write.
        table: NAME=VALUE, fields of the `TableFormat`.
        vectors: Whether answers are vectors.

    Raises:
        UserError: Names the file or the option.
    """
    for source in inputs:
        format_of(source, format)
    check_out(out, vectors=vectors)
    found: dict[str, Any] = {}
    for option in table:
        name, equals, value = option.partition("=")
        if name == "delimiter" and equals:
            found[name] = "\t" if value == "\\t" else value
        elif name in ("header", "quoting") and value in ("True", "False"):
            found[name] = value == "True"
        else:
            raise UserError(
                f"--table {option}: give header=True or False, quoting=True or False, or "
                "delimiter=CHARACTER"
            )
    return TableFormat(**found)


def _names(fields: Sequence[str], asker: Asker[Any]) -> dict[str, str]:
    names: dict[str, str] = {}
    known = (*asker.FIELDS, "id")
    for field in fields:
        ours, equals, theirs = field.partition("=")
        if not equals or ours not in known or not theirs:
            raise UserError(
                f"--field {field}: give OURS=THEIRS, such as {known[0]}=sentence; ours are "
                f"{', '.join(known)}"
            )
        names[ours] = theirs
    return names
