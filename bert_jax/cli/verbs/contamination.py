"""The verb that looks for evaluation texts in a corpus; imports are made when it runs."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from bert_jax.cli.verbs.cleaning_options import EVALUATION_HELP
from bert_jax.cli.verbs.options import Parser
from bert_jax.errors import UserError

T = TypeVar("T")

_HELDOUT = "heldout"


def add(verb: Callable[..., Parser]) -> None:
    """Add the verb; `verb` makes a parser of a name, a function, a description and an example."""
    sub = verb(
        "contamination", contamination,
        "find evaluation texts in a corpus, by their n-grams of 13 words, or held-out documents "
        "that are near-duplicates of training documents",
        "bert-jax contamination work/corpus --against glue:data/glue --against squad:dev.json\n"
        "  bert-jax contamination work/corpus --against heldout\n"
        "  bert-jax contamination 'my/*.txt' --against dev.tsv --out report.json",
    )  # fmt: skip
    sub.option(
        "corpus",
        "directory of `bert-jax corpus`, of which the store `train` is read; or text as `bert-jax "
        "corpus --input` takes it",
    )
    sub.several(
        "--against", "FILE",
        f"evaluation texts: {EVALUATION_HELP}. `heldout`: the held-out documents of the corpus. "
        "May be repeated",
    )  # fmt: skip
    sub.option(
        "--similarity", "heldout: lowest Jaccard similarity of word 5-shingles", 0.8, metavar="J"
    )
    sub.option(
        "--out",
        "file for the report (default: beside the corpus.json of a store, where `evaluate`, "
        "`export` and `lineage` find it)",
        type=Path, metavar="FILE.json",
    )  # fmt: skip
    sub.option("--num-workers", "default: all cores", type=int)
    sub.flag("--json", "print one JSON object for each evaluation instead of a table")


def contamination(arguments: argparse.Namespace) -> int:
    """Look for evaluation texts in a corpus, and write what was found."""
    from bert_jax.data.corpus.overlap.evaluation import read_evaluation
    from bert_jax.data.corpus.overlap.report import DIRECTORY
    from bert_jax.data.corpus.overlap.search import search_store, search_texts
    from bert_jax.data.corpus.sources import resolve_sources
    from bert_jax.data.corpus.workers import worker_count
    from bert_jax.data.store import is_store

    specs = arguments.against
    if not specs:
        raise UserError(f"--against is missing; give {EVALUATION_HELP}, or heldout")
    if arguments.out is not None and len(specs) > 1:
        raise UserError(f"--out is one file, and --against names {len(specs)}; rerun for each")
    if not 0.5 <= arguments.similarity <= 1:
        raise UserError(f"--similarity is {arguments.similarity:g}; it must be 0.5 to 1")
    workers = worker_count(arguments.num_workers)
    corpus = Path(arguments.corpus)
    store = next((path for path in (corpus / "train", corpus) if is_store(path)), None)
    sets = [read_evaluation(spec) for spec in specs if spec != _HELDOUT]
    if _HELDOUT in specs:
        if store is None:
            raise UserError(f"--against heldout needs a corpus directory; {corpus} is none")
        _compare_heldout(arguments, store.parent if store.name == "train" else store, workers)
    for each in sets:
        if store is not None:
            report = search_store(store, each, num_workers=workers, show=_bar)
            place = arguments.out or store / DIRECTORY / report.file_name
        else:
            sources = resolve_sources([arguments.corpus])
            documents = (text for source in sources for text in source.texts())
            report = search_texts(corpus.name, documents, each, num_workers=workers)
            place = arguments.out
        if place is not None:
            report.save(place)
        if arguments.json:
            print(json.dumps(report.summary() | {"counts": report.counts()}))
        else:
            print("\n".join([*report.lines(), *([f"report  {place}"] if place else []), ""]))
    return 0


def _compare_heldout(arguments: argparse.Namespace, corpus: Path, workers: int) -> None:
    from dataclasses import asdict

    from bert_jax.data.corpus.overlap.heldout import heldout_path, heldout_twins

    found = heldout_twins(corpus, threshold=arguments.similarity, num_workers=workers, show=_bar)
    place = arguments.out or heldout_path(corpus)
    found.save(place)
    if arguments.json:
        print(json.dumps(asdict(found), ensure_ascii=False))
    else:
        print("\n".join([*found.lines(), f"report  {place}", ""]))


def _bar(items: Sequence[T]) -> Iterable[T]:
    from tqdm import tqdm

    bar: Iterable[T] = tqdm(items, desc="corpus", unit="block", disable=not sys.stderr.isatty())
    return bar
