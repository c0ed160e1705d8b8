r"""A pretrained model against random weights of the same architecture, on nine real tasks.

    python benchmarks/finetune_table.py --init work/tiny --data DATA --out work/table
    python benchmarks/finetune_table.py --init work/tiny --data DATA --out work/table \
        --tasks mrpc,conll --seeds 3

DATA holds glue/, ner/conll2003, ner/ncbi-disease and squad/.
Each task is one sweep: both initialisations with the same seeds, in one program. A task that is
finished in --out is not run again, so that the command can be stopped and given again. The table
is printed and written to OUT/table.md.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """A task of the table."""

    title: str
    config: str
    fields: tuple[str, ...]
    epochs: float
    seeds: int
    evals_per_epoch: int = 1


def _glue(title: str, name: str, epochs: float, seeds: int, **more: Any) -> Row:
    fields = ("--config.task.data={data}/glue",)
    return Row(title, f"configs/finetune/glue.py:{name}", fields, epochs, seeds, **more)


def _tags(title: str, train: str, dev: str, epochs: float, seeds: int) -> Row:
    fields = (
        f"--config.task.train={{data}}/{train}",
        f"--config.task.dev={{data}}/{dev}",
    )
    return Row(title, "configs/finetune/ner.py", fields, epochs, seeds)


def _squad(title: str, dev: str, epochs: float, seeds: int) -> Row:
    fields = (
        "--config.task.train={data}/squad/train-v1.1-part.json",
        f"--config.task.dev={{data}}/{dev}",
        "--config.task.misplaced=skip",
    )
    return Row(title, "configs/finetune/squad.py", fields, epochs, seeds)


ROWS = {
    "mrpc": _glue("MRPC", "mrpc", 5, 5),
    "conll": _tags("CoNLL-2003", "ner/conll2003/eng.train", "ner/conll2003/eng.testa", 2, 5),
    "sst2": _glue("SST-2", "sst2", 1, 5, evals_per_epoch=2),
    "cola": _glue("CoLA", "cola", 3, 5),
    "stsb": _glue("STS-B", "stsb", 3, 5),
    "rte": _glue("RTE", "rte", 3, 5),
    "ncbi": _tags("NCBI disease", "ner/ncbi-disease/train.tsv", "ner/ncbi-disease/devel.tsv", 3, 5),
    "squad": _squad("SQuAD 1.1, part of train", "squad/dev-v1.1-16articles.json", 2, 2),
    "squad2": _squad("SQuAD 2.0 by the same", "squad/dev-v2.0.json", 2, 1),
}


def main() -> int:
    """Runs the tasks and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--init", required=True, help="the pretrained model")
    parser.add_argument("--data", required=True, help="directory of the data")
    parser.add_argument("--out", required=True, type=Path, help="work directories and the table")
    parser.add_argument("--tasks", default=",".join(ROWS), help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=None, help="default: by the task")
    parser.add_argument("--epochs", type=float, default=None, help="default: by the task")
    parser.add_argument("--learning-rate", default="1e-3", help="or several: 3e-4,1e-3")
    options = parser.parse_args()
    names = options.tasks.split(",")
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        parser.error(f"--tasks: there is no task {unknown[0]!r}; there are {', '.join(ROWS)}")

    lines = [
        "| task | metric | constant | random | pretrained | difference, 95% | failed | minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        lines.append(_table_row(ROWS[name], _run(name, options), options.init))
        print(f"\n{lines[-1]}\n", flush=True)
    text = "\n".join(lines) + "\n"
    (options.out / "table.md").write_text(text)
    print(text)
    return 0


def _run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The statistics of a task, from its work directory if it is finished."""
    from bert_jax.config.command_line import load_config
    from bert_jax.training.finetune.config import FinetuneConfig
    from bert_jax.training.finetune.train import finetune

    row, workdir = ROWS[name], options.out / name
    fields = [
        *(field.format(data=options.data) for field in row.fields),
        f"--config.init={options.init}",
        "--config.sweep.baseline=random",
        f"--config.sweep.seeds={options.seeds or row.seeds}",
        f"--config.sweep.learning_rates={options.learning_rate}",
        f"--config.training.num_epochs={options.epochs or row.epochs}",
        f"--config.training.evals_per_epoch={row.evals_per_epoch}",
    ]
    finetune(load_config(FinetuneConfig, row.config, fields), workdir)
    found: dict[str, Any] = json.loads((workdir / "statistics.json").read_text())
    return found


def _table_row(row: Row, found: dict[str, Any], init: str) -> str:
    scale = 1 if row.title.startswith("SQuAD") else 100
    groups = {
        group["init"]: group
        for group in found["groups"]
        if group["learning_rate"] == found["best_learning_rates"].get(group["init"])
    }
    cells = []
    for name in ("random", init):
        group = groups.get(name)
        if group is None:
            cells.append("-")
            continue
        median, low, high = (
            "lost" if group[name] is None else f"{group[name] * scale:.1f}"
            for name in ("median", "low_quartile", "high_quartile")
        )
        cells.append(f"{median} ({low} to {high})")
    comparison = found["comparisons"][-1]
    difference = "-"
    if comparison["mean"] is not None:
        difference = f"{comparison['mean'] * scale:+.1f}"
        if comparison["student"] is not None:
            low, high = (end * scale for end in comparison["student"])
            difference += f" ({low:+.1f} to {high:+.1f})"
    both = [groups[name] for name in ("random", init) if name in groups]
    failed = " and ".join(f"{group['failed']} of {group['runs']}" for group in both)
    minutes = sum(outcome["seconds"] for outcome in found["outcomes"]) / 60
    return (
        f"| {row.title} | {found['metric']} | {found['constant_score'] * scale:.1f} | {cells[0]} | "
        f"{cells[1]} | {difference} | {failed} | {minutes:.1f} |"
    )


if __name__ == "__main__":
    raise SystemExit(main())
