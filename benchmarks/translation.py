"""Training speed of a Transformer that translates against torch.nn.Transformer, same cores.

    python benchmarks/translation.py --check

3 + 3 layers, 256 wide, feed-forward 512, 4 heads, 8,000 tokens, one table for source, target and
output, dropout 0.1, label smoothing 0.1; forward, backward, clipping and AdamW in float32. The
pairs are as long as Multi30k's (14 tokens a side). Ours are packed into rows of 128 + 128 places.
The peer gets batches of pairs of like length, padded to the longest, with as many tokens a batch:
what a program without packing does at its best. In one process, in alternating repeats. Compared
are real tokens of both sides a second, by the wall and by the processor's time, which other work on
the machine disturbs less; `--check` exits with 1 where the ratio of the latter is below 1.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax.data.pairings import DataConfig
from bert_jax.data.phases import Phase
from bert_jax.data.pipeline import ExampleStream
from bert_jax.data.shard import Shard
from bert_jax.data.store import TokenStore
from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh, place_batch
from bert_jax.model.config import ModelConfig
from bert_jax.objectives.config import TranslationConfig
from bert_jax.objectives.translation import Translation
from bert_jax.tokenization.special_ids import SpecialIds
from bert_jax.training.steps.optim import OptimizerConfig
from bert_jax.training.steps.state import StepConfig, jitted_init
from bert_jax.training.steps.step import make_train_step

VOCAB, WIDTH, LAYERS, HEADS, MLP = 8000, 256, 3, 4, 512
LENGTH, ROWS, DROPOUT, SMOOTHING, RATE = 128, 8, 0.1, 0.1, 5e-4
SPECIAL = SpecialIds(*range(5))


class Side(NamedTuple):
    """One program."""

    run: Callable[[int], float]
    """Take the step of this number; return its loss."""
    tokens: list[int]
    """Real tokens of both sides in each step's batch."""


