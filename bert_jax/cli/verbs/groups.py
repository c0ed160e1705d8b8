"""Groups of options that several verbs share."""

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from bert_jax.cli.verbs import options
from bert_jax.cli.verbs.options import CorpusPlace, Given, ModelPlace, RunPlace, Text, Verb
from bert_jax.config.bounds import AtLeast, Count, Natural, NonNegative
from bert_jax.errors import UserError

if TYPE_CHECKING:
    from bert_jax.artefacts.saved.model import SavedModel
    from bert_jax.data.corpus.sharded.engine import Engine
    from bert_jax.files.remote import WorkDir
    from bert_jax.model.seq2seq.search import SearchConfig


class OfModel(Verb):
    """Argument for the model that a verb reads."""

    model: Given[ModelPlace]
    """Work directory of a run, or directory in Hugging Face's format."""


class OfRun(Verb):
    """Argument for the run that a verb reads."""

    workdir: Given[RunPlace]
    """Work directory of the run."""


class Json(Verb):
    """Option for the format of the output."""

    json: bool = False
    """Print JSON instead of lines for people."""

    def show(self, found: Any, lines: Iterable[str], **how: Any) -> None:
        """Print `found` as JSON if --json is given, else `lines`; `how` goes to `json.dumps`."""
        if not self.json:
            print("\n".join(lines), flush=True)
            return
        # JSON has no NaN and no infinity; they become null.
        found = json.loads(json.dumps(found, **how), parse_constant=lambda _: None)
        print(json.dumps(found, **{"indent": 2, **how}), flush=True)


class Rows(Verb):
    """Option that limits the number of rows."""

    rows: Count | None = None
    """Largest number of rows to read or print (default: `grow` 1024, `inspect` 4, others all)."""


class StoreRows(Rows):
    """Options for a corpus, and for a limit on the number of its rows."""

    corpus: CorpusPlace | None = None
    """Output of `bert-jax corpus` with the model's tokenizer (default: the run's corpus). `grow`
    has no default, and measures losses only if this option is given."""


class Checkpoint(Verb):
    """Option for one checkpoint of a run."""

    step: int | None = None
    """Step of the checkpoint to read (default: newest intact checkpoint; for `verify`, all)."""


class Seed(Verb):
    """Option for the seed of random numbers."""

    seed: Natural = 0
    """Seed for the order of rows (`inspect`) or for noise on copied weights (`grow --preserve`)."""


class Plot(Verb):
    """Option for the picture that a verb draws."""

    plot: options.Picture | None = None
    """PNG file for the picture. By default, `status` writes loss.png and `evaluate --by-position`
    writes positions.png into the work directory of a local run. Otherwise, nothing is drawn."""

    def draw(self, write: Callable[[Path], object], work: "WorkDir", name: str) -> Path | None:
        """Draw a picture of a run into the file --plot or, in a local run, into the file `name`.

        Return the path of the file, or None if nothing is drawn. If drawing fails, a line on
        standard error says why, and the verb goes on.
        """
        place = self.plot or (work.local / name if work.mirror is None else None)
        try:
            if place is not None:
                write(place)
        except (OSError, UserError) as error:
            print(f"bert-jax {type(self).__name__.lower()}: no picture: {error}", file=sys.stderr)
            return None
        return place


class IntoDirectory(Verb):
    """Option for the directory that a verb writes."""

    out: options.Directory
    """Directory to write. It appears only when it is complete; `predict` replaces files in it."""


class License(Verb):
    """Option for the licence of the output."""

    license: Text = ""
    """Licence of the text or model, abbreviated as on the Hugging Face Hub, such as apache-2.0 or
    cc-by-4.0 (default: unknown). A document can name its own in a field license or licence."""


class Tolerance(Verb):
    """Option for the comparison of a converted model with its source."""

    tolerance: NonNegative = 1e-4
    """Largest permitted difference from the source in any hidden state or logit."""


class OnEngine(Verb):
    """Options for the processes that share the work, and for the engine that runs them."""

    num_workers: int | None = None
    """Number of processes (default: one for each core)."""
    engine: Annotated[str | None, "ENGINE"] = None
    """Engine that runs the work. local (default): processes on this machine. ray: Ray on this
    machine. ray:HOST:PORT: the Ray cluster whose head has this address. ray:auto: this node's
    cluster. `tokenizer` samples the text in one process unless this option is given."""

    def opened_engine(self) -> "contextlib.closing[Engine]":
        """Return the engine as a context manager that closes the engine at the end."""
        from bert_jax.data.corpus.sharded.engine import open_engine

        name, _, place = (self.engine or "local").partition(":")
        return contextlib.closing(
            open_engine(name, address=place or None, num_workers=self.num_workers)
        )


class Top(Verb):
    """Option for the length of a list of answers."""

    top: Count | None = None
    """Number of answers to list for each text (default: 5 for `fill-mask`, 10 for `search`, 1 for
    `answer` and `translate`, and all for `classify`)."""


class SecondText(Verb):
    """Option for the second text of a pair."""

    text_b: Text | None = None
    """Second text of a pair; for a translation model, the target (default: its own translation)."""


class Dimensions(Verb):
    """Option that shortens vectors."""

    dimensions: Annotated[int | None, "N"] = None
    """Number of leading entries of each vector to keep (default: all)."""


