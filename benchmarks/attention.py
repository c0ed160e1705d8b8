"""Time and errors of attention, forward and backward, by implementation, on the device at hand.

    python benchmarks/attention.py

The peer is `xla`, the plain formula compiled by XLA: `xla / this` is its time over the row's. Rows
are packed (three segments), heads are those of BERT-base; with the published dropout of 0.1 and
without, with a window of 64 tokens and without. The error is the largest difference of the output
or of a gradient from `xla` in float32 with exact products, over the largest number there; an error
above its bound (float32 1e-4, bfloat16 3e-2) ends the script with 1. With `--json` a row is an
object, whose `right` says that the error is within its bound, and the script ends with 0.

On a CPU it says that it needs an accelerator and exits with 0; `--smoke` runs every code path there
on tiny sizes, TPU kernels interpreted, and its times mean nothing.

Not measured yet: no accelerator has been at hand. What is known of `fused` is the number of
instruction bundles, one a cycle, that the compiler schedules for v5e per row of 12 heads, forward
and backward: with dropout 24,600 and 34,400 at L=512, 2,093 and 4,021 at L=128; without 14,500 and
27,300, 1,676 and 3,307.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

IMPLS = {
    "tpu": ["xla", "banded", "splash", "fused"],
    "gpu": ["xla", "banded", "cudnn", "triton"],
    "cpu": ["xla", "banded", "fused"],
}
"""Implementations by platform; `banded` is what `xla` does with a window and no dropout."""
HAS_DROPOUT = ("xla", "fused", "triton")
BOUNDS = {"float32": 1e-4, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Case:
    """One block of the table."""

    rows: int
    length: int
    window: int = 0
    """Window in tokens; 0: none."""
    dtype: str = "bfloat16"
    heads: int = 12
    head_dim: int = 64


CASES = [
    Case(128, 128), Case(32, 512), Case(16, 1024), Case(32, 512, dtype="float32"),
    Case(16, 1024, 64), Case(16, 1024, 64, "float32"), Case(1, 8192), Case(1, 8192, 64),
]  # fmt: skip
SMOKE_CASES = [Case(2, 128, heads=1, head_dim=16), Case(2, 128, 16, "float32", 1, 16)]


def make_arguments(case: Case) -> list[Any]:
    """Make queries, keys, values and the gradient of the output."""
    import jax

    shape = (case.rows, case.length, case.heads, case.head_dim)
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, shape, case.dtype) for key in keys]


def make_step(case: Case, impl: str, rate: float) -> Callable[..., Any]:
    """Compile attention and the gradients of its three operands."""
    import jax
    import jax.numpy as jnp

    from bert_jax.model.attention.attend import attend
    from bert_jax.model.attention.library import cudnn_attention
    from bert_jax.model.attention.xla import Asked
    from bert_jax.model.dropout import DropoutStream

    shape, window = (case.rows, case.length), case.window or None
    ids = jnp.broadcast_to(1 + jnp.arange(case.length) * 3 // case.length, shape)
    places = jnp.broadcast_to(jnp.arange(case.length), shape)
    rows = jnp.arange(case.rows, dtype=jnp.uint32)

    @jax.jit
    def step(q, k, v, gradient, seed):
        def f(q, k, v):
            if impl == "cudnn":  # `attend` would take the band
                return cudnn_attention(Asked(q, k, v, ids, ids, window=window))
            named: Any = "xla" if impl == "banded" else impl
            asked = Asked(
                q, k, v, ids, ids, dropout_rate=rate, stream=DropoutStream(seed, rows),
                window=window, q_places=places if impl == "xla" else None,
            )  # fmt: skip
            return attend(asked, named)

        out, pull_back = jax.vjp(f, q, k, v)
        return out, *pull_back(gradient)

    return step


def milliseconds(step: Callable[..., Any], arguments: list[Any], repeats: int, calls: int) -> float:
    """Measure the time per call: the median over `repeats`, `calls` queued at a time."""
    import jax

    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        results = [step(*arguments) for _ in range(calls)]
        jax.block_until_ready(results[-1])
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times) * 1e3


def largest_error(found: Any, right: Any) -> float:
    """Compare outputs and gradients, each over its largest number."""
    import numpy as np

    errors = []
    for ours, theirs in zip(found, right, strict=True):
        ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
        errors.append(float(np.abs(ours - theirs).max() / np.abs(theirs).max()))
    return float("nan") if np.isnan(errors).any() else max(errors)


def measure(case: Case, rate: float, platform: str, repeats: int, calls: int) -> list[dict]:
    """Measure all implementations of one case, as records."""
    import jax
    import jax.numpy as jnp

    arrays, seed = make_arguments(case), jnp.uint32(1)
    exact = dataclasses.replace(case, dtype="float32")
    with jax.default_matmul_precision("highest"):
        right = make_step(exact, "xla", rate)(*(x.astype("float32") for x in arrays), seed)
    records: list[dict] = []
    for impl in IMPLS[platform]:
        if (
            (rate and impl not in HAS_DROPOUT)
            or (impl == "banded" and not case.window)
            or (impl in ("cudnn", "triton") and case.dtype == "float32")
            or (impl == "fused" and case.length > 1024)
        ):
            continue
        precision = "highest" if case.dtype == "float32" else None
        with jax.default_matmul_precision(precision):
            step = make_step(case, impl, rate)
            error = largest_error(step(*arrays, seed), right)
            time = milliseconds(step, [*arrays, seed], repeats, calls)
        bound = BOUNDS[case.dtype]
        records.append(
            {
                "case": f"{case.rows} x {case.length}, {case.dtype}, window {case.window or '-'}, "
                f"dropout {rate}",
                "side": impl,
                "milliseconds": time,
                "error": error,
                "bound": bound,
                "right": error <= bound,
            }
        )
    return records


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--calls", type=int, default=5, help="queued at a time")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    options = parser.parse_args()
    import jax

    platform = jax.default_backend()
    if platform == "cpu" and not options.smoke:
        print("benchmarks/attention.py needs an accelerator, and there is none here")
        return 0
    if not options.json:
        print(f"{jax.devices()[0].device_kind}, forward and backward; peer: xla")
        print(f"{'rows x length':48}  implementation       ms   xla / this     error")
    wrong = 0
    repeats, calls = (1, 1) if options.smoke else (options.repeats, options.calls)
    for case in SMOKE_CASES if options.smoke else CASES:
        for rate in (0.0, 0.1):
            if rate and case.length > 1024:  # all scores of long rows take too much memory
                continue
            if options.smoke and bool(rate) == bool(case.window):
                continue
            records = measure(case, rate, platform, repeats, calls)
            for record in records:
                ratio = records[0]["milliseconds"] / record["milliseconds"]  # the first is xla
                wrong += not record["right"]
                if options.json:
                    print(json.dumps(record), flush=True)
                    continue
                print(
                    f"{record['case']:48}  {record['side']:14} {record['milliseconds']:8.3f} "
                    f"{ratio:12.2f} {record['error']:9.1e} {'' if record['right'] else 'WRONG'}",
                    flush=True,
                )
    return int(wrong > 0 and not options.json)


if __name__ == "__main__":
    sys.exit(main())
