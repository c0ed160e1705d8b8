"""The first half of `bert-jax start`: text, speed, choice, pilot and recipe."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.cli.demo.console import make_once
from bert_jax.cli.start import law
from bert_jax.cli.start.choose import Choice, choices
from bert_jax.cli.start.look import look_at, machine, step_seconds, vocabulary_size
from bert_jax.cli.start.recipe import LENGTH, SIZES, Size, as_file, recipe, warmup_steps
from bert_jax.config.mapping import build
from bert_jax.data.corpus.build import build_corpus, is_corpus, iter_texts
from bert_jax.data.corpus.sources import resolve_sources
from bert_jax.errors import UserError
from bert_jax.files.staging import replace_file
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.planning.compile import default_cache
from bert_jax.planning.planner import Planner
from bert_jax.planning.topology import Topology, parse_topology
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.sentencepiece import train_sentencepiece
from bert_jax.tokenization.training import train_wordpiece
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus, open_corpus
from bert_jax.training.pretrain.train import train
from bert_jax.training.run.telemetry import duration

RECIPE, CHOSEN, CHOICES = "recipe.py", "start.json", "choices.txt"
_PILOT_SHARE, _LEAST_PILOT_STEPS = 0.04, 100
_LABELS_SHARE = 0.15
_OTHER_SHARE = 0.05  # evaluations, saves and exports
_HELDOUT_BYTES = 1e6
_PLANNED_VOCABULARY = 32_768


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    files: tuple[str, ...]
    hours: float
    topology: str = ""
    labels: str = ""
    test: str = ""
    columns: tuple[tuple[str, Any], ...] = ()
    """Fields of the task that name columns and the tables' format."""

    @property
    def seconds(self) -> float:
        """Time for everything, in seconds."""
        return 3600 * self.hours


@dataclass(frozen=True)
class Chosen:
    """The choice, and what was promised for it."""

    size: Size
    num_steps: int
    step_seconds: float
    nats: float
    """Predicted nats below the unigram entropy."""
    spread: float
    """Half of the width of the 80% interval around `nats`."""
    twice: float
    """Predicted nats with twice the time."""


def begin(asked: Asked, home: Path) -> Chosen:
    """Choose a recipe, print the choices with their reasons, and write the recipe.

    A second call with the same arguments returns the same choice.

    Raises:
        UserError: The files cannot be read, or `home` is the work of other arguments.
    """
    began, path = time.perf_counter(), home / CHOSEN
    known = read_json_object(path, max_bytes=1 << 20) if path.exists() else {}
    mine = json.loads(json.dumps(asdict(asked)))
    if known and known["asked"] != mine:
        was = ", ".join(f"{name} {known['asked'].get(name)!r}" for name, value in mine.items()
                        if known["asked"].get(name) != value)  # fmt: skip
        raise UserError(f"{home} was started with {was}; give another --workdir, or the same again")
    corpus = prepare(asked, home)
    if "chosen" in known:
        print((home / CHOICES).read_text("utf-8"), end="")
        return Chosen(**{**known["chosen"], "size": Size(*known["chosen"]["size"])})
    home.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps({"asked": mine}).encode())
    measure = partial(_measured, corpus, home)
    sizes: Sequence[Size] = SIZES
    if asked.topology:
        place = parse_topology(asked.topology)
        measure = partial(_planned, place)
        sizes = [size._replace(chips=place.num_chips) for size in SIZES]
    share = 1 - _PILOT_SHARE - _OTHER_SHARE - _LABELS_SHARE * bool(asked.labels)
    spent = min(time.perf_counter() - began, asked.seconds / 2)
    seconds = (asked.seconds - spent) * share
    found = choices(measure, seconds, corpus.train.num_tokens, sizes)
    pilot = None if asked.topology else _pilot(found[0], asked, corpus, home)
    best = found[0]
    off = 0.0 if pilot is None else law.PILOT_WEIGHT * (pilot.reached - pilot.choice.nats)
    times = {each.size: each.step_seconds for each in found}
    twice = choices(times.__getitem__, 2 * seconds, best.unique, sizes)
    chosen = Chosen(
        best.size, best.num_steps, best.step_seconds,
        nats=best.nats + off,
        spread=law.INTERVAL * (law.SPREAD if pilot else law.UNCALIBRATED_SPREAD),
        twice=twice[0].nats + off,
    )  # fmt: skip
    lines = list(_lines(asked, corpus, found, chosen, pilot))
    _write(home, asked, chosen, lines)
    replace_file(path, json.dumps({"asked": mine, "chosen": asdict(chosen)}).encode())
    print("\n".join(lines))
    return chosen


