"""Verbs that search by vectors. Each verb imports its modules only when it runs."""

import re
import shlex
import sys
import textwrap
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from bert_jax.cli.verbs import groups
from bert_jax.cli.verbs.options import File, Given, ModelPlace
from bert_jax.config.bounds import AtLeast, AtMost, Count
from bert_jax.errors import UserError
from bert_jax.terminal import progress_bar

if TYPE_CHECKING:
    from bert_jax.infer.records import Record
    from bert_jax.infer.search.index import Hit
    from bert_jax.infer.search.passages import Passage

_PASSAGE_TOKENS = 256
_QUERIES = 1024


class Index(groups.OfModel, groups.IntoDirectory, groups.Columns, groups.Dimensions, groups.Device):
    """Build a search index of files as a LanceDB table.

    $ bert-jax index work/embedder notes/ --out work/notes
    $ bert-jax index work/embedder 'docs/**/*.md' faq.csv --columns text=answer --out work/docs
    """

    files: Given[tuple[Annotated[str, "FILE"], ...]] = ()
    """Text files (.txt, .md), JSON lines and tables (.jsonl, .csv, .tsv, .parquet), also
    compressed; a directory or a glob of these; or hf:OWNER/NAME (Hugging Face Hub)."""
    passage_tokens: Annotated[int | None, "N"] = None
    """Largest number of tokens in a passage (default: 256, or the model's limit if lower)."""
    overwrite: bool = False
    """Replace an existing index at --out as soon as the new index is complete."""

    def __call__(self) -> int:
        from bert_jax.infer.embed import Embedder
        from bert_jax.infer.predictor import check_count
        from bert_jax.infer.search.index import write_index
        from bert_jax.infer.search.passages import found_sources, passages
        from bert_jax.tokenization.tokenizer import num_special

        if not self.files:
            raise UserError("there is nothing to index: name files, a directory or a glob")
        names, written = self.named("text")
        if written:
            raise UserError(
                f"--columns has {', '.join(written)}, but the index takes only text=COLUMN; leave "
                f"{' and '.join(written)} out"
            )
        sources, passed = found_sources(self.files, names.get("text", "text"))
        model = self.opened(self.model)
        Embedder(model, kind="document", dimensions=self.dimensions)  # checks --dimensions
        if model.embedding is not None and model.embedding.is_sparse:
            raise UserError(
                f"{model.name} makes sparse vectors, but an index has dense ones; write them with "
                "`bert-jax embed --kind=document --out FILE.jsonl` for a search engine"
            )
        room = min(self.passage_tokens or _PASSAGE_TOKENS, model.max_length)
        prefix = "" if model.embedding is None else model.embedding.document_prefix
        room -= num_special(model.tokenizer, False) + len(model.tokenizer.encode(prefix).ids)
        check_count("--passage-tokens, less special tokens and prefix,", room)
        bytes_of: deque[int] = deque()
        size = sum(source.size for source in sources) or None
        with progress_bar(of="index", unit="B", total=size) as bar:

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
                self.out, model, self.model, found(), dimensions=self.dimensions,
                overwrite=self.overwrite, advance=advance,
            )  # fmt: skip
        if model.embedding is None:
            warning += ("\nWarning: " if warning else "") + (
                f"{model.name} was not trained to make vectors, so searches will find little; "
                "`bert-jax finetune --config=embed` trains a model for that"
            )
        if warning:
            print(f"Warning: {warning}", file=sys.stderr)
        if passed:
            print(f"{passed:,} files that are empty or of another kind were skipped")
        files = "1 file" if len(sources) == 1 else f"{len(sources):,} files"
        print(f"{count:,} passages of {files} in {self.out}")
        print(f'search them: bert-jax search {shlex.quote(f"{self.out}")} "..."')
        return 0


