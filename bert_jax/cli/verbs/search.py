"""The verbs that search by vectors, with their arguments; imports are made when one runs."""

import argparse
import json
import shlex
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_jax.cli.verbs.options import Parser, written_as
from bert_jax.errors import UserError

if TYPE_CHECKING:
    from bert_jax.artefacts.saved.model import SavedModel
    from bert_jax.infer.records import Record
    from bert_jax.infer.search.index import Hit
    from bert_jax.infer.search.passages import Passage

_PASSAGE_TOKENS = 256
_SHOWN_CHARS = 240
_QUERIES = 1024


def add(verb: Callable[..., Parser]) -> None:
    """Add the verbs; `verb` makes a parser of a name, a function, a description and an example."""
    sub = verb(
        "index", index, "make files searchable: cut them into passages and store their vectors",
        "bert-jax index work/embedder notes/ --out notes.parquet\n"
        "  bert-jax index work/embedder 'docs/**/*.md' faq.csv --field answer --out docs.parquet",
    )  # fmt: skip
    _add_model(sub)
    sub.add_argument(
        "texts",
        nargs="*",
        metavar="FILE",
        help="text files (.txt, .md), JSON lines and tables (.jsonl, .csv, .tsv, .parquet), also "
        "compressed; a directory or a glob of these; hf:OWNER/NAME",
    )
    sub.option(
        "--out", "the index, one parquet file; replaced where it exists", required=True, type=Path,
        metavar="INDEX",
    )  # fmt: skip
    sub.option("--field", "field of JSON lines and tables that holds the text", "text")
    sub.option(
        "--passage-tokens",
        f"tokens of a passage at most (default: {_PASSAGE_TOKENS}, or the model's length if lower)",
        type=int, metavar="N",
    )  # fmt: skip
    sub.option(
        "--dimensions", "keep the first N numbers of each vector (default: all)", type=int,
        metavar="N",
    )  # fmt: skip
    _add_device(sub)

    sub = verb(
        "search", search, "find the passages of an index that are nearest to a query",
        'bert-jax search notes.parquet "how do I reset the router?"\n'
        "  bert-jax search notes.parquet --input questions.txt --top 3 --json > found.jsonl\n"
        '  bert-jax search notes.parquet "who wrote it?" --rerank work/reranker',
    )  # fmt: skip
    sub.option("index", "a file of `bert-jax index`", type=Path, metavar="INDEX")
    sub.add_argument(
        "texts", nargs="*", metavar="QUERY", help="a query; - (or none) for standard input"
    )
    sub.several(
        "--input", "FILE", "read queries: lines of text, or JSON lines with the field query"
    )
    sub.option("--top", "passages for each query", 10)
    sub.option("--model", "the model, where it has moved since the index was made", metavar="DIR")
    add_rerank(sub)
    sub.flag("--json", "print a JSON line for each query")
    _add_device(sub)

    sub = verb(
        "mine", mine,
        "find hard negatives for pairs of queries and documents, to train an embedding model on",
        "bert-jax mine work/embedder pairs.jsonl --out mined.jsonl\n"
        "  bert-jax finetune --config=configs/finetune/embed.py --workdir=work/harder \\\n"
        "      --config.init=work/embedder --config.task.train=mined.jsonl \\\n"
        "      --config.task.negatives=negatives",
    )  # fmt: skip
    _add_model(sub)
    sub.option("pairs", "a .csv, .tsv, .jsonl or .parquet file of pairs", metavar="PAIRS")
    sub.option(
        "--out", "JSON lines with query, document and negatives", required=True, type=Path,
        metavar="FILE",
    )  # fmt: skip
    sub.option(
        "--columns", "columns with other names, such as query=question,document=text, and how the "
        "file is written: query=1,document=2,header=False",
        metavar="LIST",
    )  # fmt: skip
    sub.several(
        "--corpus", "FILE", "more documents to choose from, as in `bert-jax index`; may be repeated"
    )
    sub.option("--field", "field of the text in --corpus", "text")
    sub.option("--negatives", "negatives of a pair at most", 5)
    sub.option(
        "--margin", "how far a negative's cosine stays below the pair's; may be negative", 0.05
    )
    sub.flag(
        "--labelled",
        "write a line for each pair and for each negative, with the label 1 or 0: to train a "
        "reranker on",
    )
    sub.option("--ranks", "ranks of negatives, among the documents that are no answer", "1-100")
    _add_device(sub)


