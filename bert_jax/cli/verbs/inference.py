"""Verbs that query a model. Each verb imports its modules only when it runs."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from bert_jax.cli.verbs import groups
from bert_jax.cli.verbs.options import File, Given, Text
from bert_jax.config.bounds import Count, Fraction
from bert_jax.errors import UserError

if TYPE_CHECKING:
    from bert_jax.infer.translate import Translator

_MAX_CONTEXT_BYTES = 4 << 20


class FillMask(groups.AskingRows, groups.Top):
    """Fill the [MASK]s of texts with a pretrained model.

    $ bert-jax fill-mask work/tiny "The capital of France is [MASK]."
    """

    def __call__(self) -> int:
        from bert_jax.cli.verbs.answering import run_verb
        from bert_jax.infer.fill_mask import MaskFiller

        return run_verb(self, partial(MaskFiller, top=self.top or 5))


class Classify(groups.AskingRows, groups.SecondText, groups.Top):
    """Predict classes, labels or scores with a fine-tuned model.

    $ bert-jax classify work/reviews "What a film."
    $ bert-jax classify work/reviews --input new.jsonl --out labels.jsonl
    """

    threshold: Fraction | None = None
    """Probability above which a label is predicted, for tasks in which a text may have several
    labels (default: the model's own thresholds, else 0.5)."""

    def __call__(self) -> int:
        from bert_jax.cli.verbs.answering import run_verb
        from bert_jax.infer.classify import Classifier

        make = partial(Classifier, top=self.top, threshold=self.threshold)
        return run_verb(self, make, text_b=self.text_b)


class Tag(groups.AskingRows):
    """Tag words, and find entities, with a fine-tuned model.

    $ bert-jax tag work/conll "Ada Lovelace lived in London."
    """

    def __call__(self) -> int:
        from bert_jax.cli.verbs.answering import run_verb
        from bert_jax.infer.tag import Tagger

        return run_verb(self, Tagger)


class Answer(groups.AskingRows, groups.Top):
    """Answer questions about a text with a fine-tuned model.

    $ bert-jax answer work/squad "Who wrote it?" --context-file book.txt
    """

    context: Text | None = None
    """Text that contains the answers."""
    context_file: File | None = None
    """File with the text that contains the answers."""
    null_threshold: Annotated[str, "ODDS"] = "auto"
    """Threshold for "no answer". A question gets no answer if the score of "no answer" exceeds the
    best answer's score by more than this amount. none: every question gets an answer. auto: the
    amount that was best on the run's dev data, if any, else none."""
    max_answer_tokens: Count | None = None
    """Largest number of tokens in an answer (default: as in the model's run, else 30)."""

    def __call__(self) -> int:
        from bert_jax.cli.verbs.answering import run_verb
        from bert_jax.files.untrusted.whole_file import read_text
        from bert_jax.infer.answer import Answerer

        context = self.context
        if self.context_file is not None:
            if context is not None:
                raise UserError("give --context or --context-file, not both")
            context = read_text(self.context_file, max_bytes=_MAX_CONTEXT_BYTES)
        if context is None and self.texts not in ((), ("-",)):
            raise UserError("a question needs a text: give --context TEXT or --context-file FILE")
        known, odds = {"none": None, "auto": "auto"}, self.null_threshold
        try:
            threshold = known[odds] if odds in known else float(odds)
        except ValueError:
            raise UserError(f"--null-threshold is {odds!r}; give a number, none or auto") from None
        make = partial(
            Answerer, top=self.top or 1, null_threshold=threshold,
            max_answer_tokens=self.max_answer_tokens, max_length=self.max_length,
        )  # fmt: skip
        return run_verb(self, make, context=context)


class Translate(groups.Asking, groups.Beams, groups.Top):
    """Translate texts with a model that was trained on pairs of texts.

    $ bert-jax translate work/ende "Two dogs play." --top 3 --alignments
    $ bert-jax translate work/ende --input test.en --out test.de
    """

    prefix: Text | None = None
    """Text with which every translation begins."""
    alignments: bool = False
    """Print, for each target word, the source word that the decoder attends to most
    (cross-attention, averaged over layers and heads). The target word often, but not always,
    translates this source word."""

    PLAIN: ClassVar[bool] = True

    def __call__(self) -> int:
        from bert_jax.cli.verbs.answering import answer_form, run_verb
        from bert_jax.infer.translate import Translator

        top = self.top or 1
        if top > self.num_beams:
            raise UserError(f"--top is {top}; it must be at most --num-beams, {self.num_beams}")
        is_json = answer_form(self) != "plain"
        needed = "JSON output: add --json, or name a .jsonl file as --out"
        self.only_with(needed, is_json or top == 1, "--top")
        self.only_with(needed, is_json, "--alignments")
        make = partial(Translator, search=self.settings(top), alignments=self.alignments)
        return run_verb(self, make, prefix=self.prefix)

    def warning(self, predictor: "Translator") -> str:
        """Return a warning with the number of translations that were cut, or "" if none was."""
        if not predictor.num_cut:
            return ""
        return (
            f"{predictor.num_cut:,} translations reached the length limit before their end and "
            "were cut there; --max-length-rate and --max-length set the limit"
        )


class Embed(groups.AskingRows, groups.SecondText, groups.Dimensions):
    """Turn texts into vectors.

    $ bert-jax embed work/tiny --input texts.txt --out vectors.npy
    $ bert-jax embed work/tiny --input texts.txt --layers=-4:-1 --out vectors.parquet
    """

    kind: Literal["query", "document"] | None = None
    """Kind of the texts. It selects the prefix that the model puts before each text."""
    pooling: (
        Literal["mean", "mean_sqrt_len", "max", "cls", "pooler", "last", "weighted", "splade"]
        | None
    ) = None
    """Pooling of the tokens' states into a vector (default: the model's pooling, else mean)."""
    layers: Annotated[str, "LAYERS"] = "-1"
    """Layer whose states are pooled. Several layers are averaged: a list such as 1,6,12 or a range
    such as --layers=-4:-1. 0 is the embeddings, and -1 is the last layer."""
    no_special_tokens: bool = False
    """Exclude [CLS] and [SEP] from mean and max pooling."""
    normalize: bool | None = None
    """Divide each vector by its Euclidean length (default: the model's own setting, else no)."""

    VECTORS: ClassVar[bool] = True

    def __call__(self) -> int:
        from bert_jax.cli.verbs.answering import run_verb
        from bert_jax.infer.embed import Embedder, parse_layers

        make = partial(
            Embedder, kind=self.kind, dimensions=self.dimensions, pooling=self.pooling,
            layers=parse_layers(self.layers), special_tokens=not self.no_special_tokens,
            normalize=self.normalize,
        )  # fmt: skip
        return run_verb(self, make, text_b=self.text_b)


class Attend(groups.OfModel, groups.SecondText):
    """Draw what the tokens of a text attend to, as one HTML page.

    The page shows all layers and heads.

    $ bert-jax attend work/tiny "The animal didn't cross the street because it was too tired"
    $ bert-jax attend work/tiny "The animal crossed the [MASK]."
    $ bert-jax attend work/ende "Two dogs play."
    """

    text: Given[Text]
    """Text to draw. For each [MASK], the page shows the model's predictions."""
    out: File = Path("attention.html")
    """HTML file to write; an existing file is replaced."""

    def __call__(self) -> int:
        from bert_jax.artefacts.saved.reading import read_model
        from bert_jax.files.staging import replace_file
        from bert_jax.files.urls import scheme
        from bert_jax.infer.attend import attention
        from bert_jax.tokenization.masks import mask_spans

        out = self.out
        if scheme(out) is not None or out.is_dir():
            what = "a directory" if scheme(out) is None else "not a local path"
            raise UserError(f"--out {out} is {what}; name a file, such as attention.html")
        if out.suffix.lower() not in (".html", ".htm"):
            raise UserError(f"--out {out}: the page is HTML; name a .html file")
        saved = read_model(self.model, encoder_only=True)
        if saved.network is None and any(
            mask_spans(text, saved.tokenizer) for text in (self.text, self.text_b or "")
        ):
            saved = read_model(self.model)
        page = attention(saved, self.text, self.text_b).page.encode()
        replace_file(out, page)
        print(f"{out} ({-(-len(page) // 1000):,} kB); open it in a browser")
        return 0
