"""Seven systems of translation, each trained until its held-out loss no longer falls.

    python benchmarks/translation_systems.py --task numbers --system additive
    BERT_JAX_DATA=DIR python benchmarks/translation_systems.py --task multi30k --system gnmt
    python benchmarks/translation_systems.py --table --plot docs/pictures/systems.png

`numbers` are lists of French number words to be written in digits, as in station 3 of the chapter;
`multi30k` is English to German (DIR/translation/multi30k/train.en.gz and so on). All systems of a
task see the same pairs: each by itself, and once more in a group of pairs that are joined to a
source of up to 60 words.

Training ends when the last `PATIENCE` evaluations have not lowered the loss of held-out pairs by
more than the task's `margin`, or when the steps have taken `--minutes` of processor time. A few
steps are measured to find this number of steps. The measurement is kept beside the run's directory,
so other work on the machine does not change the result.
The minutes of `masked_lm` include the training on masked words. The parameters with the lowest
held-out loss are scored.

A command that was stopped goes on when it is repeated. At the end it appends a line to
benchmarks/translation_systems.jsonl. There, `over_none` are paired differences from the system
`none`, if that was scored before with the same minutes. `--table` prints all lines as Markdown, and
`--plot` draws the scores by the number of source words.
"""

import argparse
import dataclasses
import json
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
from recurrent_steps import stepper
from translation_tasks import TASKS, Pair, Task, prepare

from bert_jax.artefacts.saved.reading import read_model
from bert_jax.artefacts.saved.runs import pretrained_checkpoint
from bert_jax.config.command_line import load_config
from bert_jax.infer.forward import on_device
from bert_jax.infer.translate import Translator
from bert_jax.model.seq2seq.search import SearchConfig
from bert_jax.tasks.reports.intervals import Grounds, intervals, means, unweighted
from bert_jax.tasks.translation import BUCKETS, quality
from bert_jax.terminal import markdown_table
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import open_corpus
from bert_jax.training.pretrain.train import train
from bert_jax.training.run.telemetry import read_metrics

ROWS = Path(__file__).with_suffix(".jsonl")
SYSTEMS = "none", "dot", "multiplicative", "additive", "gnmt", "transformer", "masked_lm"
SCORES = {"numbers": "exact", "multi30k": "bleu"}
"""Score that tables and pictures show, by task."""
TITLES = {"numbers": "French number words to digits", "multi30k": "captions, English to German"}
AFTER = "dot", "multiplicative"
"""Scores for which the decoder's state after a step attends (Luong et al. 2015)."""
PATIENCE = 3
"""Number of evaluations that together must lower the loss by more than the task's margin."""
MLM_SHARE = 0.2
"""Share of the minutes of `masked_lm` in which the encoder may learn masked words."""
JOINED_BUCKETS = {f"{n - 9} to {n}": (n - 9, n) for n in (30, 40, 50, 60)}
TIMED_STEPS = 5


def config_of(task: Task, system: str, home: Path, *changes: str) -> PretrainConfig:
    """Make the configuration of a system, but for its number of steps."""
    if system == "gnmt":
        recipe, *own = task.gnmt
    elif system in ("transformer", "masked_lm"):
        recipe, own = task.transformer, []
    else:
        wiring = "after" if system in AFTER else "before"
        recipe = task.recurrent
        own = [f"--config.objective.attention={system}", f"--config.objective.wiring={wiring}"]
    phase = json.dumps([{"length": task.length, "batch_size": 32}])
    given = {
        "data.corpus": home / "pairs", "data.target_length": 0, "model.num_positions": 256,
        "optimizer.schedule": "inverse_sqrt", "training.phases": phase, "training.eval_rows": None,
        "training.eval_every_steps": task.eval_every,
        "checkpoint.save_every_steps": task.eval_every, "checkpoint.keep_best": 1,
        "checkpoint.keep": 1,
    }  # fmt: skip
    fields = [f"--config.{field}={value}" for field, value in given.items()]
    return load_config(PretrainConfig, recipe, [*own, *fields, *changes])


class Trained(NamedTuple):
    """A run that has ended."""

    workdir: Path
    steps: int
    best_step: int
    loss: float
    """Lowest held-out loss, in nats per token."""
    converged: bool
    """Whether the loss no longer fell; otherwise the minutes were over."""
    minutes: float
    """Processor time of all training steps, without evaluations."""


def has_converged(losses: Sequence[float], margin: float) -> bool:
    """Return whether the last `PATIENCE` evaluations have lowered the loss by at most `margin`."""
    before, last = losses[:-PATIENCE], losses[-PATIENCE:]
    return bool(before) and min(before) - min(last) <= margin


