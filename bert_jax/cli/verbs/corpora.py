"""Verbs that make a tokenizer and a corpus. Each verb imports its modules only when it runs."""

import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from bert_jax.cli.verbs import groups
from bert_jax.cli.verbs.options import Commas, Directory, Given, Verb
from bert_jax.config.bounds import Above
from bert_jax.errors import UserError

if TYPE_CHECKING:
    from bert_jax.data.corpus.cleaning.clean import CleaningConfig
    from bert_jax.data.corpus.documents import ReadOptions
    from bert_jax.data.corpus.pairs import PairSource


class Sources(groups.Columns):
    """Options that name the text, or the pairs of texts, to read."""

    input: tuple[Annotated[str, "FILE"], ...] = ()
    """Text to read: a file, gs://BUCKET/FILE or s3://BUCKET/FILE, a quoted glob,
    `hf:OWNER/NAME[:CONFIG[:SPLIT]]` (a data set of the Hugging Face Hub, read as a stream),
    `tfds:NAME[:SPLIT]` (a data set of TensorFlow Datasets), or `python-docs` (the documentation of
    Python and of the installed packages). The formats of files are .txt with a blank line between
    documents, .jsonl, .csv, .tsv, .parquet, .warc.gz, .wet.gz and a dump of Wikipedia (.xml.bz2).
    The first four formats may be compressed (.gz, .xz, .zst, .bz2). In tables and JSON lines, the
    text is in the column named text, unless --columns names another column. May be repeated."""
    pairs: tuple[tuple[Annotated[str, "FILE"], ...], ...] = ()
    """Pairs of texts for translation: two files (also .gz, .xz or .zst), where line n of the second
    translates line n of the first; or one table with --columns source=COLUMN,target=COLUMN (.tsv,
    .csv, .jsonl, .parquet, `tfds:NAME[:SPLIT]`). May be repeated."""
    line_documents: bool = False
    """Read each line of a text file as a separate document."""
    on_bad: Annotated[str, "MODE[:SHARE]"] = "stop"
    """Reaction to records of --input that cannot be read, such as a line that is not UTF-8: stop;
    skip, which counts them; or quarantine, with which `corpus` also keeps them in OUT/quarantine.
    Each mode stops if more than SHARE of the records (default: 0.01) are bad, as in skip:0.05."""

    def reading(self, *keep: str) -> "ReadOptions":
        """Return the settings for reading text; `keep` names fields to copy to each document."""
        from bert_jax.data.corpus.documents import ReadOptions

        field = self._columns().get("text", "text")
        mode, colon, share = self.on_bad.partition(":")
        most = _number("--on-bad", share) if colon else ReadOptions.most_bad
        return ReadOptions(field, keep, self.line_documents, on_bad=mode, most_bad=most)

    def opened(self, *files: tuple[str, ...], swap: bool = False) -> "list[PairSource]":
        """Open each item (two files, or one table) as pairs; `swap` swaps sources and targets."""
        from bert_jax.data.corpus.pairs import open_pairs

        names = self._columns()
        columns = [names[side] for side in ("source", "target") if side in names]
        if len(columns) == 1:
            raise UserError(f"--columns is {','.join(self.columns)}; name both source and target")
        return [open_pairs(each, columns or None, swap=swap) for each in files]

    def _columns(self) -> dict[str, str]:
        names, written = self.named("text", "source", "target")
        if written:
            raise UserError(f"--columns: {', '.join(written)} cannot be set for this verb")
        return names


