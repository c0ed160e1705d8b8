"""Options of cleaning, for the verb that builds a corpus; imports are made when one is used."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from bert_jax.cli.verbs.options import Parser
from bert_jax.errors import UserError

if TYPE_CHECKING:
    from bert_jax.data.corpus.cleaning.config import CleaningConfig

EVALUATION_HELP = (
    "squad:FILE, glue:DIR, or a file: .txt with an example a line, .tsv or .csv with an example a "
    "row, .jsonl with an example an object"
)
_DEFAULT_SIMILARITY = 0.8


def add_cleaning(sub: Parser) -> None:
    """Add the options of cleaning to a parser, which has --drop-duplicates of its own."""
    sub.several(
        "--filter", "NAME",
        "drop documents, or lines, as published filters do: a group (gopher, gopher-quality, "
        "gopher-repetition, c4), one filter of them, or one with other bounds, NAME=LOW:HIGH. May "
        "be repeated; an unknown name lists all",
    )  # fmt: skip
    sub.option("--language", "keep documents of this language alone, such as de", metavar="CODE")
    sub.option(
        "--language-threshold", "lowest probability of --language (default: 0.8)", type=float,
        metavar="P",
    )  # fmt: skip
    sub.flag("--drop-duplicate-paragraphs", "keep the first of paragraphs with the same words")
    sub.add_argument(
        "--drop-near-duplicates", nargs="?", type=float, const=_DEFAULT_SIMILARITY,
        metavar="JACCARD",
        help="keep the first of documents that share most of their word 5-shingles: a Jaccard "
        f"similarity of {_DEFAULT_SIMILARITY} by default",
    )  # fmt: skip
    sub.several(
        "--without", "FILE",
        "leave out paragraphs that share an n-gram of 13 words with these evaluation texts: "
        f"{EVALUATION_HELP}. May be repeated",
    )  # fmt: skip
    sub.option(
        "--keep-dropped", "write samples of dropped documents with the reason into this directory",
        type=Path, metavar="DIR",
    )  # fmt: skip


def cleaning_config(arguments: argparse.Namespace) -> "CleaningConfig":
    """Return the rules that the options ask for.

    Raises:
        UserError: a value that cannot be meant, or options that contradict each other.
    """
    from bert_jax.data.corpus.cleaning.config import CleaningConfig

    if arguments.language_threshold is not None and not arguments.language:
        raise UserError("--language-threshold belongs to --language, which is not given")
    given = {}
    if arguments.language_threshold is not None:
        given["language_threshold"] = arguments.language_threshold
    config = CleaningConfig(
        filters=tuple(arguments.filter),
        language=arguments.language or "",
        duplicates=arguments.drop_duplicates,
        duplicate_paragraphs=arguments.drop_duplicate_paragraphs,
        near_duplicates=arguments.drop_near_duplicates,
        without=tuple(arguments.without),
        **given,
    )
    if arguments.keep_dropped is not None and config.is_empty:
        raise UserError(
            "--keep-dropped has nothing to write: no document is dropped without --filter, "
            "--language, --drop-duplicates, --drop-duplicate-paragraphs, "
            "--drop-near-duplicates or --without"
        )
    return config
