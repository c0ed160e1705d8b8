"""Verbs that trace models and examine corpora. Each verb imports its modules when it runs."""

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from bert_jax.cli.verbs import groups
from bert_jax.cli.verbs.options import CorpusPlace, Directory, Given
from bert_jax.config.bounds import AtLeast, AtMost, Count
from bert_jax.errors import UserError
from bert_jax.files.urls import is_url
from bert_jax.terminal import progress_bar

_HELDOUT = "heldout"
_bar = partial(progress_bar, of="corpus", unit="blocks")


class Lineage(groups.Json):
    """Trace a model back to its runs and files, and check digests.

    $ bert-jax lineage out/reviews --near work
    $ bert-jax lineage work/tiny@15000 --json
    """

    directory: Given[Annotated[str, "MODEL"]]
    """Directory of a run (or WORKDIR@STEP), an export, an import, a grown or averaged model, a
    model in Hugging Face's format, or a corpus."""
    near: tuple[Directory, ...] = ()
    """Further directory in which to search for ancestors by name and digest; exports do not record
    where their source is. The directory above an export is always searched. May be repeated."""
    quick: bool = False
    """Compare only the records, without reading checkpoints, corpora and files."""

    def __call__(self) -> int:
        from bert_jax.cli.inspection.lineage import check_lineage, lineage_lines

        def say(text: str) -> None:
            if sys.stderr.isatty():
                print(text, file=sys.stderr)

        found = check_lineage(self.directory, self.near, quick=self.quick, say=say)
        self.show(found.as_json(), lineage_lines(found))
        return int(any(each.state == "differs" for each in found.walk()))


class Inspect(groups.Rows, groups.Seed, groups.Plot, groups.OnEngine, groups.Json):
    """Look at a corpus: rows, documents, tokens per word, duplicates.

    Rows are printed as training reads them. --plot draws histograms of the documents' lengths.

    $ bert-jax inspect work/corpus
    $ bert-jax inspect work/corpus --pairing nsp --length 512 --seed 3 --plot lengths.png
    $ bert-jax inspect s3://corpora/c4 --full --engine=ray:auto
    """

    corpus: Given[CorpusPlace]
    """Output of `bert-jax corpus`, or its subdirectory train or heldout, also in a bucket."""
    part: Literal["train", "heldout"] = "train"
    """Part of the corpus to look at."""
    pairing: Literal["nsp", "sop", "none", "translation"] | None = None
    """Pairing of texts in a row, as in data.pairing (default: translation for pairs, else none)."""
    length: Annotated[int, AtLeast(8), AtMost(65_535)] = 128
    """Number of tokens in a row."""
    documents: Count = 5
    """Number of longest documents, and of shortest documents, to print."""
    full: bool = False
    """Read all documents. By default, a corpus above 50 million tokens is sampled evenly."""

    def __call__(self) -> int:
        from bert_jax.cli.inspection.corpus import corpus_lines, inspect_corpus
        from bert_jax.cli.inspection.pictures import lengths_figure
        from bert_jax.files.pictures import write_picture

        with self.opened_engine() as engine:
            look = inspect_corpus(
                self.corpus, part=self.part, pairing=self.pairing or "",
                length=self.length, rows=self.rows or 4, documents=self.documents,
                seed=self.seed, full=self.full, engine=engine, progress=True,
            )  # fmt: skip
        if self.plot is not None:
            write_picture(lengths_figure(look), self.plot)
        drawn = [] if self.plot is None else ["", f"lengths  {self.plot}"]
        self.show(look.as_json(), [*corpus_lines(look), *drawn], ensure_ascii=False)
        return 0


class Contamination(groups.OnEngine, groups.Json):
    """Find evaluation texts and near-duplicates of held-out texts.

    An evaluation text is found if it shares an n-gram of 13 words with the corpus. A held-out
    document is found if it is a near-duplicate of a training document.

    $ bert-jax contamination work/corpus --against glue:data/glue --against squad:dev.json
    $ bert-jax contamination work/corpus --against heldout
    $ bert-jax contamination 'my/*.txt' --against dev.tsv --out report.json
    $ bert-jax contamination gs://corpora/c4 --against dev.tsv --engine=ray:auto --out report.json
    """

    corpus: Given[CorpusPlace]
    """Output of `bert-jax corpus`, local or in a bucket (only the training part is read), or text
    as for `bert-jax corpus --input`."""
    against: tuple[Annotated[str, "FILE"], ...]
    """Evaluation texts: squad:FILE, glue:DIR, heldout (the corpus's held-out documents), or a file
    with one example per line (.txt), row (.tsv, .csv) or object (.jsonl). May be repeated."""
    similarity: Annotated[float, AtLeast(0.5), AtMost(1), "J"] = 0.8
    """Lowest Jaccard similarity (of word 5-shingles) at which documents are near-duplicates."""
    out: Annotated[Path | None, "FILE.json"] = None
    """File for the report (default: in the corpus, where `evaluate`, `export` and `lineage` find
    it; a report on a corpus in a bucket, or on text that is not yet a corpus, is only printed)."""

    def __call__(self) -> int:
        from bert_jax.data.corpus.overlap import search
        from bert_jax.data.corpus.overlap.evaluation import read_evaluation
        from bert_jax.data.corpus.overlap.heldout import heldout_twins
        from bert_jax.data.corpus.sources import resolve_sources
        from bert_jax.infer.writers import check_out
        from bert_jax.training.pretrain.corpus import store_openers

        specs = self.against
        if self.out is not None and len(specs) > 1:
            raise UserError(
                f"--out names one file, but there are {len(specs)} reports; run the verb once for "
                "each --against"
            )
        self.only_with(f"--against {_HELDOUT}", _HELDOUT in specs, "--similarity")
        check_out(self.out, vectors=False, plain=True, sources=specs)  # before texts are looked for
        corpus = self.corpus.rstrip("/")
        if "train" not in store_openers(corpus):  # a corpus may itself be named train
            corpus = "." if corpus == "train" else corpus.removesuffix("/train")
        name, opens = Path(corpus).resolve().name, store_openers(corpus)
        if _HELDOUT in specs and not opens:
            raise UserError(f"--against heldout needs a corpus directory; {self.corpus} is not one")
        sources = [] if opens else resolve_sources([self.corpus])
        read = [*(each.name for each in sources), *(spec.partition(":")[2] for spec in specs)]
        check_out(self.out, vectors=False, plain=True, sources=read)
        sets = [read_evaluation(spec) for spec in specs if spec != _HELDOUT]

        def place(part: str, file: str) -> Path | None:
            there = Path(corpus, part, search.DIRECTORY, file)
            return self.out or (there if opens and not is_url(corpus) else None)

        with self.opened_engine() as engine:
            if _HELDOUT in specs:
                found = heldout_twins(name, opens, engine, threshold=self.similarity, show=_bar)
                self._say(found, asdict(found), place(_HELDOUT, search.HELDOUT), ensure_ascii=False)
            part = "train" if "train" in opens else ""
            for each in sets:
                if opens:
                    report = search.search_store(name, opens[part], each, engine, show=_bar)
                else:
                    report = search.search_sources(Path(self.corpus).name, sources, each, engine)
                counts = report.summary() | {"counts": report.counts()}
                self._say(report, counts, place(part, report.file_name))
        return 0

    def _say(self, report: Any, values: Any, place: Path | None, **form: Any) -> None:
        if place is not None:
            report.save(place)
        lines = [*report.lines(), *([f"report  {place}"] if place else []), ""]
        self.show(values, lines, indent=None, **form)
