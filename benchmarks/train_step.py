"""Step time of this package's full train step against Transformers' BertForPreTraining.

    python benchmarks/train_step.py --device cpu --check
    python benchmarks/train_step.py --device gpu

Both train the same architecture on the same masked rows (forward, backward, global-norm clipping,
AdamW). Ours masks on the device as part of the step; the peer gets rows that are already masked
and, as it is published, labels of -100 elsewhere, and so projects every position onto the
vocabulary. The column `gathered` is the same peer changed to project the masked positions only:
what is left of the difference is not the smaller vocabulary projection.

On the CPU: mini, L=128, B=16, P=20, float32, dropout 0.1, in one process on the same cores, in
alternating repeats; the peer runs eagerly; medians are compared. `--check` exits with 1 when the
ratio (our median over the published peer's) is above 1.0.

On a GPU: base and large, L=128 (P=20) and 512 (P=80), dropout 0.1. Ours in bfloat16; the peer with
sdpa attention, bfloat16 autocast, torch.compile and fused AdamW. Each side runs in a process of its
own, so that one's memory pool does not narrow the other's, and at the number of rows that serves
it best among those that fit (`--rows` fixes one number for both). The table has tokens/s, MFU
(useful operations as `model/flops.py` counts them, for both sides, over the bfloat16 matmul rate
measured in the same run), and our tokens/s over the peer's. `--smoke` runs the same path on a CPU
with a tiny model; its numbers mean nothing.

Not measured yet: the GPU table, for want of a GPU.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"hidden_dim": 32, "num_layers": 1, "num_heads": 2, "mlp_dim": 64},
    "mini": {"hidden_dim": 256, "num_layers": 4, "num_heads": 4, "mlp_dim": 1024},
    "base": {"hidden_dim": 768, "num_layers": 12, "num_heads": 12, "mlp_dim": 3072},
    "large": {"hidden_dim": 1024, "num_layers": 24, "num_heads": 16, "mlp_dim": 4096},
}
VOCAB_SIZE = 30522
CLS, SEP, MASK, FIRST_WORD = 101, 102, 103, 1000
LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM = 1e-4, 0.01, 1.0

RunSteps = Callable[[int], float]
"""Runs that many steps to their end and returns the last loss."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    size: str
    length: int
    rows: int
    positions: int
    """Masked positions per row, at most."""


CPU_CASE = Case("mini", 128, 16, 20)
GPU_ROWS = {128: (64, 128, 256, 512), 512: (16, 32, 64, 128)}
"""Rows tried, by length; the sweep of a side ends where its memory does."""
GPU_CASES = [
    Case(size, length, 0, positions)
    for size in ("base", "large")
    for length, positions in ((128, 20), (512, 80))
]
SMOKE_CASE = Case("smoke", 32, 0, 5)
SIDES = ("bert_jax", "transformers", "gathered")