def add_rerank(sub: Parser, what: str = "") -> None:
    """Add the options of a reranker; `what` stands before their help."""
    sub.option(
        "--rerank",
        f"{what}order the first --candidates anew by a fine-tuned model of pairs, with one score "
        "or two classes",
        metavar="DIR",
    )
    sub.option("--candidates", f"{what}passages that are reranked", 100)


def _add_model(sub: Parser) -> None:
    sub.option("model", "of a run, or a directory in Hugging Face's format", metavar="DIR")


def _add_device(sub: Parser) -> None:
    sub.option(
        "--device", "cpu, gpu, tpu, or one of several as gpu:1 (default: the first that JAX finds)"
    )


def index(arguments: argparse.Namespace) -> int:
    """Write an index."""
    from tqdm import tqdm

    from bert_jax.infer.embed import Embedder
    from bert_jax.infer.predictor import check_count
    from bert_jax.infer.search.index import check_index_name, write_index
    from bert_jax.infer.search.passages import found_sources, passages
    from bert_jax.tokenization.tokenizer import num_special

    check_index_name(arguments.out)
    if not arguments.texts:
        raise UserError("there is nothing to index: name files, a directory or a glob")
    sources, passed = found_sources(arguments.texts, arguments.field)
    model = opened_model(arguments, arguments.model)
    Embedder(model, kind="document", dimensions=arguments.dimensions)  # refuses what cannot be
    room = min(arguments.passage_tokens or _PASSAGE_TOKENS, model.max_length)
    prefix = "" if model.embedding is None else model.embedding.document_prefix
    room -= num_special(model.tokenizer, False) + len(model.tokenizer.encode(prefix).ids)
    check_count("--passage-tokens, less special tokens and prefix,", room)
    bytes_of: deque[int] = deque()
    with tqdm(
        total=sum(source.size for source in sources) or None, unit="B", unit_scale=True,
        disable=not sys.stderr.isatty(),
    ) as bar:  # fmt: skip

        def found() -> Iterator["Passage"]:
            for source in sources:
                before = 0
                for passage in passages(source, model.tokenizer, room):
                    bytes_of.append(source.bytes_read - before)
                    before = source.bytes_read
                    yield passage

        def advance(count: int) -> None:
            bar.update(sum(bytes_of.popleft() for _ in range(count)))

        count, warning = write_index(
            arguments.out, model, arguments.model, found(), dimensions=arguments.dimensions,
            advance=advance,
        )  # fmt: skip
    if model.embedding is None:
        warning += ("\nWarning: " if warning else "") + (
            f"{model.name} was not trained to make vectors, so the search finds little; `bert-jax "
            "finetune --config=configs/finetune/embed.py` trains one"
        )
    if warning:
        print(f"Warning: {warning}", file=sys.stderr)
    if passed:
        print(f"{passed:,} hidden or empty files, or files of other kinds, were passed over")
    files = "1 file" if len(sources) == 1 else f"{len(sources):,} files"
    print(f"{count:,} passages of {files} in {arguments.out}")
    print(f'search them: bert-jax search {shlex.quote(f"{arguments.out}")} "..."')
    return 0


def search(arguments: argparse.Namespace) -> int:
    """Search an index."""
    from bert_jax.infer.predictor import check_count
    from bert_jax.infer.search.index import LINK, Index
    from bert_jax.infer.search.rerank import Reranker
    from bert_jax.infer.search.vectors import text_vectors

    check_count("--top", arguments.top)
    check_count("--candidates", arguments.candidates)
    opened = Index(arguments.index)
    place = arguments.model or f"{arguments.index}{LINK}"
    if not arguments.model and not Path(place).is_dir():
        raise UserError(f"{place}, the link to {opened.by.model}, is gone; name it: --model")
    model = opened_model(arguments, place)
    opened.check_model(model)
    reranker = Reranker(opened_model(arguments, arguments.rerank)) if arguments.rerank else None
    dimensions = opened.by.dimensions
    for records in _queries(arguments):
        queries = [record.fields["query"] for record in records]
        vectors = text_vectors(model, queries, "query", dimensions=dimensions)
        wanted = arguments.top if reranker is None else max(arguments.candidates, arguments.top)
        found = opened.search(vectors, wanted)
        if reranker is not None:
            found = [reranker.order(*each) for each in zip(queries, found, strict=True)]
        for record, hits in zip(records, found, strict=True):
            _print_hits(record, hits[: arguments.top], as_json=arguments.json)
    return 0


