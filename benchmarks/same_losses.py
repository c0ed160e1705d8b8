"""Losses and scores of small runs of every kind: what a change of structure may not move.

    python benchmarks/same_losses.py                             # against same_losses.json
    python benchmarks/same_losses.py --against HEAD~1            # against another commit, run here
    python benchmarks/same_losses.py --tolerance 1e-5 --only LoRA
    python benchmarks/same_losses.py --record                    # write same_losses.json

Every run is made by the verbs of `bert-jax`: pretraining of several kinds, on a mesh and on two
processes, a branch, a student of a teacher, a translation, and fine-tuning with sweeps in waves,
patience, low-rank updates, vectors and two processes. Compared is every training loss and every
value of every evaluation in metrics.jsonl. Exit code 1: a value differs by more than allowed.

same_losses.json holds the values of the commit that its field `commit` names. Another kind of
processor rounds otherwise; there, compare with that commit by --against.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).with_suffix(".json")
NUM_STEPS = 100
DEVICES = "--xla_force_host_platform_device_count={}"
Curves = dict[str, list[float | None]]
"""Values of each metric, in the order of metrics.jsonl; those of several trials one by one."""


@dataclass(frozen=True)
class Run:
    """A run of a verb. `{NAME}` in a value is the directory of the data or run of this name."""

    verb: str
    recipe: str
    settings: dict[str, object] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    devices: int = 1
    processes: int = 1

    def command(self, tree: Path, workdir: Path, places: dict[str, Path]) -> list[str]:
        """Make the words after the name of the program."""
        settings = {f"--config.{name}": value for name, value in self.settings.items()}
        words = [f"{name}={value}" for name, value in settings.items()] + list(self.words)
        for name, place in places.items():
            words = [word.replace(f"{{{name}}}", str(place)) for word in words]
        recipe = tree / "configs" / self.recipe
        return [self.verb, f"--config={recipe}", f"--workdir={workdir}", *words]


SIZE = {
    "model.num_layers": 2,
    "model.hidden_dim": 128,
    "model.num_heads": 2,
    "model.mlp_dim": 512,
}
RUN = {
    "training.num_steps": NUM_STEPS,
    "training.log_every_steps": 1,
    "training.eval_every_steps": 0,
    "training.eval_rows": 64,
    "checkpoint.save_every_steps": NUM_STEPS // 2,
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_steps": 10,
    "guard.spike_sigmas": 0.0,
}
ONE_PHASE = {"training.phases": "({'length': 64, 'batch_size': 16},)"}
BERT = {"data.corpus": "{corpus}", **SIZE, **RUN, **ONE_PHASE}
TUNED = {
    "training.num_epochs": 3,
    "training.evals_per_epoch": 2,
    "training.log_every_steps": 1,
    "optimizer.learning_rate": 1e-3,
}
TABLE = {"init": "{next-sentence}", "task.train": "{rows}", **TUNED}
TINY = "pretrain/bert_tiny.py"
RUNS = {
    "next-sentence": Run("pretrain", TINY, {**BERT, "data.pairing": "nsp"}),
    "whole-words": Run(
        "pretrain", TINY,
        {**BERT, "data.pairing": "none", "masking.whole_word": True, "model.pooler": False},
    ),
    "LAMB-two-lengths": Run(
        "pretrain", TINY,
        {
            **BERT,
            "optimizer.name": "lamb",
            "training.phases": "({'length': 32, 'batch_size': 32, 'share': 0.5},"
            " {'length': 128, 'batch_size': 8, 'share': 0.5})",
        },
    ),
    "mesh": Run(
        "pretrain", TINY,
        {**BERT, "mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "training.accumulation": 2},
        devices=8,
    ),
    "two-processes": Run(
        "pretrain", TINY, {**BERT, "mesh.data": 2, "mesh.fsdp": 2}, devices=2, processes=2
    ),
    "branch": Run(
        "pretrain", TINY, {**BERT, "data.pairing": "nsp", "optimizer.learning_rate": 5e-4},
        words=(f"--branch-from={{next-sentence}}@{NUM_STEPS // 2}",),
    ),
    "replaced-tokens": Run("pretrain", "pretrain/electra_small.py", BERT),
    "modern": Run("pretrain", "pretrain/modern_tiny.py", {"data.corpus": "{corpus}", **RUN,
                                                          **ONE_PHASE}),
    "student": Run(
        "pretrain", "pretrain/distil_mini.py",
        {
            **BERT, "distil.teacher": "{whole-words}", "distil.hidden_weight": 0.1,
            "distil.attention_weight": 0.1, "model.num_layers": 1,
        },
    ),
    "translation": Run(
        "pretrain", "translate/numbers.py",
        {"data.corpus": "{pairs}", **RUN, "training.phases": "({'length': 32, 'batch_size': 8},)"},
    ),
    "table": Run("finetune", "finetune/table.py", TABLE),
    "waves-with-patience": Run(
        "finetune", "finetune/table.py",
        {**TABLE, "sweep.seeds": 3, "sweep.at_once": 2, "training.patience": 1,
         "training.evals_per_epoch": 6, "sweep.baseline": "random"},
    ),
    "LoRA": Run(
        "finetune", "finetune/table.py",
        {**TABLE, "lora.rank": 2, "sweep.learning_rates": "(1e-3, 3e-3)", "sweep.at_once": 1},
    ),
    "tuned-student": Run(
        "finetune", "finetune/table.py",
        {**TABLE, "init": "{whole-words}", "distil.teacher": "{table}"},
    ),
    "vectors": Run(
        "finetune", "finetune/embed.py:classes",
        {"init": "{whole-words}", "task.train": "{rows}", **TUNED},
    ),
    "tuned-on-two-processes": Run(
        "finetune", "finetune/table.py", {**TABLE, "sweep.seeds": 2}, devices=1, processes=2
    ),
}  # fmt: skip


def main() -> None:
    """Make the runs and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--against", metavar="COMMIT", help="compare with runs of this commit")
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative (default: 0)")
    parser.add_argument("--only", choices=list(RUNS), help="this run, and those it starts from")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    options = parser.parse_args()
    before = None if options.against or options.record else json.loads(RECORD.read_text())["runs"]
    worst, found = 0.0, {}
    with tempfile.TemporaryDirectory() as name:
        scratch, other = Path(name), Path(name) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        if options.against:
            add = [*git, "add", "--quiet", "--detach", str(other), options.against]
            subprocess.run(add, check=True)
        try:
            data = make_data(scratch)
            theirs = curves_of(other, scratch / "theirs", data, options.only)
            for name, new in curves_of(ROOT, scratch / "ours", data, options.only):
                found[name] = new
                if options.record:
                    print(f"{name:24} {len(new)} metrics", flush=True)
                    continue
                old = before[name] if before else next(theirs)[1]
                apart, said = difference(old, new)
                worst = max(worst, apart)
                losses = [value for value in new["train/loss"] if value is not None]
                print(f"{name:24} {losses[0]:.4f} -> {losses[-1]:.4f}   {said}", flush=True)
        finally:
            if options.against:
                subprocess.run([*git, "remove", "--force", str(other)], check=True)
    if options.record:
        commit = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        if RECORD.exists():
            found = {**json.loads(RECORD.read_text())["runs"], **found}
        runs = [f'"{name}": {json.dumps(found[name])}' for name in RUNS]
        RECORD.write_text(
            f'{{"commit": "{commit.stdout.strip()}", "runs": {{\n' + ",\n".join(runs) + "\n}}\n"
        )
    if worst > options.tolerance:
        sys.exit(f"values differ by {worst:.1e}; allowed are {options.tolerance:g}")


