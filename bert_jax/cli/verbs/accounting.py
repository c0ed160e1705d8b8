"""The verbs that account for text and models; imports are made when one runs."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from bert_jax.cli.verbs.options import Parser
from bert_jax.errors import UserError


def add(verb: Callable[..., Parser]) -> None:
    """Add the verbs; `verb` makes a parser of a name, a function, a description and an example."""
    sub = verb(
        "lineage", lineage,
        "print the chain from an export, a model or a run to the files it came from, and compare "
        "the digests on the way",
        "bert-jax lineage out/reviews --near work\n"
        "  bert-jax lineage work/tiny@15000 --json",
    )  # fmt: skip
    sub.option(
        "directory",
        "a work directory (or WORKDIR@STEP), an export, an import, a grown model, an average, a "
        "model in Hugging Face's format, or a corpus",
    )
    sub.several(
        "--near",
        "DIR",
        "look for ancestors here, too, by name and digest: an export does not say where its source "
        "lies. The directory beside an export is always looked through. May be repeated",
    )
    sub.flag("--quick", "compare the records alone, without reading checkpoints, stores and files")
    sub.flag("--json", "print one JSON object instead")

    sub = verb(
        "inspect", inspect,
        "look at a corpus: rows as a run sees them, long and short documents, tokens per word, "
        "duplicates, a picture of the lengths",
        "bert-jax inspect work/corpus\n"
        "  bert-jax inspect work/corpus --pairing nsp --length 512 --seed 3 --out lengths.png",
    )  # fmt: skip
    sub.option("corpus", "directory of `bert-jax corpus`, or one store of it")
    sub.option("--part", "store of the corpus", "train", choices=["train", "heldout"])
    sub.option(
        "--pairing", "as data.pairing of a run (default: none, or translation for pairs)",
        choices=["nsp", "sop", "none", "translation"],
    )  # fmt: skip
    sub.option("--length", "tokens of a row", 128, metavar="N")
    sub.option("--rows", "rows to print", 4, metavar="N")
    sub.option("--documents", "longest and shortest documents to print", 5, metavar="N")
    sub.option("--seed", "other rows", 0)
    sub.flag(
        "--full", "read all documents of a corpus above 50 million tokens, not evenly spread ones"
    )
    sub.option("--out", "picture of the lengths", type=Path, metavar="FILE.png")
    sub.flag("--json", "print one JSON object instead")


def inspect(arguments: argparse.Namespace) -> int:
    """Look at a corpus; only the picture is written."""
    from bert_jax.cli.inspection.corpus import inspect_corpus
    from bert_jax.cli.inspection.corpus_lines import corpus_lines, draw_lengths

    for name in ("length", "rows", "documents"):
        if (value := getattr(arguments, name)) < 1:
            raise UserError(f"--{name} is {value}; it must be at least 1")
    look = inspect_corpus(
        arguments.corpus, part=arguments.part, pairing=arguments.pairing or "",
        length=arguments.length, rows=arguments.rows, documents=arguments.documents,
        seed=arguments.seed, full=arguments.full, progress=sys.stderr.isatty(),
    )  # fmt: skip
    if arguments.out is not None:
        try:
            draw_lengths(look, arguments.out)
        except OSError as error:
            raise UserError(f"--out: {arguments.out} cannot be written: {error}") from error
    if arguments.json:
        print(json.dumps(look.as_json(), indent=2, ensure_ascii=False))
        return 0
    print("\n".join(corpus_lines(look)))
    if arguments.out is not None:
        print(f"\nlengths  {arguments.out}")
    return 0


def lineage(arguments: argparse.Namespace) -> int:
    """Print and verify where a directory came from; 1 where a digest differs."""
    from bert_jax.cli.inspection.lineage import check_lineage, has_difference, lineage_lines

    def say(text: str) -> None:
        if sys.stderr.isatty():
            print(text, file=sys.stderr)

    near = [Path(each) for each in arguments.near]
    found = check_lineage(arguments.directory, near, quick=arguments.quick, say=say)
    if arguments.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print("\n".join(lineage_lines(found)))
    return 1 if has_difference(found) else 0
