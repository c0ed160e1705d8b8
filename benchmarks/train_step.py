"""Step time of this package's full train step against Transformers' BertForPreTraining.

    python benchmarks/train_step.py --device cpu --check

Both train the same architecture on the same masked rows (forward, backward, global-norm clipping,
AdamW) in the same process on the same cores, in alternating repeats; medians are compared. Ours
masks on the device as part of the step; the peer gets rows that are already masked and, as it is
published, labels of -100 elsewhere, and so projects every position onto the vocabulary. The last
column compares with the same peer changed to project the masked positions only: what is left of
the difference is not the smaller vocabulary projection.

On the CPU: mini, L=128, B=16, P=20, float32, dropout 0.1; the peer runs eagerly. `--check` exits
with 1 when the ratio (our median over the published peer's) is above 1.0.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "mini": {"hidden_dim": 256, "num_layers": 4, "num_heads": 4, "mlp_dim": 1024},
    "base": {"hidden_dim": 768, "num_layers": 12, "num_heads": 12, "mlp_dim": 3072},
    "large": {"hidden_dim": 1024, "num_layers": 24, "num_heads": 16, "mlp_dim": 4096},
}
VOCAB_SIZE = 30522
CLS, SEP, MASK, FIRST_WORD = 101, 102, 103, 1000
LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM = 1e-4, 0.01, 1.0


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    size: str
    length: int
    rows: int
    positions: int
    """Masked positions per row, at most."""


CASES = {"cpu": [Case("mini", 128, 16, 20)]}


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
        "nsp_labels": rng.integers(0, 2, case.rows).astype(np.int32),
        "row_index": np.arange(case.rows, dtype=np.uint32),
    }


def our_step(case: Case) -> Callable[[], float]:
    """A function that runs one of our steps to its end and returns the loss."""
    import jax

    from bert_jax.data.store import SpecialIds
    from bert_jax.model.config import ModelConfig
    from bert_jax.training.masking import MaskingConfig
    from bert_jax.training.optim import OptimizerConfig
    from bert_jax.training.sharding import MeshConfig, make_mesh, place_batch
    from bert_jax.training.step import StepConfig, init_state, make_train_step

    config = StepConfig(
        model=ModelConfig(vocab_size=VOCAB_SIZE, **SIZES[case.size]),
        masking=MaskingConfig(max_predictions=case.positions),
        optimizer=OptimizerConfig(
            learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY, clip_norm=CLIP_NORM
        ),
        num_steps=1_000_000,
        special_ids=SpecialIds(pad=0, unk=100, cls=CLS, sep=SEP, mask=MASK),
    )
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    step, host_batch = make_train_step(config, mesh), make_batch(case)
    state = init_state(config, mesh, jax.random.key(0))

    def run() -> float:
        nonlocal state
        state, metrics = step(state, place_batch(host_batch, mesh))
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return run


def peer_step(case: Case, num_threads: int, gather: bool) -> Callable[[], float]:
    """The same for Transformers and PyTorch; `gather`: project the masked positions only."""
    import numpy as np
    import torch
    from transformers import BertConfig, BertForPreTraining

    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    size = SIZES[case.size]
    model = BertForPreTraining(
        BertConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=size["hidden_dim"],
            num_hidden_layers=size["num_layers"],
            num_attention_heads=size["num_heads"],
            intermediate_size=size["mlp_dim"],
        )
    ).train()
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
    inputs = {
        "input_ids": torch.from_numpy(tokens),
        "token_type_ids": torch.from_numpy(batch["type_ids"].astype(np.int64)),
        "attention_mask": torch.ones(tokens.shape, dtype=torch.int64),
        "labels": torch.from_numpy(labels),
        "next_sentence_label": torch.from_numpy(batch["nsp_labels"].astype(np.int64)),
    }

    chosen = inputs["labels"] >= 0

    def gathered_loss() -> Any:
        hidden, pooled = model.bert(
            inputs["input_ids"], inputs["attention_mask"], inputs["token_type_ids"]
        )[:2]
        logits, pairs = model.cls(hidden[chosen], pooled)
        return torch.nn.functional.cross_entropy(
            logits, inputs["labels"][chosen]
        ) + torch.nn.functional.cross_entropy(pairs, inputs["next_sentence_label"])

    def run() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = gathered_loss() if gather else model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        return float(loss.detach())

    return run


def compare(case: Case, repeats: int, num_threads: int) -> float:
    """Print one row; return our median over the published peer's."""
    steps = {
        "bert_jax": our_step(case),
        "transformers": peer_step(case, num_threads, gather=False),
        "transformers, gathered": peer_step(case, num_threads, gather=True),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 2):  # the first two are warm-up
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if repeat >= 2:
                times[name].append(time.perf_counter() - start)
    ours, peer, gathered = (statistics.median(times[name]) for name in steps)
    tokens = case.rows * case.length
    print(
        f"{case.size:6} {case.length:5} {case.rows:5} {ours * 1e3:9.1f} {peer * 1e3:9.1f}"
        f" {gathered * 1e3:12.1f} {tokens / ours:14.0f} {ours / peer:7.3f} {ours / gathered:11.3f}"
    )
    return ours / peer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=sorted(CASES), default="cpu")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--check", action="store_true", help="exit with 1 above a ratio of 1.0")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    print(f"device {options.device}, {options.threads} threads, median of {options.repeats}")
    print("size       L     B   ours ms   peer ms  gathered ms  ours tokens/s   ratio  to gathered")
    ratios = [compare(case, options.repeats, options.threads) for case in CASES[options.device]]
    return int(options.check and max(ratios) > 1.0)


if __name__ == "__main__":
    sys.exit(main())
