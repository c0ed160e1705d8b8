"""The first half of `bert-jax start`: text, speed, choice and recipe."""

import glob
import json
import math
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from bert_jax.cli.demo.console import build_once, make_once
from bert_jax.cli.start import law
from bert_jax.cli.start.choose import Choice, Speed, choices
from bert_jax.cli.start.look import look_at, machine, vocabulary_size
from bert_jax.cli.start.recipe import Size, as_file, recipe, tokens_per_step
from bert_jax.config.mapping import build
from bert_jax.data.corpus.build import iter_texts
from bert_jax.data.corpus.documents import Source
from bert_jax.data.corpus.sources import resolve_sources
from bert_jax.errors import UserError
from bert_jax.files.staging import replace_file
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.planning.compile import default_cache
from bert_jax.planning.planner import Planner
from bert_jax.planning.topology import Topology, parse_topology
from bert_jax.tasks.opening import open_task
from bert_jax.tasks.task import Task
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.sentencepiece import train_sentencepiece
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.tokenization.training import train_wordpiece
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.pretrain.corpus import Corpus, open_corpus
from bert_jax.training.pretrain.speed import step_seconds
from bert_jax.training.run.telemetry import duration

RECIPE, CHOICES, _CHOSEN = "recipe.py", "choices.txt", "start.json"
_OTHER_SHARE, _LABELS_SHARE, _HELDOUT_BYTES, _SHOWN = 0.05, 0.15, 1e6, 4


@dataclass(frozen=True)
class Asked:
    """Arguments of the command line."""

    files: tuple[str, ...]
    hours: float
    topology: str = ""
    labels: str = ""
    test: str = ""
    columns: tuple[tuple[str, Any], ...] = ()
    """Fields of the task that name columns and the tables' format."""

    @property
    def task(self) -> dict[str, Any]:
        """Fields of the classifier's task."""
        return {"kind": "table", "train": self.labels, "test": self.test, **dict(self.columns)}


class Promise(NamedTuple):
    """Prediction for a run, in nats below the unigram entropy."""

    nats: float
    spread: float
    """Half of the width of the 80% interval."""

    def __str__(self) -> str:
        low, high = self.nats - self.spread, self.nats + self.spread
        return f"{self.nats:.2f} nats below the unigram line (80%: {low:.2f} to {high:.2f})"


def begin(asked: Asked, home: Path) -> Promise:
    """Choose a recipe, print the choices with their reasons, and write the recipe.

    A second call with the same arguments keeps the recipe. Raise a UserError if the files cannot be
    read, or `home` was made with other arguments.
    """
    began, path = time.perf_counter(), home / _CHOSEN
    place = parse_topology(asked.topology) if asked.topology else None
    files = [each.encode(errors="backslashreplace").decode() for each in asked.files]
    text = {"files": files, **_size(asked.files, home)}  # the corpus depends on these
    mine = {**text, "hours": asked.hours, "topology": asked.topology}
    known = read_json_object(path, max_bytes=1 << 20) if path.exists() else {"asked": mine}
    names = "tokenizer", "corpus", RECIPE, CHOICES
    made = [home / name for name in names if (home / name).exists()]
    if made and not path.exists():
        raise UserError(f"`bert-jax start` did not make {made[0]}; give another --workdir")
    fixed = mine if "promise" in known else text if made else {}
    was = mine | known["asked"]  # earlier versions recorded no size
    if differ := [f"{name} {was[name]!r}" for name in fixed if mine[name] != was[name]]:
        raise UserError(
            f"{home} was started with {', '.join(differ)}, which is now different; give the same "
            "again, or another --workdir"
        )
    if "promise" in known:
        if asked.labels:  # a mistake in the tables shows before hours of pretraining
            open_labels(asked, home).test_splits()
        print((home / CHOICES).read_text("utf-8"), end="")
        return Promise(*known["promise"])
    sources = resolve_sources(asked.files)
    replace_file(path, json.dumps({"asked": mine}).encode())
    corpus = prepare(sources, home)
    if asked.labels:
        open_labels(asked, home).test_splits()
    measure, speeds = partial(_measured, corpus), dict[Size, Speed]()
    if place:
        measure = partial(_predicted, place, corpus.train.vocab_size)
    given = 3600 * asked.hours
    left = given - min(time.perf_counter() - began, given / 2)
    seconds = left * (1 - _OTHER_SHARE - _LABELS_SHARE * bool(asked.labels))
    assert corpus.heldout is not None
    unique, off = corpus.train.num_tokens, law.surplus(corpus.train, corpus.heldout)
    found = choices(measure, seconds, unique, speeds)
    promise = Promise(found[0].nats + off, law.INTERVAL * law.SPREAD)
    twice = choices(measure, 2 * seconds, unique, speeds)[0].nats + off
    lines = list(_lines(asked, found, off))
    lines += [f"promise     {promise}", f"twice       {2 * asked.hours:g} h: {twice:.2f} nats"]
    chips = place.num_chips if place else jax.device_count()
    config = recipe(found[0].size, found[0].num_steps, str(home / "corpus"), chips)
    options = [f"--config={home / RECIPE}", f"--workdir={home / 'run'}"]
    command = shlex.join(["bert-jax", "pretrain", *options])
    title = f"Chosen by `bert-jax start` for {asked.hours:g} h.\n\n    {command}\n\n"
    replace_file(home / RECIPE, as_file(config, title + "\n".join(lines) + "\n").encode())
    replace_file(home / CHOICES, ("\n".join(lines) + "\n").encode())
    replace_file(path, json.dumps({"asked": mine, "promise": promise}).encode())
    print("\n".join(lines))
    return promise


