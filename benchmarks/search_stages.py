r"""Dense and sparse vectors, and a reranker, on the same pairs, beside BM25.

    BERT_JAX_DATA=DIR python benchmarks/search_stages.py --init work/tiny --out work/stages

Half of the paragraphs of SQuAD's train part teach the first stages: dense vectors, sparse vectors
(SPLADE), and sparse vectors with static queries. The other half teaches rerankers, from lists that
the dense first stage finds there: by the contrast within a list, and by the scores of a teacher,
BM25. Tested on the English questions of XQuAD against its paragraphs and others. Differences are
from the dense vectors, or of a reranker from its first stage, over the same questions; intervals
(95%) resample paragraphs. Runs that are finished in OUT are not run again.
"""

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from squad_retrieval import Pairs, read_pairs

CANDIDATES = 10
"""Paragraphs that a reranker reorders."""
NEGATIVES = 7


def rows_of(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def train(options: argparse.Namespace, name: str, recipe: str, file: Path, *more: str) -> Path:
    """Return the directory of a finished run, and print its processor time."""
    from bert_jax.config.command_line import load_config
    from bert_jax.training.finetune.config import FinetuneConfig
    from bert_jax.training.finetune.train import finetune

    fields = [
        f"--config.init={options.init}",
        f"--config.task.train={file}",
        "--config.task.dev_rate=0.05",
        f"--config.task.max_length={options.length}",
        f"--config.optimizer.learning_rate={options.learning_rate}",
        *(f"--config.{field}" for field in more),
    ]
    config, workdir = f"configs/finetune/{recipe}.py", options.out / name
    start = time.process_time()
    result = finetune(load_config(FinetuneConfig, config, fields), workdir, echo=(lambda _: None))
    print(f"{name}: {time.process_time() - start:.0f} processor seconds. {result.unlearned}")
    return workdir


def ranked(scores: np.ndarray, depth: int = 100) -> list[list[int]]:
    return np.argsort(-scores, axis=1, kind="stable")[:, :depth].tolist()


def judge(rankings: Sequence[Sequence[int]], wanted: Sequence[int]) -> dict[str, np.ndarray]:
    from bert_jax.tasks.retrieval.metrics import query_scores

    return query_scores(
        dict(enumerate(rankings)), {n: {right: 1.0} for n, right in enumerate(wanted)}
    )


def difference(mine: np.ndarray, theirs: np.ndarray, units: np.ndarray) -> str:
    from bert_jax.tasks.reports.intervals import Grounds, intervals, means

    sides = (Grounds(means(["ndcg@10"], each[:, None]), units, each) for each in (mine, theirs))
    low, high = intervals(*sides).found["ndcg@10"]
    return f"{(mine - theirs).mean():+.3f} ({low:+.3f} to {high:+.3f})"


def mined(options: argparse.Namespace, workdir: Path, pairs: Pairs) -> dict[str, Path]:
    """Write the lists of the second half with the scores of the first stage, and with BM25's."""
    import bert_jax
    from bert_jax.data.corpus.overlap.ngrams import normalised_words
    from bert_jax.infer.search.mine import Pair, mine, write_mined
    from bert_jax.tasks.retrieval.bm25 import BM25

    own = options.out / "mined.jsonl"
    model, asked = bert_jax.load(f"{workdir}").model, [Pair(*each) for each in pairs]
    write_mined(own, mine(model, asked, negatives=NEGATIVES, margin=-2.0, last=options.ranks))
    rows = [json.loads(line) for line in own.read_text().splitlines()]
    texts = list(dict.fromkeys(text for _, text in pairs))
    number_of, index = {t: n for n, t in enumerate(texts)}, BM25(map(normalised_words, texts))
    for row in rows:
        of_all = index.scores(normalised_words(row["query"]))
        listed = [row["document"], *row["negatives"]]
        row["scores"] = [float(of_all[number_of[text]]) for text in listed]
    return {"own": own, "bm25": rows_of(options.out / "taught.jsonl", rows)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=os.environ.get("BERT_JAX_DATA"))
    parser.add_argument("--init", required=True, help="the pretrained model")
    parser.add_argument("--out", required=True, type=Path, help="files and work directories")
    parser.add_argument("--pairs", type=int, default=0, help="of each half; default: all")
    parser.add_argument("--length", type=int, default=96, help="default: %(default)s")
    parser.add_argument("--epochs", type=float, default=2.0, help="default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=NEGATIVES, help="default: %(default)s")
    parser.add_argument("--others", type=int, default=1000, help="paragraphs without a question")
    options = parser.parse_args()
    if options.data is None:
        parser.error("give --data, or BERT_JAX_DATA in the environment")
    import bert_jax
    from bert_jax.data.corpus.overlap.ngrams import normalised_words
    from bert_jax.infer.search.index import Reranker
    from bert_jax.tasks.embedding import text_key
    from bert_jax.tasks.retrieval.bm25 import BM25
    from bert_jax.tasks.retrieval.metrics import unit

    options.out.mkdir(parents=True, exist_ok=True)
    squad = Path(options.data) / "squad"
    learned, asked = read_pairs(squad / "train-v1.1-part.json"), read_pairs(squad / "xquad.en.json")
    halves: tuple[list[tuple[str, str]], ...] = ([], [])
    for pair in learned:
        halves[text_key(pair[1])[0] % 2].append(pair)
    first, second = (half[: options.pairs or None] for half in halves)
    own = list(dict.fromkeys(text for _, text in asked))
    paragraphs = [*own, *dict.fromkeys(text for _, text in halves[0])][: len(own) + options.others]
    wanted = [own.index(text) for _, text in asked]
    questions, units = [question for question, _ in asked], np.array(wanted)
    pairs = rows_of(
        options.out / "pairs.jsonl", [{"query": q, "document": text} for q, text in first]
    )

    embed = ("task.max_query=32", "training.batch_size=64", f"training.num_epochs={options.epochs}")
    sparse = (*embed, "embedding.pooling=splade")
    runs = {
        "dense": train(options, "dense", "embed", pairs, *embed),
        "sparse": train(options, "sparse", "embed", pairs, *sparse),
        "static queries": train(
            options, "static", "embed", pairs, *sparse, "embedding.queries=idf"
        ),
    }
    found: dict[str, dict[str, np.ndarray]] = {}
    against: dict[str, str] = {}
    used: dict[str, tuple[float, float]] = {}
    rankings: dict[str, list[list[int]]] = {}
    for name, workdir in runs.items():
        model = bert_jax.load(f"{workdir}")
        vectors, known = (
            model.embed(questions, kind="query"),
            model.embed(paragraphs, kind="document"),
        )
        many, few = (float(np.count_nonzero(each, axis=1).mean()) for each in (vectors, known))
        used[name] = many, few
        known, vectors = (known, vectors) if name != "dense" else (unit(known), unit(vectors))
        rankings[name] = ranked(vectors @ known.T)
        found[name], against[name] = judge(rankings[name], wanted), "dense"
    index = BM25(map(normalised_words, paragraphs))
    rankings["BM25"] = [index.ranked(normalised_words(q), 100).tolist() for q in questions]
    found["BM25"], against["BM25"] = judge(rankings["BM25"], wanted), "dense"

    lists = mined(options, runs["dense"], second)
    rerank = (
        "task.scores=scores",
        "training.batch_size=16",
        f"training.num_epochs={options.epochs}",
    )
    for name, file, loss in (
        ("contrast", lists["own"], "contrast"), ("kl of BM25", lists["bm25"], "kl"),
    ):  # fmt: skip
        workdir = train(options, loss, "rerank", file, *rerank, f"task.loss={loss}")
        reranker = Reranker(bert_jax.load(f"{workdir}").model)
        heads = [(n, d) for n, row in enumerate(rankings["dense"]) for d in row[:CANDIDATES]]
        scores = reranker.scores(
            [questions[n] for n, _ in heads], [paragraphs[d] for _, d in heads]
        ).reshape(-1, CANDIDATES)
        again = [
            [
                *np.array(row[:CANDIDATES])[np.argsort(-own, kind="stable")].tolist(),
                *row[CANDIDATES:],
            ]
            for row, own in zip(rankings["dense"], scores, strict=True)
        ]
        label = f"dense, reranked ({name})"
        found[label], against[label] = judge(again, wanted), "dense"
    print(f"\n{len(questions):,} questions, {len(paragraphs):,} paragraphs")
    print("| | nDCG@10 | MRR@10 | recall@100 | less dense, nDCG@10 | tokens, query | document |")
    print("|---|---|---|---|---|---|---|")
    for name, values in found.items():
        cells = [f"{values[metric].mean():.3f}" for metric in ("ndcg@10", "mrr@10", "recall@100")]
        less = "" if name == "dense" else difference(
            values["ndcg@10"], found[against[name]]["ndcg@10"], units
        )  # fmt: skip
        sizes = (
            [f"{size:.0f}" for size in used[name]] if name in used and name != "dense" else ["", ""]
        )
        print(f"| {name} | {' | '.join([*cells, less, *sizes])} |")


if __name__ == "__main__":
    main()
