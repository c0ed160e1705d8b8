"""The verb that evaluates runs, with its arguments; imports are made when it runs."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from bert_jax.cli.verbs.inference import add_search, search_settings
from bert_jax.cli.verbs.options import Parser
from bert_jax.cli.verbs.vectors import VECTOR_OPTIONS, add_scores, evaluate_vectors
from bert_jax.errors import UserError


def add(verb: Callable[..., Parser]) -> None:
    """Add the verb; `verb` makes a parser of a name, a function, a description and an example."""
    sub = verb(
        "evaluate", evaluate,
        "evaluate the newest checkpoint on held-out text, a fine-tuned model or one in Hugging "
        "Face's format on labelled data, the vectors of a model on a test set, or the translations "
        "of pairs of files",
        "bert-jax evaluate work/tiny\n"
        "  bert-jax evaluate work/modern --by-position --length=8192 --rows=64\n"
        "  bert-jax evaluate work/roberta --corpus work/corpus\n"
        "  bert-jax evaluate work/mrpc --data dev\n"
        "  bert-jax evaluate work/embedder --retrieval scifact --dimensions 256,128\n"
        "  bert-jax evaluate work/ende --pairs test.en test.de",
    )  # fmt: skip
    sub.option(
        "workdir",
        "of a pretraining or a fine-tuning run, or a pretrained model in Hugging Face's format",
    )
    sub.option(
        "--corpus",
        "pretraining: a corpus with held-out text, of the same tokenizer; default: that of the "
        "run, and a model in Hugging Face's format has none",
    )
    sub.option("--rows", "pretraining: at most so many rows; default: all", type=int)
    sub.option("--step", "pretraining: the checkpoint of this step; default: the newest", type=int)
    sub.option(
        "--length", "pretraining: tokens per row; default: that of the last phase", type=int,
        metavar="N",
    )  # fmt: skip
    sub.flag(
        "--by-position",
        "pretraining: loss and accuracy of masked words by position in the document (0-127, "
        "128-255, 256-511, ...) and by masking rate, as a table and a picture",
    )
    sub.option(
        "--masking-rates",
        "pretraining: percentages of the tokens to mask, for --by-position; default: 5,15,30",
        metavar="LIST",
    )
    sub.option(
        "--png", "picture of --by-position; default: positions.png of a local run", type=Path,
        metavar="FILE",
    )  # fmt: skip
    sub.flag("--json", "print one JSON object instead")
    sub.option(
        "--data",
        "fine-tuning: a file like those of the run, of GLUE also a split; default: the dev data "
        "and the test data of the run, which --data dev and --data test score alone",
        metavar="FILE",
    )
    sub.option(
        "--columns",
        "names of columns. Fine-tuning: fields of the task for --data, such as "
        "text=review,label=stars; a model in Hugging Face's format has the labels and the defaults "
        "of --fields otherwise. Vectors: in place of query, document and score (--sts) or text and "
        "label (--clustering), such as query=sentence1,document=sentence2; also header=False",
        metavar="LIST",
    )
    sub.option(
        "--report",
        "fine-tuning: directory for report.md and report.json (scores by class with intervals, "
        "confusion, the mistakes that the model is surest of) and a picture",
        type=Path, metavar="DIR",
    )  # fmt: skip
    sub.option(
        "--versus",
        "fine-tuning: another run, scored on the same examples; differences with paired intervals",
        metavar="WORKDIR",
    )
    sub.option(
        "--contamination",
        "fine-tuning: reports of `bert-jax contamination` on the data, for scores of seen and of "
        "clean examples apart; default: those on the corpora that the model comes from",
        nargs="+", type=Path, metavar="REPORT",
    )  # fmt: skip
    sub.option(
        "--pairs",
        "translation: source sentences and their references, a line each; BLEU and chrF of "
        "sacreBLEU with intervals, floors, losses, a table by source length",
        nargs=2, metavar=("SOURCES", "REFERENCES"),
    )  # fmt: skip
    add_search(sub)
    add_scores(sub)


def check_rows(rows: int | None) -> None:
    """Refuse a number of rows below 1."""
    if rows is not None and rows < 1:
        raise UserError(f"--rows is {rows}; it must be at least 1")


def evaluate(arguments: argparse.Namespace) -> int:
    """Evaluate the newest checkpoint, a fine-tuned model, or translations."""
    if arguments.pairs is not None:
        return _evaluate_pairs(arguments)
    if any(getattr(arguments, name) is not None for name in VECTOR_OPTIONS):
        return evaluate_vectors(arguments)
    from bert_jax.artefacts.saved.runs import is_finetuning, is_run
    from bert_jax.cli.inspection.evaluate import evaluate_run
    from bert_jax.files.remote import open_workdir

    local = open_workdir(arguments.workdir).local
    is_model = (local / "config.json").is_file() and not is_run(local)
    if is_finetuning(local) or (is_model and arguments.data is not None):
        names = ("corpus", "rows", "step", "length", "by_position", "masking_rates", "png")
        for name in names:
            if getattr(arguments, name) not in (None, False):
                raise UserError(
                    f"{arguments.workdir} holds a fine-tuning run; --{name.replace('_', '-')} is "
                    "for pretraining. Name labelled data with --data"
                )
        return _evaluate_finetuned(arguments)
    for name in ("data", "contamination", "columns", "report", "versus"):
        if getattr(arguments, name) is not None:
            raise UserError(
                f"{arguments.workdir} holds no fine-tuning run; --{name} is for one. A "
                "pretrained model is evaluated on a --corpus"
            )
    check_rows(arguments.rows)
    if arguments.by_position or arguments.masking_rates or arguments.png:
        if arguments.step is not None:
            raise UserError(
                f"--step is {arguments.step}; losses by position are those of the newest checkpoint"
            )
        return _evaluate_by_position(arguments)
    values = evaluate_run(
        arguments.workdir, corpus=arguments.corpus, max_rows=arguments.rows,
        length=arguments.length, step=arguments.step,
    )  # fmt: skip
    if arguments.json:
        print(json.dumps(values, indent=2))
    else:
        print("\n".join(f"{name:28} {value:.6g}" for name, value in values.items()))
    return 0


def _evaluate_finetuned(arguments: argparse.Namespace) -> int:
    """Score a fine-tuned model: scores to standard output, tables to standard error."""
    from bert_jax.tasks.reports.lines import difference_lines, report_lines
    from bert_jax.training.finetune.evaluate import evaluate_finetuned
    from bert_jax.training.finetune.report import write_reports

    title, versus = (Path(each or "").name for each in (arguments.workdir, arguments.versus))
    found = evaluate_finetuned(
        arguments.workdir,
        arguments.data,
        arguments.contamination or (),
        arguments.versus,
        _columns(arguments),
    )
    lines = [
        line
        for name, report in found.reports.items()
        for line in ("", *report_lines(name, report, mistakes=False))
    ]
    if found.differences:
        lines += ["", *difference_lines(title, versus, found.differences)]
    print("\n".join(lines[1:]), file=sys.stderr)
    if arguments.report is not None:
        more = {"differences": found.differences} if found.differences else {}
        for path in write_reports(arguments.report, found.reports, more, title=title):
            print(f"report  {path}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(found.as_json(), indent=2, allow_nan=False))
    else:
        print("\n".join(f"{name:28} {value:.6g}" for name, value in found.scores.items()))
    return 0


def _columns(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the fields and values of --columns."""
    parts = [] if arguments.columns is None else arguments.columns.split(",")
    found = {}
    for part in parts:
        field, sign, value = part.partition("=")
        if not sign:
            raise UserError(
                f"--columns has {part!r}; expected FIELD=VALUE, such as text=review,label=stars"
            )
        found[field.strip()] = value
    if found and arguments.data is None:
        raise UserError(
            "--columns is set without --data; the run knows the columns of its own data"
        )
    return found


