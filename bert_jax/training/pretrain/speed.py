"""The speed of training steps, measured for some seconds."""

import statistics
import time

import jax

from bert_jax.data.pipeline import ExampleStream
from bert_jax.distributed.parallel.sharding import make_mesh, num_batch_shards, place_batch
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus
from bert_jax.training.pretrain.settings import step_config, with_batch_unit
from bert_jax.training.steps.state import jitted_init
from bert_jax.training.steps.step import make_train_step

_MEASURED_SECONDS, _LEAST_STEPS = 4.0, 3


def step_seconds(config: PretrainConfig, corpus: Corpus) -> float:
    """Measure training steps for some seconds; return the median, in seconds."""
    mesh = make_mesh(config.mesh)
    config = with_batch_unit(config, num_batch_shards(mesh))
    config = config.with_vocabulary(corpus.train.vocab_size)
    settings = step_config(config, corpus)
    step = make_train_step(settings, mesh)
    stream = ExampleStream(corpus.train, config.data, config.phases, config.seed)
    state = jitted_init(settings, mesh)(jax.random.key(0))
    times: list[float] = []
    while len(times) <= _LEAST_STEPS or sum(times[1:]) < _MEASURED_SECONDS:
        began = time.perf_counter()
        state, metrics = step(state, place_batch(stream.batch(len(times)), mesh))
        jax.block_until_ready(metrics)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])  # the first step compiles
