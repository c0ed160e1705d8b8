"""Time of a training step on one core, against the time of its matrix products alone.

    python benchmarks/step_products.py --check
    python benchmarks/step_products.py --recipe start:2x128 --length 64 --rows 32 --allocator plain

The recipe trains on random tokens of a vocabulary of 8,192. The products are all `dot` operations
of the compiled step, loops counted; each kind runs alone, with operands in the order that suits the
processor best. Step and products alternate; processor times are compared, which other work on the
machine disturbs less than the wall's. `--check` exits with 1 where the ratio exceeds 1.25.

The table has the largest operations of the step, by the profiler of JAX. `--allocator plain` leaves
out the settings of glibc that `bert-jax pretrain` makes (`bert_jax/cli/kept_pages.py`).
"""

import argparse
import math
import os
import re
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from recurrent_steps import Step, stepper

from bert_jax.cli.kept_pages import keep_pages
from bert_jax.config.command_line import load_config
from bert_jax.data.shard import Shard
from bert_jax.data.store import TokenStore
from bert_jax.planning.hlo_cost.hlo_text import Computation, Instruction, parse_text
from bert_jax.planning.hlo_cost.loops import Scope, trip_count
from bert_jax.tokenization.special_ids import SpecialIds
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus

VOCAB, TOKENS, BAR, WARM_UP = 8192, 400_000, 1.25, 4


class Product(NamedTuple):
    """A batch of matrix products."""

    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        """Number of operations; a multiplication and an addition count as two."""
        return 2 * math.prod(self)


def products(text: str) -> Counter[Product]:
    """Count the products of a compiled program, from its HLO text."""
    module = parse_text(text)

    def of(computation: Computation) -> Counter[Product]:
        counted: Counter[Product] = Counter()
        for each in computation.instructions.values():
            inner, times = each.calls, 1
            if each.opcode == "dot":
                counted[_product(each, computation)] += 1
            elif each.opcode == "while":
                inner = each.attribute(r"\bbody=%?([\w.\-]+)")
                times = trip_count(each, Scope(module, computation, lambda _: None)) or 1
            for product, found in of(module.computations[inner]).items() if inner else ():
                counted[product] += found * times
        return counted

    return of(module.computations[module.entry])


def _product(dot: Instruction, computation: Computation) -> Product:
    left, right = (
        [int(size) for size in re.findall(r"\d+", shape.partition("[")[2].partition("]")[0])]
        for shape in computation.operand_shapes(dot)
    )

    def size(kind: str) -> int:
        axes = dot.attribute(rf"lhs_{kind}_dims=\{{([\d,]*)\}}") or ""
        return math.prod(left[int(axis)] for axis in axes.split(",") if axis)

    batch, inner = size("batch"), size("contracting")
    return Product(
        batch, math.prod(left) // (batch * inner), inner, math.prod(right) // (batch * inner)
    )


def make_step(recipe: str, length: int, rows: int) -> Callable[[int], Step]:
    """Return a function of a step's number that takes the step, on random tokens."""
    fields = [f"training.phases=({{'length': {length}, 'batch_size': {rows}}},)", "seed=0"]
    config = load_config(PretrainConfig, recipe, [f"--config.{field}" for field in fields])
    random = np.random.default_rng(0)
    ends = np.arange(0, TOKENS + 1, 20)
    shard = Shard(
        tokens=random.integers(5, VOCAB, TOKENS).astype(np.uint16),
        sentence_offsets=ends,
        document_offsets=np.arange(0, len(ends), 50),
        vocab_size=VOCAB,
        special_ids=SpecialIds(*range(5)),
        meta={},
    )
    return stepper(config, Corpus(TokenStore.of([shard], np.ones(VOCAB, np.int64)), None))


def step_text() -> str:
    """Return the HLO text of the step that this process has compiled."""
    loaded = (each.hlo_modules()[0] for each in jax.devices()[0].client.live_executables())
    return max((each.to_string() for each in loaded if each.name == "jit_train_step"), key=len)


def alone(counted: Counter[Product]) -> Callable[[], float]:
    """Return a function that runs each kind of product, and returns the seconds for all."""
    multiply = jax.jit(jnp.matmul)
    operands = {
        each: (
            jnp.ones((each.batch, each.rows, each.inner)[each.batch == 1 :]),
            jnp.ones((each.batch, each.inner, each.columns)[each.batch == 1 :]),
        )
        for each in counted
    }

    def seconds() -> float:
        total = 0.0
        for product, times in counted.items():
            repeats = min(times, 4)
            began = time.process_time()
            for _ in range(repeats):
                jax.block_until_ready(multiply(*operands[product]))
            total += (time.process_time() - began) * times / repeats
        return total

    return seconds


def profile(take: Callable[[], Step], steps: int = 5) -> Counter[str]:
    """Return the milliseconds of each operation of a step."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    spent: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        with jax.profiler.trace(name, profiler_options=options):
            for _ in range(steps):
                take()
        path = next(Path(name).rglob("*.xplane.pb"))
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    facts: dict[str, Any] = dict(event.stats)
                    if "hlo_op" in facts:
                        spent[facts["hlo_op"]] += event.duration_ns / 1e6 / steps
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipe", default="start:4x256")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--allocator", choices=("kept", "plain"), default="kept")
    parser.add_argument("--check", action="store_true", help=f"fail above {BAR}")
    given = parser.parse_args()
    # All of this must come before JAX makes its first array.
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    jax.config.update("jax_platforms", "cpu")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if given.allocator == "kept":
        keep_pages()
    taking = map(make_step(given.recipe, given.length, given.rows), count())
    for _ in range(WARM_UP):
        next(taking)
    counted = products(step_text())
    products_alone = alone(counted)
    products_alone()
    steps, apart, faults = [], [], 0
    for _ in range(given.repeats):
        next(taking)  # finds memory again between the arrays of the products
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        steps.append(next(taking).seconds)
        faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        apart.append(products_alone())
    ratio = statistics.median(a / b for a, b in zip(steps, apart, strict=True))
    gigaflops = sum(each.flops * times for each, times in counted.items()) / 1e9
    print(
        f"{given.recipe}, {given.rows} rows of {given.length}: step "
        f"{statistics.median(steps) * 1e3:.1f} ms, its {sum(counted.values())} products alone "
        f"{statistics.median(apart) * 1e3:.1f} ms ({gigaflops:.1f} GFLOP), ratio {ratio:.2f}; "
        f"{faults / given.repeats:,.0f} page faults a step"
    )
    for name, spent in profile(lambda: next(taking)).most_common(20):
        print(f"{spent:8.2f} ms  {name}")
    sys.exit(given.check and ratio > BAR)


if __name__ == "__main__":
    main()