def trained(config: PretrainConfig, workdir: Path, minutes: float, margin: float) -> Trained | None:
    """Train, or go on with, a run of up to so many minutes; return None if a signal stopped it."""
    measured, every = workdir.with_suffix(".json"), config.training.eval_every_steps
    if not measured.exists():
        take = stepper(config, open_corpus(config.data.corpus))
        take(0)  # compiles
        seconds = statistics.median(take(1 + n).seconds for n in range(TIMED_STEPS))
        limit = max(1, round(60 * minutes / seconds / every)) * every
        measured.parent.mkdir(parents=True, exist_ok=True)
        measured.write_text(json.dumps({"seconds_a_step": seconds, "limit": limit}))
    found = json.loads(measured.read_text())
    name = f"eval/{config.metrics[0].name}"

    def losses() -> dict[int, float]:
        rows = read_metrics(workdir / "metrics.jsonl")
        return {row["step"]: row[name] for row in rows if row["step"] and row.get(name)}

    converged = has_converged([*losses().values()], margin)

    def echo(line: str) -> None:
        nonlocal converged
        print(line, flush=True)
        if not converged and has_converged([*losses().values()], margin):
            converged = True
            signal.raise_signal(signal.SIGTERM)  # the run saves its state and ends

    training = dataclasses.replace(config.training, num_steps=found["limit"])
    if not converged:
        result = train(dataclasses.replace(config, training=training), workdir, echo=echo)
        if not result.finished and not converged:
            return None
    loss_of = losses()
    best, steps = min(loss_of, key=loss_of.__getitem__), max(loss_of)
    spent = steps * found["seconds_a_step"] / 60
    return Trained(workdir, steps, best, loss_of[best], converged, spent)


def grounds(name: str, found: Sequence[str], pairs: Sequence[Pair]) -> Grounds:
    """Make the data for scores: BLEU and chrF, or the share of lists that are right."""
    if name == "multi30k":
        return quality(found, [pair.target for pair in pairs]).grounds
    # Decoded text has no space before a comma, the targets have one.
    wanted = ["".join(pair.target.split()) for pair in pairs]
    written = ["".join(text.split()) for text in found]
    right = np.array([a == b for a, b in zip(written, wanted, strict=True)], float)
    return Grounds(means(["exact"], 100 * right[:, None]), np.arange(len(right)), right, most=100.0)


def scored(
    name: str, pairs: Sequence[Pair], found: Sequence[str], none: Sequence[str] | None,
    buckets: Mapping[str, tuple[int, int | None]],
) -> dict[str, Any]:  # fmt: skip
    """Score the translations of all pairs, and of the pairs in each bucket of source words."""
    sizes = [len(pair.source.split()) for pair in pairs]
    scores: dict[str, Any] = {}
    for bucket, (first, last) in {"all": (0, None), **buckets}.items():
        at = [n for n, size in enumerate(sizes) if first <= size <= (last or size)]
        if not at:
            continue
        chosen = [pairs[n] for n in at]
        ours = grounds(name, [found[n] for n in at], chosen)
        own: dict[str, Any] = {"pairs": len(at), **unweighted(ours.score, len(at))}
        own |= {f"{score}_interval": ends for score, ends in intervals(ours).found.items()}
        if none is not None:
            theirs = grounds(name, [none[n] for n in at], chosen)
            less, right = unweighted(theirs.score, len(at)), name == "numbers"
            both = (each if right else each._replace(right=None) for each in (ours, theirs))
            ends = intervals(*both).found
            own["over_none"] = {
                score: [own[score] - less[score], ends.get(score)] for score in less
            }
        scores[bucket] = own
    return scores


def run(name: str, system: str, minutes: float, home: Path) -> dict[str, Any] | None:
    """Train and score a system; return its row, or None if a signal stopped the training."""
    task = TASKS[name]()
    minutes = minutes or task.minutes
    prepare(name, task, home)
    place, changes, before = home / f"{minutes:g}" / system, [], 0.0
    if system == "masked_lm":
        masked = config_of(
            task, system, home, "--config.objective.name=masked_lm", "--config.data.pairing=none",
            f"--config.data.corpus={home / 'texts'}", "--config.masking.rate=0.3",
        )  # fmt: skip
        encoder = trained(masked, place.with_name("words"), MLM_SHARE * minutes, task.margin)
        if encoder is None:
            return None
        changes = [f"--config.init={encoder.workdir}", "--config.objective.init_decoder=True"]
        before = encoder.minutes
    made = trained(config_of(task, system, home, *changes), place, minutes - before, task.margin)
    if made is None:
        return None
    # The run's own last step is some evaluations past its best step.
    best = pretrained_checkpoint(place, made.best_step).state
    saved = on_device(dataclasses.replace(read_model(place), params=best))
    translator = Translator(saved, search=SearchConfig(num_beams=task.num_beams))
    parts: dict[str, tuple[list[Pair], Any]] = {
        "test": (task.test, BUCKETS), "joined": (task.joined(task.more_test, 2), JOINED_BUCKETS)
    }  # fmt: skip
    found = {
        part: translator.translated([pair.source for pair in pairs], lambda count: None)
        for part, (pairs, _) in parts.items()
    }
    (place / "translations.json").write_text(json.dumps(found))
    other = place.with_name("none") / "translations.json"
    none = json.loads(other.read_text()) if system != "none" and other.exists() else {}
    return {
        "task": name, "system": system, "minutes": minutes,
        "spent": round(before + made.minutes, 1),
        **{key: getattr(made, key) for key in ("steps", "best_step", "converged", "loss")},
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(best)),
        **{part: scored(name, pairs, found[part], none.get(part), buckets)
           for part, (pairs, buckets) in parts.items()},
    }  # fmt: skip


