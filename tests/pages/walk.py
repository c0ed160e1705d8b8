"""Follow README.md from top to bottom as a newcomer does, and look at the page that comes out.

    python tests/pages/walk.py                 # make walk: 40 minutes or more on two cores

The newcomer has 3 MB of text in `my/` and 600 labelled rows in `reviews.csv`: with BERT_JAX_DATA,
an encyclopedia of 1810 and sentences of SST-2; otherwise the files of examples/files.py. On the dev
set of SST-2, the classifier must beat a constant by more than the interval of its accuracy.
"""

import csv
import html
import json
import lzma
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from run import CLONES, ROOT, environment, run_page

TEXT_BYTES, ROWS = 3_000_000, 600
PAGE = "work/start/start.html"
NAMED = ("this model", "TF-IDF and a linear model", "a constant")
"""Scores that stand side by side in the page."""


def prepare(directory: Path) -> dict[str, Path]:
    """Write the newcomer's files; return what they are called in README.md."""
    gifts = {"my": directory / "my", "reviews.csv": directory / "reviews.csv"}
    gifts["my"].mkdir(parents=True, exist_ok=True)
    if data := os.environ.get("BERT_JAX_DATA"):
        source = Path(data, "pretrain", "encyc-britannica1810-0000.txt.xz")
        with lzma.open(source, "rb") as file:
            text = file.read(TEXT_BYTES).decode("utf-8", "ignore")
        (gifts["my"] / "text.txt").write_text(text, "utf-8")
        rows = read_sst2(Path(data, "glue", "SST-2", "train.tsv"))
        write_rows(gifts["reviews.csv"], random.Random(0).sample(rows, ROWS))
    else:
        made = directory / "made"
        command = [sys.executable, str(ROOT / "examples" / "files.py"), str(made)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        (made / "text.txt").replace(gifts["my"] / "text.txt")
        (made / "labels.csv").replace(gifts["reviews.csv"])
    return gifts


def read_sst2(path: Path) -> list[dict[str, str]]:
    """Read sentences with their labels."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    """Write a table of texts and labels; return its path."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "label"))
        writer.writerows((row["sentence"], row["label"]) for row in rows)
    return path


def lacks(page: str) -> list[str]:
    """Return the scores that the page does not name side by side, as rows of its table."""
    rows = re.findall(r"<tr><td>(.*?)<td>\w+ -?[\d.]+", page)
    return [each for each in NAMED if not any(html.unescape(row).startswith(each) for row in rows)]


def scored(clone: Path, rows: Path) -> dict[str, Any]:
    """Score the classifier on other rows; return its scores with their intervals."""
    python = clone / ".venv" / "bin" / "python"
    command = [python, "-m", "bert_jax.cli", "evaluate", "work/start/classifier", "--data", rows]
    command += ["--report", "work/dev"]
    subprocess.run(command, cwd=clone, env=environment([], clone), check=True)
    report = json.loads((clone / "work" / "dev" / "report.json").read_text("utf-8"))
    (found,) = report["splits"].values()
    return found


def against_a_constant(found: dict[str, Any], constant: float) -> list[str]:
    """Say so if the accuracy is not above a constant by more than its interval."""
    accuracy, (low, high) = found["scores"]["accuracy"], found["intervals"]["accuracy"]
    said = f"accuracy {accuracy:.3f} ({low:.3f} to {high:.3f}), constant {constant:.3f}"
    print(f"dev of SST-2: {said}")
    return [] if low > constant else [f"the classifier does not beat a constant: {said}"]


def main() -> int:
    """Walk; end with 1 if a command failed, the page lacks a score, or a constant does as well."""
    home = ROOT / "work" / "walk"
    gifts = prepare(home)
    problems = run_page(ROOT / "README.md", gifts, write=False)
    if not problems:
        clone = CLONES / "README"
        found = lacks((clone / PAGE).read_text("utf-8"))
        problems = [f"{PAGE} has no score of {each}" for each in found]
        print(f"{PAGE} is to name {', '.join(NAMED)}")
        if data := os.environ.get("BERT_JAX_DATA"):
            rows = read_sst2(Path(data, "glue", "SST-2", "dev.tsv"))
            labels = Counter(row["label"] for row in rows)
            constant = labels.most_common(1)[0][1] / len(rows)
            dev = write_rows(home / "dev.csv", rows)
            problems += against_a_constant(scored(clone, dev), constant)
    print("\n".join(problems) or "the walk has no problem")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