def _size(files: Sequence[str], home: Path) -> dict[str, int]:
    """Return the size of the files on this machine outside `home`; an empty dict if none is."""
    paths = {Path(n).resolve() for each in files for n in (each, *glob.glob(each, recursive=True))}
    sizes = [p.stat().st_size for p in paths if p.is_file() and home.resolve() not in p.parents]
    return {"bytes of text": sum(sizes)} if sizes else {}


def prepare(sources: Sequence[Source], home: Path) -> Corpus:
    """Learn the vocabulary and build the corpus, unless they exist, and open the corpus.

    Raise a UserError if the text cannot be read; for too few documents, also remove both.
    """
    size = sum(len(text.encode()) + 1 for text in iter_texts(sources))
    writing = look_at(iter_texts(sources, max_bytes=4_000_000))
    print(f"text        {size / 1e6:,.1f} MB in {len(sources)} files; {writing.scripts}")
    vocabulary, corpus = home / "tokenizer", home / "corpus"
    vocab_size = vocabulary_size(size, writing.spaced)

    def learn() -> str:
        texts = iter_texts(sources, max_bytes=256_000_000)
        learned: Tokenizer
        if writing.spaced:
            accents = {"strip_accents": False} if writing.accents else {}
            learned = train_wordpiece(texts, vocab_size, progress=True, **accents)
            kind = "tokens, lower-cased" + ", with accents" * bool(accents)
        else:
            learned = train_sentencepiece(texts, vocab_size, model="unigram", progress=True)
            kind = "pieces: words have no spaces between them"
        learned.save(vocabulary)
        return f"vocabulary  {learned.vocab_size:,} {kind}"

    make_once(vocabulary, learn)
    rate = min(0.1, max(0.005, _HELDOUT_BYTES / max(size, 1)))
    build_once(sources, vocabulary, corpus, rate)
    found = open_corpus(str(corpus))
    if found.heldout is None:
        for made in (vocabulary, corpus):
            shutil.rmtree(made)
        raise UserError(
            f"{', '.join(source.name for source in sources[:3])}: with fewer than four documents, "
            "none is held out to measure what was learned. Separate documents by blank lines, or "
            "give more files"
        )
    return found


def open_labels(asked: Asked, home: Path) -> Task:
    """Open the tables of the classifier. Raise a UserError if a file or a column is wrong."""
    task = build(FinetuneConfig, {"task": asked.task}).task
    return open_task(task, load_tokenizer(home / "tokenizer"), task.length)


def _measured(corpus: Corpus, size: Size) -> Speed:
    """Measure the speed of a size on this machine."""
    config = recipe(size, chips=jax.device_count())
    speed = Speed(step_seconds(config, corpus), tokens_per_step(config))
    print(f"speed       {size}: {speed.tokens / speed.seconds:,.0f} tokens/s", flush=True)
    return speed


def _predicted(place: Topology, vocab_size: int, size: Size) -> Speed:
    """Predict the speed of a size on a TPU slice; the time is infinite if the size does not fit."""
    config = recipe(size, chips=place.num_chips).with_vocabulary(vocab_size)
    planner = Planner(config, 0, place, cache=default_cache())
    seconds = planner.plan(planner.configured).seconds
    return Speed(math.inf if seconds is None else seconds, tokens_per_step(config))


def _lines(asked: Asked, found: Sequence[Choice], off: float) -> Iterator[str]:
    """Describe each choice with its reason; `off` (nats) is added to the law's predictions."""
    best = found[0]
    epochs, config = best.tokens / best.unique, recipe(best.size, best.num_steps)
    yield f"machine     {asked.topology or machine()}"
    yield f"pilot       a bigram model of this text: {off:+.2f} nats against the law's text"
    yield "size        the law's best for this time and text (nats below the unigram line):"
    for each in found[:_SHOWN]:
        yield (
            f"          {'*' if each is best else ' '} {each.size!s:8} {each.num_steps:>9,} steps  "
            f"{each.tokens / each.unique:>7.1f} epochs  {each.nats + off:.2f}"
        )
    yield f"batches     {best.speed.tokens:,} tokens: many small steps teach more than few large"
    yield (
        f"rate        {config.optimizer.learning_rate:g}, Muon's for this width; warm-up of "
        f"{config.warmup_steps:,} steps, decay over the last 40%"
    )
    yield (
        f"time        {duration(best.num_steps * best.speed.seconds)} of pretraining: "
        f"{best.tokens / 1e6:,.1f} million tokens, {epochs:.1f} epochs of {best.unique:,}"
    )
    if epochs > law.MANY_EPOCHS:
        yield (
            f"Warning: {epochs:.0f} epochs; above {law.MANY_EPOCHS} a further epoch hardly "
            "teaches anything. More text would help, more time will not"
        )
