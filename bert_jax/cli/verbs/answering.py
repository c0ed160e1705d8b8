"""Steps that all verbs of `verbs.inference` share: from the arguments to the answers."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.cli.verbs.options import written_as
from bert_jax.errors import UserError
from bert_jax.files.checks import crc_of
from bert_jax.infer.forward import on_device
from bert_jax.infer.kept import KeptLines
from bert_jax.infer.predictor import Given, Predictor, check_count
from bert_jax.infer.records import STDIN, Format, Record, format_of, read_records
from bert_jax.infer.stream import answer_records
from bert_jax.infer.writers import JSON_LINES, VECTORS, Form, check_out, write_answers
from bert_jax.tasks.tables.delimited import TableFormat
from bert_jax.tokenization.tokenizer import replace_surrogates


def run_verb(
    arguments: argparse.Namespace,
    make: Callable[[SavedModel], Predictor[Any]],
    **same: str | None,
) -> int:
    """Answer the texts that are given, or the lines of files; without both, standard input.

    Args:
        arguments: Arguments of the verb.
        make: Makes the verb of a model on a device.
        **same: Fields that are the same for all records; None: not given.

    Raises:
        UserError: Nothing to read, a bad record, or a file that cannot be read or written.
    """
    table = check_files(arguments)
    if arguments.batch_tokens is not None:
        check_count("--batch-tokens", arguments.batch_tokens)
    saved = read_model(arguments.workdir)
    if found := saved.origin.unlearned:
        print(
            f"Warning: {saved.name} has learned nothing: its score on dev is {found[0]:.4g}, and a "
            f"constant prediction has {found[1]:.4g}",
            file=sys.stderr,
        )
    predictor = make(on_device(saved, arguments.device, arguments.max_row))
    predictor.batch_tokens = arguments.batch_tokens or predictor.batch_tokens
    texts, inputs, out = arguments.texts, arguments.input, arguments.out
    if texts == [STDIN]:
        texts, inputs = [], [*inputs, STDIN]
    if texts and inputs:
        raise UserError("give texts or --input FILE, not both")
    if not texts and not inputs:
        if sys.stdin.isatty():
            raise UserError("there is nothing to read: give texts, --input FILE, or pipe lines in")
        inputs = [STDIN]
    names = _names(arguments, predictor.FIELDS)
    more = {name: value for name, value in same.items() if value is not None}
    kept = None
    if out and out.suffix.lower() not in VECTORS and arguments.on_error == "fail":
        arrays = (np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(saved.params))
        model = f"{saved.tokenizer.fingerprint} {crc_of(arrays)}"
        kept = KeptLines(out, f"{model} {arguments.command_line}")
    keep = kept.found if kept else iter
    total = sum(os.path.getsize(name) for name in inputs if os.path.isfile(name))
    count = skipped = 0
    with tqdm(
        total=total if total and STDIN not in inputs else None,
        unit="B", unit_scale=True, disable=not inputs or not sys.stderr.isatty(),
    ) as bar:  # fmt: skip

        def records() -> Iterator[Record]:
            for number, text in enumerate(texts, 1):
                given = {predictor.FIELDS[0]: replace_surrogates(text)}
                yield Record(Given("text", number), {**more, **given})
            for source in inputs:
                yield from read_records(
                    source, format=_format(arguments, source), fields=predictor.FIELDS, names=names,
                    more=more, table=table, read=bar.update,
                )  # fmt: skip

        def chunks() -> Iterator[list[Record]]:
            nonlocal count, skipped
            for chunk in answer_records(
                predictor, keep(records()), on_error=arguments.on_error,
                say=lambda line: bar.write(line, file=sys.stderr),
            ):  # fmt: skip
                count += len(chunk)
                skipped += sum(record.problem is not None for record in chunk)
                bar.set_postfix(answered=count)
                yield chunk

        write_answers(predictor, chunks(), kept or out, form=answer_form(arguments))
    if skipped:
        print(f"{skipped:,} of {count:,} records were skipped", file=sys.stderr)
    if out is not None:
        print(f"{count:,} answers in {out}", file=sys.stderr)
    return 0


def check_files(arguments: argparse.Namespace) -> TableFormat:
    """Refuse files that cannot be read or written as they are named, before a model is loaded.

    Raises:
        UserError: Names the file or the option.
    """
    for source in arguments.input:
        _format(arguments, source)
    check_out(arguments.out, vectors=arguments.verb == "embed", plain=_is_plain(arguments))
    found: dict[str, Any] = {}
    for option in arguments.table:
        if not (written := written_as(option)):
            raise UserError(
                f"--table {option}: give header=True or False, quoting=True or False, or "
                "delimiter=CHARACTER"
            )
        found |= written
    return TableFormat(**found)


def _is_plain(arguments: argparse.Namespace) -> bool:
    """Whether files are lines of text, which become lines of text."""
    return arguments.verb == "translate"


def _format(arguments: argparse.Namespace, source: str) -> Format:
    return format_of(source, arguments.format, "text" if _is_plain(arguments) else None)


def answer_form(arguments: argparse.Namespace) -> Form:
    """Return the form in which the answers are written."""
    out = arguments.out
    from_files = bool(arguments.input) or arguments.texts in ([], [STDIN])
    if arguments.json or (out is not None and out.suffix.lower() in JSON_LINES):
        return "json"
    if not from_files and out is None:
        return "people"
    return "plain" if _is_plain(arguments) else "json"


def _names(arguments: argparse.Namespace, fields: Sequence[str]) -> dict[str, str]:
    """Return the names that the verb's fields have in the files."""
    names: dict[str, str] = {}
    known = (*fields, "id")
    column = arguments.text_column
    for option in [*arguments.field, *([] if column is None else [f"{fields[0]}={column}"])]:
        ours, equals, theirs = option.partition("=")
        if not equals or ours not in known or not theirs:
            raise UserError(
                f"--field {option}: give OURS=THEIRS, such as {known[0]}=sentence; ours are "
                f"{', '.join(known)}"
            )
        names[ours] = theirs
    return names