class Tokenizer(Sources, groups.IntoDirectory, groups.OnEngine):
    r"""Learn a vocabulary from text.

    $ bert-jax tokenizer --input 'my/*.txt' --vocab-size 30522 --out work/tokenizer
    $ bert-jax tokenizer --pairs train.en train.de --kind unigram --vocab-size 8000 \
        --out work/en-de-tokenizer
    $ bert-jax tokenizer --input 's3://raw/*.jsonl' --engine=ray:auto --out work/tokenizer
    """

    kind: Literal["wordpiece", "bytelevel", "unigram", "bpe"] = "wordpiece"
    """Kind: wordpiece (as in BERT), bytelevel (as in ModernBERT), SentencePiece unigram or bpe."""
    vocab_size: int = 30522
    """Number of tokens."""
    cased: bool = False
    """Keep case and accents in a wordpiece vocabulary, which is otherwise lower-cased without
    accents. The other kinds of tokenizer always keep both."""
    keep_accents: bool = False
    """Keep accents in a lower-cased wordpiece vocabulary."""
    character_coverage: float | None = None
    """Share of the text's characters that the vocabulary must cover (default: at least 0.9995).
    The most frequent characters get tokens first. If a word has a character without a token,
    wordpiece turns the word into [UNK]; SentencePiece splits the character into bytes."""
    limit_alphabet: Annotated[int | None, "N"] = None
    """Largest number of distinct characters that get wordpiece tokens. By default,
    --character-coverage decides. Without both options, the 1000 most frequent characters get
    tokens, and further characters until 99.95% of the text is covered."""
    min_frequency: Annotated[int | None, "N"] = None
    """Lowest frequency at which wordpiece and bytelevel merge a pair of tokens (default: 2)."""
    max_mb: Annotated[float | None, Above(0), "MB"] = None
    """Largest amount of text to learn from, in megabytes; more text is sampled evenly (default:
    256). --engine reads all the text, for wordpiece only."""
    memory: Annotated[float | None, Above(0), "GIB"] = None
    """Memory bound for the words that each process of wordpiece counts, at 1 KiB a word (default:
    4). If the words exceed the bound, the rarest words are dropped until the rest fills half."""

    def __call__(self) -> int:
        from bert_jax.data.corpus.build import counted_texts, iter_texts
        from bert_jax.files.staging import check_local
        from bert_jax.tokenization.sentencepiece import train_sentencepiece
        from bert_jax.tokenization.tokenizer import Tokenizer
        from bert_jax.tokenization.training import MEMORY, train_bytelevel, train_wordpiece
        from bert_jax.tokenization.wordpiece import WordPieceOptions

        check_local(self.out, "directory")
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise UserError(f"{self.out} exists and is not empty; choose another --out")
        if not (self.input or self.pairs):
            raise UserError("give --input for text, --pairs for pairs of texts, or both")
        how, read = self.reading(), list[Any]((*self.input, *self.opened(*self.pairs)))
        texts = iter_texts(read, max_bytes=int((self.max_mb or 256) * 1e6), options=how)
        options = (
            "character_coverage", "limit_alphabet", "min_frequency", "keep_accents", "memory"
        )  # fmt: skip
        values = ((name, getattr(self, name)) for name in options)
        given = {name: value for name, value in values if not (value is None or value is False)}
        if self.memory is not None and self.kind != "wordpiece":
            raise UserError("--memory is for --kind wordpiece; for other kinds, use --max-mb")
        needed = "--engine; without --engine, one process reads a sample"
        self.only_with(needed, self.engine, "--num-workers")
        if self.engine and self.kind != "wordpiece":
            why = f"the trainer of {self.kind} reads the text itself, in one process"
            raise UserError(f"--engine counts words for --kind wordpiece; {why}")
        if self.engine and self.max_mb is not None:
            why = "--max-mb limits a sample; leave out one of them (--memory limits the words)"
            raise UserError(f"--engine counts the words of all the text, but {why}")
        tokenizer: Tokenizer
        if self.kind == "wordpiece":
            given |= {"lowercase": not self.cased, "progress": not self.engine}
            given["strip_accents"] = False if given.pop("keep_accents", False) else None
            with self.opened_engine() if self.engine else contextlib.nullcontext() as engine:
                form = WordPieceOptions(given["lowercase"], given["strip_accents"])
                counted = engine and counted_texts(read, how, form, engine, self.memory or MEMORY)
                tokenizer = train_wordpiece(counted or texts, self.vocab_size, **given)
        elif self.kind == "bytelevel":
            for name in given.keys() - {"min_frequency"}:
                raise UserError(
                    f"--{name.replace('_', '-')} cannot be used with --kind bytelevel, which keeps "
                    "all characters (as bytes) and all accents"
                )
            tokenizer = train_bytelevel(texts, self.vocab_size, progress=True, **given)
        else:
            for name in given.keys() & set(options[1:]):
                raise UserError(
                    f"--{name.replace('_', '-')} cannot be used with --kind unigram or bpe. "
                    "SentencePiece keeps all accents and has no smallest frequency; use "
                    "--character-coverage to limit its characters"
                )
            tokenizer = train_sentencepiece(
                texts, self.vocab_size, model=self.kind, progress=True, **given
            )
        tokenizer.save(self.out)
        print(
            f"{self.out}: {self.kind}, {tokenizer.vocab_size:,} tokens, fingerprint "
            f"{tokenizer.fingerprint[:12]}"
        )
        return 0