def by_length(
    rows: Sequence[dict[str, Any]], name: str
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Return the rows of a task, and the parts and buckets of source words that have scores."""
    own = [row for row in rows if row["task"] == name]
    return own, [(part, bucket) for part in ("test", "joined") for bucket in own[0][part]]


def table(rows: Sequence[dict[str, Any]], name: str) -> str:
    """Make the Markdown tables of a task: scores, and differences from `none`, by length."""
    score = SCORES[name]
    own, columns = by_length(rows, name)
    first = own[0]
    titles = [f"{part}, {bucket} ({first[part][bucket]['pairs']})" for part, bucket in columns]

    def cell(value: float, ends: Sequence[float] | None, sign: str = "") -> str:
        return f"{value:{sign}.1f}" + (" ({:.1f} to {:.1f})".format(*ends) if ends else "")

    scores = [["system", "parameters", "steps", "minutes", "loss", *titles]]
    gains = [["over none", *titles]]
    for row in own:
        steps = f"{row['best_step']:,} of {row['steps']:,}{'' if row['converged'] else ', cut'}"
        about = [f"{row['parameters']:,}", steps, f"{row['spent']}", f"{row['loss']:.3f}"]
        found = [row[part].get(bucket, {}) for part, bucket in columns]
        cells = [cell(each[score], each.get(f"{score}_interval")) for each in found]
        scores.append([f"`{row['system']}`", *about, *cells])
        if all("over_none" in each for each in found):
            differences = [each["over_none"][score] for each in found]
            cells = [cell(mean, ends, "+") for mean, ends in differences]
            gains.append([f"`{row['system']}`", *cells])
    tables = [markdown_table(each, figures=True) for each in (scores, gains) if len(each) > 1]
    return "\n\n".join([f"{name}, {score}", *tables])


def plot(rows: Sequence[dict[str, Any]], names: Sequence[str], file: Path) -> None:
    """Draw the scores of all systems by the number of source words, a panel for each task."""
    figure, panels = plt.subplots(1, len(names), figsize=(7 * len(names), 4), squeeze=False)
    for name, axes in zip(names, panels[0], strict=True):
        score = SCORES[name]
        own, columns = by_length(rows, name)
        columns = [(part, bucket) for part, bucket in columns if bucket != "all"]
        for row in own:
            found = [row[part][bucket] for part, bucket in columns]
            middle = np.array([each[score] for each in found])
            lower, upper = np.array([each[f"{score}_interval"] for each in found]).T
            number = SYSTEMS.index(row["system"])
            # Lines lie side by side: intervals of seven systems hide each other otherwise.
            places = np.arange(len(columns)) + 0.06 * (number - (len(SYSTEMS) - 1) / 2)
            reach = [middle - lower, upper - middle]
            axes.errorbar(
                places, middle, reach, marker="o", color=f"C{number}", label=row["system"]
            )
        ticks = [f"{bucket}\n{part}" for part, bucket in columns]
        axes.set_xticks(range(len(columns)), ticks, size=8)
        axes.set_title(TITLES[name])
        axes.set_xlabel("source words")
        axes.set_ylabel("lists without mistake, %" if name == "numbers" else "BLEU")
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(file, dpi=100)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--system", choices=SYSTEMS)
    parser.add_argument(
        "--minutes", type=float, default=0, help="default: 15 numbers, 150 multi30k"
    )
    parser.add_argument("--out", type=Path, default=Path("work/translation_systems"))
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of the lines")
    parser.add_argument("--table", action="store_true", help="only print the tables")
    parser.add_argument("--plot", type=Path, help="picture of the scores by source words")
    options = parser.parse_args()
    lines = options.rows.read_text().splitlines() if options.rows.exists() else []
    rows = [json.loads(line) for line in lines]
    names = [name for name in TASKS if any(row["task"] == name for row in rows)]
    if options.plot:
        plot(rows, names, options.plot)
    if options.table:
        print("\n\n".join(table(rows, name) for name in names))
        return 0
    if not options.task or not options.system:
        parser.error("give --task and --system, or --table")
    row = run(options.task, options.system, options.minutes, options.out / options.task)
    if row is None:
        return 1
    known = "task", "system", "minutes"
    if any(all(other[key] == row[key] for key in known) for other in rows):
        print(f"{options.rows} has this system already; the line is not added", file=sys.stderr)
    else:
        with options.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
    print(table([row], options.task))
    return 0


if __name__ == "__main__":
    sys.exit(main())
