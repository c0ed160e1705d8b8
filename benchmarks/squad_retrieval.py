r"""Paragraphs found by their questions, before and after contrastive training, and by BM25.

    BERT_JAX_DATA=DIR python benchmarks/squad_retrieval.py --init work/tiny --out work/squad

Trained on the questions and paragraphs of SQuAD's train part, of which a twentieth of the
paragraphs is held out to choose the checkpoint by. Tested on the English questions of XQuAD, whose
paragraphs are not among the training pairs: against the paragraphs of XQuAD, and against these and
all training paragraphs. `before` is the mean of the last states of `--init`, as it was pretrained.
A run that is finished in OUT is not run again.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

LEAST = 0.15
"""Least gain in nDCG@10 of every seed, against the paragraphs of XQuAD."""
METRICS = ("ndcg@10", "mrr@10", "recall@100")
DEPTH = 100

Pairs = Sequence[tuple[str, str]]
"""Questions and their paragraphs."""


def read_pairs(path: Path) -> Pairs:
    from bert_jax.tasks.squad.sources import read_squad

    found = read_squad(path, misplaced="keep").examples
    return list(dict.fromkeys((each.question, each.context) for each in found))


def train(options: argparse.Namespace, pairs: Path, seed: int) -> Path:
    """Return the directory of a finished run."""
    from bert_jax.config.command_line import load_config
    from bert_jax.training.finetune.config import FinetuneConfig
    from bert_jax.training.finetune.train import finetune

    workdir: Path = options.out / f"seed{seed}"
    fields = [
        f"--config.init={options.init}",
        f"--config.task.train={pairs}",
        "--config.task.dev_rate=0.05",
        "--config.task.max_query=48",
        f"--config.training.num_epochs={options.epochs}",
        f"--config.training.batch_size={options.batch_size}",
        f"--config.optimizer.learning_rate={options.learning_rate}",
        f"--config.seed={seed}",
    ]
    finetune(load_config(FinetuneConfig, "configs/finetune/embed.py", fields), workdir)
    return workdir


def scores(ranked: Iterable[Iterable[int]], pairs: Pairs, documents: Sequence[str]) -> list[float]:
    """Return `METRICS` of the rankings of the questions, best first."""
    from bert_jax.tasks.retrieval.metrics import ranking_scores

    rankings = {f"{n}": [f"{d}" for d in found] for n, found in enumerate(ranked)}
    number_of = {text: n for n, text in enumerate(documents)}
    wanted = {f"{n}": {f"{number_of[text]}": 1.0} for n, (_, text) in enumerate(pairs)}
    found = ranking_scores(rankings, wanted)
    return [found[name] for name in METRICS]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=os.environ.get("BERT_JAX_DATA"))
    parser.add_argument("--init", required=True, help="the pretrained model")
    parser.add_argument("--out", required=True, type=Path, help="pairs.jsonl and work directories")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--epochs", type=float, default=4.0, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="default: %(default)s")
    parser.add_argument(
        "--check", action="store_true", help=f"exit 1 where a seed gains less than {LEAST}"
    )
    options = parser.parse_args()
    if options.data is None:
        parser.error("give --data, or BERT_JAX_DATA in the environment")
    import bert_jax
    from bert_jax.data.corpus.overlap.ngrams import normalised_words
    from bert_jax.tasks.retrieval.bm25 import BM25

    squad = Path(options.data) / "squad"
    learned, asked = read_pairs(squad / "train-v1.1-part.json"), read_pairs(squad / "xquad.en.json")
    own = list(dict.fromkeys(text for _, text in asked))
    more = list(dict.fromkeys(text for _, text in learned))
    if set(own) & set(more):
        raise SystemExit("training paragraphs are among the test paragraphs")
    pairs = options.out / "pairs.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"query": question, "document": text}) for question, text in learned]
    pairs.write_text("\n".join(rows) + "\n")

    names = ["before", *(f"seed {seed}" for seed in range(options.seeds))]
    runs = [train(options, pairs, seed) for seed in range(options.seeds)]
    tables: dict[int, dict[str, list[float]]] = {len(own): {}, len(own) + len(more): {}}
    for name, path in zip(names, [options.init, *runs], strict=True):
        model = bert_jax.load(str(path))
        vectors = model.embed([question for question, _ in asked], pooling="mean", normalize=True)
        known = model.embed([*own, *more], pooling="mean", normalize=True)
        for count, table in tables.items():
            order = np.argsort(-(vectors @ known[:count].T), axis=1, kind="stable")[:, :DEPTH]
            table[name] = scores(order.tolist(), asked, [*own, *more][:count])
    words = [normalised_words(text) for text in [*own, *more]]
    for count, table in tables.items():
        index = BM25(words[:count])
        shared = (index.ranked(normalised_words(question), DEPTH) for question, _ in asked)
        table["BM25"] = scores(shared, asked, [*own, *more][:count])
    for count, table in tables.items():
        print(f"\n{len(asked):,} questions, {count:,} paragraphs")
        print("| | " + " | ".join(METRICS) + " |\n|---|---|---|---|")
        for name, found in table.items():
            print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in found) + " |")
        gains = [table[name][0] - table["before"][0] for name in names[1:]]
        print(f"gain in nDCG@10: median {statistics.median(gains):.3f}, least {min(gains):.3f}")
    least = min(tables[len(own)][name][0] for name in names[1:]) - tables[len(own)]["before"][0]
    return int(options.check and least < LEAST)


if __name__ == "__main__":
    sys.exit(main())