class Cleaning(Verb):
    """Options for the rules that clean documents."""

    TITLE: ClassVar[str] = "cleaning"

    filter: tuple[Annotated[str, "NAME"], ...] = ()
    """Published filter that drops documents or lines: a group of filters (gopher, gopher-quality,
    gopher-repetition, c4), a single filter, or a filter with other bounds, NAME=LOW:HIGH. May be
    repeated. The message about an unknown name lists all filters."""
    language: Annotated[str, "CODE[:P]"] = ""
    """Language of texts to keep, such as de; de:0.9 sets the lowest probability (default: 0.8)."""
    drop_duplicates: Commas[str] = ()
    """Kinds of duplicates to drop, separated by commas. exact: documents with the same words as an
    earlier document or, with --pairs, pairs that equal an earlier pair. paragraphs: paragraphs with
    the same words as an earlier paragraph. near: documents whose word 5-shingles have a Jaccard
    similarity of at least 0.8 with an earlier document; near=0.7 sets another limit."""
    without: tuple[Annotated[str, "FILE"], ...] = ()
    """Evaluation texts to keep out of the corpus, named as for `bert-jax contamination --against`.
    Paragraphs that share an n-gram of 13 words with these texts are left out. May be repeated."""
    keep_dropped: Directory | None = None
    """Directory for samples of dropped documents, each with the reason."""

    def cleaning(self) -> "CleaningConfig":
        """Return the rules that the options set. Raise a UserError for wrong or unused options."""
        from bert_jax.data.corpus.cleaning.clean import CleaningConfig

        language, colon, threshold = self.language.partition(":")
        given = dict[str, Any]()
        if colon:
            given["language_threshold"] = _number("--language", threshold)
        names = {"exact": "duplicates", "paragraphs": "duplicate_paragraphs"}
        for each in self.drop_duplicates:
            kind, equals, similarity = each.partition("=")
            if kind == "near":
                value = _number("--drop-duplicates near", similarity) if equals else 0.8
                given["near_duplicates"] = value
            elif each in names:
                given[names[each]] = True
            else:
                raise UserError(
                    f"--drop-duplicates has {each!r}; give exact, paragraphs, near or "
                    "near=JACCARD, with commas between them"
                )
        config = CleaningConfig(self.filter, language=language, without=self.without, **given)
        needed = "an option that drops text: --filter, --language, --drop-duplicates, --without"
        self.only_with(needed, not config.is_empty, "--keep-dropped")
        return config


class OfText(Cleaning):
    """Options of a corpus of text."""

    TITLE: ClassVar[str] = "text"

    splitter: Literal["fast", "lines", "syntok"] | None = None
    """Sentence splitter (default: fast). lines takes each line as one sentence."""
    by_column: Annotated[str, "COLUMN"] = ""
    """Column with few values, such as lang; each value gets a corpus in a subdirectory of --out."""
    estimate: bool = False
    """Read a sample and estimate the cost of the build. Nothing is written."""
    shard_mb: Annotated[float | None, Above(0), "MB"] = None
    """Total size of a shard's input files, in MiB (default: 1024). Each shard is one task of the
    engine. If the whole input is smaller than twice this size, it becomes a single shard."""
    scratch: Annotated[str | None, "DIR"] = None
    """Directory or bucket for finding duplicates; all nodes must reach it (default: in --out)."""


class OfPairs(Verb):
    """Options of a corpus of pairs."""

    TITLE: ClassVar[str] = "pairs"

    heldout_pairs: tuple[tuple[Annotated[str, "FILE"], ...], ...] = ()
    """Pairs for evaluation, given like --pairs (default: the share --heldout-rate of --pairs)."""
    swap: bool = False
    """Swap source and target in each pair, to translate from the second language into the first."""


