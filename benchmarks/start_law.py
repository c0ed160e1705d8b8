"""The runs behind the predictions of `bert-jax start`: sizes, budgets, learning rates and epochs.

    python benchmarks/start_law.py --out work/law --text books.txt          # hours on two cores
    python benchmarks/start_law.py --out work/law --text books.txt --group rates
    python benchmarks/start_law.py --out work/law --table

A trial is a size of `bert_jax.cli.start.recipe`, a number of operations (a third of them forward,
as `model/flops.py` counts), a factor of the learning rate and the share of the training text that
is kept. Trials stay in OUT/trials.jsonl; benchmarks/start_law.jsonl has the trials of the law so
far. Several processes with --turn=0/2 and --turn=1/2 share the trials; each should have a core for
itself (`taskset`).
"""

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from bert_jax.cli.start.law import REPEATS, surplus, useful_tokens
from bert_jax.cli.start.recipe import Size, recipe, tokens_per_step
from bert_jax.data.corpus.build import build_corpus, is_corpus, iter_texts
from bert_jax.model.flops import train_flops
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.training import train_wordpiece
from bert_jax.training.pretrain.corpus import Corpus, open_corpus
from bert_jax.training.pretrain.train import train

SIZES = (Size(2, 64), Size(2, 128), Size(4, 128), Size(4, 256))
BUDGETS = (1e12, 2.5e12, 6e12, 15e12, 30e12)


class Trial(NamedTuple):
    """One run."""

    layers: int
    width: int
    flops: float
    rate: float = 1.0
    """Factor of the learning rate."""
    megabytes: int = 0
    """Megabytes of training text; 0 for the whole file."""

    @property
    def size(self) -> Size:
        """Size of the encoder."""
        return Size(self.layers, self.width)


_LEFT_THE_LINE = 1.3
_LIMIT, _SIZE_POWER = 4.5, 0.35
GROUPS = {
    "rates": [
        Trial(*size, 12e12, rate) for rate in (2.0, 1.0, 4.0) for size in (SIZES[1], SIZES[3])
    ],
    "law": [Trial(*size, budget) for budget in BUDGETS for size in SIZES],
    "epochs": [
        Trial(2, 64, 6e12, megabytes=1), Trial(2, 128, 15e12, megabytes=1),
        Trial(2, 64, 15e12, megabytes=1), Trial(2, 128, 15e12, megabytes=3),
    ],
    "choices": [
        Trial(2, 64, 12e12),
        *[Trial(*size, 12e12, rate) for rate in (1.0, 2.0) for size in SIZES[1:]],
    ],
}  # fmt: skip
"""Trials by the question that they answer.

`choices` is for texts that the law has not seen: the size that `start` takes for 12e12 operations,
about five minutes of one core, and recipes set by hand.
"""


def corpus_of(out: Path, text: Path, megabytes: int, vocab_size: int) -> Path:
    """Build the corpus of the first megabytes of the text, and the vocabulary of the whole."""
    corpus = out / f"corpus{megabytes or ''}"
    if is_corpus(corpus):
        return corpus
    vocabulary = out / "tokenizer"
    if not vocabulary.exists():
        train_wordpiece(iter_texts([str(text)]), vocab_size).save(vocabulary)
    if megabytes:
        whole = text.read_text("utf-8")
        text = out / f"first{megabytes}.txt"
        text.write_text(whole[: megabytes * 1_000_000], "utf-8")
    rate = 0.04 if not megabytes else min(0.2, 0.3 / megabytes)
    build_corpus([str(text)], load_tokenizer(vocabulary), corpus, heldout_rate=rate)
    return corpus