class Search(groups.Texts, groups.Top, groups.Rerank, groups.Json, groups.Device):
    """Find the passages of an index that answer a query.

    $ bert-jax search work/notes "how do I reset the router?"
    $ bert-jax search work/notes --input questions.txt --top 3 --json > found.jsonl
    $ bert-jax search work/notes "who wrote it?" --rerank work/reranker
    """

    index: Given[Annotated[Path, "INDEX"]]
    """Output of `bert-jax index`."""
    method: Literal["hybrid", "vector", "words"] = "hybrid"
    """Method. vector: by cosine. words: by shared words (BM25). hybrid: by the mean of both."""
    model: ModelPlace | None = None
    """Present location of the model that made the index, if the model has moved since then."""

    def __call__(self) -> int:
        from bert_jax.infer.embed import text_vectors
        from bert_jax.infer.search.index import Index, Reranker

        self.only_with("--rerank", self.rerank, "--candidates")
        self.only_with("--method=vector or hybrid", self.method != "words", "--model")
        top, opened, model = self.top or 10, Index(self.index), None
        if self.method != "words":
            place = self.model or f"{opened.link}"
            if not self.model and not Path(place).is_dir():
                raise UserError(
                    f"{place} is the link to the index's model {opened.by.model}, but leads "
                    "nowhere; give --model"
                )
            model = self.opened(place)
            opened.check_model(model)
        reranker = Reranker(self.opened(self.rerank)) if self.rerank else None
        wanted = top if reranker is None else max(self.candidates, top)
        for records in self._queries():
            queries = [record.fields["query"] for record in records]
            asked: dict[str, Any] = {} if self.method == "vector" else {"words": queries}
            if model is not None:
                width = opened.dimensions
                asked["vectors"] = text_vectors(model, queries, "query", dimensions=width)
            found = opened.search(wanted, **asked)
            if reranker is not None:
                found = [reranker.order(*each) for each in zip(queries, found, strict=True)]
            for record, hits in zip(records, found, strict=True):
                self._print_hits(record, hits[:top])
        return 0

    def _print_hits(self, record: "Record", hits: list["Hit"]) -> None:
        query = record.fields["query"]
        id = {"id": record.fields["id"]} if "id" in record.fields else {}
        found = [hit | {"score": round(hit["score"], 6)} for hit in hits]
        self.show(
            {**id, "query": query, "hits": found}, _numbered(query, hits),
            indent=None, default=str, ensure_ascii=False,
        )  # fmt: skip

    def _queries(self) -> Iterator[list["Record"]]:
        """Yield groups of queries. From a pipe, a group has the lines that have arrived so far."""
        from bert_jax.infer.predictor import Given, chunks, text_field
        from bert_jax.infer.records import STDIN, Record, read_records
        from bert_jax.tokenization.tokenizer import replace_surrogates

        texts, inputs = self.texts, self.input
        if texts and inputs:
            raise UserError("give queries or --input FILE, not both")
        if texts in ((), (STDIN,)) and not inputs:
            if sys.stdin.isatty():
                print("Type one query per line; end the input to end the search.", file=sys.stderr)
            texts, inputs = (), (STDIN,)
        if not all(map(str.strip, texts)):
            raise UserError("a query is empty; give some words")

        def records() -> Iterator[Record]:
            for number, text in enumerate(texts, 1):
                yield Record(Given("query", number), {"query": replace_surrogates(text)})
            for source in inputs:
                yield from read_records(source, fields=("query",))

        for part in chunks(records(), _QUERIES):
            for record in part:
                if record.problem is not None:
                    raise UserError(record.problem)
                text_field(record.fields, "query", record.origin)
            yield part


def _numbered(query: str, hits: list["Hit"]) -> Iterator[str]:
    from bert_jax.infer.search.snippets import snippet

    yield query
    for number, hit in enumerate(hits, 1):
        part = hit.get("passage") or 1  # updates may lack the column
        name = f"{hit.get('id')}" + (f"#{part}" if part > 1 else "")
        yield f"{number:4}  {hit['score']:.3f}  {name}"
        yield textwrap.indent(textwrap.fill(snippet(hit["text"], query), 90), " " * 6)


class Mine(groups.OfModel, groups.Columns, groups.Device):
    r"""Find hard negatives for pairs of queries and documents.

    An embedding model or a reranker can be trained on the negatives.

    $ bert-jax mine work/embedder pairs.jsonl --out mined.jsonl
    $ bert-jax finetune --config=embed --workdir=work/harder \
        --config.init=work/embedder --config.task.train=mined.jsonl \
        --config.task.negatives=negatives
    """

    pairs: Given[Annotated[str, "FILE"]]
    """File of pairs, each a query and a document: .csv, .tsv, .jsonl or .parquet."""
    out: File
    """File to write or replace, in JSON lines (.jsonl)."""
    input: tuple[Annotated[str, "FILE"], ...] = ()
    """Further documents that may become negatives, as for `bert-jax index`. May be repeated."""
    negatives: Count = 5
    """Largest number of negatives for each pair."""
    margin: Annotated[float, AtLeast(-1000), AtMost(1000)] = 0.05
    """Margin by which a pair's similarity must exceed a negative's similarity; may be below 0."""
    ranks: Annotated[str, "FIRST-LAST"] = "1-100"
    """Ranks of the negatives by cosine, among the documents that are not paired with the query."""

    def __call__(self) -> int:
        from bert_jax.infer.search import mine as mining
        from bert_jax.infer.search.passages import found_sources
        from bert_jax.infer.writers import check_out

        ranks = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", self.ranks)
        first, last = map(int, ranks.groups()) if ranks else (0, 0)
        if not 1 <= first <= last:
            raise UserError(
                f"--ranks is {self.ranks!r}; give the first rank, at least 1, and the last, such "
                "as 1-100"
            )
        names, written = self.named("query", "document", "text")
        columns = (names.get(field, field) for field in ("query", "document"))
        pairs = mining.read_pairs(self.pairs, *columns, **written)
        sources = found_sources(self.input, names.get("text", "text"))[0] if self.input else []
        check_out(self.out, vectors=False, sources=(self.pairs, *(each.name for each in sources)))
        model = self.opened(self.model)
        more = [text for source in sources for text in source.texts()]
        with progress_bar(of="vectors", unit="texts") as bar:
            found = mining.mine(
                model, pairs, negatives=self.negatives, margin=self.margin, first=first, last=last,
                corpus=more, advance=bar.update,
            )  # fmt: skip
        if not any(found.negatives):
            raise UserError(
                f"no pair has a negative: {found.lines()[-1]}. Add documents (--input), lower "
                f"--margin ({self.margin}) or widen --ranks ({self.ranks})"
            )
        mining.write_mined(self.out, found)
        if found.warning:
            print(f"Warning: {found.warning}", file=sys.stderr)
        print("\n".join(found.lines()))
        print(f"{self.out}: train on it with --config.task.negatives=negatives")
        return 0
