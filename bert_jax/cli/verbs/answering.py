"""Steps from texts to answers that the verbs in `verbs.inference` share."""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.cli.verbs.groups import Asking, AskingRows
from bert_jax.errors import UserError
from bert_jax.files.checks import crc_of
from bert_jax.infer.forward import on_device
from bert_jax.infer.predictor import Given, Predictor, answer_records
from bert_jax.infer.records import STDIN, Format, Record, format_of, read_records
from bert_jax.infer.writers import JSON_LINES, VECTORS, Form, KeptLines, check_out, write_answers
from bert_jax.tasks.tables import TableFormat
from bert_jax.terminal import progress_bar
from bert_jax.tokenization.tokenizer import replace_surrogates


def run_verb(
    asked: Asking, make: Callable[[SavedModel], Predictor[Any]], **same: str | None
) -> int:
    """Answer texts from the command line or from files, or else from standard input.

    `make` turns a model on a device into a predictor. `same` holds fields that are added to every
    record, with the same value; a field whose value is None is not added.
    """
    table = check_files(asked)
    saved = read_model(asked.model)
    if found := saved.origin.unlearned:
        print(
            f"Warning: {saved.name} has learned nothing: its score on dev is {found[0]:.4g}, and a "
            f"constant prediction has {found[1]:.4g}",
            file=sys.stderr,
        )
    most = asked.max_length if isinstance(asked, AskingRows) else None
    predictor = make(on_device(saved, asked.device, most))
    predictor.batch_tokens = asked.batch_tokens or predictor.batch_tokens
    texts, inputs, out = asked.texts, asked.input, asked.out
    if texts == (STDIN,):
        texts, inputs = (), (*inputs, STDIN)
    if texts and inputs:
        raise UserError("give texts or --input FILE, not both")
    if not texts and not inputs:
        if sys.stdin.isatty():
            raise UserError("there is nothing to read: give texts, --input FILE, or pipe lines in")
        inputs = (STDIN,)
    names, _ = asked.named(*predictor.FIELDS, "id")
    more = {name: value for name, value in same.items() if value is not None}
    kept = None
    if out and out.suffix.lower() not in VECTORS and asked.on_error == "fail":
        arrays = (np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(saved.params))
        model = f"{saved.tokenizer.fingerprint} {crc_of(arrays)}"
        kept = KeptLines(out, f"{model} {asked.command_line}")
    keep = kept.found if kept else iter
    total = sum(os.path.getsize(name) for name in inputs if os.path.isfile(name))
    count = skipped = 0
    known = total if total and STDIN not in inputs else None
    with progress_bar(of="answers", unit="B", total=known, shown=bool(inputs)) as bar:

        def records() -> Iterator[Record]:
            for number, text in enumerate(texts, 1):
                given = {predictor.FIELDS[0]: replace_surrogates(text)}
                yield Record(Given("text", number), {**more, **given})
            for source in inputs:
                yield from read_records(
                    source, format=_format(asked, source), fields=predictor.FIELDS, names=names,
                    more=more, table=table, read=bar.update,
                )  # fmt: skip

        def chunks() -> Iterator[list[Record]]:
            nonlocal count, skipped
            for chunk in answer_records(
                predictor, keep(records()), on_error=asked.on_error,
                say=lambda line: tqdm.write(line, file=sys.stderr),
            ):  # fmt: skip
                count += len(chunk)
                skipped += sum(record.problem is not None for record in chunk)
                yield chunk

        write_answers(predictor, chunks(), kept or out, form=answer_form(asked))
    if warning := asked.warning(predictor):
        print(f"Warning: {warning}", file=sys.stderr)
    if skipped:
        print(f"{skipped:,} of {count:,} records were skipped", file=sys.stderr)
    if out is not None:
        print(f"{count:,} answers in {out}", file=sys.stderr)
    return 0


def check_files(asked: Asking) -> TableFormat:
    """Check the formats of all files before a model is loaded, and return the tables' format."""
    for source in asked.input:
        _format(asked, source)
    reads = asked.texts in ((), (STDIN,))
    asked.only_with("--input or standard input", reads, "--columns", "--format")
    check_out(asked.out, vectors=asked.VECTORS, plain=asked.PLAIN, sources=asked.input)
    return TableFormat(**asked.named()[1])


def _format(asked: Asking, source: str) -> Format:
    return format_of(source, asked.format, "text" if asked.PLAIN else None)


def answer_form(asked: Asking) -> Form:
    """Choose the form in which the answers are written."""
    out = asked.out
    from_files = bool(asked.input) or asked.texts in ((), (STDIN,))
    if asked.json or (out is not None and out.suffix.lower() in JSON_LINES):
        return "json"
    if not from_files and out is None:
        return "people"
    return "plain" if asked.PLAIN else "json"