def prepare(asked: Asked, home: Path) -> Corpus:
    """Learn the vocabulary and build the corpus, unless they exist, and open the corpus."""
    sources = resolve_sources(asked.files)
    size = sum(source.size for source in sources)
    writing = look_at(iter_texts(sources, max_bytes=4_000_000))
    print(f"text        {size / 1e6:,.1f} MB in {len(sources)} files; {writing.described()}")
    vocabulary, corpus, vocab_size = home / "tokenizer", home / "corpus", vocabulary_size(size)

    def learn() -> str:
        texts = iter_texts(sources, max_bytes=256_000_000)
        if writing.kind == "unigram":
            train_sentencepiece(texts, vocab_size, model="unigram", progress=True).save(vocabulary)
            return f"vocabulary  {vocab_size:,} pieces: words have no spaces between them"
        accents = {"strip_accents": False} if writing.keep_accents else {}
        train_wordpiece(texts, vocab_size, progress=True, **accents).save(vocabulary)
        kept = ", accents kept: they tell words apart" if accents else ""
        return f"vocabulary  {vocab_size:,} tokens, lower-cased{kept}"

    make_once(vocabulary, learn)
    rate = min(0.1, max(0.005, _HELDOUT_BYTES / max(size, 1)))
    tokenizer = load_tokenizer(vocabulary)
    build_it = partial(build_corpus, sources, tokenizer, corpus, heldout_rate=rate)
    make_once(corpus, lambda: build_it().summary(), is_corpus)
    return open_corpus(str(corpus))


class Pilot(NamedTuple):
    """A short run of the chosen size."""

    choice: Choice
    reached: float
    """Nats below the unigram entropy that the run reached."""


def _pilot(best: Choice, asked: Asked, corpus: Corpus, home: Path) -> Pilot | None:
    """Run the chosen size for a share of the time; return None if that is too short."""
    choice = best._replace(num_steps=int(_PILOT_SHARE * asked.seconds / best.step_seconds))
    if choice.num_steps < _LEAST_PILOT_STEPS or corpus.heldout is None:
        return None
    print(f"pilot       {best.size}: {choice.num_steps:,} steps", flush=True)
    values = recipe(best.size, choice.num_steps, corpus=str(home / "corpus"))
    result = train(build(PretrainConfig, values), home / "pilot", echo=_progress)
    if not result.finished:
        raise KeyboardInterrupt
    return Pilot(choice, result.eval_metrics["eval/nats_below_unigram"])


def _progress(line: str) -> None:
    if line.startswith("step "):
        print(line, flush=True)


def _measured(corpus: Corpus, home: Path, size: Size) -> float:
    """Measure the seconds of a step on this machine."""
    seconds = step_seconds(recipe(size, 1000, corpus=str(home / "corpus")), corpus)
    print(f"speed       {size}: {seconds:.3g} s a step of {size.rows} rows", flush=True)
    return seconds


def _planned(place: Topology, size: Size) -> float:
    """Predict the seconds of a step on a TPU slice."""
    config = build(PretrainConfig, recipe(size, 1000)).with_vocabulary(_PLANNED_VOCABULARY)
    planner = Planner(config, 0, place, cache=default_cache())
    seconds = planner.plan(planner.configured).seconds
    return math.inf if seconds is None else seconds


def _lines(
    asked: Asked, corpus: Corpus, found: Sequence[Choice], chosen: Chosen, pilot: Pilot | None
) -> Iterator[str]:
    """Describe each choice with its reason."""
    best, seconds = found[0], found[0].seconds
    yield f"machine     {asked.topology or machine()}"
    yield "size        the law's best for this time and text (nats below the unigram line):"
    for each in found[:4]:
        mark = "*" if each is best else " "
        yield (
            f"          {mark} {each.size!s:9} {each.num_steps:>9,} steps  "
            f"{each.epochs:>7.1f} epochs  {each.nats:.2f}"
        )
    yield f"rows        {best.size.rows} of {LENGTH} tokens a step: small batches, many steps"
    yield (
        f"rate        {best.size.learning_rate:g} (Muon), narrow layers take more; warm-up "
        f"{warmup_steps(best.num_steps):,} steps, decay over the last 40%"
    )
    yield (
        f"time        {duration(seconds)} of pretraining: {best.tokens / 1e6:,.1f} million tokens, "
        f"{best.epochs:.1f} epochs of {best.unique:,}"
    )
    if best.epochs > law.MANY_EPOCHS:
        yield (
            f"Warning: {best.epochs:.0f} epochs; above {law.MANY_EPOCHS} a further epoch hardly "
            "teaches anything. More text would help, more time will not"
        )
    if pilot:
        yield (
            f"pilot       {pilot.reached:.2f} nats after {pilot.choice.num_steps:,} steps (the law "
            f"said {pilot.choice.nats:.2f})"
        )
    low, high = chosen.nats - chosen.spread, chosen.nats + chosen.spread
    yield f"promise     {chosen.nats:.2f} nats below the unigram line ({low:.2f} to {high:.2f})"
    yield f"twice       {2 * asked.hours:g} hours would bring {chosen.twice:.2f} nats"


def _write(home: Path, asked: Asked, chosen: Chosen, lines: Sequence[str]) -> None:
    """Write the recipe, with the choices as its docstring."""
    values = recipe(chosen.size, chosen.num_steps, corpus=str(home / "corpus"))
    title = f"{chosen.size} for {asked.hours:g} hours, chosen by `bert-jax start`."
    command = f"bert-jax pretrain --config={home / RECIPE} --workdir={home / 'run'}"
    text = "\n".join([title, "", f"    {command}", "", *lines, ""])
    replace_file(home / RECIPE, as_file(values, text).encode())
    replace_file(home / CHOICES, ("\n".join(lines) + "\n").encode())
