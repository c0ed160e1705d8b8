r"""Training pairs a second: bert_jax against sentence-transformers in PyTorch.

    BERT_JAX_DATA=DIR python benchmarks/embedding_training.py --check
    BERT_JAX_DATA=DIR python benchmarks/embedding_training.py --size tiny --batch-size 64

Questions of SQuAD with their paragraphs (from DIR/squad, with BERT's vocabulary from DIR/vocab);
mean pooling, in-batch negatives, dropout 0.1, AdamW. Both sides begin with the same weights of
Transformers' BertModel, cut questions and paragraphs at the same lengths and take batches of the
same size from the same pairs. Sentence-transformers pads each column of a batch, in random order,
to the column's longest text; bert_jax has a few lengths (`training.max_buckets`) of paragraphs, and
one of questions. Texts are token ids before the clock starts, and compiling is over by then.

The sides take turns, a pass over all batches each. Printed are medians of the passes, in pairs a
second of wall time and of processor time, and the mean loss of the last pass, in which both sides
have seen the pairs as many times.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SIZES = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "mini": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
}
MAX_QUERY, MAX_LENGTH = 64, 256
LEAST = 1.2
RATE = 1e-4

Pass = Callable[[], list[float]]
"""A pass over all batches, which returns their losses."""


def read_pairs(data: Path, count: int) -> list[dict[str, str]]:
    """Questions and paragraphs; of a paragraph one question, so that no negative is an answer."""
    articles = json.loads((data / "squad" / "train-v1.1-part.json").read_text())["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    pairs = {each["context"]: each["qas"][0]["question"] for each in paragraphs if each["qas"]}
    rows = [{"query": question, "document": text} for text, question in pairs.items()]
    return rows[:: max(1, len(rows) // count)][:count]


def write_model(directory: Path, vocabulary: Path, size: str) -> None:
    """A BertModel with random weights, and its tokenizer."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(0)
    shape = SIZES[size]
    tokenizer = BertTokenizerFast.from_pretrained(str(vocabulary))
    config = BertConfig(
        vocab_size=len(tokenizer), intermediate_size=4 * shape["hidden_size"], **shape
    )
    BertModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def ours(model: Path, pairs: Path, batch_size: int, buckets: int) -> tuple[Pass, str]:
    """Passes of bert_jax, compiled, and what the batches are."""
    import jax
    import numpy as np

    from bert_jax.config.mapping import build
    from bert_jax.distributed.parallel.sharding import MeshConfig, make_trial_mesh
    from bert_jax.training.finetune.config import FinetuneConfig
    from bert_jax.training.finetune.setup import set_up
    from bert_jax.training.steps import trials
    from bert_jax.training.steps.step import make_train_step

    section = {"train": str(pairs), "dev": str(pairs), "max_query": MAX_QUERY}
    sections = {
        "task": {"kind": "embedding", "max_length": MAX_LENGTH, **section},
        "init": str(model),
        "training": {"batch_size": batch_size, "max_buckets": buckets, "num_epochs": 1000},
        "optimizer": {"learning_rate": RATE, "warmup_rate": 0.0},  # the rate is theirs
    }
    setup = set_up(build(FinetuneConfig, sections))
    mesh = make_trial_mesh(MeshConfig(), 1, jax.devices()[:1])
    step = make_train_step(setup.step, mesh)
    settings = trials.place_settings([RATE], [0], mesh)
    first = np.zeros(1, np.int32)

    def fresh() -> Any:
        return trials.init_trials(
            setup.step, mesh, first.astype(np.uint32), setup.start.parts, first
        )

    state = fresh().train
    for length in setup.batches.batches_of:  # compile each length
        batches = setup.batches.epoch(0, [0])
        batch = next(each for each in batches if each["tokens"].shape[-1] == length)
        state, _ = step(state, trials.place_rows(batch, mesh), settings)
    state = fresh().train
    epochs = iter(range(1_000_000))

    def run() -> list[float]:
        nonlocal state
        metrics = []
        for batch in setup.batches.epoch(next(epochs), [0]):
            state, found = step(state, trials.place_rows(batch, mesh), settings)
            metrics.append(found["loss"])
        return [float(loss[0]) for loss in jax.block_until_ready(metrics)]

    shapes = ", ".join(f"{n} x {length}" for length, n in setup.batches.batches_of.items())
    return run, f"{shapes}; questions {setup.objective.query_length}"  # type: ignore[union-attr]