def _evaluate_by_position(arguments: argparse.Namespace) -> int:
    from bert_jax.cli.inspection.by_position import DEFAULT_RATES, evaluate_by_position
    from bert_jax.cli.inspection.position_lines import draw_positions, position_lines
    from bert_jax.files.remote import open_workdir

    rates = DEFAULT_RATES
    if arguments.masking_rates:
        try:
            rates = tuple(float(word) / 100 for word in arguments.masking_rates.split(","))
        except ValueError as error:
            raise UserError(
                f"--masking-rates is {arguments.masking_rates!r}; it must be percentages with "
                "commas between them, such as 5,15,30"
            ) from error
    losses = evaluate_by_position(
        arguments.workdir, corpus=arguments.corpus, max_rows=arguments.rows,
        length=arguments.length, rates=rates,
    )  # fmt: skip
    work = open_workdir(arguments.workdir)
    picture = arguments.png
    if picture is None and work.mirror is None:
        picture = work.local / "positions.png"
    trouble = ""
    if picture is not None:
        try:
            draw_positions(losses, picture, title=work.local.absolute().name)
        except (OSError, UserError) as error:
            trouble = f"{picture} cannot be written: {error}"
    if arguments.json:
        print(json.dumps(losses.as_json(), indent=2))
    else:
        print("\n".join(position_lines(losses)))
        if picture and not trouble:
            print(f"\nloss by position  {picture}")
    if trouble:
        print(f"bert-jax evaluate: no picture: {trouble}", file=sys.stderr)
    return 0


def _evaluate_pairs(arguments: argparse.Namespace) -> int:
    from bert_jax.cli.inspection.translation import evaluate_pairs, translation_lines

    names = ("data", "rows", "step", "length", "by_position", "masking_rates", "png")
    for name in (*names, "contamination", "columns", "report", "versus"):
        if getattr(arguments, name) not in (None, False):
            raise UserError(f"--{name.replace('_', '-')} does not go with --pairs")
    sources, references = arguments.pairs
    found = evaluate_pairs(
        arguments.workdir, sources, references, settings=search_settings(arguments),
        corpus=arguments.corpus,
    )  # fmt: skip
    print(json.dumps(found, indent=2) if arguments.json else "\n".join(translation_lines(found)))
    return 0
