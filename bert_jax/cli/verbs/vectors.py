"""The options of `evaluate` that score the vectors of a model; imports are made when one runs."""

import argparse
import json
import sys

from bert_jax.cli.verbs.options import Parser
from bert_jax.cli.verbs.search import add_rerank, columns_named, opened_model
from bert_jax.errors import UserError

_SETS = ("retrieval", "sts", "clustering")
VECTOR_OPTIONS = (*_SETS, "dimensions", "rerank")
"""Options of `evaluate` that ask for scores of vectors."""
_OTHER_OPTIONS = (
    "pairs", "data", "corpus", "rows", "step", "length", "by_position", "masking_rates", "png",
    "contamination",
)  # fmt: skip


def add_scores(sub: Parser) -> None:
    """Add the options of `evaluate` for the vectors of a model."""
    sub.option(
        "--retrieval",
        "embedding: a directory in BEIR's layout (corpus.jsonl, queries.jsonl, qrels/test.tsv), or "
        "one of its files of judgements; nDCG@10, MRR@10, recall@100 and MAP, beside BM25's",
        metavar="DIR",
    )
    sub.option(
        "--sts",
        "embedding: a table of pairs of texts with scores; Spearman's correlation of the cosines",
        metavar="FILE",
    )
    sub.option(
        "--clustering",
        "embedding: a table of texts with classes; V-measure of k-means, mean of 10 runs",
        metavar="FILE",
    )
    sub.option(
        "--dimensions",
        "embedding: score the first numbers of the vectors too, such as 256,128,64",
        metavar="LIST",
    )
    add_rerank(sub, "embedding, --retrieval: ")


def evaluate_vectors(arguments: argparse.Namespace) -> int:
    """Score the vectors of a model on a labelled set."""
    from tqdm import tqdm

    from bert_jax.infer.predictor import check_count
    from bert_jax.infer.search import evaluation
    from bert_jax.infer.search.rerank import Reranker
    from bert_jax.tasks.retrieval.collection import read_collection

    given = [f"--{name}" for name in _SETS if getattr(arguments, name) is not None]
    if len(given) != 1:
        options = " and ".join(given) or "--dimensions and --rerank"
        raise UserError(f"{options}: give one of --retrieval, --sts and --clustering at a time")
    for name in _OTHER_OPTIONS:
        if getattr(arguments, name) not in (None, False):
            raise UserError(f"--{name.replace('_', '-')} does not go with {given[0]}")
    if arguments.rerank and not arguments.retrieval:
        raise UserError(f"--rerank does not go with {given[0]}; it goes with --retrieval")
    if arguments.columns and arguments.retrieval:
        raise UserError("--columns does not go with --retrieval, whose columns have fixed names")
    check_count("--candidates", arguments.candidates)
    try:
        widths = [int(word) for word in (arguments.dimensions or "").split(",") if word.strip()]
    except ValueError as error:
        raise UserError(
            f"--dimensions is {arguments.dimensions!r}; give whole numbers with commas between "
            "them, such as 256,128"
        ) from error
    model = opened_model(arguments, arguments.workdir)
    reranker = Reranker(opened_model(arguments, arguments.rerank)) if arguments.rerank else None
    with tqdm(unit=" texts", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        if arguments.retrieval:
            result = evaluation.evaluate_retrieval(
                model, read_collection(arguments.retrieval), widths, reranker=reranker,
                candidates=arguments.candidates, advance=bar.update,
            )  # fmt: skip
        elif arguments.sts:
            columns, written = columns_named(arguments.columns, "query", "document", "score")
            result = evaluation.evaluate_similarity(
                model, arguments.sts, columns, widths, advance=bar.update, **written
            )
        else:
            columns, written = columns_named(arguments.columns, "text", "label")
            result = evaluation.evaluate_clustering(
                model, arguments.clustering, columns, widths, advance=bar.update, **written
            )
    if warning := result.pop("warning"):
        print(f"Warning: {warning}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print("\n".join(evaluation.score_lines(result)))
    return 0
