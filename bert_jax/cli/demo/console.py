"""Headings of a demo, commands for the user's shell, and a check of the demo's directory."""

import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bert_jax.data.corpus.build import build_corpus, is_corpus
from bert_jax.data.corpus.documents import Source
from bert_jax.errors import UserError
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.saves import read_config

NUM_PARTS = 5
"""Number of parts of every demo."""


def heading(number: int, title: str) -> None:
    """Print the heading of part `number` of the demo."""
    print(f"\n[{number}/{NUM_PARTS}] {title}", flush=True)


def make_once(
    path: Path, make: Callable[[], str | None], is_there: Callable[[Path], bool] = Path.exists
) -> None:
    """Call `make` and print the line that it returns, or only print that `path` exists already."""
    if line := f"{path} is there already" if is_there(path) else make():
        print(line)


def build_once(
    sources: Sequence[Source | str], vocabulary: Path, corpus: Path, heldout_rate: float
) -> None:
    """Build a corpus with the saved tokenizer `vocabulary`, unless the corpus exists."""

    def build() -> str:
        tokenizer = load_tokenizer(vocabulary)
        return build_corpus(sources, tokenizer, corpus, heldout_rate=heldout_rate).summary()

    make_once(corpus, build, is_corpus)


def verdict(learned: bool, commands: Sequence[Sequence[str]], guide: str) -> int:
    """Print what to try next, or that the demo failed; return the exit code.

    `commands` has the arguments of `bert-jax` for each command to try. The printed commands work in
    the directory where the demo was started. `guide` is printed as the last sentence.
    """
    if not learned:
        print("The demo FAILED: the model has not learned what it should have.")
        return 1
    print("\nNext, to try:\n")
    print("\n".join(f"  {shlex.join([*_program(), *arguments])}" for arguments in commands))
    print(f"\n{guide}")
    return 0


def config_there(config: PretrainConfig, run: Path) -> PretrainConfig | None:
    """Return the configuration of `run`, or None if there is no run.

    Raise a UserError if the run has another objective than `config`.
    """
    if not (run / "config.json").exists():
        return None
    there = read_config(run)
    if there.objective.name != config.objective.name:
        raise UserError(
            f"{run} holds a run with objective.name {there.objective.name!r}, but this demo has "
            f"{config.objective.name!r}; give another --workdir"
        )
    return there


def _program() -> list[str]:
    """Return words that start `bert-jax` in a shell, even if no environment is active."""
    script = Path(sys.executable).with_name("bert-jax")
    found = shutil.which("bert-jax")
    if found is not None and script.exists() and Path(found).samefile(script):
        return ["bert-jax"]
    if script.exists():
        here = Path.cwd()
        return [str(script.relative_to(here) if script.is_relative_to(here) else script)]
    return [sys.executable, "-m", "bert_jax.cli"]
