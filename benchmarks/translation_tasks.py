"""Pairs of texts for translation_systems.py, and what differs between its two tasks."""

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert_jax.data.corpus.build import build_corpus, is_corpus
from bert_jax.data.corpus.build_pairs import build_pairs
from bert_jax.data.corpus.pairs import open_pairs
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.sentencepiece import train_sentencepiece
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS, Tokenizer
from bert_jax.tokenization.wordpiece import WordPieceOptions, WordPieceTokenizer

CHAPTER = Path(__file__).parents[1] / "examples" / "chapter"
MOST_WORDS, FEWEST_WORDS = 60, 20
"""Greatest number of words in a joined source, and smallest limit that is drawn for a group."""


class Pair(NamedTuple):
    """A source and its translation."""

    source: str
    target: str


class Task(NamedTuple):
    """Pairs of a task, and what differs between the tasks."""

    train: list[Pair]
    heldout: list[Pair]
    test: list[Pair]
    more_test: list[Pair]
    """Pairs of the joined test."""
    between: Pair
    """Text between the sources, and between the targets, of joined pairs."""
    minutes: float
    """Most minutes of processor time that the training of a system takes."""
    recurrent: str
    """Recipe of the systems with one layer, whose attention is then set."""
    gnmt: list[str]
    """Recipe of GNMT, and changes of the recipe."""
    transformer: str
    length: int
    """Places of a row on each side."""
    eval_every: int
    margin: float
    """Fall of the held-out loss, in nats per token, below which training ends."""
    num_beams: int

    def joined(self, pairs: Sequence[Pair], seed: int) -> list[Pair]:
        """Join pairs in random order, each at most once, to sources of up to 20 to 60 words."""
        random = np.random.default_rng(seed)
        groups: list[list[Pair]] = []
        words, limit = 0, 0
        for number in random.permutation(len(pairs)):
            pair = pairs[number]
            words += len(f"{self.between.source}{pair.source}".split())
            if words > limit:
                groups.append([])
                words = len(pair.source.split())
                limit = int(random.integers(FEWEST_WORDS, MOST_WORDS + 1))
            groups[-1].append(pair)
        return [
            Pair(*map(str.join, self.between, zip(*group, strict=True)))
            for group in groups
            if len(group) > 1
        ]


def numbers() -> Task:
    """Make lists of numbers; the numbers of test and held-out lists are in no training list."""
    sys.path.append(str(CHAPTER))
    task = importlib.import_module("number_words")

    def pairs(known: np.ndarray, count: int, seed: int) -> list[Pair]:
        lists = task.drawn(known, count, seed)
        return [Pair(" ".join(task.spelled(n)), " ".join(task.in_digits(n))) for n in lists]

    known, dev = np.split(task.KNOWN, [-50])
    recipe = "translate/numbers"
    return Task(
        pairs(known, 20_000, 1), pairs(dev, 1000, 2), pairs(task.UNSEEN, 1000, 3),
        pairs(task.UNSEEN, 3000, 4), Pair(f" {task.THEN} ", f" {task.COMMA} "), 15,
        f"{recipe}:recurrent", [
            f"{recipe}:recurrent", "--config.objective.cell=lstm", "--config.model.num_layers=4",
            "--config.objective.residual_from=3",
        ], recipe, length=64, eval_every=200, margin=0.0, num_beams=1,
    )  # fmt: skip


def multi30k() -> Task:
    """Read the captions, which are not in the repository."""
    directory = Path(os.environ["BERT_JAX_DATA"]) / "translation" / "multi30k"

    def pairs(name: str) -> list[Pair]:
        files = [str(directory / f"{name}.{language}.gz") for language in ("en", "de")]
        return [Pair(*sides) for _, *sides in open_pairs(files).pairs() if all(sides)]

    test = pairs("test_2016_flickr")
    return Task(
        pairs("train"), pairs("val"), test, test, Pair(" ", " "), 150, "translate/recurrent",
        ["translate/gnmt"], "translate/multi30k_small", length=128, eval_every=240, margin=0.01,
        num_beams=5,
    )  # fmt: skip


TASKS = {"numbers": numbers, "multi30k": multi30k}


def prepare(name: str, task: Task, home: Path) -> None:
    """Write a tokenizer, a corpus of pairs and a corpus of texts, unless they are there."""
    home.mkdir(parents=True, exist_ok=True)
    texts = [text for pair in task.train for text in pair]
    if not (home / "tokenizer").exists():
        (words_of(texts) if name == "numbers" else train_sentencepiece(texts, 8000)).save(
            home / "tokenizer"
        )
    tokenizer = load_tokenizer(home / "tokenizer")
    if not is_corpus(home / "pairs"):
        opened = []
        for seed, (part, pairs) in enumerate({"train": task.train, "dev": task.heldout}.items()):
            all_pairs = [*pairs, *task.joined(pairs, seed)]
            files = [home / f"{part}.{side}.txt" for side in Pair._fields]
            for file, texts_of_side in zip(files, zip(*all_pairs, strict=True), strict=True):
                file.write_text("".join(f"{text}\n" for text in texts_of_side), "utf-8")
            opened.append(open_pairs([str(file) for file in files]))
        build_pairs(opened[:1], tokenizer, home / "pairs", heldout=opened[1:])
    if not is_corpus(home / "texts"):
        (home / "texts.txt").write_text("\n\n".join(texts), "utf-8")
        build_corpus([str(home / "texts.txt")], tokenizer, home / "texts", heldout_rate=0.02)


def words_of(texts: Sequence[str]) -> Tokenizer:
    """Make a vocabulary in which each word, digit and comma is a token."""
    words = sorted({word for text in texts for word in text.split()})
    return WordPieceTokenizer([*SPECIAL_TOKENS, *words], WordPieceOptions(lowercase=False))
