"""`bert-jax demo --recipe translation`: French number words to digits, tested on unseen numbers."""

import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bert_jax.artefacts.saved.reading import read_model
from bert_jax.cli.demo.console import config_there, heading, make_once, verdict
from bert_jax.config.command_line import load_config, overridden
from bert_jax.data.corpus.build import is_corpus
from bert_jax.data.corpus.build_pairs import build_pairs
from bert_jax.data.corpus.numbers import draw_numbers, french_words
from bert_jax.data.corpus.pairs import open_pairs
from bert_jax.errors import signal_code
from bert_jax.files.staging import staged_file
from bert_jax.infer.attend import attention
from bert_jax.infer.loaded import LoadedModel
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS
from bert_jax.tokenization.wordpiece import CONTINUATION, WordPieceOptions, WordPieceTokenizer
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.train import train

CONFIG = "configs/translate/numbers.py"
LEAST_EXACT = 0.99
"""Smallest accepted share of unseen numbers that are translated exactly."""
NUM_TRAIN, NUM_UNSEEN = 20_000, 2_000
FIRST_DRAWN = 5_001
"""Smallest number that may be drawn; all smaller numbers are in the training data."""
NUM_SHOWN = 6
"""Number of translations to show, and largest number of mistakes to show."""
_SEED = 0
_SHOWN = 98_765  # the number whose attention is drawn


class Sides(NamedTuple):
    """A file of sources and a file of targets, aligned line by line."""

    words: Path
    digits: Path

    def lines(self) -> list[tuple[str, str]]:
        """Read both files, and return the pairs of lines."""
        words, digits = (path.read_text("utf-8").splitlines() for path in self)
        return list(zip(words, digits, strict=True))


def run_demo(config_name: str, workdir: Path) -> int:
    """Run the demo in `workdir`. A second call continues an unfinished run.

    Return 0 if at least `LEAST_EXACT` of the unseen numbers are right, and 1 if fewer are right. If
    a signal stops the training, save the run, and return 130 after Ctrl-C or 0 after SIGTERM.
    Raise a `UserError` if `workdir` cannot be used, or holds a run of another configuration.
    """
    began = time.perf_counter()
    config, run = load_config(PretrainConfig, config_name), workdir / "run"
    config_there(config, run)  # refuses a run of the other demo
    heading(1, "French numbers below a million, in words and in digits")
    known, unseen = (
        Sides(workdir / f"{name}.words.txt", workdir / f"{name}.digits.txt")
        for name in ("train", "unseen")
    )
    _write_numbers(known, unseen)

    heading(2, "A vocabulary of words and digits, and the token store")
    vocabulary, corpus = workdir / "tokenizer", workdir / "corpus"

    def build() -> str:
        pairs = [open_pairs([str(path) for path in sides]) for sides in (known, unseen)]
        tokenizer = load_tokenizer(vocabulary)
        return build_pairs(pairs[:1], tokenizer, corpus, heldout=pairs[1:]).summary()

    texts = (words for words, _ in known.lines())
    make_once(vocabulary, lambda: words_and_digits(texts).save(vocabulary))
    make_once(corpus, build, is_corpus)

    heading(3, "Training: the next digit, from the words and the digits before")
    result = train(overridden(config, [f"--config.data.corpus={corpus}"]), run)
    if not result.finished:
        return signal_code(result.stopped_by)

    heading(4, "Numbers that were not in the training data, translated by greedy search")
    saved = read_model(run)
    examples = unseen.lines()
    answers = LoadedModel(saved).translate([words for words, _ in examples], num_beams=1)
    share = _show(examples, [answer["translation"] for answer in answers])

    heading(5, f"Where everything lies, after {(time.perf_counter() - began) / 60:.1f} minutes")
    page = workdir / "attention.html"
    attention(saved, french_words(_SHOWN), str(_SHOWN)).save(page)
    print(f"numbers       {known.words}, {known.digits}\ntokenizer     {vocabulary}")
    print(f"token store   {corpus}\ncheckpoints   {run / 'checkpoints'}")
    print(f"metrics       {run / 'metrics.jsonl'}\nloss curve    {run / 'loss.png'}")
    print(f"attention     {page}: open it in a browser\n")
    return _verdict(share, len(examples), workdir)


def words_and_digits(texts: Iterable[str]) -> WordPieceTokenizer:
    """Make a vocabulary in which each number word, each hyphen and each digit is a token.

    Digits also have a form that continues a word, so that a number decodes without spaces.
    """
    words = sorted({word for text in texts for word in re.findall(r"\w+|-", text)})
    digits = "0123456789"
    vocabulary = [*SPECIAL_TOKENS, *words, *digits, *(CONTINUATION + digit for digit in digits)]
    return WordPieceTokenizer(vocabulary, WordPieceOptions(lowercase=False))


def _write_numbers(known: Sides, unseen: Sides) -> None:
    numbers = draw_numbers(NUM_TRAIN, NUM_UNSEEN, _SEED, FIRST_DRAWN)
    for sides, drawn in ((known, numbers.train), (unseen, numbers.unseen)):
        for path, spell in ((sides.words, french_words), (sides.digits, str)):
            if path.exists():
                print(f"{path} is there already")
                continue
            with staged_file(path) as file:
                file.writelines(f"{spell(number)}\n".encode() for number in drawn.tolist())
            print(f"{path}: {len(drawn):,} lines")


def _show(examples: Sequence[tuple[str, str]], translations: Sequence[str]) -> float:
    found = [(*pair, given) for pair, given in zip(examples, translations, strict=True)]
    wrong = [each for each in found if each[1] != each[2]]
    for words, _, given in found[:NUM_SHOWN]:
        print(f"{words}\n    {given}")
    if wrong:
        print(f"\nMistakes, {min(len(wrong), NUM_SHOWN)} of {len(wrong):,}:")
    for words, digits, given in wrong[:NUM_SHOWN]:
        print(f"{words}\n    {given}   (it is: {digits})")
    return 1 - len(wrong) / len(found)


def _verdict(share: float, count: int, workdir: Path) -> int:
    print(f"{share:.2%} of {count:,} unseen numbers exact (at least {LEAST_EXACT:.0%})")
    guide = "To use your own pairs of texts, see docs/recipes/translation.md."
    return verdict(share >= LEAST_EXACT, _next_commands(workdir), guide)


def _next_commands(workdir: Path) -> list[list[str]]:
    run, recurrent = str(workdir / "run"), workdir / "recurrent"
    return [
        ["translate", run, french_words(_SHOWN), "--top", "3", "--alignments"],
        ["replay", run, "--step", "0", "--rows", "2"],
        ["demo", "--recipe=translation", f"--config={CONFIG}:recurrent", f"--workdir={recurrent}"],
    ]