def make_pairs(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Make pairs of random tokens; the sides' lengths are alike, 14 tokens in the mean."""
    random = np.random.default_rng(0)
    source = np.clip(random.gamma(7, 2, count).round(), 3, 40).astype(int)
    target = np.clip((source * random.normal(1, 0.15, count)).round(), 3, 40).astype(int)
    return [
        (random.integers(5, VOCAB, n), random.integers(5, VOCAB, m))
        for n, m in zip(source, target, strict=True)
    ]


def ours(pairs: list[tuple[np.ndarray, np.ndarray]], steps: int) -> Side:
    """Make the train step of this package over packed rows."""
    sentences = [side for pair in pairs for side in pair]
    shard = Shard(
        tokens=np.concatenate(sentences).astype(np.uint16),
        sentence_offsets=np.cumsum([0, *map(len, sentences)]),
        document_offsets=np.arange(0, len(sentences) + 1, 2),
        vocab_size=VOCAB,
        special_ids=SPECIAL,
        meta={"pairs": True, "target_entropy": 1.0},
    )
    store = TokenStore.of([shard], np.ones(VOCAB, np.int64))
    data = DataConfig(pairing="translation")
    stream = ExampleStream(store, data, [Phase(LENGTH, ROWS, steps)])
    model = ModelConfig(
        vocab_size=VOCAB, hidden_dim=WIDTH, num_layers=LAYERS, num_heads=HEADS, mlp_dim=MLP,
        num_positions=LENGTH, num_types=0, positions="sinusoidal", scale_embeddings=True,
        embedding_norm=False, activation="relu", head_transform=False, pooler=False,
        hidden_dropout_rate=DROPOUT, attention_dropout_rate=DROPOUT, dtype="float32",
    )  # fmt: skip
    objective = Translation(model, TranslationConfig().network(model), SPECIAL, SMOOTHING)
    config = StepConfig(objective, OptimizerConfig(learning_rate=RATE, warmup_steps=1), steps)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    state = jitted_init(config, mesh)(jax.random.key(0))
    step = make_train_step(config, mesh)
    batches = [place_batch(stream.batch(number), mesh) for number in range(steps)]

    def run(number: int) -> float:
        nonlocal state
        state, metrics = step(state, batches[number])
        return float(metrics["translation_loss"])

    return Side(run, [int(objective.num_tokens(batch)) for batch in batches])


def peer(pairs: list[tuple[np.ndarray, np.ndarray]], steps: int, threads: int) -> Side:
    """Make the same step with torch.nn.Transformer over padded batches of pairs of like length."""
    import torch
    from torch import nn

    torch.set_num_threads(threads)
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCAB, WIDTH)
            nn.init.normal_(self.table.weight, std=WIDTH**-0.5)
            self.bias = nn.Parameter(torch.zeros(VOCAB))
            self.dropout = nn.Dropout(DROPOUT)
            self.body = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, MLP, DROPOUT, batch_first=True)
            # The paper has no norms after the last layers, which have one of their own.
            self.body.encoder.norm = self.body.decoder.norm = None
            places = torch.arange(LENGTH)[:, None]
            angles = places / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
            both = torch.stack((angles.sin(), angles.cos()), -1).reshape(LENGTH, WIDTH)
            self.register_buffer("positions", both)

        def embed(self, tokens: Any) -> Any:
            x = self.table(tokens) * WIDTH**0.5 + self.positions[: tokens.shape[1]]
            return self.dropout(x)

        def forward(self, source: Any, target: Any) -> Any:
            padding = source == SPECIAL.pad
            ahead = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            states = self.body(
                self.embed(source), self.embed(target), tgt_mask=ahead, tgt_is_causal=True,
                src_key_padding_mask=padding, memory_key_padding_mask=padding,
            )  # fmt: skip
            return states @ self.table.weight.T + self.bias

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    criterion = nn.CrossEntropyLoss(ignore_index=-1, label_smoothing=SMOOTHING)
    batches, tokens = [], []
    ordered = sorted(pairs, key=lambda pair: (len(pair[0]), len(pair[1])))
    places, groups, group = 2 * ROWS * LENGTH, [], []
    for a, b in ordered:
        group.append((a, b))
        widest = max(len(x) + 2 for x, _ in group) + max(len(y) + 1 for _, y in group)
        if len(group) * widest >= places:
            groups.append(group)
            group = []
    chosen = np.random.default_rng(1).permutation(len(groups))[:steps]
    for number in chosen:
        sources = [[SPECIAL.cls, *a, SPECIAL.sep] for a, _ in groups[number]]
        targets = [[SPECIAL.cls, *b] for _, b in groups[number]]
        labels = [[*b, SPECIAL.sep] for _, b in groups[number]]
        batches.append([_padded(x, f) for x, f in ((sources, 0), (targets, 0), (labels, -1))])
        tokens.append(sum(map(len, sources)) + sum(map(len, targets)))

    def run(number: int) -> float:
        source, target, label = (torch.from_numpy(x) for x in batches[number])
        optimizer.zero_grad()
        loss = criterion(model(source, target).flatten(0, 1), label.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return Side(run, tokens)


def _padded(rows: list[list[int]], fill: int) -> np.ndarray:
    length = max(map(len, rows))
    return np.array([[*row, *[fill] * (length - len(row))] for row in rows], np.int64)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--check", action="store_true", help="exit with 1 below the bar")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    steps = options.repeats + 2  # the first two are warm-up
    pairs = make_pairs(90 * steps)
    sides = {
        "bert_jax": ours(pairs, steps),
        "torch.nn.Transformer": peer(pairs, steps, options.threads),
    }
    walls: dict[str, list[float]] = {name: [] for name in sides}
    busy: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(steps):
        for name, side in sides.items():
            if sys.stderr.isatty():
                print(f"\r{number + 1}/{steps} {name:20}", end="", file=sys.stderr)
            wall, used = time.perf_counter(), time.process_time()
            side.run(number)
            if number >= 2:
                walls[name].append(side.tokens[number] / (time.perf_counter() - wall))
                busy[name].append(side.tokens[number] / (time.process_time() - used))
    if sys.stderr.isatty():
        print(end="\r", file=sys.stderr)
    print(f"{LAYERS} + {LAYERS} x {WIDTH}, {VOCAB:,} tokens, {options.threads} threads")
    print("side                   tokens/s   tokens/CPU s   tokens a step")
    middle = {n: (statistics.median(walls[n]), statistics.median(busy[n])) for n in sides}
    for name, (wall, used) in middle.items():
        print(f"{name:20} {wall:10,.0f} {used:14,.0f} {np.mean(sides[name].tokens):15,.0f}")
    first, second = middle.values()
    print(f"ratio {first[0] / second[0]:.2f} by the wall, {first[1] / second[1]:.2f} by CPU time")
    return int(options.check and first[1] < second[1])


if __name__ == "__main__":
    sys.exit(main())
