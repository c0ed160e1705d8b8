"""Verbs that account for text and models; imports are made when a verb runs."""

import json
import sys
from typing import Annotated, Literal

from bert_jax.cli.verbs import groups
from bert_jax.cli.verbs.options import CorpusPlace, Directory, Given
from bert_jax.config.bounds import Count
from bert_jax.errors import UserError


class Lineage(groups.Json):
    """Print the chain of files from which a model or a run came.

    The digests on the way are compared.

    $ bert-jax lineage out/reviews --near work
    $ bert-jax lineage work/tiny@15000 --json
    """

    directory: Given[Annotated[str, "MODEL"]]
    """Work directory (or WORKDIR@STEP), export, import, grown model, average, model in Hugging
    Face's format, or corpus."""
    near: tuple[Directory, ...] = ()
    """Directory to look for ancestors in, too, by name and digest: an export does not say where its
    source lies. The directory beside an export is always looked through. May be repeated."""
    quick: bool = False
    """Compare only the records, without reading checkpoints, stores and files."""

    def __call__(self) -> int:
        from bert_jax.cli.inspection.lineage import check_lineage, has_difference, lineage_lines

        def say(text: str) -> None:
            if sys.stderr.isatty():
                print(text, file=sys.stderr)

        found = check_lineage(self.directory, self.near, quick=self.quick, say=say)
        if self.json:
            print(json.dumps(found.as_json(), indent=2))
        else:
            print("\n".join(lineage_lines(found)))
        return 1 if has_difference(found) else 0


class Inspect(groups.Rows, groups.Seed, groups.Plot, groups.Json):
    """Look at a corpus: rows, documents, tokens per word, duplicates.

    Rows are printed as a run sees them; --plot draws the lengths of the documents.

    $ bert-jax inspect work/corpus
    $ bert-jax inspect work/corpus --pairing nsp --length 512 --seed 3 --plot lengths.png
    """

    corpus: Given[CorpusPlace]
    """Directory of `bert-jax corpus`, or one store of it."""
    part: Literal["train", "heldout"] = "train"
    """Store of the corpus."""
    pairing: Literal["nsp", "sop", "none", "translation"] | None = None
    """Pairing of the rows, as data.pairing of a run (default: none, or translation for pairs)."""
    length: Count = 128
    """Number of tokens of a row."""
    documents: Count = 5
    """Number of longest, and of shortest documents to print."""
    full: bool = False
    """Read all documents of a corpus above 50 million tokens, not evenly spread ones."""

    def __call__(self) -> int:
        from bert_jax.cli.inspection.corpus import inspect_corpus
        from bert_jax.cli.inspection.corpus_lines import corpus_lines, draw_lengths

        look = inspect_corpus(
            self.corpus, part=self.part, pairing=self.pairing or "",
            length=self.length, rows=self.rows or 4, documents=self.documents,
            seed=self.seed, full=self.full, progress=sys.stderr.isatty(),
        )  # fmt: skip
        if self.plot is not None:
            try:
                draw_lengths(look, self.plot)
            except OSError as error:
                raise UserError(f"--plot: {self.plot} cannot be written: {error}") from error
        if self.json:
            print(json.dumps(look.as_json(), indent=2, ensure_ascii=False))
            return 0
        print("\n".join(corpus_lines(look)))
        if self.plot is not None:
            print(f"\nlengths  {self.plot}")
        return 0