def difference(old: Curves, new: Curves) -> tuple[float, str]:
    """Return the largest relative difference of two runs, and a clause that tells of it."""
    if missing := sorted(set(old) ^ set(new)):
        return float("inf"), f"only one side has {', '.join(missing)}"
    worst, where = 0.0, ""
    for name in old:
        if len(old[name]) != len(new[name]):
            return float("inf"), f"{name}: {len(old[name])} and {len(new[name])} values"
        for a, b in zip(old[name], new[name], strict=True):
            if a is None or b is None:
                apart = 0.0 if a == b else float("inf")
            else:
                apart = abs(a - b) / max(abs(a), abs(b), 1e-30)
            if apart > worst:
                worst, where = apart, name
    return worst, f"largest difference {worst:.1e}, {where}" if where else "equal to the last bit"


def curves_of(
    tree: Path, scratch: Path, data: dict[str, Path], only: str | None
) -> Iterator[tuple[str, Curves]]:
    """Make the runs with the package in `tree`, one after another; yield what each logged."""
    places = dict(data)
    wanted = needed(only) if only else set(RUNS)
    for name, run in RUNS.items():
        if name not in wanted:
            continue
        workdir = scratch / name
        places[name] = workdir
        words = run.command(tree, workdir, places)
        bert_jax(tree, *words, devices=run.devices, processes=run.processes)
        curves: Curves = {}
        for line in (workdir / "metrics.jsonl").read_text().splitlines():
            for metric, value in json.loads(line).items():
                if metric == "train/loss" or metric.startswith("eval/"):
                    values = value if isinstance(value, list) else [value]
                    curves.setdefault(metric, []).extend(values)
        yield name, curves


