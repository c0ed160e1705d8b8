"""The verbs that ask a model, with their arguments; imports are made when one runs."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bert_jax.cli.verbs.options import Parser
from bert_jax.errors import UserError

if TYPE_CHECKING:
    from bert_jax.artefacts.saved.model import SavedModel
    from bert_jax.model.seq2seq.search import SearchConfig

_MAX_CONTEXT_BYTES = 4 << 20


def add(verb: Callable[..., Parser]) -> None:
    """Add the verbs; `verb` makes a parser of a name, a function, a description and an example."""
    sub = verb(
        "fill-mask", fill_mask, "fill the [MASK]s of texts with a pretrained model",
        'bert-jax fill-mask work/tiny "The capital of France is [MASK]."',
    )  # fmt: skip
    _add_source(sub, "a text with one [MASK] or more")
    sub.option("--top", "candidates a mask", 5)

    sub = verb(
        "classify", classify,
        "tell the class, the labels or the score of texts and pairs with a fine-tuned model",
        'bert-jax classify work/reviews "What a film."\n'
        "  bert-jax classify work/reviews --input new.jsonl --out labels.jsonl",
    )  # fmt: skip
    _add_source(sub, "a text")
    sub.option("--text-b", "the second text of a pair, to every text", metavar="TEXT")
    sub.option("--top", "list N classes (default: all)", type=int, metavar="N")
    sub.option(
        "--threshold",
        "of several labels, those that are more probable (default: the model's own, else 0.5)",
        type=float,
        metavar="P",
    )

    sub = verb(
        "tag", tag, "tag words, and find entities, with a fine-tuned model",
        'bert-jax tag work/conll "Ada Lovelace lived in London."',
    )  # fmt: skip
    _add_source(sub, "a text; it is split into words")

    sub = verb(
        "answer", answer, "answer questions about a text with a fine-tuned model",
        'bert-jax answer work/squad "Who wrote it?" --context-file book.txt',
    )  # fmt: skip
    _add_source(sub, "a question", field="question")
    sub.option("--context", "the text in which answers stand", metavar="TEXT")
    sub.option("--context-file", "likewise, from a file", type=Path, metavar="FILE")
    sub.option("--top", "answers listed", 1)
    sub.add_argument(
        "--null-threshold",
        default="auto",
        metavar="ODDS",
        help="no answer above these odds; `none`: always answer (default: what was best on the "
        "dev data of the run, else none)",
    )
    sub.option("--max-answer-tokens", "default: as the run, else 30", type=int, metavar="N")

    sub = verb(
        "translate", translate, "translate texts with a model that was trained on pairs of texts",
        'bert-jax translate work/ende "Two dogs play." --nbest 3 --alignments\n'
        "  bert-jax translate work/ende --input test.en --out test.de",
    )  # fmt: skip
    _add_source(sub, "a text", out="translations, a line each, or a .jsonl file", limited=False)
    add_search(sub)
    sub.option("--nbest", "list so many translations of a text, at most --num-beams", 1)
    sub.option("--prefix", "the beginning of every translation", metavar="TEXT")
    sub.flag(
        "--alignments",
        "say for each target word which source word the decoder looked at most (cross-attention, "
        "mean over layers and heads), which is often, not always, the word it translates",
    )

    sub = verb(
        "embed", embed, "turn texts into vectors",
        "bert-jax embed work/tiny --input texts.txt --out vectors.npy\n"
        "  bert-jax embed work/tiny --input texts.txt --layers=-4:-1 --out vectors.parquet",
    )  # fmt: skip
    _add_source(sub, "a text", out="a .npy, .parquet or .jsonl file")
    sub.option("--text-b", "the second text of a pair, to every text", metavar="TEXT")
    sub.option(
        "--kind", "put the model's own prefix for queries or for documents before each text",
        choices=["query", "document"],
    )  # fmt: skip
    sub.option("--dimensions", "first numbers of each vector (default: all)", type=int, metavar="N")
    sub.option(
        "--pooling", "of the states of the tokens, which (default: as the model says, else mean)",
        choices=["mean", "max", "cls", "pooler", "last", "weighted"],
    )  # fmt: skip
    sub.add_argument(
        "--layers",
        "--layer",
        default="-1",
        metavar="LAYERS",
        help="a layer, some (1,6,12) or a first and a last one (--layers=-4:-1), of which the mean "
        "is taken; 0 is the embeddings, -1 the last (default: %(default)s)",
    )
    sub.flag("--no-special-tokens", "leave [CLS] and [SEP] out of mean and max")
    sub.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="to length 1 (default: as the model says, else not)",
    )

    sub = verb(
        "attend", attend,
        "draw what the tokens of a text attend to: one HTML page with all layers and heads",
        'bert-jax attend work/tiny "The animal didn\'t cross the street because it was too tired"\n'
        '  bert-jax attend work/tiny "The animal crossed the [MASK]."\n'
        '  bert-jax attend work/ende "Two dogs play."',
    )  # fmt: skip
    sub.option("directory", "a work directory, or in Hugging Face's format", metavar="DIR")
    sub.option(
        "text", "for each [MASK] the page says what the model would put there", metavar="TEXT"
    )
    sub.option(
        "--text-b",
        "the second text of a pair; of a model that translates, a translation (default: its own)",
        metavar="TEXT",
    )
    sub.option("--out", "replaced where it exists", "attention.html", type=Path, metavar="FILE")


def add_search(sub: Parser) -> None:
    """Add the options of the search for a translation."""
    sub.option("--num-beams", "hypotheses that are kept at each step; 1: greedy search", 5)
    sub.option(
        "--length-alpha", "scores are divided by ((beta + tokens) / (beta + 1)) ** alpha", 1.0
    )
    sub.option("--length-beta", "see --length-alpha", 0.0)
    sub.option(
        "--max-length", "most tokens of a translation, end token included (default: the model's)",
        type=int, metavar="N",
    )  # fmt: skip
    sub.option("--max-length-rate", "target tokens for each source token at most; 0: no limit", 3.0)


def search_settings(arguments: argparse.Namespace) -> "SearchConfig":
    """Return the settings of a search from the arguments."""
    from bert_jax.model.seq2seq.search import SearchConfig

    return SearchConfig(
        num_beams=arguments.num_beams,
        length_alpha=arguments.length_alpha,
        length_beta=arguments.length_beta,
        max_length=arguments.max_length or 0,
        max_length_rate=arguments.max_length_rate,
        nbest=getattr(arguments, "nbest", 1),
    )


def _add_source(
    sub: Parser, what: str, out: str = "a .jsonl file", field: str = "text", *,
    limited: bool = True,
) -> None:  # fmt: skip
    """Add the arguments that these verbs share; `limited` adds a limit of the rows."""
    sub.option("workdir", "of a run, or a directory in Hugging Face's format", metavar="DIR")
    sub.add_argument(
        "texts", nargs="*", metavar="TEXT", help=f"{what}; - (or none) for standard input"
    )
    sub.several(
        "--input",
        "FILE",
        "read lines of text (.txt), JSON (.jsonl, .json) or a table (.csv, .tsv, .parquet); "
        "also .gz, .xz, .zst; may be repeated",
    )
    sub.add_argument(
        "--format",
        default="auto",
        choices=["auto", "text", "json", "jsonl", "csv", "tsv", "parquet"],
        help="of the files; auto tells by the suffix, of standard input by its first line",
    )
    sub.option(
        "--text-column",
        f"column or JSON field of {what} (default: {field}); a column is a name, or a number from "
        "1",
        metavar="NAME",
    )
    sub.several(
        "--table",
        "NAME=VALUE",
        "how CSV and TSV files are written: header=False, delimiter=';', quoting=False",
    )
    sub.several(
        "--field",
        "OURS=THEIRS",
        "the name that another field has in the files, such as text_b=answer",
    )
    sub.option("--out", f"write {out}; it appears whole or not at all", type=Path, metavar="FILE")
    sub.flag("--json", "print JSON lines for texts too")
    sub.option(
        "--device", "cpu, gpu, tpu, or one of several as gpu:1 (default: the first that JAX finds)",
        metavar="NAME",
    )  # fmt: skip
    sub.option("--batch-tokens", "most tokens in a batch (default: 1024)", type=int, metavar="N")
    if limited:
        sub.option(
            "--max-length", "most tokens of a row, special ones included; what is longer is cut, "
            "or read in windows (default: the model's)",
            type=int, metavar="N", dest="max_row",
        )  # fmt: skip
    else:
        sub.set_defaults(max_row=None)
    sub.option(
        "--on-error", "at a line that cannot be read or asked about: stop, or say so in its place",
        "fail", choices=["fail", "skip"],
    )  # fmt: skip


def fill_mask(arguments: argparse.Namespace) -> int:
    """Fill masks."""
    from bert_jax.cli.verbs.answering import run_verb
    from bert_jax.infer.fill_mask import MaskFiller

    return run_verb(arguments, partial(MaskFiller, top=arguments.top))


def classify(arguments: argparse.Namespace) -> int:
    """Classify texts: classes, labels or scores."""
    from bert_jax.cli.verbs.answering import run_verb
    from bert_jax.infer.classify import Classifier

    make = partial(Classifier, top=arguments.top, threshold=arguments.threshold)
    return run_verb(arguments, make, text_b=arguments.text_b)


def tag(arguments: argparse.Namespace) -> int:
    """Tag words."""
    from bert_jax.cli.verbs.answering import run_verb
    from bert_jax.infer.tag import Tagger

    return run_verb(arguments, Tagger)


def answer(arguments: argparse.Namespace) -> int:
    """Answer questions."""
    from bert_jax.cli.verbs.answering import run_verb
    from bert_jax.files.untrusted.whole_file import read_text
    from bert_jax.infer.answer import Answerer

    context = arguments.context
    if arguments.context_file is not None:
        if context is not None:
            raise UserError("give --context or --context-file, not both")
        context = read_text(arguments.context_file, max_bytes=_MAX_CONTEXT_BYTES)
    if context is None and arguments.texts not in ([], ["-"]):
        raise UserError("a question needs a text: give --context TEXT or --context-file FILE")
    threshold = arguments.null_threshold
    if threshold not in ("none", "auto"):
        try:
            threshold = float(threshold)
        except ValueError:
            raise UserError(
                f"--null-threshold is {threshold!r}; give a number, none or auto"
            ) from None
    make = partial(
        Answerer,
        top=arguments.top,
        null_threshold=None if threshold == "none" else threshold,
        max_answer_tokens=arguments.max_answer_tokens,
    )
    return run_verb(arguments, make, context=context)


def translate(arguments: argparse.Namespace) -> int:
    """Translate texts."""
    from bert_jax.cli.verbs.answering import answer_form, run_verb
    from bert_jax.infer.translate import Translator

    settings = search_settings(arguments)
    if answer_form(arguments) == "plain":
        for option, given in (
            ("--nbest", settings.nbest > 1),
            ("--alignments", arguments.alignments),
        ):
            if given:
                raise UserError(
                    f"{option} does not fit into a line for each text: add --json, or name a "
                    ".jsonl file as --out"
                )
    translators: list[Translator] = []

    def make(model: "SavedModel") -> Translator:
        translators.append(Translator(model, search=settings, alignments=arguments.alignments))
        return translators[-1]

    code = run_verb(arguments, make, prefix=arguments.prefix)
    if cut := translators[0].num_cut:
        print(
            f"Warning: {cut:,} translations reached the greatest length without an end and were "
            "cut there; --max-length-rate and --max-length are the limits",
            file=sys.stderr,
        )
    return code


def embed(arguments: argparse.Namespace) -> int:
    """Turn texts into vectors."""
    from bert_jax.cli.verbs.answering import run_verb
    from bert_jax.infer.embed import Embedder, parse_layers

    make = partial(
        Embedder, kind=arguments.kind, dimensions=arguments.dimensions, pooling=arguments.pooling,
        layers=parse_layers(arguments.layers), special_tokens=not arguments.no_special_tokens,
        normalize=arguments.normalize,
    )  # fmt: skip
    return run_verb(arguments, make, text_b=arguments.text_b)


def attend(arguments: argparse.Namespace) -> int:
    """Write a page with attention weights."""
    from bert_jax.artefacts.saved.reading import read_model
    from bert_jax.files.staging import replace_file
    from bert_jax.files.urls import scheme
    from bert_jax.infer.attend import attention_page
    from bert_jax.tokenization.masks import mask_spans

    out = arguments.out
    if scheme(out) is not None or out.is_dir():
        what = "a directory" if scheme(out) is None else "not a local path"
        raise UserError(f"--out {out} is {what}; name a file, such as attention.html")
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out {out}: the page is HTML; name a .html file")
    saved = read_model(arguments.directory, encoder_only=True)
    if saved.network is None and any(
        mask_spans(text, saved.tokenizer) for text in (arguments.text, arguments.text_b or "")
    ):
        saved = read_model(arguments.directory)
    page = attention_page(saved, arguments.text, arguments.text_b).encode()
    replace_file(out, page)
    print(f"{out} ({-(-len(page) // 1000):,} kB); open it in a browser")
    return 0