def theirs(model: Path, rows: list[dict[str, str]], batch_size: int) -> tuple[Pass, str]:
    """Passes of sentence-transformers: its model and its loss, in a plain loop of PyTorch."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses
    from transformers import AutoTokenizer

    torch.manual_seed(0)
    network = SentenceTransformer(str(model), device="cpu")
    loss = losses.MultipleNegativesRankingLoss(network)
    network.train()
    decay = 0.01
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=decay)
    tokenizer = AutoTokenizer.from_pretrained(str(model))

    def padded(texts: list[str], length: int) -> dict[str, Any]:
        return dict(
            tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
        )

    def epoch() -> Iterator[list[dict[str, Any]]]:
        order = torch.randperm(len(rows)).tolist()
        for start in range(0, len(rows), batch_size):
            some = [rows[n] for n in order[start : start + batch_size]]
            yield [
                padded([each["query"] for each in some], MAX_QUERY),
                padded([each["document"] for each in some], MAX_LENGTH),
            ]

    ready = [list(epoch()) for _ in range(2)]  # token ids before the clock starts
    passes = iter(range(1_000_000))

    def run() -> list[float]:
        found = []
        for columns in ready[next(passes) % len(ready)]:
            optimizer.zero_grad(set_to_none=True)
            value = loss([dict(column) for column in columns], None)
            value.backward()
            optimizer.step()
            found.append(value.item())
        return found

    lengths = [columns[1]["input_ids"].shape[1] for columns in ready[0]]
    return run, f"{len(lengths)} of {min(lengths)} to {max(lengths)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=os.environ.get("BERT_JAX_DATA"))
    parser.add_argument("--size", choices=SIZES, default="mini", help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--batches", type=int, default=8, help="of a pass; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="passes; default: %(default)s")
    parser.add_argument("--buckets", type=int, default=4, help="lengths; default: %(default)s")
    parser.add_argument(
        "--check", action="store_true", help=f"exit 1 where the ratio is below {LEAST}"
    )
    options = parser.parse_args()
    if options.data is None:
        parser.error("give --data, or BERT_JAX_DATA in the environment")
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as home:
        model, pairs = Path(home) / "model", Path(home) / "pairs.jsonl"
        write_model(model, Path(options.data) / "vocab" / "bert-base-uncased", options.size)
        rows = read_pairs(Path(options.data), options.batches * options.batch_size)
        pairs.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        sides = {
            "bert_jax": ours(model, pairs, options.batch_size, options.buckets),
            "sentence-transformers": theirs(model, rows, options.batch_size),
        }
        for run, _ in sides.values():  # memory is allocated
            run()
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        lost: dict[str, float] = {}
        for _ in range(options.repeats):
            for name, (run, _) in sides.items():
                start, processor = time.perf_counter(), time.process_time()
                losses = run()
                spent = time.perf_counter() - start, time.process_time() - processor
                times[name].append(spent)
                lost[name] = statistics.mean(losses)
    print(f"{options.size}, {len(rows):,} pairs, batches of {options.batch_size}\n")
    print("side                    pairs/s wall  pairs/s processor  last loss  lengths")
    rates = {}
    for name, (_, shapes) in sides.items():
        rates[name] = [
            len(rows) / statistics.median(kind) for kind in zip(*times[name], strict=True)
        ]
        wall, processor = rates[name]
        print(f"{name:22} {wall:13.1f} {processor:18.1f} {lost[name]:10.3f}  {shapes}")
    pairs_of = zip(rates["bert_jax"], rates["sentence-transformers"], strict=True)
    ratios = [mine / other for mine, other in pairs_of]
    print(f"\nratio: {ratios[0]:.2f} by wall time, {ratios[1]:.2f} by processor time")
    return int(options.check and min(ratios) < LEAST)


if __name__ == "__main__":
    sys.exit(main())
