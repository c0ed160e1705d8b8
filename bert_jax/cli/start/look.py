"""A look at the text and at the machine, on which the choices of `bert-jax start` rest."""

import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import jax

from bert_jax.data.corpus.datasheet import script_of
from bert_jax.data.pipeline import ExampleStream
from bert_jax.distributed.parallel.sharding import make_mesh, num_batch_shards, place_batch
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus
from bert_jax.training.pretrain.settings import step_config, with_batch_unit
from bert_jax.training.steps.state import jitted_init
from bert_jax.training.steps.step import make_train_step

_SAMPLE_CHARS = 1_000_000
_UNSPACED = ("Thai", "Lao", "Khmer", "Myanmar", "Hiragana", "Katakana")
_VOCABULARIES = {20e6: 4096, 200e6: 8192, 2e9: 16_384, float("inf"): 32_768}
_MEASURED_SECONDS, _LEAST_STEPS = 4.0, 3


class Writing(NamedTuple):
    """How a text is written."""

    scripts: str
    """Scripts above 1% of the letters, with their shares."""
    spaced: bool
    """Whether words have spaces between them."""
    accents: bool
    """Whether accents are frequent enough to tell words apart."""


def look_at(texts: Iterable[str]) -> Writing:
    """Read about a million characters, and find out how the text is written."""
    counts, accented, read = Counter[str](), 0, 0
    for text in texts:
        letters = [char for char in text[: _SAMPLE_CHARS - read] if char.isalpha()]
        counts.update(map(script_of, letters))
        accented += sum("\u00c0" <= char <= "\u024f" for char in letters)
        read += len(text)
        if read >= _SAMPLE_CHARS:
            break
    total = max(1, counts.total())
    shares = [f"{name} {n / total:.0%}" for name, n in counts.most_common() if n > 0.01 * total]
    unspaced = sum(counts[name] for name in _UNSPACED)
    return Writing(", ".join(shares), unspaced < 0.2 * total, accented > 0.005 * total)


def vocabulary_size(text_bytes: int) -> int:
    """Return a size with which most tokens occur hundreds of times."""
    return next(size for bound, size in _VOCABULARIES.items() if text_bytes < bound)


def machine() -> str:
    """Describe the devices that train."""
    devices = jax.devices()
    kind = devices[0].device_kind
    return f"{os.cpu_count()} CPU cores" if kind == "cpu" else f"{len(devices)} x {kind}"


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