class Columns(Verb):
    """Option for names in tables and JSON lines."""

    columns: tuple[Annotated[Text, "FIELD=COLUMN,..."], ...] = ()
    """Names of columns in tables, or of fields in JSON lines, separated by commas, such as
    text=review,label=stars. If a table has no header, name a column by its number, counted from 1.
    The entries header=False, delimiter=; and quoting=False set the format of CSV and TSV files."""

    def named(self, *known: str) -> tuple[dict[str, str], dict[str, Any]]:
        """Return the name of the column for each field, and the settings of a table's format.

        Raises:
            UserError: An entry is malformed, or its field is not one of the `known` fields, if any.
        """
        names, written = dict[str, str](), dict[str, Any]()
        for part in [p for each in self.columns for p in re.split(r",\s*(?=\w+\s*=)", each)]:
            field, equals, column = (word.strip() for word in part.partition("="))
            fits = (column and field in known) if known else equals  # a task's field may be empty
            if field in ("header", "quoting") and column in ("True", "False"):
                written[field] = column == "True"
            elif field == "delimiter" and column:
                written[field] = column.replace("\\t", "\t")
            elif field in ("header", "quoting", "delimiter") or not fits:
                raise UserError(
                    f"--columns has {part!r}; write FIELD=COLUMN, separated by commas, where FIELD "
                    f"is {' or '.join(known) or 'a field of the task, as in text=review'}. To set "
                    "the format of a table, write header=True, header=False, quoting=True, "
                    "quoting=False or delimiter=CHARACTER"
                )
            else:
                names[field] = column
        return names, written


class Texts(Verb):
    """Argument and option for the texts that a model reads."""

    texts: Given[tuple[Text, ...]] = ()
    """Texts, questions or queries; - (or no text and no --input) means standard input."""
    input: tuple[Annotated[str, "FILE"], ...] = ()
    """File to read: lines of text (.txt), JSON (.jsonl, .json) or a table (.csv, .tsv, .parquet),
    also compressed (.gz, .xz, .zst). May be repeated."""


class Device(Verb):
    """Option for the device of a model."""

    device: Annotated[str | None, "NAME"] = None
    """Device: cpu, gpu or tpu, or one of several, such as gpu:1 (default: JAX's first device)."""

    def opened(self, place: str) -> "SavedModel":
        """Read a model and put it onto the device."""
        from bert_jax.artefacts.saved.reading import read_model
        from bert_jax.infer.forward import on_device

        return on_device(read_model(place), self.device)


class Rerank(Verb):
    """Options for the reranker of a search."""

    rerank: ModelPlace | None = None
    """Model that reorders --candidates passages, fine-tuned on pairs (a score or two classes)."""
    candidates: Count = 100
    """Number of passages that --rerank reorders."""


class Beams(Verb):
    """Options for the search for a translation."""

    TITLE: ClassVar[str] = "search for a translation"

    num_beams: Count = 5
    """Number of hypotheses (beams) that each step keeps; 1 is greedy search."""
    length_alpha: NonNegative = 1.0
    """Exponent alpha: scores are divided by the penalty ((beta + tokens) / (beta + 1)) ** alpha."""
    length_beta: NonNegative = 0.0
    """Constant beta of the length penalty; see --length-alpha."""
    max_length: Annotated[int, AtLeast(0)] = 0
    """Largest number of target tokens, including the end token (default: the model's limit)."""
    max_length_rate: NonNegative = 3.0
    """Largest number of target tokens for each source token; 0 means no limit."""

    def settings(self, nbest: int = 1) -> "SearchConfig":
        """Return the settings of the search."""
        from bert_jax.model.seq2seq.search import SearchConfig

        return SearchConfig(
            self.num_beams, self.length_alpha, self.length_beta, self.max_length,
            self.max_length_rate, nbest,
        )  # fmt: skip


class Asking(OfModel, Texts, Columns, Json, Device):
    """A verb that gives an answer for each text."""

    format: Literal["auto", "text", "json", "jsonl", "csv", "tsv", "parquet"] = "auto"
    """Format of the input. auto goes by a file's suffix or by the first line of standard input."""
    out: options.File | None = None
    """File for the answers: JSON lines (.jsonl), for `embed` also .npy or .parquet, for `translate`
    also text with one line per answer. It appears when complete (default: standard output)."""
    batch_tokens: Count | None = None
    """Largest number of tokens in a batch (default: 1024; for translation, 2048)."""
    on_error: Literal["fail", "skip"] = "fail"
    """Reaction to a line that gives no answer. fail stops; skip writes the error instead."""

    PLAIN: ClassVar[bool] = False
    """Whether the verb reads lines of text and writes lines of text."""
    VECTORS: ClassVar[bool] = False
    """Whether answers are vectors."""

    def warning(self, predictor: Any) -> str:
        """Return a warning about the answers that `predictor` gave, or "" if there is none."""
        del predictor
        return ""


class AskingRows(Asking):
    """A verb that gives an answer for each text and limits the length of rows."""

    max_length: Annotated[int | None, "N"] = None
    """Largest number of tokens in a row (one input of the model), including special tokens. Longer
    texts are cut or read in windows (default: the model's limit; for `answer`, at most 384 if other
    software trained the model)."""
