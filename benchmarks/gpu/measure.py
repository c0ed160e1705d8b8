"""All that is measured on GPUs, in parts, as one table.

    make gpu PART=train PYTHON=python3
    python benchmarks/gpu/measure.py --part numerics
    python benchmarks/gpu/measure.py --smoke

Parts: `numerics` (attention.py: every implementation against `xla`, values and gradients, and its
time), `train` (train_step.py: BERT-base, BERT-large and ModernBERT-base against Transformers with
torch.compile, on the same rows), `sweep` (finetune_sweep.py: eight fine-tuning runs together) and
`inference` (inference.py). A part ends within eight minutes: cases that have no result yet come
first, so that the same command again goes on; `all` takes the time it needs. Every measurement is a
process of its own with a limit, and its result is kept at once, in results.json and results.md,
merged over parts. Nothing is installed: a package that is missing is named, and the rest goes on.

`--smoke` runs every part with tiny sizes on a CPU; its numbers mean nothing. Exit codes: 0, 1 where
a measurement failed, 2 where there is no GPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from gpu_table import OURS, Record, Table

BENCHMARKS = Path(__file__).parents[1]
PARTS = ("numerics", "train", "sweep", "inference")
PART_SECONDS = 470
"""Time of a part, for eight minutes with the description of the device."""
PEERS = {"bert": ("sdpa",), "modernbert": ("flex_attention", "sdpa", "flash_attention_2")}
"""Implementations of attention of the peers, by kind of model."""
PEER_PACKAGES = ("torch", "transformers")
TRAIN = (
    ("bert_large", 128, 256), ("modernbert_base", 1024, 32), ("bert_base", 128, 256),
    ("modernbert_base", 8192, 4), ("bert_large", 512, 64), ("bert_base", 512, 64),
)  # fmt: skip
"""Model, length and rows of each case: 32,768 tokens a step."""
SMOKE_TRAIN = (("smoke", 32, 2), ("smoke_modern", 64, 2))


@dataclass(frozen=True)
class Task:
    """A process that measures, and prints a JSON object for each result."""

    part: str
    case: str
    side: str
    """Side that is measured; empty where the results name theirs."""
    command: tuple[str, ...]
    seconds: float
    """Limit of its time."""
    missing: tuple[str, ...] = ()
    """Packages it needs that are not there."""


class Outcome(NamedTuple):
    """End of a process."""

    results: list[Record]
    failed: str
    """Reason of a failure; empty: none."""


def run_bounded(command: tuple[str, ...], seconds: float) -> Outcome:
    """Run a script until its limit, then end it with all that it started."""
    known = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(BENCHMARKS.parent), *([known] if known else [])])
    process = subprocess.Popen(
        [sys.executable, str(BENCHMARKS / command[0]), *command[1:]],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    failed = ""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        failed = f"stopped after {seconds:.0f} s"
    finally:
        if process.poll() is None or failed:
            os.killpg(process.pid, signal.SIGKILL)
    if failed:
        out, err = process.communicate()
    elif process.returncode:
        failed = _cause(err) or f"exit code {process.returncode}"
    results = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return Outcome(results, failed)


def _cause(err: str) -> str:
    """Find the reason of a failure in what a process wrote."""
    if any(words in err for words in ("OutOfMemoryError", "RESOURCE_EXHAUSTED")):
        return "out of memory"
    last = next((line for line in reversed(err.splitlines()) if line.strip()), "")
    if last.startswith("ModuleNotFoundError: No module named"):
        return f"missing: {last.split(chr(39))[1]}"
    return last[:300]


def plan(table: Table, options: argparse.Namespace) -> list[Task]:
    """List the measurements of the parts that were asked for."""
    smoke = ("--smoke",) if options.smoke else ()
    versions = table.device["versions"]
    missing = tuple(name for name in PEER_PACKAGES if not versions[name])
    tasks = [
        Task("numerics", "attention", "", ("attention.py", "--json", *smoke), PART_SECONDS),
        *_train_tasks(smoke, missing, has_flash=bool(versions["flash_attn"])),
    ]
    for model in ("tiny",) if smoke else ("tiny", "small"):
        sizes = ("--members=2", "--length=16", "--batch-size=2", "--steps=1", "--repeats=1")
        command = ("finetune_sweep.py", "--json", f"--model={model}", *(sizes if smoke else ()))
        tasks.append(Task("sweep", model, "", command, 230))
    command = ("inference.py", "--json")
    if smoke:
        command += ("--model=tiny", "--texts=4", "--repeats=1", "--batch-sizes=2")
    else:
        command += ("--device=gpu", "--texts=2048", "--repeats=3", "--batch-sizes=32,128,256")
    tasks.append(Task("inference", "classify", "", command, PART_SECONDS))
    chosen = PARTS if options.part == "all" else (options.part,)
    return [t for t in tasks if t.part in chosen and options.case in t.case]


def _train_tasks(smoke: tuple[str, ...], missing: tuple[str, ...], has_flash: bool) -> list[Task]:
    tasks = []
    for model, length, rows in SMOKE_TRAIN if smoke else TRAIN:
        peers = PEERS["modernbert" if "modern" in model else "bert"]
        for side in (OURS["train"], *(("sdpa",) if smoke else peers)):
            if side == "flash_attention_2" and not has_flash:
                continue
            command = (
                "train_step.py", f"--side={side}", f"--model={model}", f"--length={length}",
                f"--rows={rows}", "--repeats=9", *smoke,
            )  # fmt: skip
            needed = () if side == OURS["train"] else missing
            tasks.append(Task("train", f"{model}, L={length}", side, command, 200, needed))
    return tasks


def in_order(tasks: list[Task], table: Table) -> list[Task]:
    """Put the cases first that have no result of one of their sides."""

    def done(task: Task) -> bool:
        sides = {t.side for t in tasks if (t.part, t.case) == (task.part, task.case)}
        found = {
            r["side"] for r in table.records if (r["part"], r["case"]) == (task.part, task.case)
        }
        return bool(sides <= found)

    return sorted(tasks, key=lambda task: (PARTS.index(task.part), done(task)))


def run(tasks: list[Task], table: Table, directory: Path, seconds: float) -> int:
    """Measure, and save the table after each result; return the number of failures."""
    begun, failures = time.monotonic(), 0
    for number, task in enumerate(tasks, 1):
        left = seconds - (time.monotonic() - begun)
        name = ", ".join(filter(None, (task.part, task.case, task.side)))
        if left < 20:
            print(f"Time is up with {len(tasks) - number + 1} measurements left, {name} first: "
                  "run the same command again")  # fmt: skip
            break
        limit = min(task.seconds, left)
        print(f"[{number}/{len(tasks)}] {name} (at most {limit:.0f} s) ...", flush=True)
        outcome, start = Outcome([], f"missing: {', '.join(task.missing)}"), time.monotonic()
        if not task.missing:
            outcome = run_bounded(task.command, limit)
        stamp = {"part": task.part, "measured": datetime.now(UTC).isoformat(timespec="seconds")}
        whole = {"case": task.case, "side": task.side or "all", **stamp}
        table.forget_failure(whole)
        for result in outcome.results:
            record = {**(whole if task.side else {}), **result, **stamp}
            if "flops_per_second" in record:
                record["mfu"] = record["flops_per_second"] / table.device["matmul_flops"]
            table.add(record)
        if outcome.failed:
            table.add({**whole, "failed": outcome.failed})
        failures += bool(outcome.failed)
        table.save(directory)
        took = time.monotonic() - start
        print(f"    {outcome.failed or f'{len(outcome.results)} results'} ({took:.0f} s)")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--case", default="", help="cases whose name has this, such as L=8192")
    parser.add_argument("--out", type=Path, help="directory of the table (default: work/gpu)")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU")
    options = parser.parse_args()
    directory = options.out or Path("work/gpu-smoke" if options.smoke else "work/gpu")
    found = run_bounded(("gpu/device.py", *(["--smoke"] if options.smoke else [])), 120)
    if found.failed or not (options.smoke or found.results[0]["platform"] == "gpu"):
        said = found.failed or f"JAX sees {found.results[0]['device']} alone"
        print(f"No GPU to measure with {sys.executable}: {said}. --smoke runs all parts on a CPU")
        return 2
    table = Table.load(directory)
    name, device = table.device.get("device"), found.results[0]
    if name not in (None, device["device"]):
        print(f"{directory}/results.json is of {name}, and this is {device['device']}: give --out")
        return 2
    directory.mkdir(parents=True, exist_ok=True)
    table.device = device
    print(f"{device['device']}: {device['matmul_flops'] / 1e12:.4g} TFLOP/s in bfloat16 products")
    tasks = in_order(plan(table, options), table)
    seconds = float("inf") if options.part == "all" else PART_SECONDS
    failures = run(tasks, table, directory, seconds)
    print(f"\n{table.markdown()}\nThe table is in {directory}/results.md and results.json")
    return int(failures > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `finally` ends the measurement
    sys.exit(main())
