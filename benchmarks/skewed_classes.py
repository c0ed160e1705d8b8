"""A class of 2%: beginnings of paragraphs of textbooks among those of books.

    python benchmarks/skewed_classes.py --init work/tiny --data DATA --out work/skewed

DATA holds pretrain/books-*.txt.xz and pretrain/textbooks.txt.xz, a paragraph a line, chapters apart
by empty lines. Training and held-out rows come from different books and from different chapters of
textbooks. Each treatment is one sweep over the same seeds; a sweep
that is finished in --out is not run again. Scores are those of the last evaluation on the held-out
rows, after a fixed number of passes: the rows choose nothing. The table is printed and written to
OUT/table.md.
"""

import argparse
import itertools
import json
import lzma
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bert_jax.config.mapping import build
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.train import finetune

TREATMENTS: dict[str, dict[str, Any]] = {
    "none": {},
    "balanced": {"class_weights": "balanced"},
    "oversampling 0.5": {"oversampling": 0.5},
    "focal 2": {"focal_gamma": 2.0},
    "balanced and focal 2": {"class_weights": "balanced", "focal_gamma": 2.0},
}
"""Fields of `task` by the name of the treatment."""


def beginnings(path: Path, words: int) -> list[list[str]]:
    """Return the first words of each paragraph that has as many, by chapter."""
    chapters: list[list[str]] = [[]]
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            found = line.split()
            if not found:
                chapters.append([])
            elif len(found) >= words:
                chapters[-1].append(" ".join(found[:words]))
    return chapters


def spread(texts: Iterable[str], count: int) -> list[str]:
    """Return `count` texts at equal distances."""
    found = list(texts)
    return [found[n * len(found) // count] for n in range(count)]


def write_data(data: Path, out: Path, options: argparse.Namespace) -> None:
    """Write the training and the held-out rows, of which every fiftieth is of the rare class."""
    home = data / "pretrain"
    books = [beginnings(path, options.words) for path in sorted(home.glob("books-*.txt.xz"))]
    textbooks = beginnings(home / "textbooks.txt.xz", options.words)
    parts = {
        "train": (itertools.chain(*books[:-2]), textbooks[::2], options.rows),
        "held_out": (itertools.chain(*books[-2:]), textbooks[1::2], options.held_out),
    }
    for name, (common, rare, count) in parts.items():
        texts = {
            "book": iter(spread(itertools.chain(*common), count - count // 50)),
            "textbook": iter(spread(itertools.chain(*rare), count // 50)),
        }
        with open(out / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for number in range(count):
                label = "textbook" if number % 50 == 49 else "book"
                file.write(json.dumps({"text": next(texts[label]), "label": label}) + "\n")


def scores(out: Path, name: str, options: argparse.Namespace) -> list[Mapping[str, Any]]:
    """Return the last scores of each seed, in their order."""
    config = build(
        FinetuneConfig,
        {
            "init": options.init,
            "task": {
                "kind": "table",
                "max_length": 32,
                "train": str(out / "train.jsonl"),
                "dev": str(out / "held_out.jsonl"),
                "metric": "macro_f1",
                "labels": ["book", "textbook"],
                **TREATMENTS[name],
            },
            "training": {"num_epochs": options.epochs, "batch_size": 32, "eval_batch_size": 256,
                         "max_buckets": 1},
            "optimizer": {"learning_rate": options.learning_rate},
            "sweep": {"seeds": options.seeds},
        },
    )  # fmt: skip
    result = finetune(config, out / name.replace(" ", "_"))
    if not result.finished:
        raise SystemExit("stopped; the same command continues")
    return [outcome.scores[-1] for outcome in result.outcomes]


def main() -> int:
    """Runs the sweeps and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--init", required=True, help="the pretrained model")
    parser.add_argument("--data", required=True, type=Path, help="directory of the data")
    parser.add_argument("--out", required=True, type=Path, help="work directories and the table")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--rows", type=int, default=2000, help="rows to train on")
    parser.add_argument("--held-out", type=int, default=2500)
    parser.add_argument("--words", type=int, default=16, help="of each paragraph")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--treatments", default="none,balanced", help=", ".join(TREATMENTS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write_data(options.data, options.out, options)
    names = options.treatments.split(",")
    found = {name: scores(options.out, name, options) for name in names}
    lines = [
        "| treatment | macro F1 by seed, x 100 | median | F1 of the rare class | above none |",
        "|---|---|---|---|---|",
    ]
    for name, each in found.items():
        macro, rare = ([100 * score[key] for score in each] for key in ("macro_f1", "f1"))
        higher = sum(mine > base["macro_f1"] for mine, base in
                     zip((s["macro_f1"] for s in each), found[names[0]], strict=True))  # fmt: skip
        by_seed = ", ".join(f"{value:.1f}" for value in macro)
        medians = (sorted(values)[len(values) // 2] for values in (macro, rare))
        said = " | ".join(f"{value:.1f}" for value in medians)
        above = f"{higher} of {len(each)}" if name != names[0] else ""
        lines.append(f"| {name} | {by_seed} | {said} | {above} |")
    table = "\n".join(lines) + "\n"
    (options.out / "table.md").write_text(table, encoding="utf-8")
    print(table, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
