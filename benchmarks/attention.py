"""Time of attention, forward and backward, by implementation, on the accelerator at hand.

    python benchmarks/attention.py

The peer is `xla`, the plain formula compiled by XLA: the last column is its time over the row's.
Rows are packed (three segments), heads are those of BERT-base, bfloat16, with the published dropout
of 0.1 and without. On a CPU it says that it needs an accelerator and exits with 0; `--smoke` runs
every code path there on tiny sizes, TPU kernels interpreted, and its times mean nothing.

Not measured yet: no accelerator has been at hand. What is known of `fused` is the number of
instruction bundles, one a cycle, that the compiler schedules for v5e per row of 12 heads, forward
and backward: with dropout 24,600 and 34,400 at L=512, 2,093 and 4,021 at L=128; without 14,500 and
27,300, 1,676 and 3,307.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

IMPLS = {"tpu": ["xla", "splash", "fused"], "gpu": ["xla", "cudnn"], "cpu": ["xla", "fused"]}
HAS_DROPOUT = ("xla", "fused")


@dataclass(frozen=True)
class Case:
    """Sizes of one block of the table."""

    rows: int
    length: int
    heads: int = 12
    head_dim: int = 64


CASES = [Case(128, 128), Case(32, 512), Case(16, 1024)]
SMOKE_CASES = [Case(2, 128, heads=1, head_dim=16)]


def make_step(case: Case, impl: Any, rate: float) -> tuple[Callable[..., Any], list[Any]]:
    """A compiled function of its arguments: attention and the gradients of its three operands."""
    import jax
    import jax.numpy as jnp

    from bert_jax.model.attention.attend import attend
    from bert_jax.model.dropout import DropoutStream

    shape = (case.rows, case.length, case.heads, case.head_dim)
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    ids = jnp.broadcast_to(1 + jnp.arange(case.length) * 3 // case.length, shape[:2])
    rows = jnp.arange(case.rows, dtype=jnp.uint32)

    @jax.jit
    def step(q, k, v, gradient, seed):
        def f(q, k, v):
            return attend(
                q, k, v, ids, ids, dropout_rate=rate, stream=DropoutStream(seed, rows), impl=impl
            )

        out, pull_back = jax.vjp(f, q, k, v)
        return out, pull_back(gradient)

    return step, [*arrays, jnp.uint32(1)]


def milliseconds(step: Callable[..., Any], arguments: list[Any], repeats: int, calls: int) -> float:
    """Median over `repeats` of the time per call, `calls` queued at a time."""
    import jax

    jax.block_until_ready(step(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        results = [step(*arguments) for _ in range(calls)]
        jax.block_until_ready(results[-1])
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--calls", type=int, default=5, help="queued at a time")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, for a CPU")
    options = parser.parse_args()
    import jax

    platform = jax.default_backend()
    if platform == "cpu" and not options.smoke:
        print("benchmarks/attention.py needs an accelerator, and there is none here")
        return 0
    print(f"{jax.devices()[0].device_kind}, bfloat16, forward and backward; peer: xla")
    print("     B     L   H    K  dropout  implementation       ms   xla / this")
    for case in SMOKE_CASES if options.smoke else CASES:
        for rate in (0.0, 0.1):
            peer = None
            for impl in IMPLS[platform]:
                if rate and impl not in HAS_DROPOUT:
                    continue
                repeats, calls = (1, 1) if options.smoke else (options.repeats, options.calls)
                ours = milliseconds(*make_step(case, impl, rate), repeats, calls)
                peer = peer or ours  # the first is xla
                print(
                    f"{case.rows:6} {case.length:5} {case.heads:3} {case.head_dim:4} {rate:8.1f}"
                    f"  {impl:14} {ours:8.3f} {peer / ours:12.2f}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
