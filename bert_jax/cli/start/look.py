"""A look at the text, the labels and the machine, on which the choices of `bert-jax start` rest."""

import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from bert_jax.config.mapping import build
from bert_jax.data.corpus.datasheet import script_of
from bert_jax.data.pipeline import ExampleStream
from bert_jax.distributed.parallel.sharding import make_mesh, num_batch_shards, place_batch
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus
from bert_jax.training.pretrain.settings import step_config, with_batch_unit
from bert_jax.training.steps.state import jitted_init
from bert_jax.training.steps.step import make_train_step

_SAMPLE_CHARS = 1_000_000
_UNSPACED = {"Thai", "Lao", "Khmer", "Myanmar", "Hiragana", "Katakana"}
_MEASURED_SECONDS, _LEAST_STEPS = 4.0, 3


class Writing(NamedTuple):
    """Scripts of a text, and the kind of vocabulary that suits the text."""

    scripts: dict[str, float]
    """Share of each script among the letters, the most frequent first."""
    kind: str
    """`wordpiece`, or `unigram` for text without spaces between words."""
    keep_accents: bool

    def described(self) -> str:
        """Return the scripts above 1%, with their shares."""
        return ", ".join(f"{name} {share:.0%}" for name, share in self.scripts.items())


def look_at(texts: Iterable[str]) -> Writing:
    """Read about a million characters, and find out how the text is written."""
    counts, accented, read = Counter[str](), 0, 0
    for text in texts:
        part = text[: _SAMPLE_CHARS - read]
        read += len(part)
        letters = [char for char in part if char.isalpha()]
        counts.update(map(script_of, letters))
        accented += sum("\u00c0" <= char <= "\u024f" for char in letters)
        if read >= _SAMPLE_CHARS:
            break
    total = max(1, counts.total())
    scripts = {name: n / total for name, n in counts.most_common() if n / total >= 0.01}
    unspaced = sum(scripts.get(name, 0.0) for name in _UNSPACED)
    return Writing(scripts, "unigram" if unspaced > 0.2 else "wordpiece", accented > 0.005 * total)


def vocabulary_size(text_bytes: int) -> int:
    """Return a size with which most tokens occur hundreds of times: 4,096 for a few megabytes."""
    bounds = {20e6: 4096, 200e6: 8192, 2e9: 16_384}
    return next((size for bound, size in bounds.items() if text_bytes < bound), 32_768)


def machine() -> str:
    """Describe the devices that train."""
    devices = jax.devices()
    kind = devices[0].device_kind
    return f"{os.cpu_count()} CPU cores" if kind == "cpu" else f"{len(devices)} x {kind}"


def step_seconds(values: dict[str, Any], corpus: Corpus) -> float:
    """Measure a training step of a recipe for some seconds; return the median, in seconds."""
    config = build(PretrainConfig, values)
    mesh = make_mesh(config.mesh)
    config = with_batch_unit(config, num_batch_shards(mesh))
    config = config.with_vocabulary(corpus.train.vocab_size)
    settings = step_config(config, corpus)
    step, stream = make_train_step(settings, mesh), ExampleStream(
        corpus.train, config.data, config.phases, config.seed
    )  # fmt: skip
    state, times, began, number = jitted_init(settings, mesh)(jax.random.key(0)), [], 0.0, 0
    while number <= _LEAST_STEPS or time.perf_counter() - began < _MEASURED_SECONDS:
        at = time.perf_counter()
        state, metrics = step(state, place_batch(stream.batch(number), mesh))
        jax.block_until_ready(metrics)
        if number:  # the first step compiles
            times.append(time.perf_counter() - at)
        else:
            began = time.perf_counter()
        number += 1
    return statistics.median(times)