def run(trial: Trial, corpus: Path) -> dict[str, float]:
    """Train, and return steps, tokens, seconds and the held-out loss against the unigram line."""
    config = recipe(trial.size, corpus=str(corpus))
    model = config.with_vocabulary(open_corpus(str(corpus)).train.vocab_size).model
    (phase,) = config.training.phases
    masked = config.masking.num_predictions(phase.length)
    step_flops = train_flops(model, phase.length, masked) * phase.batch_size
    config = recipe(trial.size, max(20, round(trial.flops / step_flops)), str(corpus))
    rate = trial.rate * config.optimizer.learning_rate
    optimizer = dataclasses.replace(config.optimizer, learning_rate=rate)
    training = dataclasses.replace(config.training, eval_every_steps=0, eval_rows=2048)
    config = dataclasses.replace(config, optimizer=optimizer, training=training)
    began = time.process_time()
    with tempfile.TemporaryDirectory(prefix="law") as workdir:
        result = train(config, Path(workdir) / "run")
    return {
        "steps": training.num_steps,
        "tokens": training.num_steps * tokens_per_step(config),
        "gain": result.eval_metrics["eval/nats_below_unigram"],
        "loss": result.eval_metrics["eval/mlm_loss"],
        "seconds": time.process_time() - began,
    }


def fit(done: dict[Trial, dict[str, float]], corpora: dict[int, Corpus]) -> None:
    """Print the constants of the law, and how far each run is from it, in nats.

    Runs that have hardly left the unigram line are left out. The limit of the whole text, the power
    of the size and the repeats are given: the runs are too short or too few to determine them.
    """
    runs = [(t, r) for t, r in done.items() if t.rate == 1 and r["gain"] > _LEFT_THE_LINE]
    size = np.array([t.size.parameters for t, _ in runs], float)
    useful = np.array([
        useful_tokens(int(r["tokens"]), corpora[t.megabytes].train.num_tokens) for t, r in runs
    ])  # fmt: skip
    more = {}
    for megabytes, each in corpora.items():
        assert each.heldout is not None
        more[megabytes] = surplus(each.train, each.heldout)
    gain = np.array([r["gain"] - more[t.megabytes] for t, r in runs])

    def off(values: np.ndarray) -> np.ndarray:
        log_size, log_text, text_power = values
        of_size = np.exp(log_size - _SIZE_POWER * np.log(size))
        return _LIMIT - of_size - np.exp(log_text - text_power * np.log(useful)) - gain

    found = least_squares(off, [3.0, 5.0, 0.3], loss="soft_l1", f_scale=0.05).x
    print(
        f"limit {_LIMIT}, size {np.exp(found[0]):.4g} / N^{_SIZE_POWER}, text "
        f"{np.exp(found[1]):.4g} / T^{found[2]:.4g}, repeats {REPEATS}; root mean square "
        f"{np.sqrt(np.mean(np.square(off(found)))):.3f}"
    )
    for (trial, _), each in zip(runs, off(found), strict=True):
        print(f"{trial.size} {trial.flops:.2g} {trial.megabytes or ''}: {each:+.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of corpora and trials")
    parser.add_argument("--text", type=Path, help="text file")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--group", choices=GROUPS, help="group of trials; default: all")
    parser.add_argument("--turn", default="0/1", help="N/M: trial N of every M")
    parser.add_argument("--fit", action="store_true", help="print the constants of the law")
    parser.add_argument("--table", action="store_true", help="print what is there, and run nothing")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "trials.jsonl"
    turn, turns = map(int, options.turn.split("/"))
    groups = [options.group] if options.group else list(GROUPS)
    for number, trial in enumerate(each for group in groups for each in GROUPS[group]):
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        done = {Trial(**row["trial"]): row["result"] for row in rows}
        if trial not in done and not (options.table or options.fit) and number % turns == turn:
            corpus = corpus_of(options.out, options.text, trial.megabytes, options.vocab_size)
            done[trial] = run(trial, corpus)
            with path.open("a") as file:
                file.write(json.dumps({"trial": trial._asdict(), "result": done[trial]}) + "\n")
        if trial in done:
            values = done[trial]
            print(
                f"| {trial.size} | {trial.flops:.2g} | {trial.rate:g} | {trial.megabytes or ''} | "
                f"{values['steps']:,} | {values['tokens'] / 1e6:.1f} | {values['seconds']:.0f} | "
                f"{values['gain']:.3f} |",
                flush=True,
            )
    if options.fit:
        there = {trial.megabytes for trial in done}
        places = {n: corpus_of(options.out, options.text, n, options.vocab_size) for n in there}
        fit(done, {n: open_corpus(str(path)) for n, path in places.items()})


if __name__ == "__main__":
    main()
