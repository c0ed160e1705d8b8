"""The speed of training steps, measured for some seconds."""

import statistics
import time
from dataclasses import replace

import jax

from bert_jax.data.pipeline import ExampleStream
from bert_jax.distributed.parallel.sharding import make_mesh, place_batch
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus
from bert_jax.training.pretrain.settings import step_config
from bert_jax.training.steps.state import jitted_init
from bert_jax.training.steps.step import make_train_step

_MEASURED_SECONDS, _LEAST_STEPS = 4.0, 3


def step_seconds(config: PretrainConfig, corpus: Corpus) -> float:
    """Measure whole batches of each phase; return the mean seconds of a step of the run."""
    config = config.with_vocabulary(corpus.train.vocab_size)
    medians = [_median_seconds(config, corpus, n) for n in range(len(config.phases))]
    return statistics.fmean(medians, [phase.num_steps for phase in config.phases])


def _median_seconds(config: PretrainConfig, corpus: Corpus, number: int) -> float:
    mesh = make_mesh(config.mesh)
    settings = step_config(config, corpus, number)
    step = make_train_step(settings, mesh)
    phase = replace(config.phases[number], num_steps=1 << 20, batch_warmup_steps=0)
    stream = ExampleStream(corpus.train, config.data, [phase], config.seed)
    state = jitted_init(settings, mesh)(jax.random.key(0))
    times: list[float] = []
    while len(times) <= _LEAST_STEPS or sum(times[1:]) < _MEASURED_SECONDS:
        began = time.perf_counter()
        state, metrics = step(state, place_batch(stream.batch(len(times)), mesh))
        jax.block_until_ready(metrics)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])  # the first step compiles
