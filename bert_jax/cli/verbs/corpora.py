"""The verbs that turn text into a tokenizer and a corpus; imports are made when one runs."""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

from bert_jax.cli.verbs.cleaning_options import add_cleaning, cleaning_config
from bert_jax.cli.verbs.options import Parser
from bert_jax.errors import UserError

_INPUT_HELP = (
    "a file or gs://BUCKET/FILE, a quoted glob, `hf:OWNER/NAME[:CONFIG[:SPLIT]]` (a data set of "
    "the Hugging Face Hub, read where it lies), `tfds:NAME[:SPLIT]`, or `python-docs` (the "
    "documentation that Python and the installed packages carry). Files: .txt with a blank line "
    "between documents, .jsonl, .csv, .tsv, each also as .gz, .xz, .zst or .bz2, .parquet, "
    ".warc.gz, .wet.gz, and dumps of Wikipedia (.xml.bz2). May be repeated"
)


_FIELD = "text"
_TEXT_OPTIONS = (
    "by-field", "estimate", "engine", "address", "shard-mb", "scratch", "filter", "language",
    "language-threshold", "drop-duplicate-paragraphs", "drop-near-duplicates", "without",
    "keep-dropped",
)  # fmt: skip
"""Options of `bert-jax corpus` for text alone."""


