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
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
VOCAB, TOKENS, BAR, WARM_UP = 8192, 400_000, 1.25, 4
_LINE = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(")
_CALL = re.compile(r"(?:calls|body|to_apply)=%([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


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
    bodies: dict[str, list[str]] = defaultdict(list)
    name = entry = ""
    for line in text.splitlines():
        if found := re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line):
            name, entry = found[2], found[2] if found[1] else entry
        elif " = " in line:
            bodies[name].append(line)

    def of(name: str) -> Counter[Product]:
        shapes: dict[str, list[int]] = {}
        counted: Counter[Product] = Counter()
        for line in bodies[name]:
            if not (found := _LINE.match(line)):
                continue
            result, shape, operation = found.groups()
            shapes[result] = [
                int(size) for size in re.findall(r"\d+", shape.partition("[")[2].partition("]")[0])
            ]
            if operation == "dot":
                counted[_product(line, shapes)] += 1
            elif inner := _CALL.search(line):
                trips = _TRIPS.search(line) if operation == "while" else None
                for product, count in of(inner[1]).items():
                    counted[product] += count * (int(trips[1]) if trips else 1)
        return counted

    return of(entry)


def _product(line: str, shapes: dict[str, list[int]]) -> Product:
    operands = re.findall(r"%([\w.\-]+)", line.split(" dot(")[1].split(")")[0])
    left, right = (shapes[name] for name in operands)

    def sizes(key: str, shape: list[int]) -> list[int]:
        found = re.search(key + r"=\{([\d,]*)\}", line)
        return [shape[int(axis)] for axis in found[1].split(",")] if found and found[1] else []

    batch, inner = (math.prod(sizes(f"lhs_{kind}_dims", left)) for kind in ("batch", "contracting"))
    return Product(
        batch, math.prod(left) // (batch * inner), inner, math.prod(right) // (batch * inner)
    )


def make_step(recipe: str, length: int, rows: int) -> tuple[Callable[[], None], Callable[[], str]]:
    """Return a function that takes a step, and a function that returns the step's HLO text."""
    import jax
    import numpy as np

    from bert_jax.config.command_line import load_config
    from bert_jax.data.pipeline import ExampleStream
    from bert_jax.data.shard import Shard
    from bert_jax.data.store import TokenStore
    from bert_jax.distributed.parallel.sharding import make_mesh, place_batch
    from bert_jax.tokenization.special_ids import SpecialIds
    from bert_jax.training.pretrain.config import PretrainConfig
    from bert_jax.training.pretrain.settings import step_config
    from bert_jax.training.steps.state import jitted_init
    from bert_jax.training.steps.step import make_train_step

    fields = [f"training.phases=({{'length': {length}, 'batch_size': {rows}}},)", "seed=0"]
    config = load_config(PretrainConfig, recipe, [f"--config.{field}" for field in fields])
    config = config.with_vocabulary(VOCAB)
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
    store = TokenStore.of([shard], np.ones(VOCAB, np.int64))
    mesh = make_mesh(config.mesh)
    settings = step_config(config, None)
    step, state = make_train_step(settings, mesh), jitted_init(settings, mesh)(jax.random.key(0))
    batch = place_batch(ExampleStream(store, config.data, config.phases, 0).batch(0), mesh)

    def take() -> None:
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)

    def text() -> str:
        loaded = (each.hlo_modules()[0] for each in jax.devices()[0].client.live_executables())
        return max((each.to_string() for each in loaded if each.name == "jit_train_step"), key=len)

    return take, text


def alone(counted: Counter[Product]) -> Callable[[], float]:
    """Return a function that runs each kind of product, and returns the seconds for all."""
    import jax
    import jax.numpy as jnp

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
        for product, count in counted.items():
            repeats = min(count, 4)
            began = time.process_time()
            for _ in range(repeats):
                jax.block_until_ready(multiply(*operands[product]))
            total += (time.process_time() - began) * count / repeats
        return total

    return seconds


def profile(take: Callable[[], None], steps: int = 5) -> Counter[str]:
    """Return the milliseconds of each operation of a step."""
    import jax

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
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if given.allocator == "kept":
        from bert_jax.cli.kept_pages import keep_pages

        keep_pages()
    take, text = make_step(given.recipe, given.length, given.rows)
    for _ in range(WARM_UP):
        take()
    counted = products(text())
    products_alone = alone(counted)
    products_alone()
    steps, apart, faults = [], [], 0
    for _ in range(given.repeats):
        take()  # finds memory again between the arrays of the products
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        began = time.process_time()
        take()
        steps.append(time.process_time() - began)
        faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        apart.append(products_alone())
    ratio = statistics.median(a / b for a, b in zip(steps, apart, strict=True))
    gigaflops = sum(each.flops * count for each, count in counted.items()) / 1e9
    print(
        f"{given.recipe}, {given.rows} rows of {given.length}: step "
        f"{statistics.median(steps) * 1e3:.1f} ms, its {sum(counted.values())} products alone "
        f"{statistics.median(apart) * 1e3:.1f} ms ({gigaflops:.1f} GFLOP), ratio {ratio:.2f}; "
        f"{faults / given.repeats:,.0f} page faults a step"
    )
    for name, spent in profile(take).most_common(20):
        print(f"{spent:8.2f} ms  {name}")
    sys.exit(given.check and ratio > BAR)


if __name__ == "__main__":
    main()
