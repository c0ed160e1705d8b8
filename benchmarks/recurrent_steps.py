"""Training steps of the recurrent recipes against those of the Transformer's, on the same pairs.

    python benchmarks/recurrent_steps.py --corpus work/pairs

Compared is the processor's time for a real token of either side, which other work on the machine
disturbs less than the clock: forward, backward and optimizer, each recipe with its own rows. All
recipes take their steps in turn, in one process; the median of each is divided by that of the first
recipe.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax

from bert_jax.config.command_line import load_config
from bert_jax.data.pipeline import ExampleStream
from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh, place_batch
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus, open_corpus
from bert_jax.training.pretrain.settings import step_config
from bert_jax.training.steps.state import jitted_init
from bert_jax.training.steps.step import make_train_step

RECIPES = "multi30k_small", "recurrent_additive"


class Step(NamedTuple):
    """Costs of one training step."""

    seconds: float
    """Seconds of the processor's time."""
    tokens: int
    """Real tokens in the batch."""


def stepper(config: PretrainConfig, corpus: Corpus, phase: int = 0) -> Callable[[int], Step]:
    """Return a function of a number that takes this step of a phase; the first call compiles.

    All batches are whole, also where the phase begins with smaller batches.
    """
    config = config.with_vocabulary(corpus.train.vocab_size)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    settings = step_config(config, corpus, phase)
    state = jitted_init(settings, mesh)(jax.random.key(0))
    step = make_train_step(settings, mesh)
    own = replace(config.phases[phase], num_steps=1 << 20, batch_warmup_steps=0)
    stream = ExampleStream(corpus.train, config.data, [own])

    def take(number: int) -> Step:
        nonlocal state
        batch = place_batch(stream.batch(number), mesh)
        start = time.process_time()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        return Step(time.process_time() - start, int(metrics["num_tokens"]))

    return take


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--corpus", required=True, help="directory made by bert-jax corpus --pairs")
    parser.add_argument("--steps", type=int, default=5, help="timed steps; default: %(default)s")
    parser.add_argument(
        "--recipes", nargs="+", default=RECIPES, help=f"default: {' '.join(RECIPES)}"
    )
    options = parser.parse_args()
    corpus = open_corpus(options.corpus)
    takes = [stepper(load_config(PretrainConfig, recipe), corpus) for recipe in options.recipes]
    steps = [[take(number) for take in takes] for number in range(options.steps + 1)][1:]
    seconds = [[step.seconds / step.tokens for step in row] for row in steps]
    medians = [statistics.median(column) for column in zip(*seconds, strict=True)]
    for recipe, median in zip(options.recipes, medians, strict=True):
        print(f"{recipe}: {median * 1e6:.0f} us a token, {median / medians[0]:.2f} of the first")


if __name__ == "__main__":
    main()