class Corpus(Sources, OfPairs, OfText, groups.License, groups.OnEngine):
    r"""Tokenize text, or pairs of texts, into a corpus.

    $ bert-jax corpus --input 'my/*.txt' --tokenizer work/tokenizer --out work/corpus
    $ bert-jax corpus --input hf:allenai/c4:en --tokenizer work/tokenizer --estimate
    $ bert-jax corpus --input 'gs://raw/*.jsonl.gz' --tokenizer work/tokenizer \
        --engine=ray:auto --out gs://corpora/mine
    $ bert-jax corpus --pairs train.en train.de --heldout-pairs val.en val.de \
        --tokenizer work/tokenizer --out work/en-de
    """

    tokenizer: Annotated[Path, "TOKENIZER"]
    """Output of `bert-jax tokenizer`, or a vocab.txt, tokenizer.json or SentencePiece model."""
    out: Annotated[str | None, "CORPUS"] = None
    """Directory to write or, with --input, gs:// or s3://BUCKET/DIRECTORY."""
    heldout_rate: Annotated[float | None, "SHARE"] = None
    """Share of the documents, or of the pairs, to hold out for evaluation (default: 0.01)."""
    overwrite: bool = False
    """Replace an existing corpus at --out: on a disk, as soon as the new corpus is complete; in a
    bucket, the old corpus is lost when the build begins."""

    def __call__(self) -> int:
        self._check_form()
        return self._of_pairs(self.out or "") if self.pairs else self._of_text(self.out or "")

    def _of_text(self, out: str) -> int:
        from bert_jax.data.corpus.build import build_corpora
        from bert_jax.data.corpus.datasheet import Provenance
        from bert_jax.data.corpus.passes import Recipe
        from bert_jax.data.corpus.sharded.build import estimate_corpus
        from bert_jax.data.corpus.sharded.engine import SHARD_BYTES
        from bert_jax.data.corpus.sources import resolve_sources
        from bert_jax.data.corpus.workers import worker_count
        from bert_jax.planning.prices import read_prices
        from bert_jax.tokenization.load import load_tokenizer

        shard_bytes = SHARD_BYTES if self.shard_mb is None else math.ceil(self.shard_mb * (1 << 20))
        rate = {} if self.heldout_rate is None else {"heldout_rate": self.heldout_rate}
        recipe = Recipe(
            load_tokenizer(self.tokenizer), splitter=self.splitter or "fast",
            by_field=self.by_column, cleaning=self.cleaning(), **rate,
        )  # fmt: skip
        options = self.reading(*((self.by_column,) if self.by_column else ()))
        if self.estimate:
            sources = resolve_sources(self.input, options)
            found = estimate_corpus(sources, recipe, shard_bytes=shard_bytes)
            lines = found.lines(worker_count(self.num_workers))
            if price := read_prices()["core"]:
                dollars = found.processor_seconds / 3600 * price.dollars
                why = f"{price.dollars:g} a core-hour on demand on {price.date}, {price.source}"
                lines.append(f"  dollars          {dollars:,.2f} ({why})")
            print("\n".join(lines))
            return 0
        with self.opened_engine() as engine:
            built = build_corpora(
                self.input, recipe, out, engine=engine, shard_bytes=shard_bytes,
                options=options, overwrite=self.overwrite, keep_dropped=self.keep_dropped,
                scratch=self.scratch, provenance=Provenance(self.license, self.command_line),
            )  # fmt: skip
        for corpus in built:
            print(corpus.summary())
        return 0

    def _of_pairs(self, out: str) -> int:
        from bert_jax.data.corpus.build_pairs import build_pairs
        from bert_jax.data.corpus.datasheet import Provenance
        from bert_jax.tokenization.load import load_tokenizer

        some = {"heldout_rate": self.heldout_rate, "num_workers": self.num_workers}
        given: dict[str, Any] = {name: value for name, value in some.items() if value is not None}
        built = build_pairs(
            self.opened(*self.pairs, swap=self.swap), load_tokenizer(self.tokenizer), out,
            heldout=self.opened(*self.heldout_pairs, swap=self.swap), overwrite=self.overwrite,
            drop_duplicates=bool(self.drop_duplicates),
            provenance=Provenance(self.license, self.command_line), **given,
        )  # fmt: skip
        print(built.summary())
        return 0

    def _check_form(self) -> None:
        """Raise a UserError if an option is missing, or fits only the other kind of corpus."""
        if bool(self.input) == bool(self.pairs):
            both = "; not both" if self.input else ""
            raise UserError(f"give --input for text, or --pairs for sources and targets{both}")
        if (self.out is None) != self.estimate:
            raise UserError(
                "--estimate writes nothing; leave out either --out or --estimate"
                if self.estimate
                else "give --out, the directory to write, or --estimate"
            )
        sides = self._columns().keys() - {"text"}
        if self.pairs:
            form, other, wrong = "--pairs", "--input", self.given(OfText)
            wrong = [each for each in wrong if each != "--drop-duplicates"]
            for_text = "--line-documents", "--on-bad", "--engine"
            wrong += [each for each in self.given(type(self)) if each in for_text]
            wrong += ["--columns text"] * ("text" in self._columns())
            wrong += [f"--drop-duplicates {k}" for k in self.drop_duplicates if k != "exact"]
        else:
            form, other, wrong = "--input", "--pairs", self.given(OfPairs)
            wrong += [f"--columns {side}" for side in sorted(sides)]
        if wrong:
            raise UserError(f"{wrong[0]} works only with {other}; this corpus is from {form}")
        if sides and all(len(files) > 1 for files in (*self.pairs, *self.heldout_pairs)):
            raise UserError(
                f"--columns {','.join(self.columns)} is for tables, but all files of --pairs have "
                "lines of plain text"
            )
        if self.heldout_pairs and self.heldout_rate is not None:
            raise UserError(
                "--heldout-rate takes the held-out pairs from --pairs, and --heldout-pairs takes "
                "them from files; give only one of the two"
            )


class Tfds(Verb):
    """Download and prepare a data set of TensorFlow Datasets.

    TensorFlow is not needed.

    $ bert-jax tfds glue/mrpc
    """

    name: Given[Annotated[str, "NAME"]]
    """Name of the data set in the catalogue of TensorFlow Datasets. The environment variable
    TFDS_DATA_DIR names the directory of the data (default: ~/tensorflow_datasets)."""

    def __call__(self) -> int:
        from bert_jax.files.tfds import prepare_tfds

        print(prepare_tfds(self.name))
        return 0


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{option}: {text!r} is not a number") from None