def _queries(arguments: argparse.Namespace) -> Iterator[list["Record"]]:
    """Read the queries in parts; from a pipe, the lines that are there."""
    from bert_jax.infer.predictor import Given, text_field
    from bert_jax.infer.records import PAUSE, STDIN, Record, read_records
    from bert_jax.tokenization.tokenizer import replace_surrogates

    texts, inputs = arguments.texts, list(arguments.input)
    if texts and inputs:
        raise UserError("give queries or --input FILE, not both")
    if texts in ([], [STDIN]) and not inputs:
        if sys.stdin.isatty():
            print("A query in each line; the end of the input ends the search.", file=sys.stderr)
        texts, inputs = [], [STDIN]
    part = [
        Record(Given("query", number), {"query": replace_surrogates(text)})
        for number, text in enumerate(texts, 1)
    ]
    if not all(map(str.strip, texts)):
        raise UserError("a query is empty; give some words")
    for source in inputs:
        for record in read_records(source, fields=("query",)):
            if record is not PAUSE:
                if record.problem is not None:
                    raise UserError(record.problem)
                text_field(record.fields, "query", record.origin)
                part.append(record)
            if part and (record is PAUSE or len(part) == _QUERIES):
                yield part
                part = []
    if part:
        yield part


def _print_hits(record: "Record", hits: list["Hit"], *, as_json: bool) -> None:
    query = record.fields["query"]
    if as_json:
        id = {"id": record.fields["id"]} if "id" in record.fields else {}
        line = {**id, "query": query, "hits": [hit.as_json() for hit in hits]}
        print(json.dumps(line, ensure_ascii=False, default=str), flush=True)
        return
    print(query)
    for number, hit in enumerate(hits, 1):
        text = textwrap.shorten(hit.passage.text, _SHOWN_CHARS, placeholder=" ...")
        print(f"{number:4}  {hit.score:.3f}  {hit.passage.id}")
        print(textwrap.indent(textwrap.fill(text, 90), " " * 6))
    sys.stdout.flush()


def mine(arguments: argparse.Namespace) -> int:
    """Find hard negatives."""
    from tqdm import tqdm

    from bert_jax.infer.search import mine as mining
    from bert_jax.infer.search.passages import found_sources
    from bert_jax.infer.writers import check_out

    check_out(arguments.out, vectors=False)
    first, dash, last = arguments.ranks.partition("-")
    if not (dash and first.strip().isdigit() and last.strip().isdigit()):
        raise UserError(f"--ranks is {arguments.ranks!r}; give a first and a last one, as 1-100")
    config = mining.MineConfig(arguments.negatives, arguments.margin, int(first), int(last))
    columns, written = columns_named(arguments.columns, "query", "document")
    pairs = mining.read_pairs(arguments.pairs, *columns, **written)
    sources = found_sources(arguments.corpus, arguments.field)[0] if arguments.corpus else []
    model = opened_model(arguments, arguments.model)
    more = [text for source in sources for text in source.texts()]
    with tqdm(unit=" texts", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        found = mining.mine(model, pairs, config, corpus=more, advance=bar.update)
    if not any(found.negatives):
        raise UserError(
            f"no pair has a negative: {found.lines()[-1]}. Add documents (--corpus), lower "
            f"--margin ({arguments.margin}) or widen --ranks ({arguments.ranks})"
        )
    mining.write_mined(arguments.out, found, labelled=arguments.labelled)
    if found.warning:
        print(f"Warning: {found.warning}", file=sys.stderr)
    print("\n".join(found.lines()))
    if arguments.labelled:
        fields = "text=query --config.task.text_pair=document"
    else:
        fields = "negatives=negatives"
    print(f"{arguments.out}: train on it with --config.task.{fields}")
    return 0


def columns_named(text: str | None, *fields: str) -> tuple[list[str], dict[str, Any]]:
    """Return the column of each field, its name unless `--columns` says another, and the format.

    Raises:
        UserError: Names what is no field.
    """
    found, written = {field: field for field in fields}, dict[str, Any]()
    for part in (text or "").split(",") if text else ():
        field, equals, column = part.strip().partition("=")
        if option := written_as(part.strip()):
            written |= option
        elif field not in found or not equals or not column:
            raise UserError(
                f"--columns: {part!r} is no FIELD=COLUMN; the fields are {', '.join(fields)}"
            )
        else:
            found[field] = column
    return [*found.values()], written


def opened_model(arguments: argparse.Namespace, place: str) -> "SavedModel":
    """Read a model onto the device of `--device`."""
    from bert_jax.artefacts.saved.reading import read_model
    from bert_jax.infer.forward import on_device

    return on_device(read_model(place), getattr(arguments, "device", None))