def add(verb: Callable[..., Parser]) -> None:
    """Add the verbs; `verb` makes a parser of a name, a function, a description and an example."""
    sub = verb(
        "tokenizer", tokenizer_, "learn a vocabulary from text",
        "bert-jax tokenizer --input 'my/*.txt' --vocab-size 30522 --out work/tokenizer\n"
        "  bert-jax tokenizer --pairs train.en train.de --kind unigram --vocab-size 8000 \\\n"
        "      --out work/en-de-tokenizer",
    )  # fmt: skip
    _add_input(sub)
    _add_pairs(sub, "of which both sides are learned from")
    sub.option("--out", "directory to write", required=True, type=Path)
    sub.option(
        "--kind",
        "wordpiece as BERT's, bytelevel (BPE) as ModernBERT's, or SentencePiece unigram or bpe",
        "wordpiece", choices=["wordpiece", "bytelevel", "unigram", "bpe"],
    )  # fmt: skip
    sub.option("--vocab-size", default=30522)
    sub.flag(
        "--cased",
        "keep case and accents (wordpiece lower-cases otherwise; the others never do)",
    )
    sub.flag("--keep-accents", "wordpiece: keep accents where case is not kept", default=None)
    sub.option(
        "--character-coverage",
        "share of the text's characters that get a token, the most frequent first; a word "
        "with another becomes [UNK], or bytes in SentencePiece (default: at least 0.9995)",
        type=float, metavar="SHARE",
    )  # fmt: skip
    sub.option(
        "--limit-alphabet",
        "wordpiece: at most so many characters get a token (default: as the coverage says, "
        "at least 1000)",
        type=int, metavar="N",
    )  # fmt: skip
    sub.option(
        "--min-frequency",
        "wordpiece and bytelevel: pairs of pieces that are rarer are not merged (default: 2)",
        type=int, metavar="N",
    )  # fmt: skip
    sub.option(
        "--max-mb", "learn from at most so much text, spread over all of it", 256,
        type=float, metavar="MB",
    )  # fmt: skip

    sub = verb(
        "corpus", corpus_, "tokenize text, or pairs of texts, into a corpus directory",
        "bert-jax corpus --input 'my/*.txt' --tokenizer work/tokenizer --out work/corpus\n"
        "  bert-jax corpus --input hf:allenai/c4:en --tokenizer work/tokenizer --estimate\n"
        "  bert-jax corpus --input 'gs://raw/*.jsonl.gz' --tokenizer work/tokenizer \\\n"
        "      --engine=ray --address=auto --out gs://corpora/mine\n"
        "  bert-jax corpus --pairs train.en train.de --heldout-pairs val.en val.de \\\n"
        "      --tokenizer work/tokenizer --out work/en-de",
    )  # fmt: skip
    _add_input(sub)
    _add_pairs(sub, "for translation, in place of --input")
    sub.option(
        "--heldout-pairs", "pairs for evaluation, given as --pairs (default: some of --pairs)",
        nargs="+", action="append", metavar="FILE",
    )  # fmt: skip
    sub.flag("--swap", "pairs: translate the other way, from the second side to the first")
    sub.flag(
        "--drop-duplicates",
        "keep the first of documents with the same words, or of equal training pairs alone",
    )
    sub.option(
        "--tokenizer",
        "directory from `bert-jax tokenizer`, or a vocab.txt, tokenizer.json or SentencePiece "
        "model",
        required=True, type=Path,
    )  # fmt: skip
    sub.option("--out", "directory to write, or gs://BUCKET/DIRECTORY")
    sub.option(
        "--heldout-rate",
        "share of the documents, or of the pairs, kept for evaluation (default: 0.01)", type=float,
    )  # fmt: skip
    sub.option(
        "--splitter", "how sentences are found (default: fast); `lines`: one a line",
        choices=["fast", "lines", "syntok"],
    )  # fmt: skip
    sub.option("--num-workers", "default: all cores", type=int)
    sub.flag("--overwrite", "replace a corpus at --out once the new one is complete")
    sub.option(
        "--by-field", "make a corpus for each value of this field, such as lang, below --out",
        metavar="FIELD",
    )  # fmt: skip
    sub.flag("--estimate", "read a sample and say what the build takes; nothing is written")
    sub.option(
        "--engine", "processes of this machine, or of a Ray cluster (default: local)",
        choices=["local", "ray"],
    )  # fmt: skip
    sub.option(
        "--address",
        "Ray: HOST:PORT of the cluster's head, or `auto` on one of its nodes (default: a Ray of "
        "this machine alone)",
        metavar="HOST:PORT",
    )  # fmt: skip
    sub.option(
        "--shard-mb",
        "size of the files that make one shard, a task of the engine; twice as much and more makes "
        "a corpus of shards (default: 1024)",
        type=float, metavar="MB",
    )  # fmt: skip
    sub.option(
        "--scratch", "directory that all nodes reach, for the search for duplicates (default: "
        "beside --out)", type=Path, metavar="DIR",
    )  # fmt: skip
    sub.option(
        "--licence", "licence of the text, for corpus.json and the datasheet CORPUS.md (default: "
        "unknown, but for documents with a field licence or license)",
    )  # fmt: skip
    add_cleaning(sub)

    sub = verb(
        "tfds", tfds_,
        "download a data set of TensorFlow Datasets and prepare it, without TensorFlow",
        "bert-jax tfds glue/mrpc",
    )  # fmt: skip
    sub.option("name", "as in its catalogue; goes to TFDS_DATA_DIR")


def _add_pairs(sub: Parser, purpose: str) -> None:
    sub.option(
        "--pairs",
        f"pairs of texts, {purpose}: two files, of which line n of the second is the translation "
        "of line n of the first, also as .gz, .xz or .zst; or one table with --columns (.tsv, "
        ".csv, .jsonl, .parquet, `tfds:NAME[:SPLIT]`). May be repeated",
        nargs="+", action="append", metavar="FILE",
    )  # fmt: skip
    sub.option(
        "--columns",
        "columns of a table of pairs: names, or numbers from 1 in .tsv and .csv without a header",
        nargs=2, metavar=("SOURCE", "TARGET"),
    )  # fmt: skip


def _add_input(sub: Parser) -> None:
    sub.option("--input", _INPUT_HELP, action="append")
    sub.option("--field", "of a JSON line or parquet row that holds the text", _FIELD)
    sub.flag("--line-documents", "text files: each line is a document")