def make_batch(case: Case):
    """Full rows of random words: what the pipeline would deliver, without its corpus."""
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (case.rows, case.length)
    tokens = rng.integers(FIRST_WORD, VOCAB_SIZE, shape).astype(np.uint16)
    tokens[:, 0], tokens[:, case.length // 2], tokens[:, -1] = CLS, SEP, SEP
    type_ids = (np.arange(case.length) > case.length // 2).astype(np.uint8)
    return {
        "tokens": tokens,
        "type_ids": np.broadcast_to(type_ids, shape).copy(),
        "segment_ids": np.ones(shape, np.uint8),
        "pair_labels": rng.integers(0, 2, case.rows).astype(np.int32),
        "row_index": np.arange(case.rows, dtype=np.uint32),
    }


def model_config(case: Case):
    from bert_jax.model.config import ModelConfig

    return ModelConfig(vocab_size=VOCAB_SIZE, **SIZES[case.size])


def our_steps(case: Case) -> RunSteps:
    import jax

    from bert_jax.data.store import SpecialIds
    from bert_jax.objectives.masked_lm import MaskedLM
    from bert_jax.objectives.masking import MaskingConfig
    from bert_jax.parallel.sharding import MeshConfig, make_mesh, place_batch
    from bert_jax.training.optim import OptimizerConfig
    from bert_jax.training.state import StepConfig, init_state
    from bert_jax.training.step import make_train_step

    config = StepConfig(
        objective=MaskedLM(
            model=model_config(case),
            masking=MaskingConfig(max_predictions=case.positions),
            special_ids=SpecialIds(pad=0, unk=100, cls=CLS, sep=SEP, mask=MASK),
        ),
        optimizer=OptimizerConfig(
            learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY, clip_norm=CLIP_NORM
        ),
        num_steps=1_000_000,
    )
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    step, host_batch = make_train_step(config, mesh), make_batch(case)
    state = init_state(config, mesh, jax.random.key(0))

    def run(count: int) -> float:
        nonlocal state
        for _ in range(count):
            state, metrics = step(state, place_batch(host_batch, mesh))
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return run


def peer_steps(
    case: Case, num_threads: int, gather: bool, device: str, compiler: str | None
) -> RunSteps:
    """The same for Transformers and PyTorch.

    Args:
        case: what to train.
        num_threads: of PyTorch on the CPU.
        gather: project the masked positions only.
        device: "cpu" (float32) or "cuda" (bfloat16 autocast).
        compiler: torch.compile's backend; None runs eagerly.
    """
    import numpy as np
    import torch
    from transformers import BertConfig, BertForPreTraining

    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    torch.set_float32_matmul_precision("high")
    size = SIZES[case.size]
    model = BertForPreTraining(
        BertConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=size["hidden_dim"],
            num_hidden_layers=size["num_layers"],
            num_attention_heads=size["num_heads"],
            intermediate_size=size["mlp_dim"],
            attn_implementation="sdpa",
        )
    )
    model = model.to(device).train()
    names: dict[bool, list[Any]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        names["bias" not in name and "LayerNorm" not in name].append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": names[True], "weight_decay": WEIGHT_DECAY},
            {"params": names[False], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE,
        eps=1e-6,
        fused=True,
    )
    rng, batch = np.random.default_rng(1), make_batch(case)
    tokens = batch["tokens"].astype(np.int64)
    labels = np.full_like(tokens, -100)
    for row in range(case.rows):
        inner = rng.permutation(np.setdiff1d(np.arange(1, case.length - 1), [case.length // 2]))
        chosen = inner[: min(case.positions, round(0.15 * case.length))]
        labels[row, chosen] = tokens[row, chosen]
        tokens[row, chosen] = MASK

    def place(array: Any) -> Any:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    inputs = {
        "input_ids": place(tokens),
        "token_type_ids": place(batch["type_ids"]),
        "attention_mask": place(np.ones_like(tokens)),
        "labels": place(labels),
        "next_sentence_label": place(batch["pair_labels"]),
    }
    places = place(np.flatnonzero(labels >= 0))
    words = place(labels[labels >= 0])

    def published_loss() -> Any:
        return model(**inputs).loss

    def gathered_loss() -> Any:
        hidden, pooled = model.bert(
            inputs["input_ids"], inputs["attention_mask"], inputs["token_type_ids"]
        )[:2]
        logits, pairs = model.cls(hidden.flatten(0, 1)[places], pooled)
        cross_entropy = torch.nn.functional.cross_entropy
        return cross_entropy(logits, words) + cross_entropy(pairs, inputs["next_sentence_label"])

    loss_function = gathered_loss if gather else published_loss
    if compiler is not None:
        loss_function = torch.compile(loss_function, backend=compiler)

    def run(count: int) -> float:
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = loss_function()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
        return float(loss.detach())  # waits for the device

    return run


def compare_on_cpu(case: Case, repeats: int, num_threads: int) -> float:
    """Print one row; return our median over the published peer's."""
    steps = {
        "bert_jax": our_steps(case),
        "transformers": peer_steps(case, num_threads, False, "cpu", None),
        "gathered": peer_steps(case, num_threads, True, "cpu", None),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 2):  # the first two are warm-up
        for name, step in steps.items():
            start = time.perf_counter()
            step(1)
            if repeat >= 2:
                times[name].append(time.perf_counter() - start)
    ours, peer, gathered = (statistics.median(times[name]) for name in steps)
    tokens = case.rows * case.length
    print("size       L     B   ours ms   peer ms  gathered ms  ours tokens/s   ratio  to gathered")
    print(
        f"{case.size:6} {case.length:5} {case.rows:5} {ours * 1e3:9.1f} {peer * 1e3:9.1f}"
        f" {gathered * 1e3:12.1f} {tokens / ours:14.0f} {ours / peer:7.3f} {ours / gathered:11.3f}"
    )
    return ours / peer


def matmul_flops(size: int) -> float:
    """Operations per second of a product of two bfloat16 matrices: the best of ten timings."""
    import jax
    import jax.numpy as jnp

    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    chain = jax.jit(lambda a, b: jax.lax.fori_loop(0, 8, lambda _, x: (x @ b) * 0.01, a))
    chain(a, a).block_until_ready()
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        chain(a, a).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 8 * 2 * size**3 / best


def work(side: str, case: Case, repeats: int, steps: int, num_threads: int, smoke: bool) -> float:
    """In a process of its own: seconds per step of one side, median over repeats."""
    if side == "bert_jax":
        run = our_steps(case)
    else:
        # The smoke run traces and differentiates as the real one, but makes no machine code.
        device, compiler = ("cpu", "aot_eager") if smoke else ("cuda", "inductor")
        run = peer_steps(case, num_threads, side == "gathered", device, compiler)
    run(3)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run(steps)
        times.append((time.perf_counter() - start) / steps)
    return statistics.median(times)


def start_worker(arguments: Sequence[str]) -> Any:
    """What a process with these arguments measured; None if it ran out of memory.

    Raises:
        RuntimeError: it failed otherwise.
    """
    done = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if any(words in done.stderr for words in ("OutOfMemoryError", "RESOURCE_EXHAUSTED")):
        return None
    raise RuntimeError(f"{arguments} failed:\n{done.stderr[-4000:]}")


def compare_on_gpu(case: Case, options: argparse.Namespace, peak: float) -> None:
    """Print a row per side, each at the number of rows that serves it best."""
    from bert_jax.model.flops import train_flops

    flops = train_flops(model_config(case), case.length, case.positions)
    sweep = (2,) if options.smoke else GPU_ROWS[case.length]
    ours = None
    for side in SIDES[:1] if options.ours_only else SIDES:
        best: tuple[float, int] = (0.0, 0)
        for rows in (options.rows,) if options.rows else sweep:
            one = dataclasses.asdict(dataclasses.replace(case, rows=rows))
            arguments = ["--device=gpu", "--worker", side, "--case", json.dumps(one)]
            for name in ("repeats", "steps", "threads"):
                arguments += [f"--{name}", str(getattr(options, name))]
            seconds = start_worker(arguments + ["--smoke"] * options.smoke)
            if seconds is None:
                break
            best = max(best, (rows / seconds, rows))
        rate, rows = best
        if not rows:
            print(f"{case.size:6} {case.length:5} {side:13} does not fit at any number of rows")
            continue
        ours = ours or rate
        print(
            f"{case.size:6} {case.length:5} {side:13} {rows:5} {rows / rate * 1e3:9.2f}"
            f" {rate * case.length:11.0f} {rate * flops / peak:7.1%} {ours / rate:12.2f}",
            flush=True,
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--check", action="store_true", help="CPU: exit with 1 above a ratio of 1")
    parser.add_argument("--steps", type=int, default=5, help="GPU: steps per timing")
    parser.add_argument("--rows", type=int, help="GPU: for both sides, instead of the best")
    parser.add_argument("--size", choices=("base", "large"), help="GPU: this one only")
    parser.add_argument("--length", type=int, choices=(128, 512), help="GPU: this one only")
    parser.add_argument("--ours-only", action="store_true", help="GPU: without the peer")
    parser.add_argument("--smoke", action="store_true", help="the GPU's path, tiny, on a CPU")
    parser.add_argument("--worker", choices=(*SIDES, "matmul"), help=argparse.SUPPRESS)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    if options.device == "cpu" or options.smoke:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if options.smoke:
        options.repeats = options.steps = 1
    if options.worker == "matmul":
        print(json.dumps(matmul_flops(128 if options.smoke else 8192)))
        return 0
    if options.worker:
        case = Case(**options.case)
        seconds = work(
            options.worker, case, options.repeats, options.steps, options.threads, options.smoke
        )
        print(json.dumps(seconds))
        return 0
    if options.device == "cpu":
        print(f"device cpu, {options.threads} threads, median of {options.repeats}")
        ratio = compare_on_cpu(CPU_CASE, options.repeats, options.threads)
        return int(options.check and ratio > 1.0)

    peak = start_worker(["--device=gpu", "--worker=matmul", *["--smoke"] * options.smoke])
    print(f"bfloat16 matmul: {peak / 1e12:.4g} TFLOP/s; median of {options.repeats}")
    print("size       L side              B   step ms    tokens/s     MFU  ours / this")
    for case in [SMOKE_CASE] if options.smoke else GPU_CASES:
        if options.size in (None, case.size) and options.length in (None, case.length):
            compare_on_gpu(case, options, peak)
    return 0


if __name__ == "__main__":
    sys.exit(main())
