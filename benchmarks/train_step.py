"""Step time of this package's full train step against the same model in Transformers.

    python benchmarks/train_step.py --check
    python benchmarks/train_step.py --model ettin_17m --check

Both train the same architecture on the same masked rows (forward, backward, global-norm clipping,
AdamW). Ours masks on the device as part of the step; the peer gets rows that are already masked.

On the CPU: float32, in one process on the same cores, in alternating repeats; the peer runs eagerly
with sdpa attention; medians are compared, and the processor's time beside them, which other work on
the machine disturbs less. `--check` exits with 1 when the ratio (our median over the peer's) is
above the bar.

- mini (BERT): L=128, B=16, P=19, dropout 0.1; bar 1.0. The peer is BertForPreTraining as published,
  which projects every position onto the vocabulary. The column `gathered` is the same peer changed
  to project the masked positions only.
- ettin_17m (ModernBERT): L=256, B=8, P=77, no dropout; bar 0.8. The peer is ModernBertForMaskedLM
  with `sparse_prediction`, which projects the masked positions only, in the column `gathered`.

One side alone, as `make gpu` runs it in a process of its own, with the result as JSON:

    python benchmarks/train_step.py --side bert_jax --model bert_large --length 128 --rows 256
    python benchmarks/train_step.py --side sdpa --model bert_large --length 128 --rows 256

There ours computes in bfloat16; the peer has bfloat16 autocast, torch.compile, fused AdamW, and the
implementation of attention that `--side` names. `--smoke` does the same on a CPU.
"""

import argparse
import json
import os
import statistics
import sys
import time

from training_sides import Case, RunSteps, our_steps, peer_steps

CPU_CASES = {"mini": Case("mini", 128, 16), "ettin_17m": Case("ettin_17m", 256, 8)}
CPU_BARS = {"mini": 1.0, "ettin_17m": 0.8}
"""Greatest ratio to the peer that `--check` accepts."""
PEERS = ("sdpa", "flex_attention", "flash_attention_2")


def compare_on_cpu(case: Case, repeats: int, num_threads: int) -> float:
    """Print a row per side; return our median over the peer's."""
    sides: dict[str, RunSteps] = {"bert_jax": our_steps(case)}
    if case.kind == "bert":
        sides["transformers"] = peer_steps(case, gather=False, num_threads=num_threads)
    sides["gathered"] = peer_steps(case, gather=True, num_threads=num_threads)
    walls: dict[str, list[float]] = {name: [] for name in sides}
    busy: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 2):  # the first two are warm-up
        for name, run in sides.items():
            if sys.stderr.isatty():
                print(f"\r{repeat + 1}/{repeats + 2} {name:12}", end="", file=sys.stderr)
            wall, used = time.perf_counter(), time.process_time()
            run(1)
            if repeat >= 2:
                walls[name].append(time.perf_counter() - wall)
                busy[name].append(time.process_time() - used)
    if sys.stderr.isatty():
        print(end="\r", file=sys.stderr)
    print(f"{case.model}, L={case.length}, B={case.rows}, P={case.positions}")
    print("side              ms     min     max  ours / this   CPU ms  ours / this  tokens/s")
    ours, ours_busy = (statistics.median(times["bert_jax"]) for times in (walls, busy))
    for name, times in walls.items():
        median, used = statistics.median(times), statistics.median(busy[name])
        print(
            f"{name:12} {median * 1e3:7.0f} {min(times) * 1e3:7.0f} {max(times) * 1e3:7.0f}"
            f" {ours / median:12.3f} {used * 1e3:8.0f} {ours_busy / used:12.3f}"
            f" {case.rows * case.length / median:9.0f}"
        )
    peer = "transformers" if "transformers" in sides else "gathered"
    return ours / statistics.median(walls[peer])


def one_side(side: str, case: Case, repeats: int, steps: int, smoke: bool) -> dict[str, object]:
    """Measure one side: the median over repeats, as a record."""
    start = time.perf_counter()
    if side == "bert_jax":
        run = our_steps(case)
    else:
        # The smoke run traces and differentiates as the real one, but makes no machine code.
        device, compiler = ("cpu", "aot_eager") if smoke else ("cuda", "inductor")
        run = peer_steps(case, gather=True, device=device, compiler=compiler, attention=side)
    run(1)
    compiled = time.perf_counter()
    loss, times = run(2), []
    for _ in range(repeats):
        begun = time.perf_counter()
        loss = run(steps)
        times.append((time.perf_counter() - begun) / steps)
    seconds = statistics.median(times)
    return {
        "rows": case.rows,
        "milliseconds": 1e3 * seconds,
        "tokens_per_second": case.rows * case.length / seconds,
        "flops_per_second": case.flops() / seconds,
        "first_step_seconds": compiled - start,
        "loss": loss,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mini", help="model (default: mini)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--check", action="store_true", help="exit with 1 above the bar")
    parser.add_argument("--side", choices=("bert_jax", *PEERS), help="this side alone, as JSON")
    parser.add_argument("--length", type=int, help="tokens of a row, with --side")
    parser.add_argument("--rows", type=int, help="rows of a batch, with --side")
    parser.add_argument("--steps", type=int, default=5, help="steps per timing, with --side")
    parser.add_argument("--smoke", action="store_true", help="--side on a CPU, three steps")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    if not options.side or options.smoke:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if options.side:
        case = Case(options.model, options.length, options.rows)
        repeats, steps = (1, 1) if options.smoke else (options.repeats, options.steps)
        print(json.dumps(one_side(options.side, case, repeats, steps, options.smoke)))
        return 0
    print(f"device cpu, {options.threads} threads, median of {options.repeats}")
    ratio = compare_on_cpu(CPU_CASES[options.model], options.repeats, options.threads)
    return int(options.check and ratio > CPU_BARS[options.model])


if __name__ == "__main__":
    sys.exit(main())