def tokenizer_(arguments: argparse.Namespace) -> int:
    """Learn a vocabulary."""
    from bert_jax.data.corpus.build import iter_texts
    from bert_jax.data.corpus.documents import ReadOptions
    from bert_jax.data.corpus.pairs import open_pairs
    from bert_jax.tokenization.bytelevel_training import train_bytelevel
    from bert_jax.tokenization.sentencepiece import train_sentencepiece
    from bert_jax.tokenization.tokenizer import Tokenizer
    from bert_jax.tokenization.wordpiece_training import train_wordpiece

    if arguments.out.exists() and (not arguments.out.is_dir() or any(arguments.out.iterdir())):
        raise UserError(f"{arguments.out} exists and is not empty; choose another --out")
    if not (math.isfinite(arguments.max_mb) and arguments.max_mb > 0):
        raise UserError(f"--max-mb is {arguments.max_mb:g}; it must be a number above 0")
    if not (arguments.input or arguments.pairs):
        raise UserError("give --input for text, --pairs for pairs of texts, or both")
    pairs = [open_pairs(names, arguments.columns) for names in arguments.pairs or ()]
    texts = iter_texts(
        [*(arguments.input or ()), *pairs],
        max_bytes=int(arguments.max_mb * 1e6),
        options=ReadOptions(arguments.field, line_documents=arguments.line_documents),
    )
    options = ("character_coverage", "limit_alphabet", "min_frequency", "keep_accents")
    given = {name: value for name in options if (value := getattr(arguments, name)) is not None}
    show = sys.stderr.isatty()
    tokenizer: Tokenizer
    if arguments.kind == "wordpiece":
        if given.pop("keep_accents", False):
            given["strip_accents"] = False
        tokenizer = train_wordpiece(
            texts, arguments.vocab_size, lowercase=not arguments.cased, progress=show, **given
        )
    elif arguments.kind == "bytelevel":
        for name in given.keys() - {"min_frequency"}:
            raise UserError(
                f"--{name.replace('_', '-')} does not belong to --kind bytelevel, which keeps all "
                "characters, as bytes, and all accents"
            )
        tokenizer = train_bytelevel(texts, arguments.vocab_size, progress=show, **given)
    else:
        for name in given.keys() & set(options[1:]):
            raise UserError(
                f"--{name.replace('_', '-')} belongs to --kind wordpiece. SentencePiece keeps all "
                "accents and has no least frequency; --character-coverage limits its characters"
            )
        tokenizer = train_sentencepiece(
            texts, arguments.vocab_size, model=arguments.kind, progress=show, **given
        )
    tokenizer.save(arguments.out)
    print(
        f"{arguments.out}: {arguments.kind}, {tokenizer.vocab_size:,} tokens, fingerprint "
        f"{tokenizer.fingerprint[:12]}"
    )
    return 0


def corpus_(arguments: argparse.Namespace) -> int:
    """Build token stores, of text or of pairs."""
    _check_form(arguments)
    return _pairs_corpus(arguments) if arguments.pairs else _text_corpus(arguments)


def _text_corpus(arguments: argparse.Namespace) -> int:
    from bert_jax.data.corpus.build import build_corpora
    from bert_jax.data.corpus.datasheet import Provenance
    from bert_jax.data.corpus.documents import ReadOptions
    from bert_jax.data.corpus.passes import Recipe
    from bert_jax.data.corpus.sharded.engine import open_engine
    from bert_jax.data.corpus.sharded.estimate import estimate_corpus
    from bert_jax.data.corpus.sharded.tasks import SHARD_BYTES
    from bert_jax.data.corpus.sources import resolve_sources
    from bert_jax.data.corpus.workers import worker_count
    from bert_jax.tokenization.load import load_tokenizer

    shard_bytes = SHARD_BYTES
    if (size := arguments.shard_mb) is not None:
        if not (math.isfinite(size) and size * 1e6 >= 1):
            raise UserError(f"--shard-mb is {size:g}; it must be a number above 0")
        shard_bytes = int(size * (1 << 20))
    rate = {} if arguments.heldout_rate is None else {"heldout_rate": arguments.heldout_rate}
    recipe = Recipe(
        load_tokenizer(arguments.tokenizer),
        splitter=arguments.splitter or "fast",
        by_field=arguments.by_field or "",
        cleaning=cleaning_config(arguments),
        **rate,
    )
    keep = (arguments.by_field,) if arguments.by_field else ()
    options = ReadOptions(arguments.field, keep, line_documents=arguments.line_documents)
    if arguments.estimate:
        sources = resolve_sources(arguments.input, options)
        found = estimate_corpus(sources, recipe, shard_bytes=shard_bytes)
        print("\n".join(found.lines(worker_count(arguments.num_workers))))
        return 0
    engine = open_engine(
        arguments.engine or "local", address=arguments.address, num_workers=arguments.num_workers
    )
    try:
        built = build_corpora(
            arguments.input, recipe, arguments.out, engine=engine, shard_bytes=shard_bytes,
            options=options, overwrite=arguments.overwrite, keep_dropped=arguments.keep_dropped,
            scratch=arguments.scratch,
            provenance=Provenance(arguments.licence or "", arguments.command_line),
        )  # fmt: skip
    finally:
        engine.close()
    for corpus in built:
        print(corpus.summary())
    return 0


