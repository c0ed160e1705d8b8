"""The verb that evaluates runs and models. It imports its modules only when it runs."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

from bert_jax.cli.verbs import groups
from bert_jax.cli.verbs.options import Commas, Directory, File, RunPlace, Verb
from bert_jax.config.bounds import Above, Below
from bert_jax.errors import UserError
from bert_jax.terminal import progress_bar


class Heldout(groups.StoreRows, groups.Checkpoint, groups.Plot):
    """Options of the evaluation on held-out text."""

    TITLE: ClassVar[str] = "a pretraining run or a pretrained model, on text or minimal pairs"

    length: Annotated[int | None, "N"] = None
    """Number of tokens in a row (default: as in the last phase of the run)."""
    by_position: bool = False
    """Print loss and accuracy of masked words by position in the document (0-127, 128-255, 256-511,
    ...) and by masking rate, as a table and a picture."""
    masking_rates: Commas[Annotated[float, Above(0), Below(100)]] = ()
    """Percentages of the tokens that --by-position masks (default: 5,15,30)."""
    minimal_pairs: Annotated[str | None, "FILE"] = None
    """JSON lines as in BLiMP (sentence_good, sentence_bad, UID). Prints how often the good sentence
    has the higher pseudo-log-likelihood, overall and for each UID. A token is masked with the later
    tokens of its word (word_l2r) and without them (token)."""


class Labelled(Verb):
    """Options of the evaluation on labelled data."""

    TITLE: ClassVar[str] = "a fine-tuned model, on labelled data"

    data: Annotated[str | None, "FILE"] = None
    """Labelled data: a file like the run's files, dev or test (a part of the run's data; default:
    both parts) or, for GLUE, the name of a split. --columns sets column names and other fields."""
    report: Directory | None = None
    """Directory for report.md and report.json (scores with intervals, scores by class, the
    confusion matrix, the most confident mistakes) and a picture."""
    versus: tuple[RunPlace, ...] = ()
    """Another run to score on the same examples or --pairs. Prints differences with paired
    intervals. May be repeated: for the evaluated run first, then in order for each --other-seed."""
    other_seed: tuple[RunPlace, ...] = ()
    """Another run of the evaluated model with another seed. The intervals of --versus are then over
    seeds (Student's t). May be repeated."""
    contamination: tuple[File, ...] = ()
    """Report of `bert-jax contamination` on the data. Contaminated and clean examples are then
    scored separately (default: reports on the model's training corpora). May be repeated."""


class Pairs(groups.Beams):
    """Options of the evaluation of translations."""

    TITLE: ClassVar[str] = "a model that translates, on pairs of files"

    pairs: tuple[Annotated[str, "FILE"], Annotated[str, "FILE"]] | None = None
    """Files of source sentences and of references, one per line. Prints sacreBLEU's BLEU and chrF
    with intervals, BLEU of trivial translations (floors), losses, and a table by source length."""


class Vectors(groups.Rerank):
    """Options of the evaluation of vectors."""

    TITLE: ClassVar[str] = "a model that makes vectors, on one of three test sets"

    retrieval: Directory | None = None
    """Directory in BEIR's layout (corpus.jsonl, queries.jsonl, qrels/test.tsv), or a file in its
    qrels. Prints nDCG@10, MRR@10, recall@100 and MAP of the vectors and, to compare, of BM25."""
    sts: Annotated[str | None, "FILE"] = None
    """Table of text pairs with scores (columns query, document, score). Prints Spearman's and
    Pearson's correlations between these scores and the cosines of the vectors."""
    clustering: Annotated[str | None, "FILE"] = None
    """Table with columns text and label (class). Prints the mean V-measure of 10 k-means runs."""
    dimensions: Commas[int] = ()
    """Lengths, such as 256,128,64. The vectors truncated to each length are scored as well."""


class Evaluate(groups.OfModel, Heldout, Labelled, Pairs, Vectors, groups.Columns, groups.Json):
    """Evaluate a run, a model, its vectors or its translations.

    $ bert-jax evaluate work/tiny
    $ bert-jax evaluate work/modern --by-position --length=8192 --rows=64
    $ bert-jax evaluate work/roberta --corpus work/corpus
    $ bert-jax evaluate work/roberta --minimal-pairs examples/minimal_pairs.jsonl
    $ bert-jax evaluate work/mrpc --data dev
    $ bert-jax evaluate work/embedder --retrieval scifact --dimensions 256,128
    $ bert-jax evaluate work/ende --pairs test.en test.de
    """

    def __call__(self) -> int:
        if self.minimal_pairs is not None:
            self._refuse("cannot be used with --minimal-pairs", Heldout, Labelled, Pairs, Vectors,
                         groups.Columns, but=("--minimal-pairs",))  # fmt: skip
            return self._minimal_pairs(self.minimal_pairs)
        if self.pairs is not None:
            self._refuse("cannot be used with --pairs", Heldout, Labelled, Vectors, groups.Columns,
                         but=("--corpus", "--versus", "--other-seed"))  # fmt: skip
            return self._pairs(*self.pairs)
        if self.given(Vectors):
            chosen = [f"--{name}" for name in ("retrieval", "sts", "clustering")
                      if getattr(self, name) is not None]  # fmt: skip
            if len(chosen) != 1:
                options = " and ".join(chosen or self.given(Vectors))
                raise UserError(f"{options}: give exactly one of --retrieval, --sts, --clustering")
            self._refuse(f"cannot be used with {chosen[0]}", Heldout, Labelled, Pairs)
            return self._vectors(chosen[0])
        from bert_jax.artefacts.saved.runs import is_finetuning, is_run
        from bert_jax.cli.inspection.evaluate import evaluate_run
        from bert_jax.files.remote import open_workdir

        local = open_workdir(self.model).local
        if is_finetuning(local) or (self.data is not None and not is_run(local)):
            self._refuse(
                f"does not apply to {self.model}, a fine-tuned model. Name labelled data with "
                "--data", Heldout, Pairs,
            )  # fmt: skip
            return self._finetuned()
        self._refuse(
            f"does not apply to {self.model}, a pretrained model. Evaluate it on held-out text "
            "(--corpus)", Labelled, groups.Columns, Pairs,
        )  # fmt: skip
        if self.by_position or self.masking_rates or self.plot:
            return self._by_position()
        values = evaluate_run(
            self.model, corpus=self.corpus, max_rows=self.rows, length=self.length, step=self.step
        )
        self.show(values, (f"{name:28} {value:.6g}" for name, value in values.items()))
        return 0

    def _refuse(self, why: str, *groups: type[Verb], but: tuple[str, ...] = ()) -> None:
        """Raise a UserError if any option of `groups`, except the options `but`, is given."""
        for option in self.given(*groups):
            if option not in but:
                raise UserError(f"{option} {why}")

    def _finetuned(self) -> int:
        """Score a fine-tuned model. Print scores to standard output, tables to standard error."""
        from bert_jax.tasks.reports.lines import difference_lines, report_lines
        from bert_jax.training.finetune.evaluate import evaluate_finetuned
        from bert_jax.training.finetune.report import write_reports

        title = Path(self.model).name
        ours, (names, written) = (self.model, *self.other_seed), self.named()
        whose = "--data, since the run knows the columns of its own data"
        self.only_with(whose, self.data is not None, "--columns")
        own = ("config.json", "folds.json")  # of a model and of a cross-validation
        if self.report is not None and any((self.report / name).exists() for name in own):
            raise UserError(
                f"--report {self.report} holds a model, whose own report would be replaced; name "
                "another directory"
            )
        found = evaluate_finetuned(
            self.model, self.data, self.contamination, self.versus, {**names, **written},
            self.other_seed,
        )  # fmt: skip
        lines = []
        for name, report in found.reports.items():
            lines += ["", *report_lines(name, report, mistakes=False)]
        if found.differences:
            lines += ["", *difference_lines(ours, self.versus, found.differences)]
        print("\n".join(lines[1:]), file=sys.stderr)
        if self.report is not None:
            more = {"differences": found.differences} if found.differences else {}
            for path in write_reports(self.report, found.reports, more, title=title):
                print(f"report  {path}", file=sys.stderr)
        scores = (f"{name:28} {value:.6g}" for name, value in found.scores.items())
        self.show(found.as_json(), scores)
        return 0

    def _by_position(self) -> int:
        from bert_jax.cli.inspection.by_position import measure, position_lines
        from bert_jax.cli.inspection.evaluate import open_heldout
        from bert_jax.cli.inspection.pictures import position_figure
        from bert_jax.files.pictures import write_picture
        from bert_jax.files.remote import open_workdir
        from bert_jax.objectives.masked_lm import position_buckets

        why = "cannot be used with --by-position, which evaluates the newest checkpoint"
        self._refuse(why, groups.Checkpoint)
        rates = [each / 100 for each in self.masking_rates or (5, 15, 30)]
        if len(set(rates)) < len(rates):
            raise UserError("--masking-rates must name each rate once, such as 5,15,30")
        run = open_heldout(self.model, corpus=self.corpus, max_rows=self.rows, length=self.length)
        losses = measure(run, position_buckets(run.length), rates)
        work = open_workdir(self.model)
        make_figure = partial(position_figure, losses, title=work.local.absolute().name)
        picture = self.draw(lambda at: write_picture(make_figure(), at), work, "positions.png")
        drawn = ["", f"loss by position  {picture}"] if picture else []
        self.show(losses.as_json(), [*position_lines(losses), *drawn])
        return 0

    def _pairs(self, sources: str, references: str) -> int:
        from bert_jax.cli.inspection.translation import evaluate_pairs, translation_lines
        from bert_jax.tasks.reports.lines import difference_lines

        found = evaluate_pairs(
            self.model, sources, references, settings=self.settings(), corpus=self.corpus,
            versus=self.versus, other_seeds=self.other_seed,
        )  # fmt: skip
        lines = translation_lines(found)
        if self.versus:
            split = {Path(sources).name: found["differences"]}
            lines += ["", *difference_lines((self.model, *self.other_seed), self.versus, split)]
        self.show(found, lines)
        return 0

    def _minimal_pairs(self, source: str) -> int:
        from bert_jax.artefacts.saved.reading import read_model
        from bert_jax.infer.forward import on_device
        from bert_jax.infer.minimal_pairs import evaluate_pairs, pair_lines, read_pairs

        found = evaluate_pairs(read_pairs(source), on_device(read_model(self.model)))
        self.show(found, pair_lines(found))
        return 0

    def _vectors(self, chosen: str) -> int:
        """Score vectors on the test set that the option `chosen` names."""
        from bert_jax.artefacts.saved.reading import read_model
        from bert_jax.infer.forward import on_device
        from bert_jax.infer.search.evaluation import Evaluation, score_lines
        from bert_jax.infer.search.index import Reranker
        from bert_jax.tasks.retrieval.collection import read_collection

        self.only_with(f"--retrieval, not with {chosen}", self.retrieval, "--rerank")
        self.only_with("--rerank", self.rerank, "--candidates")
        fixed = "--sts or --clustering; the columns of --retrieval have fixed names"
        self.only_with(fixed, not self.retrieval, "--columns")
        fields = ("query", "document", "score") if self.sts else ("text", "label")
        names, written = self.named(*fields)
        columns = [names.get(field, field) for field in fields]
        model = on_device(read_model(self.model), None)
        reranker = Reranker(on_device(read_model(self.rerank), None)) if self.rerank else None
        with progress_bar(of="vectors", unit="texts") as bar:
            evaluation = Evaluation(model, self.dimensions, bar.update)
            if self.retrieval:
                collection = read_collection(self.retrieval)
                result = evaluation.retrieval(collection, reranker, self.candidates)
            elif self.sts:
                result = evaluation.similarity(self.sts, columns, **written)
            else:
                result = evaluation.clustering(self.clustering or "", columns, **written)
        if warning := result.pop("warning"):
            print(f"Warning: {warning}", file=sys.stderr)
        self.show(result, score_lines(result))
        return 0
