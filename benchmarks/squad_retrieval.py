r"""Paragraphs found by their questions, before and after contrastive training, and by BM25.

    BERT_JAX_DATA=DIR python benchmarks/squad_retrieval.py --init work/tiny --out work/squad
    BERT_JAX_DATA=DIR python benchmarks/squad_retrieval.py --init work/tiny --out work/squad --joins

Trained on the questions and paragraphs of SQuAD's train part, of which a twentieth of the
paragraphs is held out to choose the checkpoint by. Tested on the English questions of XQuAD, whose
paragraphs are not among the training pairs: against the paragraphs of XQuAD, and against these and
all training paragraphs. `before` is the mean of the last states of `--init`, as it was pretrained.
A run that is finished in OUT is not run again.

`--joins` searches the paragraphs of XQuAD by an index of LanceDB instead: by words, by the vectors
of seed 0, and by both. The questions about every other paragraph (development) compare the ways to
join both; those about the others test `bert-jax search` and rank fusion, in English and in other
languages, by the difference to words alone in nDCG@10 with its paired 95% interval over paragraphs.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

LEAST = 0.15
"""Least gain in nDCG@10 of every seed, against the paragraphs of XQuAD."""
METRICS = ("ndcg@10", "mrr@10", "recall@100")
DEPTH = 100

LANGUAGES = ("en", "ar", "hi", "zh")
WEIGHTS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
"""Weights of the vectors in a sum; the words have the rest."""

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


def joined(words: np.ndarray, cosines: np.ndarray) -> dict[str, np.ndarray]:
    """Return scores (Q, N) by way; BM25 is 0 without a shared word, and -inf is no hit."""
    legs = [np.where(words > 0, words, -np.inf), cosines]
    limits = [-np.sort(-leg, axis=1)[:, DEPTH - 1 : DEPTH] for leg in legs]
    legs = [np.where(leg >= low, leg, -np.inf) for leg, low in zip(legs, limits, strict=True)]
    places = [np.argsort(np.argsort(-leg, axis=1, kind="stable"), axis=1) for leg in legs]
    ranks = [
        np.where(leg > -np.inf, 1 / (61 + at), 0.0) for leg, at in zip(legs, places, strict=True)
    ]
    found = {"words": legs[0], "vector": legs[1], "ranks": ranks[0] + ranks[1]}
    spread = []
    for leg in legs:  # as LanceDB's LinearCombinationReranker
        low = np.where(leg > -np.inf, leg, np.inf).min(1, keepdims=True)
        range_ = np.maximum(leg.max(1, keepdims=True) - low, 1e-9)
        spread.append(np.where(leg > -np.inf, (leg - low) / range_, 0.0))
    share = words / np.maximum(words.max(1, keepdims=True), 1e-9)
    for weight in WEIGHTS:
        found[f"range {weight}"] = weight * spread[1] + (1 - weight) * spread[0]
        found[f"share {weight}"] = weight * cosines + (1 - weight) * share
    return found


def join_tables(squad: Path, trained: Path, out: Path) -> Iterator[str]:
    """Yield the lines of the tables of `--joins`."""
    from lancedb.index import FTS

    from bert_jax.artefacts.saved.reading import read_model
    from bert_jax.infer.embed import text_vectors
    from bert_jax.infer.forward import on_device
    from bert_jax.infer.search.index import WORDS, Index, write_index
    from bert_jax.tasks.reports.intervals import Grounds, intervals, means
    from bert_jax.tasks.retrieval.metrics import query_scores
    from bert_jax.tasks.squad.sources import read_squad

    english = read_squad(squad / "xquad.en.json").examples
    number = {text: n for n, text in enumerate(dict.fromkeys(each.context for each in english))}
    answer = {each.id: number[each.context] for each in english}
    model = on_device(read_model(trained), None)
    rows = [
        {"id": f"{n}", "passage": 1, "source": "xquad", "text": text} for text, n in number.items()
    ]
    write_index(out / "index", model, trained, rows, overwrite=True)
    index = Index(out / "index")

    def scores(**asked: Any) -> np.ndarray:
        table = np.zeros((max(map(len, asked.values())), len(rows)))
        for row, hits in zip(table, index.search(len(rows), **asked), strict=True):
            for hit in hits:
                row[int(hit["id"])] = hit["score"]
        return table

    def gains(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Return nDCG@10 of each question."""
        order = np.argsort(-found, axis=1, kind="stable")
        ranked = {
            n: [int(d) for d in best[:DEPTH] if found[n, d] > -np.inf]
            for n, best in enumerate(order)
        }
        return query_scores(ranked, {n: {int(d): 1.0} for n, d in enumerate(wanted)})["ndcg@10"]

    table = "\n| test | words | vector | ranks | `search` | ranks - words | `search` - words |"
    table += "\n|---|---|---|---|---|---|---|"
    for language in LANGUAGES:
        questions = read_squad(squad / f"xquad.{language}.json").examples
        texts = [each.question for each in questions]
        wanted = np.array([answer[each.id] for each in questions])
        vectors = text_vectors(model, texts, "query")
        dev = wanted % 2 == 0
        ways = joined(scores(words=texts), scores(vectors=vectors))
        ways["search"] = scores(words=texts, vectors=vectors)
        each = {way: gains(found, wanted) for way, found in ways.items()}
        yield f"{language}, {dev.sum()} development questions: " + ", ".join(
            f"{way} {values[dev].mean():.4f}" for way, values in each.items()
        )
        cells = [f"{each[way][~dev].mean():.4f}" for way in ("words", "vector", "ranks", "search")]
        for way in ("ranks", "search"):
            ours, theirs = (
                Grounds(means(["ndcg@10"], each[name][~dev, None]), wanted[~dev])
                for name in (way, "words")
            )
            low, high = intervals(ours, theirs).found["ndcg@10"]
            mean = (each[way] - each["words"])[~dev].mean()
            cells.append(f"{mean:+.4f} ({low:+.4f} to {high:+.4f})")
        table += f"\n| {language}, {(~dev).sum()} | " + " | ".join(cells) + " |"
        if language == "en":
            for changed in ({"stem": True}, {"remove_stop_words": True}):
                index.table.create_index("text", config=FTS(**WORDS | changed), replace=True)
                found = gains(joined(scores(words=texts), ways["vector"])["words"], wanted)
                yield f"words, {changed}: {found[dev].mean():.4f}, test {found[~dev].mean():.4f}"
            index.table.create_index("text", config=FTS(**WORDS), replace=True)
    yield table


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
    parser.add_argument("--joins", action="store_true", help="search by words and vectors together")
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
    if options.joins:
        for line in join_tables(squad, train(options, pairs, 0), options.out):
            print(line, flush=True)
        return 0

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