def _pairs_corpus(arguments: argparse.Namespace) -> int:
    from bert_jax.data.corpus.build_pairs import build_pairs
    from bert_jax.data.corpus.datasheet import Provenance
    from bert_jax.data.corpus.pairs import open_pairs
    from bert_jax.tokenization.load import load_tokenizer

    given = {
        name: value
        for name in ("heldout_rate", "num_workers")
        if (value := getattr(arguments, name)) is not None
    }
    sources, heldout = (
        [open_pairs(names, arguments.columns, swap=arguments.swap) for names in several or ()]
        for several in (arguments.pairs, arguments.heldout_pairs)
    )
    built = build_pairs(
        sources, load_tokenizer(arguments.tokenizer), arguments.out, heldout=heldout,
        drop_duplicates=arguments.drop_duplicates, overwrite=arguments.overwrite,
        provenance=Provenance(arguments.licence or "", arguments.command_line), **given,
    )  # fmt: skip
    print(built.summary())
    return 0


def _check_form(arguments: argparse.Namespace) -> None:
    """Refuse options of the other form, text or pairs."""
    if bool(arguments.input) == bool(arguments.pairs):
        raise UserError(
            "give --input for text, or --pairs for sources and targets"
            + ("; not both" if arguments.input else "")
        )
    if (arguments.out is None) != arguments.estimate:
        raise UserError(
            "--estimate writes nothing; leave --out or --estimate out"
            if arguments.estimate
            else "give --out, the directory to write, or --estimate"
        )
    form, other = ("--pairs", "--input") if arguments.pairs else ("--input", "--pairs")
    of_other = {
        "--input": {
            "splitter": arguments.splitter is not None,
            "field": arguments.field != _FIELD,
            "line-documents": arguments.line_documents,
            **{
                name: getattr(arguments, name.replace("-", "_")) not in (None, False, [])
                for name in _TEXT_OPTIONS
            },
        },
        "--pairs": {
            "heldout-pairs": bool(arguments.heldout_pairs),
            "columns": arguments.columns is not None,
            "swap": arguments.swap,
        },
    }[other]
    for name, is_given in of_other.items():
        if is_given:
            raise UserError(f"--{name} belongs to {other}, and this is a corpus of {form}")
    several = [*(arguments.pairs or ()), *(arguments.heldout_pairs or ())]
    if arguments.columns and all(len(names) > 1 for names in several):
        raise UserError(
            f"--columns {' '.join(arguments.columns)} belongs to a table, and --pairs names files "
            "of lines"
        )
    if arguments.heldout_pairs and arguments.heldout_rate is not None:
        raise UserError(
            "--heldout-rate holds out some of --pairs, but --heldout-pairs are given; leave one out"
        )


def tfds_(arguments: argparse.Namespace) -> int:
    """Download and prepare a data set of TensorFlow Datasets."""
    from bert_jax.files.tfds import prepare_tfds

    print(prepare_tfds(arguments.name))
    return 0