def needed(name: str) -> set[str]:
    """Return the run of this name and the runs that it starts from."""
    run = RUNS[name]
    said = " ".join(map(str, [*run.settings.values(), *run.words]))
    below = {other for other in RUNS if f"{{{other}}}" in said}
    return {name}.union(*map(needed, below))


def make_data(scratch: Path) -> dict[str, Path]:
    """Make a corpus, pairs for translation and a table, the same on every machine."""
    draw = random.Random(0)
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    numbers = [[draw.randrange(10) for _ in range(draw.randint(2, 9))] for _ in range(600)]
    (scratch / "digits.txt").write_text("".join(" ".join(map(str, n)) + "\n" for n in numbers))
    (scratch / "words.txt").write_text(
        "".join(" ".join(names[digit] for digit in number) + "\n" for number in numbers)
    )
    words = ["the", "of", "to", "in", "is", "a", "class", "list", "string", "value", "function",
             "object", "file", "module", "return"]  # fmt: skip
    rows = ["text,label"]
    for _ in range(400):
        label = draw.randrange(3)
        chosen = draw.choices(words[3 * label : 3 * label + 9], k=draw.randint(4, 20))
        rows.append(f"{' '.join(chosen)},c{label}")
    (scratch / "table.csv").write_text("\n".join(rows) + "\n")
    prose = scratch / "prose.txt"
    prose.write_text(made_prose(draw))
    pairs = ["--pairs", scratch / "digits.txt", scratch / "words.txt"]
    for given, size, tokenizer, corpus in (
        (["--input", prose], 512, "tokenizer", "corpus"),
        (pairs, 60, "tokenizer-of-pairs", "pairs"),
    ):
        bert_jax(ROOT, "tokenizer", *given, "--vocab-size", size, "--out", scratch / tokenizer)
        bert_jax(ROOT, "corpus", *given, "--tokenizer", scratch / tokenizer,
                 "--out", scratch / corpus)  # fmt: skip
    return {name: scratch / name for name in ("corpus", "pairs")} | {"rows": scratch / "table.csv"}


def made_prose(draw: random.Random) -> str:
    """Write documents of made sentences, in which a word depends on the word before."""
    parts = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "io", "u")]
    words = ["".join(draw.choices(parts, k=draw.randint(1, 4))) for _ in range(800)]
    follow = [draw.choices(range(len(words)), k=6) for _ in words]
    documents = []
    for _ in range(400):
        at, sentences = draw.randrange(len(words)), []
        for _ in range(draw.randint(5, 30)):
            sentence = []
            for _ in range(draw.randint(4, 16)):
                sentence.append(words[at])
                at = draw.choice(follow[at])
            sentences.append(" ".join(sentence).capitalize() + ".")
        documents.append(" ".join(sentences))
    return "\n\n".join(documents) + "\n"


def bert_jax(tree: Path, *words: Any, devices: int = 1, processes: int = 1) -> None:
    """Run a verb of the package in `tree`; its output is shown only if the verb fails."""
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": DEVICES.format(devices),
    }
    command = [sys.executable, "-m", "bert_jax.cli", *map(str, words)]
    if processes > 1:
        local = [tree / "launch/local.py", "--processes", processes, "--devices", devices, "--"]
        command = [sys.executable, *map(str, local), *command]
    done = subprocess.run(
        command, env=environment, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    if done.returncode not in (0, 8):  # 8: complete, and no better than a constant
        sys.exit(f"{' '.join(map(str, words))} failed in {tree}:\n{done.stdout[-4000:]}")


if __name__ == "__main__":
    main()
